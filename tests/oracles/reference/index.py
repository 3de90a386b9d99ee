"""Id -> slot, open addressing with linear probing, whole arrays at a time."""

from __future__ import annotations

import numpy as np

from runtime.data.ids import mix64
from runtime.embedding.store import ABSENT

_EMPTY = np.uint64(2**64 - 1)  # no id has field number 255, see runtime.data.ids


class IdIndex:
    """Maps uint64 ids to slots 0, 1, 2, ... in the order of insertion."""

    def __init__(self) -> None:
        self._allocate(1 << 10)
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def find(self, ids: np.ndarray) -> np.ndarray:
        """int64 slots of ``ids``; ABSENT where an id was never inserted."""
        slots = np.full(len(ids), ABSENT, np.int64)
        pending = np.arange(len(ids))
        place = self._home(ids)
        while len(pending):
            keys = self._keys[place]
            hit = keys == ids[pending]
            slots[pending[hit]] = self._slots[place[hit]]
            going_on = ~hit & (keys != _EMPTY)
            pending = pending[going_on]
            place = (place[going_on] + 1) & self._mask
        return slots

    def insert(self, ids: np.ndarray) -> np.ndarray:
        """Insert distinct, absent ids; returns their new slots."""
        slots = np.arange(self._size, self._size + len(ids))
        if 2 * (self._size + len(ids)) > len(self._keys):
            self._grow(self._size + len(ids))
        self._place(ids, slots)
        self._size += len(ids)
        return slots

    def items(self) -> tuple[np.ndarray, np.ndarray]:
        """All ids and their slots, in the order of slots."""
        used = self._keys != _EMPTY
        order = np.argsort(self._slots[used])
        return self._keys[used][order], self._slots[used][order]

    def _allocate(self, capacity: int) -> None:
        self._keys = np.full(capacity, _EMPTY, np.uint64)
        self._slots = np.empty(capacity, np.int64)
        self._mask = np.int64(capacity - 1)

    def _home(self, ids: np.ndarray) -> np.ndarray:
        return mix64(ids).astype(np.int64) & self._mask

    def _place(self, ids: np.ndarray, slots: np.ndarray) -> None:
        pending = np.arange(len(ids))
        place = self._home(ids)
        while len(pending):
            free = self._keys[place] == _EMPTY
            # Two ids may aim at one free place: the last write wins, the loser sees it and goes on.
            self._keys[place[free]] = ids[pending[free]]
            won = free & (self._keys[place] == ids[pending])
            self._slots[place[won]] = slots[pending[won]]
            pending = pending[~won]
            place = (place[~won] + 1) & self._mask

    def _grow(self, size: int) -> None:
        ids, slots = self.items()
        self._allocate(1 << (4 * size - 1).bit_length())
        self._place(ids, slots)
