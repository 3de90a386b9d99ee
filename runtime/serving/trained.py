"""A trained model out of a run's checkpoint: its rows and its weights, and judged again, on the
test part of its own data or of other data of its kind; and the vectors of a table by id, of a run
or an export, sorted, and never written."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from contextlib import closing
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from persia_sim.base.rules import printable
from persia_sim.base.schema import parse
from runtime.checkpoint.places import STATE, run_of
from runtime.checkpoint.rows import load
from runtime.checkpoint.whole import Checkpoint, find_checkpoint
from runtime.config import EngineConfig, TrainConfig
from runtime.data.batch import Batch, Layout
from runtime.data.ids import MAX_FIELDS, VALUE_BITS
from runtime.data.open import open_source
from runtime.data.parquet import parquet_batches, parquet_file
from runtime.data.source import heads_taken_over, rebatch, refuse_other_columns
from runtime.dense.state import drain_into, load_model
from runtime.embedding.config import Admission, Capacity, TableConfig
from runtime.embedding.native.extension import native
from runtime.embedding.native.store import NativeStore, open_table
from runtime.embedding.worker import EmbeddingWorker
from runtime.files import BrokenFileError
from runtime.models.imported import refuse_code_in, refuse_urls_named_in
from runtime.object_store import address_of
from runtime.rank.learner import Learner
from runtime.run.evaluate import HeldOut, evaluate, evaluating, overlap_with, threads_of
from runtime.run.folder import plain
from runtime.serving.ranking import rank_against


@dataclass(frozen=True, slots=True)
class Trained:
    """A model that is not trained any further."""

    checkpoint: Checkpoint
    config: TrainConfig
    """The config that it was trained with, but on the device that is here."""
    tables: dict[str, TableConfig]
    """Tables as they were trained."""
    learner: Learner
    worker: EmbeddingWorker


def open_trained(
    checkpoint: Checkpoint,
    *,
    device: str | None = None,
    on_warning: Callable[[str], None] = lambda text: None,
    trust: bool = False,
) -> Trained:
    """Build the network and fill it and a store with what the checkpoint holds.

    ``device`` is where the network computes, else where it was trained if that is here;
    ``on_warning`` is told whose code is run. Raises ValueError for files that cannot be trusted or
    are of another model, and for code that lies in their folder, or without ``trust`` beside it.
    """
    # The config as it was sealed; code that may be another's is refused.
    state = checkpoint.state
    where = f"{checkpoint.folder / STATE}: "
    config = parse(TrainConfig, state.config, f"{where}config")
    known = state.facts.get("model_code")
    refuse_code_in(run_of(checkpoint.folder), config.model.name, on_warning, known, trust=trust)
    here = config.engine.device if torch.cuda.is_available() else "cpu"
    config = replace(config, engine=on_device(config.engine, device or here))
    tables = {n: parse(TableConfig, t, f"{where}tables.{n}") for n, t in state.tables.items()}

    # The network with its weights, whatever they still waited for applied.
    layout = parse(Layout, state.layout, f"{where}layout")
    learner = Learner(config, layout, {name: table.dim for name, table in tables.items()})
    try:
        dense = checkpoint.dense()
        load_model(learner.model, dense)
        drain_into(learner.model, config, dense)
    except ValueError as error:
        raise ValueError(f"{checkpoint.folder}: {error}") from None
    store = NativeStore(
        layout,
        # They take every saved row and let none go.
        [replace(table, capacity=Capacity(), admission=Admission()) for table in tables.values()],
        shards=max(len(state.servers), 1),
        seed=config.seed,
    )
    load(store, checkpoint.rows)
    worker = EmbeddingWorker(store)
    worker.load_state_dict(state.learner["rows"])
    return Trained(checkpoint, config, tables, learner, worker)


def on_device(engine: EngineConfig, device: str) -> EngineConfig:
    """A CPU computes in full float32 what a GPU rounded to tf32."""
    exact = device == "cpu" and engine.precision == "tf32"
    return replace(engine, device=device, precision="float32" if exact else engine.precision)


_MOST_NAMED = 3


def first_test_rows(trained: Trained, most: int = 1000, *, trust: bool = False) -> Batch:
    """The first samples of the test part of the data that a model was trained on. Raises ValueError
    or OSError where these are not here, or are of another kind by now, and for a URL that nobody is
    known to ``trust``."""
    data = trained.config.data
    refuse_urls_named_in(run_of(trained.checkpoint.folder), data.name, trust=trust)
    source = open_source(data.name, data.dir, data.rows, data.skip_bad_rows)
    refuse_other_layout(trained.learner.layout, source.layout, data.name)
    return next(rebatch(iter(HeldOut(source, most)), most))


def evaluate_run(
    path: Path,
    *,
    data: str | None = None,
    data_dir: Path | None = None,
    skip_bad_rows: bool = False,
    test_rows: int | None = None,
    items: Path | None = None,
    on_warning: Callable[[str], None] = lambda text: None,
    trust: bool = False,
) -> dict[str, Any]:
    """The scores of each task, with what they are of; plain JSON values. With ``items`` also the
    figures of ranking all items of that table (`ranking.rank_against`).

    Raises ValueError for a path without a checkpoint, for data of another kind, and as
    `open_trained` for code, and URLs of data, that nobody is known to ``trust``.
    """
    # The data it was trained on, or other data of the same kind.
    trained = open_trained(find_checkpoint(path, on_warning), on_warning=on_warning, trust=trust)
    config = trained.config
    trained_on = config.data
    skips = skip_bad_rows or trained_on.skip_bad_rows
    if data is None:
        refuse_urls_named_in(run_of(trained.checkpoint.folder), trained_on.name, trust=trust)
        place = data_dir or trained_on.dir
        share = trained_on.validation_fraction
        source = open_source(
            trained_on.name, place, trained_on.rows, skips, validation_fraction=share
        )
        test_rows = config.evaluation.test_rows if test_rows is None else test_rows
    else:
        source = open_source(data, data_dir, skip_bad_rows=skips)

    # The columns must be those that it reads; labels may be others.
    refuse_other_layout(trained.learner.layout, source.layout, data or trained_on.name)
    before = trained.checkpoint.state.facts.get("data_schema", {})
    refuse_other_columns(before, source.provenance())
    if changed := heads_taken_over(before, source.provenance()):
        on_warning(f"judged by another label than it was trained on: {', '.join(changed)}")

    # Judge it, and look whether any row that judges has trained it (law 17).
    held_out = HeldOut(source, test_rows)
    with threads_of(config.engine):
        evaluated = evaluate(trained.learner, trained.learner.model, trained.worker, held_out)
        ranked = {}
        if items is not None:
            predict = partial(_predictions, trained)
            ranked["ranking"] = rank_against(items, source, held_out, predict)
    overlap = overlap_with(trained.checkpoint.trained_on(), held_out)
    evaluated.warnings[:0] = overlap.sentences()
    if overlap.trained:
        sentence = (
            f"{overlap.amount} of the {len(evaluated.labels):,} samples trained this model, or"
            " one that it was started from: it looks better here than it is; judge it by others"
        )
        evaluated.warnings.insert(0, sentence)

    # The scores, and all that they are of.
    return {
        "checkpoint": address_of(trained.checkpoint.folder),
        "samples": trained.checkpoint.state.samples,
        "updates": trained.checkpoint.state.updates,
        "data": plain(source.provenance()),
        "data_says": str(source.provenance()),
        "rows_evaluated": len(evaluated.labels),
        "rows_trained_on": overlap.count,
        "rows_alike": overlap.alike,
        "tasks": {name: plain(score.figures()) for name, score in evaluated.tasks.items()},
        **plain(ranked),
        "ids_with_row": evaluated.ids_with_row,
        "warnings": evaluated.warnings,
    }


def _predictions(trained: Trained, batches: Iterable[Batch]) -> Generator[np.ndarray, None, None]:
    """float [B, T] of each batch, with the rows as they are."""
    model, worker = trained.learner.model, trained.worker
    with evaluating(model), closing(worker.store.peek_all(batches)) as handles:
        for handle in handles:
            yield trained.learner.predict(model, handle.batch, worker.pool(handle))


def refuse_other_layout(trained: Layout, given: Layout, name: str) -> None:
    """Raise ValueError, naming what differs, where the data are not of the model's kind."""
    differences = [
        f"{field.name.replace('dense', 'dense features')}: {_difference(was, now)}"
        for field in fields(Layout)
        # By which samples are judged, not of what kind the model is.
        if field.name not in ("group", "weighted", "optional")
        if (was := getattr(trained, field.name)) != (now := getattr(given, field.name))
    ]
    if differences:
        raise ValueError(
            f"data set {name} has another schema than the model was trained on;"
            f" {'; '.join(differences)}"
        )


