"""Who is told the scores of a run as they come: TensorBoard, or a class of the user's own."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any, Protocol, cast

from runtime.models.imported import is_pythons, refuse_code_in
from runtime.models.networks import described_error
from runtime.run.folder import plain

TENSORBOARD = "tensorboard"


class Logger(Protocol):
    """What `train --log` names."""

    def __init__(self, folder: Path, options: dict[str, Any]) -> None:
        """``folder`` of the run; ``options`` by dotted name."""

    def scores(self, samples: int, tasks: dict[str, dict[str, Any]], *, drained: bool) -> None:
        """An evaluation after so many samples, by task; ``drained``: the last one."""

    def end(self, summary: dict[str, Any]) -> None:
        """What summary.json holds."""


def logger_class(name: str) -> type[Logger]:
    """The class of a name that somebody has typed: `TensorBoard`, or one of their own, whose code
    is run by importing it, but never out of the folder of a run or of an export. Raises ValueError
    where it is none."""
    # The one of this project, else a name of the user's own code.
    if name == TENSORBOARD:
        return TensorBoard
    module, _, attribute = name.partition(":")
    if not attribute:
        raise ValueError(
            f"--log is {name!r}: name {TENSORBOARD}, or a class of yours, as my_module:Logger"
        )
    refuse_code_in(None, name)
    if is_pythons(module):
        raise ValueError(f"--log is {name!r}: {module} is a module of Python itself")

    # Import it, and see whether it is such a class.
    try:
        result = getattr(importlib.import_module(module), attribute)
    except Exception as error:  # importing runs the user's file
        raise ValueError(
            f"--log {name} cannot be imported: {described_error(error)}; its folder must be the"
            " current one, or on PYTHONPATH"
        ) from error
    lacking = [method for method in ("scores", "end") if not callable(getattr(result, method, 0))]
    if not isinstance(result, type) or lacking:
        lacks = f" without {' and '.join(lacking)}" if lacking else ""
        raise ValueError(
            f"--log {name} is no class{lacks}: it needs __init__(folder, options),"
            " scores(samples, tasks, *, drained) and end(summary)"
        )
    return cast(type[Logger], result)


class TensorBoard:
    """Events in the run folder; `tensorboard --logdir runs` shows every run by that name."""

    def __init__(
        self, folder: Path, options: dict[str, Any], goes_on_at: int | None = None
    ) -> None:
        """``goes_on_at``: samples of the checkpoint that a resumed run goes on from; what a killed
        run told after it is hidden. Raises ValueError where tensorboard is not installed."""
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ValueError(
                "tensorboard is asked for and not installed; run `pip install tensorboard`, or"
                " leave --log out"
            ) from error
        self._writer: Any = SummaryWriter(str(folder / "tensorboard"), purge_step=goes_on_at)
        self._options = options

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
        # How late rows were, at the end of the curve.
        samples = summary["samples"]
        staleness = plain(summary["staleness"])
        for name in ("mean_steps", "max_steps"):
            if staleness[name] is not None:
                self._writer.add_scalar(f"staleness/{name}", staleness[name], samples)

        # Options beside the scores, as TensorBoard compares runs: values that are no number become
        # text.
        options = {
            name: value if isinstance(value, int | float | str) else str(value)
            for name, value in self._options.items()
        }
        tasks = plain(summary["tasks"]).items()
        known = {
            f"final/{t}": figures_of_task["auc"]
            for t, figures_of_task in tasks
            if figures_of_task["auc"] is not None
        }
        self._writer.add_hparams(options, known, run_name=".", global_step=samples)
        self._writer.close()
