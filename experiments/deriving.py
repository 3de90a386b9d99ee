"""The workload of a run: its log and its model, counted, in the simulator's words."""

from __future__ import annotations

from persia_sim.cluster.workload import Workload
from persia_sim.presets.from_file import workload_of
from runtime.config import TrainConfig
from runtime.data.source import Source


def derive_workload(
    config: TrainConfig,
    data: Source | None = None,
    *,
    scale: float = 1.0,
    batch_per_rank: int | None = None,
    dense_flops: float | None = None,
) -> Workload:
    """What a run's options and data come to as a workload, as `persia-runtime describe` prints it.

    ``data``: where it is open already, else that of ``config``. ``scale``: of how many times as
    many samples the log is a cut, which decides how many rows tables have. ``batch_per_rank``:
    samples of a rank in a step, else ``batch`` / ``ranks``. ``dense_flops``: operations of a
    sample's forward and backward pass where torch cannot count them. Raises ValueError naming what
    cannot be counted, and the remedy.

    `persia_sim.presets.from_file.workload_text` has the file that says the same.
    """
    from runtime.describe_command import Describe, described  # late: torch
    from runtime.executors.open import source_of

    asked = Describe(scale=scale, batch_per_rank=batch_per_rank, dense_flops=dense_flops)
    return workload_of(described(config, data or source_of(config), asked))
