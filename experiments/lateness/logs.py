"""What can be counted in a log before rows are trained late: how its lookups come in bursts."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import numpy as np

from experiments.lateness.runs import StreamData, append_line, lines_of
from runtime.config import TrainConfig
from runtime.data.batch import Batch
from runtime.data.ids import VALUE_BITS

LATENESSES = (4, 16)
"""Updates R for which b(R) is counted."""


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
