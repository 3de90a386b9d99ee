"""A trained model to read from: vectors by id, and predictions, also of values as they stand in a
table; nothing is ever written."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from persia_sim.base.schema import nearest, parse, shown
from runtime.checkpoint.lineage import TrainedOn
from runtime.checkpoint.places import fetched
from runtime.checkpoint.whole import find_checkpoint
from runtime.data.batch import Batch, Layout
from runtime.data.convert import column_values
from runtime.data.errors import DataError
from runtime.data.files import batch_of, refuse_row
from runtime.data.fingerprints import RowSet
from runtime.data.ids import tag
from runtime.data.rows import Rows, written
from runtime.data.schema import Column, Schema
from runtime.data.table import file_of, header_of
from runtime.embedding.batch_rows import ByTable
from runtime.embedding.native.plan import Planner, Pooling
from runtime.models.networks import batch_warnings, in_parts
from runtime.object_store import address_of, named_as
from runtime.serving.exported import MANIFEST, read_export, read_trained_on
from runtime.serving.network import Score, Scorer, dtype_of, score_with
from runtime.serving.trained import Vectors, ids_of, open_trained

if TYPE_CHECKING:
    import pandas as pd


class Columns:
    """The columns that a model was trained on, by their names; values of labels are not read."""

    def __init__(self, document: Mapping[str, Any], where: str) -> None:
        """``document``: of the schema, as a run keeps it; empty of a stream that is no table."""
        if not document:
            raise ValueError(
                f"{where} was trained on a synthetic stream, which has no columns: `predict` takes"
                " its batches, `lookup` its ids"
            )
        self.schema = parse(Schema, {"name": "what is scored", **document}, where)

    def stream(self, file: Path, also: Sequence[str] = ()) -> Iterator[tuple[Rows, Batch]]:
        """The rows of a table and of its columns ``also``, chunk by chunk; DataError for a bad
        one."""
        table = file_of(self.schema, file, header=header_of(self.schema, file))
        names = tuple(dict.fromkeys((*self.schema.feature_columns, *also)))
        table.check_columns(names)
        for rows in table.stream(names):
            yield rows, batch_of(self.schema, rows, refuse_row, labelled=False)

    def has_labels(self, file: Path) -> bool:
        """Whether a table holds a label, too: then its predictions can be judged by it."""
        table = file_of(self.schema, file, header=header_of(self.schema, file))
        return not set(self.schema.labels).isdisjoint(table.column_names())

    def column_notes(self, file: Path) -> list[str]:
        """A line where a table without a line of names has fewer columns than those that train."""
        names = self.schema.header or ()
        written = header_of(self.schema, file) or ()
        lacking = [name for name in names if name not in written]
        if not lacking:
            return []
        return [f"{file} has no column {', '.join(lacking)}; it holds {', '.join(written)}"]

    def of_frame(self, frame: pd.DataFrame) -> Batch:
        """The rows of a frame; DataError for a column that is not there, and for a bad value."""
        import pyarrow as pa

        # Anything that looks like a frame, with the columns of the training data.
        names = list(self.schema.feature_columns)
        if not hasattr(frame, "columns") or not hasattr(frame, "iloc"):  # whoever's pandas it is
            raise DataError(f"frame must be a pandas DataFrame, got {shown(frame)}")
        lacking = [name for name in names if name not in frame]
        if lacking:
            raise DataError(
                f"the frame has no column {lacking[0]!r}; {nearest(lacking[0], map(str, frame))}"
            )

        # As rows of a file, so that they become ids by the same code as in training.
        try:
            table = pa.RecordBatch.from_pandas(frame[names], preserve_index=False)
        except pa.ArrowException as error:  # of which some are no ValueError
            reason = "; ".join(map(str, error.args))
            raise DataError(f"the frame: {reason}: give each column values of one kind") from error
        rows = Rows(table=table, numbers=np.arange(1, len(frame) + 1), path=Path("the frame"))
        return batch_of(self.schema, rows, refuse_row, labelled=False)

    def ids(self, name: str, values: Sequence[Any]) -> tuple[str, np.ndarray]:
        """The table, and the id of each value: uint64 [n]; of a list column each is one id."""
        import pyarrow as pa

        # A column of ids, and a list of values.
        known = {c.name: c for c in self.schema.id_columns}
        if name not in known:
            raise ValueError(f"no column of ids is called {name!r}; {nearest(name, known)}")
        if isinstance(values, str | bytes) or not isinstance(values, Iterable):
            given = f"the text {values!r}" if isinstance(values, str) else shown(values)
            raise ValueError(f"values must be a sequence of them, got {given}")

        # What has no id by its value alone.
        column = known[name]
        if column.with_column is not None:
            raise ValueError(
                f"an id of column {name} is made of its value and that of {column.with_column};"
                " `predict_frame` takes both"
            )
        if column.kind in ("multi", "sequence"):
            column = Column(name=name, table=column.table)

        # Values become ids as in training, kind by kind.
        try:
            array = pa.array(list(values), from_pandas=True)
        except (pa.ArrowException, OverflowError):  # of several kinds, or beyond 63 bits: as texts
            array = pa.array([_text_of(value) for value in values], pa.string())
        for value in values:
            if isinstance(value, list | tuple | dict | set | np.ndarray):
                kind = type(value).__name__
                why = f"it is a {kind}, and each value is one id, also of a column of lists"
                raise ValueError(f"column {name} has no id for {value!r}: {why}")
        hashed = column_values(column, array, None, self.schema.missing)
        if hashed.bad.any():
            wrong = list(values)[int(np.flatnonzero(hashed.bad)[0])]
            raise ValueError(f"column {name} has no id for {wrong!r}: {hashed.rule}")

        # An id has its column's number in its top bits, so that fields share a table without
        # sharing rows.
        number = self.schema.field_numbers[list(known).index(name)]
        return column.table or "rows", tag(number, hashed.data)


def _text_of(value: Any) -> str | None:
    """What a value is written as, by itself; None for none."""
    import pyarrow as pa

    try:
        texts, which = written(pa.array([value], from_pandas=True))
    except (pa.ArrowException, OverflowError):
        return str(value)
    return texts[0] if which[0] < len(texts) else None


class Model:
    """Rows and a dense network that stay as they are; safe for threads. See `open_model`.

    ``layout``: the fields, dense features and tasks that batches must have; ``tables``: the rows,
    by name of the table; ``schema``: the document of the columns that it was trained on;
    ``score``: what the network makes of dense features and vectors.
    """

    def __init__(
        self,
        layout: Layout,
        tables: dict[str, Vectors],
        score: Score,
        schema: Mapping[str, Any],
        network: str,
        precision: str,
        trained: TrainedOn | None = None,
    ) -> None:
        """``network``: its name in the options of a run; ``precision``: in which it computes;
        ``trained``: the samples that trained it; None: nobody knows."""
        self.trained = trained
        self.layout = layout
        self.tables = tables
        self._schema = schema
        dims = {name: vectors.config.dim for name, vectors in tables.items()}
        self._pooling = Pooling(layout.fields, dims)
        self._planner = Planner(layout.fields, (v.config for v in tables.values()), 1)
        self._score = score
        self._network = network
        self._precision = precision

    def lookup(self, table: str, ids: Sequence[int] | np.ndarray) -> np.ndarray:
        """float [n, dim]: the vectors of these ids, as they stand in batches and in the export.

        ``ids``: [n], whole numbers such as `Batch.ids` holds. An id without a row has its initial
        value. Raises ValueError for an unknown table and for what cannot be ids.
        """
        if table not in self.tables:
            raise ValueError(f"no table is called {table!r}; there are {', '.join(self.tables)}")
        return self.tables[table].lookup(ids_of(ids))

    @property
    def columns(self) -> Columns:
        """What turns values of a table into batches and ids; ValueError where there was none."""
        return Columns(self._schema, "the model")

    def training_warnings(self, file: Path, judged: RowSet) -> list[str]:
        """Warnings, where rows of a table trained the model, or one that it was started from;
        ``judged`` is the sketch of its rows."""
        if self.trained is None:
            return [
                "nobody knows which samples trained this export: it may look better here than it is"
            ]
        overlap = self.trained.overlap_of_file(self.columns.schema, file, judged)
        warnings = overlap.sentences()
        if overlap.trained:
            warnings.append(
                f"{overlap.amount} of the {overlap.rows:,} samples trained this model, or one that"
                f" it was started from: judged by the labels of {file}, it looks better than it is"
            )
        return warnings

    def batch_warnings(self, batch: Batch, predictions: np.ndarray) -> list[str]:
        """Warnings, where a network of somebody's own predicts a sample otherwise in another batch;
        ``predictions`` are those of this batch."""
        parts = in_parts(self._network, batch)
        if not parts:
            return []
        apart = [self.predict(part) for part in parts]
        return batch_warnings(self._network, self._precision, batch.size, predictions, apart)

    def vectors(self, column: str, values: Sequence[Any]) -> np.ndarray:
        """float [n, dim]: the vectors of these values of a column, as ``vectors("user", ["u17"])``.

        A value that was never seen has the initial vector of its id. Raises ValueError for what is
        no column of ids.
        """
        table, ids = self.columns.ids(column, values)
        return self.tables[table].lookup(ids)

    def predict_frame(self, frame: pd.DataFrame) -> np.ndarray:
        """float64 [B, T]: as `predict`, of a frame with the columns that the model was trained on;
        labels need not be there. Raises DataError naming the row and column that do not fit."""
        return self.predict(self.columns.of_frame(frame))

    def ids_with_row(self, batch: Batch) -> dict[str, np.ndarray]:
        """Field -> which of a batch's ids have a row, bool [N]: others are read as fresh."""
        of_field = batch.field_of_ids()
        return {
            field.name: self.tables[field.table].holds(batch.ids[of_field == number])
            for number, field in enumerate(self.layout.fields)
        }

    def predict(self, batch: Batch) -> np.ndarray:
        """float64 [B, T]: the probability of each task, of a regression the number, in
        the order of ``layout.tasks``.

        The batch must be of the model's layout, or ValueError is raised; its labels are not looked
        at.
        """
        self._check(batch)
        if not batch.size:
            return np.empty((0, len(self.layout.tasks)))
        plans = self._planner.plan(batch)
        rows = [self.tables[name].rows(plan.ids).ravel() for name, plan in plans.items()]
        values = ByTable(np.concatenate(rows), plans, wide=True)
        return self._score(batch.dense, self._pooling.forward(batch, plans, values))

    def _check(self, batch: Batch) -> None:
        # Another library's batch.
        if not isinstance(batch, Batch):
            raise ValueError(
                f"batch must be a runtime.data.batch.Batch, got {shown(batch)}; a source's chunks"
                " are such batches, and open_source opens one"
            )

        # A bag of ids for each sample and field, and all dense features.
        samples = batch.size
        fields = len(self.layout.fields)
        bags = len(batch.ids) if batch.offsets is None else len(batch.offsets) - 1
        if bags != samples * fields:
            raise ValueError(
                f"a batch of {samples} samples must have {samples * fields} bags of ids, one for"
                f" each of the {fields} fields; this one has {bags}"
            )
        if batch.dense.shape != (samples, len(self.layout.dense)):
            raise ValueError(
                f"dense features must have shape {(samples, len(self.layout.dense))}, got"
                f" {batch.dense.shape}"
            )


