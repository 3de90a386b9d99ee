"""Samples drawn beside each training sample: of the same user, another item, labels of 0."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from runtime.data.batch import Batch
from runtime.data.errors import DataError, matching
from runtime.data.files import files_of
from runtime.data.ids import mix64
from runtime.data.items import Items, read_items
from runtime.data.source import Source

_STEP = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True, slots=True)
class Negatives:
    """Items drawn uniformly, by seed, batch of the stream and place in it alone: so that every
    mode, executor and number of ranks trains the same samples."""

    items: Items
    count: int
    """Drawn beside each sample."""
    tasks: int
    seed: int

    @property
    def each(self) -> int:
        """Samples that train for one of the log."""
        return 1 + self.count

    def beside(self, batch: Batch, number: int, first: int) -> Batch:
        """Each sample with those drawn for it behind it. ``number``: of the stream's batch, of
        which these are the samples from place ``first`` on."""
        # A uniform draw among the other items: from the sample's own number on all are one further.
        samples = np.repeat(np.arange(batch.size), self.count)
        draw = np.arange(first * self.count, (first + batch.size) * self.count, dtype=np.uint64)
        seed, batch_number = np.array([[self.seed], [number]], np.uint64)
        key = mix64(mix64(seed) + batch_number * _STEP)
        uniform = (mix64(key + (draw + np.uint64(1)) * _STEP) >> np.uint64(11)) * 2.0**-53
        own = self.items.number_of(batch.of_field(self.items.place))[samples]
        drawn = (uniform * (len(self.items.ids) - (own >= 0))).astype(np.int64)
        drawn += (own >= 0) & (drawn >= own)

        # Behind its sample, with labels of 0 and the sample's weight.
        beside = self.items.in_place(batch.take(samples), drawn)
        labels = beside.labels.copy()
        labels[:, : self.tasks] = 0
        both = Batch.concat([batch, replace(beside, labels=labels)])
        order = np.arange(batch.size * self.count).reshape(batch.size, self.count) + batch.size
        return both.take(np.column_stack([np.arange(batch.size), order]).ravel())


def negatives_of(source: Source, seed: int) -> Negatives | None:
    """What the schema of the data draws beside each sample; None where it draws nothing. DataError
    for a table of items that cannot be used."""
    files = files_of(source)
    if files is None or files.schema.negatives is None:
        return None
    asked = files.schema.negatives
    items = read_items(files.schema, matching(files.folder, asked.items)[0])
    if len(items.ids) < 2:
        raise DataError(f"{asked.items} has one item; negatives are drawn among two or more")
    return Negatives(items, asked.count, len(source.layout.tasks), seed)
