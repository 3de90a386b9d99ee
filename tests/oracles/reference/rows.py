"""The rows of one table that one shard owns: index, values, optimiser state, write counts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from runtime.embedding.config import TableConfig
from runtime.embedding.store import ABSENT
from runtime.embedding.verbs import TableSnapshot
from tests.oracles.reference import optimizers
from tests.oracles.reference.index import IdIndex
from tests.oracles.reference.initial import table_key, uniform_rows

_MOST_WRITES = (1 << 24) - 1  # a saved word holds so many; the bits above are marks of native


class Rows:
    """Lazily created rows. Not safe for threads: the shard that owns it holds a lock."""

    def __init__(self, config: TableConfig, seed: int) -> None:
        self.config = config
        self._key = table_key(seed, config.name)
        self._index = IdIndex()
        self._values = np.empty((0, config.dim), config.dtype)
        self._state = np.empty((0, config.optimizer.state_floats(config.dim)), config.dtype)
        self._writes = np.empty(0, np.int64)

    def __len__(self) -> int:
        return len(self._index)

    def read(self, ids: np.ndarray, create: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Rows of distinct ids: slots [n], values [n, d], write counts [n].

        An absent id is created, or (``create=False``) gives its initial value, slot ABSENT and
        count 0, and leaves no trace.
        """
        slots = self._index.find(ids)
        absent = np.flatnonzero(slots == ABSENT)
        if create and len(absent):
            slots[absent] = self._create(ids[absent])
        if not len(self):
            return slots, self._initial(ids), np.zeros(len(ids), np.int64)
        values, writes = self._values[slots], self._writes[slots]
        if not create and len(absent):
            values[absent] = self._initial(ids[absent])
            writes[absent] = 0
        return slots, values, writes

    def write_counts(self, slots: np.ndarray) -> np.ndarray:
        """How many optimiser steps each row has taken so far."""
        counts: np.ndarray = self._writes[slots]
        return counts

    def update(self, slots: np.ndarray, gradients: np.ndarray, step: int, lr: float) -> None:
        """One optimiser step on distinct rows; ``step`` counts the run's steps from 1."""
        values, state = self._values[slots], self._state[slots]
        row_steps = self._writes[slots] + 1
        optimizers.apply(self.config.optimizer, values, state, gradients, lr, step, row_steps)
        self._values[slots] = values
        self._state[slots] = state
        self._writes[slots] = row_steps

    def export(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """All ids [n], values [n, d] and state [n, k], sorted by id: what equality means."""
        ids, slots = self._index.items()
        order = np.argsort(ids)
        slots = slots[order]
        return ids[order], self._values[slots], self._state[slots]

    def snapshot(self) -> TableSnapshot:
        """Copies of everything, in the form of the native engine: the same bytes per row."""
        ids, slots = self._index.items()
        values, state = (
            np.ascontiguousarray(part[slots]).view(np.uint8).reshape(len(slots), -1)
            for part in (self._values, self._state)
        )
        return {
            "ids": ids,
            "words": (self._writes[slots] & _MOST_WRITES).astype(np.uint32),
            "stamps": np.zeros(0, np.uint32),
            "rows": np.hstack([values, state]),
            "removed": np.zeros(0, np.uint64),
            "sightings": np.zeros(0, np.uint8),
            "latest_step": 0,
        }

    def restore(self, saved: Mapping[str, Any], *, keep_present: bool) -> None:
        """Put rows back, from either engine; no row ever goes here, so none can be removed."""
        ids = saved["ids"]
        slots = self._index.find(ids)
        absent = slots == ABSENT
        slots[absent] = self._create(ids[absent])
        chosen = absent if keep_present else np.ones(len(ids), bool)
        rows, into = saved["rows"].reshape(len(ids), -1)[chosen], slots[chosen]
        width = self._values.shape[1] * self._values.itemsize
        parts = (np.ascontiguousarray(rows[:, :width]), np.ascontiguousarray(rows[:, width:]))
        self._values[into] = parts[0].view(self._values.dtype)
        if self._state.shape[1]:
            self._state[into] = parts[1].view(self._state.dtype)
        self._writes[into] = saved["words"][chosen] & _MOST_WRITES

    def _initial(self, ids: np.ndarray) -> np.ndarray:
        config = self.config
        return uniform_rows(self._key, ids, config.dim, config.initial_scale, config.dtype)

    def _create(self, ids: np.ndarray) -> np.ndarray:
        slots = self._index.insert(ids)
        if len(self._index) > len(self._values):
            self._reserve(2 * len(self._index))
        self._values[slots] = self._initial(ids)
        self._state[slots] = self.config.optimizer.initial_accumulator
        self._writes[slots] = 0
        return slots

    def _reserve(self, rows: int) -> None:
        for name in ("_values", "_state", "_writes"):
            old: np.ndarray = getattr(self, name)
            new = np.empty((rows, *old.shape[1:]), old.dtype)
            new[: len(old)] = old
            setattr(self, name, new)
