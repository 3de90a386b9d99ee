"""`persia-runtime predict`: the rows of a table scored by a trained model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from persia_sim.words.command_line import POSITIONAL, read_options
from persia_sim.words.rules import Refused, printable
from persia_sim.words.schema import check_fields
from runtime.serving.commands import warn

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, slots=True, kw_only=True)
class Predict:
    """Predict each row of a table: CSV or parquet, with the columns of the training data."""

    run: Annotated[Path, POSITIONAL]
    """Folder of a run, of one of its checkpoints, or of an export."""
    data: Path
    """The table; labels need not be there."""
    out: Path
    """File to write, .parquet or .csv: a row a row, a column a task with its probability, or
    number of a regression."""
    also: tuple[str, ...] = ()
    """Columns of the table that are written, too, such as user and item."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.out.suffix not in (".parquet", ".csv"):
            raise Refused("out", f"must end in .parquet or .csv, got {str(self.out)!r}")


def predict(arguments: Sequence[str]) -> None:
    """Write the file, and say how many ids the model has never seen."""
    options = read_options(Predict, arguments, "persia-runtime predict")
    if options.out.exists():
        raise ValueError(f"out {options.out} is there already; name another file")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    import numpy as np
    import pandas as pd

    from persia_sim.words.files import atomic_write
    from runtime.inference import open_model
    from runtime.run.evaluate import told_of_rows

    model = open_model(options.run, warn)
    doubled = sorted(set(options.also) & set(model.layout.tasks))
    if doubled:
        raise ValueError(f"also names {doubled[0]!r}, which is a task's column; leave it out")
    parts: list[pd.DataFrame] = []
    shares: dict[str, list[float]] = {}
    for rows, batch in model.columns.stream(options.data, options.also):
        found = rows.table.select(list(options.also)).to_pandas()
        found[list(model.layout.tasks)] = model.predict(batch)
        parts.append(found)
        for name, share in model.shares_with_row(batch).items():
            shares.setdefault(name, []).append(share)
    table = pd.concat(parts, ignore_index=True)
    with atomic_write(options.out) as file:
        write = table.to_parquet if options.out.suffix == ".parquet" else table.to_csv
        write(file, index=False)
    means = {name: float(np.mean(found)) for name, found in shares.items()}
    lines = told_of_rows(means, "scored")
    print(printable("\n".join([*lines, f"{len(table):,} rows: {options.out}"]), keep="\n"))
