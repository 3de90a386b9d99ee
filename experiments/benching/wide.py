"""Workload `wide`: the fixed speed test of the embedding path, 26 Zipf fields of one sample."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from runtime.data.batch import Batch, Field, Layout
from runtime.data.ids import hash_integers, tag
from runtime.data.source import Part, Provenance

FIELDS = 26
DENSE = 13
ZIPF_EXPONENT = 1.05


@dataclass(frozen=True, slots=True)
class WideWorkload:
    """Ready-made batches that repeat, so that a measurement contains no generation of data."""

    batches: tuple[Batch, ...]

    @property
    def layout(self) -> Layout:
        """26 id fields of equal vocabularies, 13 dense features, one task."""
        fields = tuple(Field(name=f"c{k}") for k in range(FIELDS))
        return Layout(fields=fields, dense=tuple(f"i{k}" for k in range(DENSE)), tasks=("click",))

    def chunks(self, part: Part) -> Iterator[Batch]:
        """The batches in turn, without end; the test part is the first of them."""
        if part == "test":
            yield self.batches[0]
            return
        while True:
            yield from self.batches

    def provenance(self) -> Provenance:
        """Random labels: for speed only."""
        return Provenance(name="workload-wide", sha256="generated", split="none: speed only")


def wide_workload(batch: int, rows: int, batches: int = 24, ids_per_field: int = 1) -> WideWorkload:
    """``rows`` distinct ids over all fields, a bounded Zipf law of exponent 1.05 in each."""
    draw = np.random.default_rng(0)
    values = rows // FIELDS
    weights = np.arange(1, values + 1, dtype=np.float64) ** -ZIPF_EXPONENT
    cumulated = np.cumsum(weights) / weights.sum()
    made = []
    for _ in range(batches):
        ranks = np.searchsorted(cumulated, draw.random((batch, FIELDS, ids_per_field)))
        ids = np.stack([tag(f, hash_integers(ranks[:, f].ravel())) for f in range(FIELDS)], axis=1)
        ids = ids.reshape(batch, ids_per_field, FIELDS).transpose(0, 2, 1).ravel()
        offsets = None if ids_per_field == 1 else np.arange(0, len(ids) + 1, ids_per_field)
        dense = draw.normal(size=(batch, DENSE)).astype(np.float32)
        labels = (draw.random((batch, 1)) < 0.25).astype(np.float32)
        made.append(Batch(ids, offsets, dense, labels))
    return WideWorkload(tuple(made))
