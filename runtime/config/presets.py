"""What others run, by name: each a few options of the group `sync`, with its source.

A preset says when rows and dense weights are read and written, nothing else: data, network,
optimisers and ranks are those of the run. Where the original has no bound in steps, the concurrent
executor has what the original has, and constant_lag, which reaches a bound exactly, a number
that stands for it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

from persia_sim.base.schema import parse
from runtime.config.sync import SyncConfig
from runtime.config.train import TrainConfig
from runtime.files import table_beside

PresetName = Literal[
    "torchrec-semisync",
    "torchrec-semisync-stash",
    "tfra-half-sync",
    "ascend-prefetch6",
    "deeprec-async",
    "persia-default",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """Options of the group `sync`, and where they are from."""

    says: str
    """What is late in it."""
    source: str
    sync: dict[str, Any]
    constant_lag: dict[str, Any] = field(default_factory=dict)
    """What takes their place in the executor constant_lag."""
    stands_for: str = ""
    """Why that does."""


_TABLE = table_beside(__file__).items()
PRESETS = {name: parse(Preset, table, f"preset {name}") for name, table in _TABLE}
"""By name, as `presets.toml` has them."""

assert tuple(PRESETS) == get_args(PresetName)


def preset_text(name: PresetName, config: TrainConfig) -> str:
    """What a person reads before a run of the preset."""
    preset = PRESETS[name]
    has_other_options = config.engine.executor == "constant_lag" and preset.constant_lag
    stands = (
        f"; tau {config.sync.tau} stands for it here: {preset.stands_for}"
        if has_other_options
        else ""
    )
    return preset.says + stands


def with_preset(config: TrainConfig, name: PresetName, executor: str | None = None) -> TrainConfig:
    """The config with the preset's options for its executor; all others of `sync` have defaults.

    ``executor`` takes the place of the config's. Raises ValueError for a replay.
    """
    engine = config.engine
    if "replay" in (executor, engine.executor):
        raise ValueError(f"--preset {name} is not of a replay, which has its trace's; remove it")
    if executor is not None:
        engine = replace(engine, executor=executor)  # type: ignore[arg-type]
    preset = PRESETS[name]
    options = preset.sync
    if engine.executor == "constant_lag":
        options = options | preset.constant_lag
    known = {name: None if value == "none" else value for name, value in options.items()}
    sync = parse(SyncConfig, {"ranks": config.sync.ranks, **known}, f"preset {name}")
    return replace(config, sync=sync, engine=engine)
