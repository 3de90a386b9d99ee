"""`evaluate`, `predict` and `export`: their options, checks, tables and files."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from persia_sim.base.command_line import OF_GROUP, POSITIONAL, read_options
from persia_sim.base.rules import Refused, printable
from persia_sim.base.schema import Checked, Within, check_fields
from persia_sim.base.vocabulary import ENDLESS
from runtime.files import ensure_place

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedData:
    """What a model is judged on."""

    name: Annotated[str | None, OF_GROUP] = None
    """Another data set with the same fields, dense features and tasks, as next_day.toml; else the
    run's own."""
    dir: Path | None = None
    """Folder with the real data sets, as in training. Example: ~/data."""
    skip_bad_rows: bool = False
    """Count and leave out rows that break the schema, as a run does that was trained so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """A trained model that a command reads."""

    run: Annotated[Path, POSITIONAL]
    """Folder of a run, as runs/mine, whose best (`--keep-best`) or newest checkpoint is taken, or
    of one; to predict, or of an export. Each may be a URL, as s3://bucket/runs/mine."""
    trust: bool = False
    """Run the code of a model of somebody's own class although it lies beside the folder and may
    have come with it. It can do whatever you can, so read it first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluate(Opened, Checked):
    """Evaluate a trained model on a test part: AUC and log-loss of each task."""

    data: JudgedData = field(default_factory=JudgedData)
    test_rows: Annotated[int | None, Within(2, ENDLESS)] = None
    """Only the first samples of the test part, >= 2; of the run's own data as in training."""
    rank_against: Path | None = None
    """A table of items, one a row, as items.csv: also rank all of them for each test sample with a
    1, but those that its user (the schema's group) has with a 1 elsewhere: Recall@10, NDCG@10."""
    out: Path | None = None
    """JSON file to write, as scores.json; an earlier evaluation in its place is replaced."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Predict(Opened):
    """Predict each row of a CSV or parquet, with the training data's columns, joined ones too."""

    data: Path
    """The table, as clicks.csv; labels need not be there."""
    out: Path
    """File to write, as scores.parquet, or .csv: a row a row, a column a task with its probability,
    or number of a regression."""
    also: tuple[str, ...] = ()
    """Columns of the table that are written, too, such as user and item. With a label, as click,
    its score is called click_score."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.data.suffix in (".toml", ".json"):
            rule = "must be a table, as clicks.csv: the model knows its schema"
            raise Refused("data", f"{rule}; got {str(self.data)!r}")
        if self.out.suffix not in (".parquet", ".csv"):
            raise Refused("out", f"must end in .parquet or .csv, got {str(self.out)!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Export(Opened):
    """Write a trained model as files: rows as parquet, the network as ONNX and its weights."""

    out: Path
    """Folder to make, such as exported; nothing is overwritten."""


def evaluate(arguments: Sequence[str]) -> None:
    """Print a line a task, and write the JSON file that was asked for."""
    # Where it will be written is looked at before minutes are spent.
    options = read_options(Evaluate, arguments, "persia-runtime evaluate")
    if options.out is not None:
        ensure_place(options.out, "evaluation", {"checkpoint"}, {"tasks"})
    from runtime.serving.trained import evaluate_run

    # Evaluate, print, write.
    result = evaluate_run(
        options.run,
        data=options.data.name,
        data_dir=options.data.dir,
        skip_bad_rows=options.data.skip_bad_rows,
        test_rows=options.test_rows,
        items=options.rank_against,
        on_warning=warn,
        trust=options.trust,
    )
    print(printable(describe(result), keep="\n"))
    if options.out is not None:
        from runtime.run.folder import write_json

        write_json(options.out, result)
        print(f"written: {options.out}")


def predict(arguments: Sequence[str]) -> None:
    """Write the file, and say how many ids the model has never seen."""
    options = read_options(Predict, arguments, "persia-runtime predict")
    if os.path.lexists(options.out):
        raise ValueError(f"--out {options.out} is there already; name another file")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    import numpy as np
    import pandas as pd
    import pyarrow.types as kinds

    from persia_sim.base.files import atomic_write
    from runtime.data.fingerprints import Sketch
    from runtime.inference import open_model
    from runtime.run.evaluate import row_share_lines

    model = open_model(options.run, warn, trust=options.trust)
    # A label may ride along: the score beside it has another name then.
    scores = [f"{t}_score" if t in options.also else t for t in model.layout.tasks]
    names = [*scores, *options.also]
    if doubled := [name for name in options.also if names.count(name) > 1]:
        raise ValueError(f"also names {doubled[0]!r}, which is a column already; leave it out")
    parts: list[pd.DataFrame] = []

    def whole(kind: Any) -> Any:
        """The pandas type of integers: numpy's would be floats where one is absent, and large ids
        others."""
        return pd.ArrowDtype(kind) if kinds.is_integer(kind) else None

    # Chunk by chunk: scores, what is known of the ids, and a sketch of the rows.
    known: dict[str, np.ndarray] = {}
    judged = Sketch()
    for rows, batch in model.columns.stream(options.data, options.also):
        scored = rows.table.select(list(options.also)).to_pandas(types_mapper=whole)
        predictions = model.predict(batch)
        if not parts:
            for text in model.batch_warnings(batch, predictions):
                warn(text)
        scored[scores] = predictions
        parts.append(scored)
        judged.add_samples(batch)
        for name, have in model.ids_with_row(batch).items():
            known[name] = known.get(name, 0) + np.array([have.sum(), have.size])

    # Written at once, or not at all.
    table = pd.concat(parts, ignore_index=True)
    with atomic_write(options.out) as file:
        write = table.to_parquet if options.out.suffix == ".parquet" else table.to_csv
        write(file, index=False)

    # Warn where these rows have trained the model: their scores would be too good.
    if model.columns.has_labels(options.data):  # predictions may be judged by them
        for text in model.training_warnings(options.data, judged.rows()):
            warn(text)
    shares = {name: float(there / ids) for name, (there, ids) in known.items()}
    lines = [*model.columns.column_notes(options.data), *row_share_lines(shares, "scored")]
    print(printable("\n".join([*lines, f"{len(table):,} rows: {options.out}"]), keep="\n"))


def export(arguments: Sequence[str]) -> None:
    """Write the folder and say what lies in it."""
    # What is exported, and to where: nothing is overwritten.
    options = read_options(Export, arguments, "persia-runtime export")
    from runtime.checkpoint.whole import find_checkpoint
    from runtime.run.evaluate import by_its_batch
    from runtime.serving import exported, network
    from runtime.serving.trained import first_test_rows, open_trained

    exported.refuse_place(options.out)
    checkpoint = find_checkpoint(options.run, warn)
    trained = open_trained(checkpoint, device="cpu", on_warning=warn, trust=options.trust)

    # The samples on which what was written is tried.
    try:
        rows = first_test_rows(trained, trust=options.trust)
    except (ValueError, OSError) as error:
        rows = None
        warn(f"the network is tried on made-up samples, for the test part cannot be read: {error}")
    if rows is not None:
        for text in by_its_batch(trained.learner, trained.learner.model, trained.worker, rows):
            warn(text)

    # What was written, and what somebody needs to use it.
    result = exported.export(trained, options.out, rows)
    made = result.manifest
    print(printable(f"dense network: {network.WEIGHTS}, the weights of {made.model}"))
    if made.why_no_graph:
        print(printable(f"no {network.NETWORK}: {made.why_no_graph}"))
    else:
        kind = "test" if made.tried_on_test_rows else "made-up"
        print(
            f"for any program: {network.NETWORK}, within {made.furthest:.1e} of the model's"
            f" predictions for {made.tried_on:,} {kind} samples"
        )
        if made.precision == "bfloat16":
            print(f"it computes in float32, where the training was in {made.precision}")
    for table, count in result.rows.items():
        print(f"table {printable(table)}: {count:,} rows")
    print(f"exported {result.file_bytes:,} bytes: {options.out}")


def describe(result: dict[str, Any]) -> str:
    """What a person reads after an evaluation."""
    # Of which model and data the scores are; a task that no sample has a label of has no figures.
    judged = {
        name: score for name, score in result["tasks"].items() if score["label_rate"] is not None
    }
    tasks = {name: score for name, score in judged.items() if "rmse" not in score}
    numbers = {name: score for name, score in judged.items() if "rmse" in score}
    width = max(len(name) for name in (*tasks, "task"))
    grouped = any(score.get("gauc_groups") for score in tasks.values())
    lines = [
        f"{result['checkpoint']}, after {result['samples']:,} samples",
        f"data: {result['data_says']}; {result['rows_evaluated']:,} evaluated",
    ]
    if result["data"]["rows_skipped"]:
        lines.append(f"bad rows skipped: {result['data']['skipped_where']}")

    # Numbers beside the error of always saying their mean; clicks beside the loss of their rate.
    for name, score in numbers.items():
        lines.append(
            f"{name}: RMSE {score['rmse']:.4g}, MAE {score['mae']:.4g}; RMSE of always saying"
            f" {score['label_rate']:.4g}: {math.sqrt(score['trivial_mse']):.4g}"
        )
    if tasks:
        lines.append(
            f"{'task':<{width}}     AUC  log-loss  label rate  log-loss of the rate"
            f"  calibration{'    GAUC' if grouped else ''}"
        )
    for name, score in tasks.items():
        known = {key: math.nan if value is None else value for key, value in score.items()}
        auc = known["auc"]
        loss = known["log_loss"]
        gauc = known.get("gauc", math.nan)
        lines.append(
            f"{name:<{width}}  {auc:.4f}    {loss:.4f}      {score['label_rate']:.4f}"
            f"                {score['trivial_log_loss']:.4f}"
            f"       {known['calibration']:6.3f}{f'  {gauc:.4f}' if grouped else ''}"
        )
    for name, score in tasks.items():
        if top := ", ".join(f"{k} {v:.4f}" for k, v in score.items() if "@" in k and v is not None):
            lines.append(f"{name}: {top} within the groups")

    if ranked := result.get("ranking"):
        top = ", ".join(f"{k} {v:.4f}" for k, v in ranked.items() if "@" in k and v is not None)
        by = ranked["left_out"]
        without = f", without those that the same {by} has with a 1 elsewhere" if by else ""
        lines.append(
            f"{ranked['task']}: {top} of {ranked['items']:,} items for each of"
            f" {ranked['lists']:,} samples with a 1{without}"
        )
        if absent := ranked["lists_without_item"]:
            lines.append(f"warning: the table of items lacks those of {absent:,} such samples")

    # What makes these scores doubtful.
    from runtime.run.evaluate import row_share_lines

    lines += row_share_lines(result["ids_with_row"], "test")
    if result["rows_alike"] and not result["rows_trained_on"]:
        lines.append(
            f"{result['rows_alike']:,} test samples hold what a sample held that was trained on:"
            " samples of this kind do so by chance"
        )
    lines += [f"warning: {text}" for text in result["warnings"]]
    return "\n".join(lines)


def warn(text: str) -> None:
    """Tell a person on stderr."""
    print(printable(f"warning: {text}", keep="\n"), file=sys.stderr)
