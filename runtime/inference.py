"""A trained model to read from: vectors by id, and predictions; nothing is ever written."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from persia_sim.words.schema import shown
from runtime.checkpoint.whole import find_checkpoint
from runtime.data.batch import Batch, Layout
from runtime.embedding.native.plan import Planner
from runtime.embedding.open import open_pooling
from runtime.embedding.store import ByTable
from runtime.serving.columns import Columns
from runtime.serving.exported import is_export, read_export
from runtime.serving.network import Scorer, score_with
from runtime.serving.trained import open_trained
from runtime.serving.vectors import Vectors, ids_of

if TYPE_CHECKING:
    import pandas as pd


class Model:
    """Rows and a dense network that stay as they are; safe for threads. See `open_model`.

    ``layout``: the fields, dense features and tasks that batches must have; ``tables``: the rows,
    by name of the table; ``schema``: the document of the columns that it was trained on.
    """

    def __init__(
        self,
        layout: Layout,
        tables: dict[str, Vectors],
        network: Any,
        precision: str,
        schema: Mapping[str, Any],
    ) -> None:
        self.layout, self.tables, self._schema = layout, tables, schema
        dims = {name: vectors.config.dim for name, vectors in tables.items()}
        self._pooling = open_pooling(layout.fields, dims)
        self._planner = Planner(layout.fields, (v.config for v in tables.values()), 1)
        self._score = score_with(
            network, torch.float64 if precision == "float64" else torch.float32, layout
        )

    def lookup(self, table: str, ids: Sequence[int] | np.ndarray) -> np.ndarray:
        """float [n, dim]: the vectors of these ids, as they stand in batches and in the export.

        ``ids``: [n], whole numbers such as `Batch.ids` holds. An id without a row has its initial
        value. Of a hash stack, the sum of an id's rows. Raises ValueError for an unknown table and
        for what cannot be ids.
        """
        if table not in self.tables:
            raise ValueError(f"no table is called {table!r}; there are {', '.join(self.tables)}")
        return self.tables[table].lookup(ids_of(ids))

    @property
    def columns(self) -> Columns:
        """What turns values of a table into batches and ids; ValueError where there was none."""
        return Columns(self._schema, "the model")

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

    def shares_with_row(self, batch: Batch) -> dict[str, float]:
        """Of each field, the share of a batch's ids that have a row: others are read as fresh."""
        bags = np.diff(batch.offsets) if batch.offsets is not None else 1
        fields = self.layout.fields
        of_field = np.repeat(np.tile(np.arange(len(fields)), batch.size), bags)
        there = {
            number: np.isin(batch.ids[of_field == number], self.tables[field.table].ids)
            for number, field in enumerate(fields)
            if not self.tables[field.table].config.hash_stack.rounds
        }
        return {fields[n].name: float(found.mean()) for n, found in there.items() if len(found)}

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
        if not isinstance(batch, Batch):
            raise ValueError(
                f"batch must be a runtime.data.batch.Batch, got {shown(batch)}; a source's chunks"
                " are such batches, and open_source opens one"
            )
        samples, fields = batch.size, len(self.layout.fields)
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


def open_model(path: str | Path, on_warning: Callable[[str], None] = lambda text: None) -> Model:
    """The model of an exported folder, of a run's newest checkpoint, or of one checkpoint.

    ``on_warning`` is told of damaged checkpoints, and of a class of the user's the files that its
    import runs; code that lies in the folder itself is refused. Raises ValueError naming the path
    and what is wrong with it. The vectors lie in memory; of a
    checkpoint, its optimiser state too while it is opened.
    """
    path = Path(path)
    if is_export(path):
        found = read_export(path, on_warning)
        return Model(found.layout, found.tables, found.network, found.precision, found.schema)
    trained = open_trained(find_checkpoint(path, on_warning), device="cpu", on_warning=on_warning)
    exported, seed = trained.worker.store.export(), trained.config.seed
    tables = {
        name: Vectors(trained.tables[name], seed, ids, np.ascontiguousarray(values))
        for name, (ids, values, _) in exported.items()
    }
    precision = trained.config.engine.precision
    network = Scorer(trained.learner.model, precision).eval()
    schema = trained.checkpoint.state.facts.get("data_schema", {})
    return Model(trained.layout, tables, network, precision, schema)
