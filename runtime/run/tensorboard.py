"""Scores of a run for TensorBoard while it goes on: an optional sink beside metrics.jsonl."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from runtime.config import TrainConfig
from runtime.run.folder import plain

FOLDER = "tensorboard"
"""In the run folder: `tensorboard --logdir runs` then shows every run by its folder's name."""


class TensorBoard:
    """Events in the run folder."""

    def __init__(self, folder: Path, config: TrainConfig, goes_on_at: int | None = None) -> None:
        """``goes_on_at``: samples of the checkpoint that a resumed run goes on from; what a killed
        run told after it is hidden. Raises ValueError where tensorboard is not installed."""
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ValueError(
                "tensorboard is asked for and not installed; run `pip install tensorboard`, or"
                " leave --tensorboard out"
            ) from error
        self._writer: Any = SummaryWriter(str(folder / FOLDER), purge_step=goes_on_at)
        self._config = config

    def scores(self, samples: int, tasks: dict[str, dict[str, Any]], *, drained: bool) -> None:
        """A scalar for each figure of each task; those after draining under names of their own."""
        moment = "final" if drained else "snapshot"
        for task, figures in tasks.items():
            for name, value in figures.items():
                if isinstance(value, int | float) and not isinstance(value, bool):
                    self._writer.add_scalar(f"{task}/{name} ({moment})", value, samples)
        self._writer.flush()

    def end(self, summary: dict[str, Any]) -> None:
        """The histogram of missed steps, and the options beside the final AUCs."""
        samples = summary["samples"]
        staleness = plain(summary["staleness"])
        for name in ("mean_steps", "max_steps"):
            if staleness[name] is not None:
                self._writer.add_scalar(f"staleness/{name}", staleness[name], samples)
        options = {
            name: value if isinstance(value, int | float | str) else str(value)
            for name, value in _flat(plain(self._config))
        }
        finals = {
            f"final/{task}": scores["auc"] for task, scores in plain(summary["tasks"]).items()
        }
        known = {name: auc for name, auc in finals.items() if auc is not None}
        self._writer.add_hparams(options, known, run_name=".", global_step=samples)
        self._writer.close()


def _flat(values: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """(group.option, value) of all groups."""
    found: list[tuple[str, Any]] = []
    for name, value in values.items():
        if isinstance(value, dict):
            found += _flat(value, f"{prefix}{name}.")
        else:
            found.append((prefix + name, value))
    return found