def open_model(
    path: str | Path,
    on_warning: Callable[[str], None] = lambda text: None,
    *,
    trust: bool = False,
) -> Model:
    """The model of an exported folder, of a run's newest checkpoint, or of one checkpoint; the path
    may be a URL of a store.

    ``on_warning`` is told of damaged checkpoints, and of a class of the user's the files that its
    import runs. Code that lies in the folder itself is refused, and code that may have come with
    it, from beside it, unless ``trust`` says that it was read. Raises ValueError naming the path
    and what is wrong with it. The vectors lie in memory; of a
    checkpoint, its optimiser state too while it is opened.

    >>> from tempfile import TemporaryDirectory
    >>> from runtime.config import CheckpointConfig, DataConfig, EvaluationConfig, TrainConfig
    >>> from runtime.run.record import run_into
    >>> config = TrainConfig(
    ...     data=DataConfig(name="synthetic", rows=256),
    ...     evaluation=EvaluationConfig(test_rows=50),
    ...     checkpoint=CheckpointConfig(checkpoint_every="end"),
    ... )
    >>> with TemporaryDirectory() as folder:
    ...     summary = run_into(Path(folder), config)
    ...     model = open_model(folder)
    >>> table = next(iter(model.tables))
    >>> model.lookup(table, [7, 8]).shape  # two ids; one that did not train has its initial row
    (2, 8)

    A model of a table takes its values as they stand there: ``model.vectors("user", ["u17"])``, and
    ``model.predict_frame(frame)``.
    """
    folder = fetched(path)
    with named_as(address_of(folder), folder):
        return _model_in(folder, on_warning, trust)


def _model_in(path: Path, on_warning: Callable[[str], None], trust: bool) -> Model:
    # An export is read as it lies there.
    if (path / MANIFEST).is_file():
        return Model(*read_export(path), trained=read_trained_on(path))

    # A checkpoint is opened as a run, of which rows and network are kept.
    checkpoint = find_checkpoint(path, on_warning)
    trained = open_trained(checkpoint, device="cpu", on_warning=on_warning, trust=trust)
    exported = trained.worker.store.export()
    seed = trained.config.seed
    tables = {
        name: Vectors(trained.tables[name], seed, ids, np.ascontiguousarray(values))
        for name, (ids, values, _) in exported.items()
    }

    # The network in the arithmetic it was trained in, and what trained it.
    precision = trained.config.engine.precision
    layout = trained.learner.layout
    network = Scorer(trained.learner.model, precision).eval()
    score = score_with(network, dtype_of(precision), layout)
    schema = trained.checkpoint.state.facts.get("data_schema", {})
    name = trained.config.model.name
    trained_on = trained.checkpoint.trained_on()
    return Model(layout, tables, score, schema, name, precision, trained_on)