def _difference(was: tuple[Any, ...], now: tuple[Any, ...]) -> str:
    lacking = [part for part in was if part not in now]
    new = [part for part in now if part not in was]
    if not lacking and not new:
        return "the same in another order"
    differing = [("lacks", lacking), ("has beside them", new)]
    return ", ".join(f"{word} {_shortened(parts)}" for word, parts in differing if parts)


def _shortened(parts: list[Any]) -> str:
    words = [p if isinstance(p, str) else f"{p.name} ({p.pooling}, {p.table})" for p in parts]
    rest = f" and {len(words) - _MOST_NAMED} more" if len(words) > _MOST_NAMED else ""
    return ", ".join(words[:_MOST_NAMED]) + rest


_ROWS_AT_ONCE = 1 << 17
_MOST_ID = np.uint64((MAX_FIELDS << VALUE_BITS) - 1)


class Vectors:
    """Rows that are there, and the initial value of every other one (law 10)."""

    def __init__(self, config: TableConfig, seed: int, ids: np.ndarray, values: np.ndarray) -> None:
        """``ids`` uint64 [n], sorted; ``values`` [n, dim]."""
        self.config = config
        self.ids = ids
        self.values = values
        plain = replace(config, capacity=Capacity(), admission=Admission())
        self._empty = open_table(plain, seed, 1)

    def rows(self, ids: np.ndarray) -> np.ndarray:
        """[n, dim]: the rows of these ids, as they stand in a plan."""
        result: np.ndarray = np.empty((len(ids), self.config.dim), self.config.dtype)
        place = np.searchsorted(self.ids, ids)
        place[place == len(self.ids)] = 0
        there = self.ids[place] == ids if len(self.ids) else np.zeros(len(ids), bool)
        result[there] = self.values[place[there]]
        absent = np.ascontiguousarray(ids[~there])
        count = len(absent)
        values = np.empty((count, self.config.dim), self.config.dtype)
        handles = np.empty(count, np.int64)
        writes = np.empty(count, np.int64)
        span = np.array([[0, count, 0]])
        native.read([self._empty], absent, span, handles, writes, values, False, 0)
        result[~there] = values
        return result

    def lookup(self, ids: np.ndarray) -> np.ndarray:
        """[n, dim]: the vector of each id."""
        distinct, which = np.unique(ids, return_inverse=True)
        return self.rows(distinct)[which]

    def holds(self, ids: np.ndarray) -> np.ndarray:
        """bool [n], whether each id has a row."""
        return np.isin(ids, self.ids)


