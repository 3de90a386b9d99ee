"""What can be known of a log before rows are trained late: its bursts and its gradients.

`b(R)` is counted in the log alone; `s` takes a synchronous run of 100 updates.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

import numpy as np

from experiments.lateness.runs import StreamData, append_line, lines_of
from runtime.config import TrainConfig
from runtime.data.batch import Batch
from runtime.data.ids import VALUE_BITS

LATENESSES = (4, 16, 64)
"""Updates R for which b(R) is counted."""
GRADIENT_UPDATES = 100
"""First updates of sync whose row gradients are squared (the plan)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bursts:
    """Shares of lookups whose id was first seen fewer than R updates before, by R."""

    of_all: dict[int, float]
    field: str
    """The field with the highest share at 16 updates."""
    of_field: dict[int, float]


def burst_shares(
    ids: np.ndarray, updates: np.ndarray, latenesses: Sequence[int] = LATENESSES
) -> dict[int, float]:
    """b(R) of lookups in their order: ``ids`` [N], and the dense update [N] that each is of.

    >>> burst_shares(np.array([7, 7, 8, 7]), np.array([0, 3, 4, 9]), (4, 16))
    {4: 0.75, 16: 1.0}
    """
    _, first, place = np.unique(ids, return_index=True, return_inverse=True)
    age = updates - updates[first][place]
    return {late: float((age < late).mean()) for late in latenesses}


