"""Studies built on the runtime and the simulator: one module each, results in run folders."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["sweep", "which_mode"]


def sweep(
    study: str | Path | Mapping[str, Any],
    *,
    config: str | Path | None = None,
    set: Mapping[str, Any] | None = None,
    seeds: int | None = None,
    out: str | Path | None = None,
) -> pd.DataFrame:
    """Train the lines of a study, and return the AUC of each with its gap to the line that it is
    held against.

    ``study``: a file, one that comes with the package (``"demo.toml"``), or a mapping as a file has
    it. ``config``: options of training from a file, over the study's base; ``set``: options by
    name, over both, whose lists are crossed. ``seeds``: paired seeds, else the study's. ``out``:
    folder of the runs, where a second call finds what is done; else runs/ and the study's name.
    Returns a row a line and task: ``auc``, ``gap`` and ``gap_half_width_95`` (95 %, over seeds and
    test samples) among its columns. Raises ValueError naming the key, the line, the value and the
    remedy.
    """
    import pandas as pd  # late: with torch they take seconds

    from experiments.option_values import flat, values_of
    from experiments.studies.sweep import Options, table_of

    asked = flat(set or {}, "set")
    typed = {name: values_of(name, value, "set") for name, value in asked.items()}
    file = Path("study.toml") if isinstance(study, Mapping) else Path(study)
    options = Options(
        file=file,
        config=None if config is None else Path(config),
        seeds=seeds,
        out=None if out is None else Path(out),
    )
    return pd.DataFrame(table_of(study if isinstance(study, Mapping) else file, options, typed))


def which_mode(
    data: str | Path,
    cluster: str | Path,
    *,
    config: str | Path | None = None,
    set: Sequence[str] = (),
    minutes: float = 10.0,
    tolerance: float = 1.0,
    out: str | Path | None = None,
    **more: Any,
) -> pd.DataFrame:
    """What each mode gains on a cluster and loses on a log, printed with the advice.

    ``data``: the log's schema, as ``"clicks.toml"``; ``cluster``: a file or a preset. ``config``,
    ``set``: options of training, as of `sweep`'s command. ``minutes``: that all of it may take;
    ``tolerance``: thousandths of AUC that a mode may lose. ``more``: other options of the command
    `which-mode` by their names, as ``scale=1000`` or ``hosts="given"``. Returns a row a mode:
    ``samples_per_s`` and ``usd_per_billion_samples``, each with its ``_low`` and ``_high``,
    ``rows_late``, ``gap`` and ``gap_half_width_95`` among its columns. Raises ValueError for what
    cannot be asked.
    """
    import pandas as pd  # late: with torch they take seconds

    from experiments.choosing.answer import answered
    from experiments.studies.which_mode import Options

    options = Options(
        data=str(data),
        cluster=(str(cluster),),
        config=None if config is None else Path(config),
        set=tuple(set),
        minutes=minutes,
        tolerance=tolerance,
        out=None if out is None else Path(out),
        **more,
    )
    return pd.DataFrame(answered(options))