def ids_of(given: Any) -> np.ndarray:
    """Row ids as an array; ValueError for what cannot be ids."""
    ids = np.asarray(given)
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "ui"):
        raise ValueError(
            f"ids must be one row of whole numbers, got {ids.dtype} of shape {ids.shape}"
        )
    if ids.size and (ids.min() < 0 or ids.max() > _MOST_ID):
        wrong = ids.min() if ids.min() < 0 else ids.max()
        raise ValueError(f"ids must be 0 to {int(_MOST_ID)}, got {int(wrong)}")
    return np.ascontiguousarray(ids.astype(np.uint64))


def write_vectors(file: Path, config: TableConfig, ids: np.ndarray, values: np.ndarray) -> None:
    """A parquet file of columns id and vector, sorted by id as they come."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = _schema(config)
    # Vectors are noise to a compressor, and no two are alike.
    with pq.ParquetWriter(file, schema, compression="none", use_dictionary=False) as out:
        for start in range(0, len(ids), _ROWS_AT_ONCE):
            part = slice(start, start + _ROWS_AT_ONCE)
            flat = pa.array(values[part].reshape(-1))
            vectors = pa.FixedSizeListArray.from_arrays(flat, config.dim)
            out.write_table(pa.table([pa.array(ids[part]), vectors], schema=schema))


def read_vectors(file: Path, config: TableConfig) -> tuple[np.ndarray, np.ndarray]:
    """Ids and values; the file is mapped while it is decoded. `BrokenFileError` for any other."""
    import pyarrow as pa

    expected = _schema(config)
    try:
        # The columns of such a table, and no others.
        with parquet_file(file, mapped=True) as content:
            columns = content.schema_arrow
            count = content.metadata.num_rows
        if not columns.equals(expected):
            given, wanted = (
                ", ".join(f"{c.name}: {c.type}" for c in s) for s in (columns, expected)
            )
            raise BrokenFileError(
                f"{file} has the columns {printable(given)}; a table of this model has {wanted}"
            )

        # Part by part into arrays of the whole size, which the file has, too.
        least = count * (8 + config.dim * np.dtype(config.dtype).itemsize)
        if not 0 <= least <= file.stat().st_size:
            raise BrokenFileError(f"{file} holds fewer bytes than {count:,} rows have")
        at = 0
        ids = np.empty(count, np.uint64)
        values = np.empty((count, config.dim), config.dtype)
        for part in parquet_batches(file, expected.names, _ROWS_AT_ONCE, mapped=True):
            to = slice(at, at + len(part))  # never all of it twice
            ids[to] = part["id"].to_numpy(zero_copy_only=False)
            flat = part["vector"].flatten().to_numpy(zero_copy_only=False)
            values[to] = flat.reshape(len(part), config.dim)
            at = to.stop
    except BrokenFileError:
        raise
    except (ValueError, IndexError, OSError, pa.ArrowException) as error:
        reason = str(error).splitlines()[0].removeprefix(f"{file} ")
        raise BrokenFileError(f"{file} is no parquet file of a table: {reason}") from None

    # Lookups search by bisection: ids must rise.
    if (ids[1:] <= ids[:-1]).any():
        raise BrokenFileError(f"{file}: its ids are not sorted, or one stands twice")
    return ids, values


def _schema(config: TableConfig) -> Any:
    import pyarrow as pa

    kind = pa.float64() if config.dtype == "float64" else pa.float32()
    return pa.schema({"id": pa.uint64(), "vector": pa.list_(kind, config.dim)})