def sample_of_each_id(batch: Batch) -> np.ndarray:
    """The number of the sample that each id of the batch belongs to, int64 [N]."""
    if batch.offsets is None:
        return np.repeat(np.arange(batch.size), len(batch.ids) // max(1, batch.size))
    fields = (len(batch.offsets) - 1) // max(1, batch.size)
    return np.repeat(np.arange(batch.size), np.diff(batch.offsets[::fields]))


def missed_share(ids: np.ndarray, updates: np.ndarray, late: int) -> float:
    """The share of lookups that miss at least half of the updates that their row ever had, where
    rows are ``late`` updates late: ``ids`` [N], and the dense update [N] that each is of.

    A row that was never updated misses nothing.

    >>> missed_share(np.array([7, 7, 7, 7]), np.array([0, 1, 2, 30]), 16)
    0.5
    """
    # Each pair of an id and an update that reads it is one update of its row.
    _, owner = np.unique(ids, return_inverse=True)
    span = int(updates.max()) + 1
    pairs, place = np.unique(owner * span + updates, return_inverse=True)
    begin_of_owner = pairs // span * span
    number = np.arange(len(pairs))
    before = number - np.searchsorted(pairs, begin_of_owner)

    # Those of the last updates are missed.
    begin_of_missed = begin_of_owner + np.maximum(pairs % span - late, 0)
    missed = number - np.searchsorted(pairs, begin_of_missed)
    return float(((before > 0) & (2 * missed >= before))[place].mean())


def lookups_by_field(config: TrainConfig) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """The ids of each field and the updates that read them, in the order in which a run trains."""
    from runtime.executors.open import source_of  # late: seconds to import
    from runtime.rank.feed import training_stream

    # Every id with the update that reads it.
    source = source_of(config)
    ids = []
    updates = []
    sample = 0
    for batch in training_stream(config, source):
        ids.append(batch.ids)
        updates.append((sample + sample_of_each_id(batch)) // config.batch)
        sample += batch.size
    all_ids = np.concatenate(ids)
    all_updates = np.concatenate(updates)

    # By field: an id's field stands in its top bits.
    owner = (all_ids >> np.uint64(VALUE_BITS)).astype(np.int64)
    mine = {field.name: owner == number for number, field in enumerate(source.layout.fields)}
    return {name: (all_ids[of], all_updates[of]) for name, of in mine.items() if of.any()}


def bursts_of(config: TrainConfig) -> Bursts:
    """The bursts of a run's training samples, in the order in which it trains them."""
    by_field = lookups_by_field(config)
    shares = {name: burst_shares(*lookups) for name, lookups in by_field.items()}
    burstiest = max(shares, key=lambda name: shares[name][16])
    ids, updates = (np.concatenate(parts) for parts in zip(*by_field.values(), strict=True))
    return Bursts(of_all=burst_shares(ids, updates), field=burstiest, of_field=shares[burstiest])


def mean_square_gradient(config: TrainConfig) -> float:
    """Mean squared gradient of a row, per element, over the row updates of the first
    `GRADIENT_UPDATES` updates of sync: what row-wise Adagrad adds to its accumulator each time."""
    from runtime.executors.given_order import OrderedRun, constant_lag_order
    from runtime.executors.open import source_of  # late: seconds to import
    from runtime.rank.components import assemble
    from runtime.rank.feed import training_stream

    # From 0, the accumulators end as the sum of the squared gradients of all row updates.
    optimizer = replace(config.rows.optimizer, initial_accumulator=0.0)
    short = replace(
        config,
        steps=GRADIENT_UPDATES,
        sync=replace(config.sync, tau=0, dense_lag=0),
        rows=replace(config.rows, optimizer=optimizer),
    )
    components = assemble(short, source_of(short))
    OrderedRun(components).run(constant_lag_order(short, components.feed))
    added = sum(float(state.sum()) for _, _, state in components.store.export().values())

    # Divided by the number of these updates.
    batches = training_stream(short, source_of(short))
    return added / sum(len(np.unique(batch.ids)) for batch in batches)


@dataclass(frozen=True, slots=True, kw_only=True)
class LogFacts:
    """What was measured of one stream in one order: a line of lateness_logs.csv."""

    hash: str
    stream: str
    order: str
    row_lr: float
    dense_lr: float
    """Rates of the sync run that was measured."""
    samples: int
    b_4: float
    b_16: float
    b_64: float
    burst_field: str
    field_b_16: float
    mean_square_gradient: float
    drift_16: float = math.nan
    drift_64: float = math.nan
    """Sum over rows of their share of lookups times their squared way in so many updates. Measured
    of the stored logs, on which S5 was judged, and of no later one: it did not order the losses."""


LOG_HEADER = [field.name for field in fields(LogFacts)]


def log_hash(config: TrainConfig, data: StreamData, order: str) -> str:
    """Hash of all that decides the facts of a log."""
    decides = [data.sha256, order, config.rows.optimizer.lr, config.model.lr, config.seed]
    return hashlib.sha256(json.dumps(decides).encode()).hexdigest()[:16]


def facts_of(
    stream: str, order: str, config: TrainConfig, data: StreamData, updates: int
) -> LogFacts:
    """Measure a log by a sync run's config of ``updates`` updates."""
    bursts = bursts_of(config)
    return LogFacts(
        hash=log_hash(config, data, order),
        stream=stream,
        order=order,
        row_lr=config.rows.optimizer.lr,
        dense_lr=config.model.lr,
        samples=updates * config.batch,
        b_4=bursts.of_all[4],
        b_16=bursts.of_all[16],
        b_64=bursts.of_all[64],
        burst_field=bursts.field,
        field_b_16=bursts.of_field[16],
        mean_square_gradient=mean_square_gradient(config),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldFacts:
    """What was counted of one field of a stream in time order: a line of lateness_counts.csv."""

    data: str
    """Hash of the data and of the samples of an update."""
    stream: str
    field: str
    b_4: float
    b_16: float
    missed_half_16: float
    """`missed_share` of rows 16 late."""


COUNTS_HEADER = [field.name for field in fields(FieldFacts)]


def counts_hash(data: StreamData, batch: int) -> str:
    """Hash of all that decides what is counted of a log's fields."""
    return hashlib.sha256(json.dumps([data.sha256, batch]).encode()).hexdigest()[:16]


def facts_of_fields(stream: str, config: TrainConfig, data: str) -> list[FieldFacts]:
    """Count the lookups of each field of a log."""
    counted = []
    for name, (ids, updates) in lookups_by_field(config).items():
        shares = burst_shares(ids, updates)
        facts = FieldFacts(
            data=data,
            stream=stream,
            field=name,
            b_4=shares[4],
            b_16=shares[16],
            missed_half_16=missed_share(ids, updates, 16),
        )
        counted.append(facts)
    return counted


def read_counts(path: Path) -> list[FieldFacts]:
    """The facts of fields, stream by stream."""
    texts = {"data", "stream", "field"}
    return [
        FieldFacts(**{k: v if k in texts else float(v) for k, v in line.items()})
        for line in lines_of(path, COUNTS_HEADER)
    ]


def add_counts(path: Path, facts: Sequence[FieldFacts]) -> None:
    """Append a line for each field."""
    for one in facts:
        append_line(path, COUNTS_HEADER, [str(value) for value in asdict(one).values()])


def read_logs(path: Path) -> dict[str, LogFacts]:
    """The facts by hash."""
    result = {}
    for line in lines_of(path, LOG_HEADER):
        texts = {"hash", "stream", "order", "burst_field"}
        values = {k: v if k in texts else float(v) for k, v in line.items()}
        facts = LogFacts(**{**values, "samples": int(line["samples"])})
        result[facts.hash] = facts
    return result


def add_log(path: Path, facts: LogFacts) -> None:
    """Append a line."""
    append_line(path, LOG_HEADER, [str(value) for value in asdict(facts).values()])
