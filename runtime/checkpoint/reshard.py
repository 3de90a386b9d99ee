"""Rows saved by one number of shards, for another number of shards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from runtime.embedding.shard import shard_of

NO_ID = np.uint64(2**64 - 1)
"""In place of an id where a slot stands empty; no id of a batch is this one (runtime.data.ids)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrays:
    """The rows of one table and shard, the next one to be evicted first; n rows.

    Of a table with a clock, slots that stand empty and rows that have expired are among them.
    """

    ids: np.ndarray
    """uint64 [n]"""
    words: np.ndarray
    """uint32 [n]: write counts and marks."""
    stamps: np.ndarray
    """uint32 [n], last used at step; empty where rows do not expire."""
    rows: np.ndarray
    """uint8 [n, bytes per row], as stored."""
    removed: np.ndarray
    """uint64: ids that went since the part before this one."""
    sightings: np.ndarray
    """uint8: the sketch of admission by frequency."""
    latest_step: int
    """The last step seen."""


def merge_shards(shards: Sequence[Arrays]) -> Arrays:
    """All rows as one, old shards interleaved by the relative age of their rows."""
    age = np.concatenate([np.arange(len(s.ids)) / max(len(s.ids), 1) for s in shards])
    order = np.argsort(age, kind="stable")
    stamps = np.concatenate([s.stamps for s in shards])
    return Arrays(
        ids=np.concatenate([s.ids for s in shards])[order],
        words=np.concatenate([s.words for s in shards])[order],
        stamps=stamps[order] if len(stamps) else stamps,
        rows=np.concatenate([s.rows for s in shards])[order],
        removed=np.concatenate([s.removed for s in shards]),
        sightings=np.empty(0, np.uint8),
        latest_step=max(s.latest_step for s in shards),
    )


def divide(saved: Sequence[Arrays], shards: int) -> list[Arrays]:
    """All rows by their new shards."""
    merged = merge_shards(saved)
    owner, gone = shard_of(merged.ids, shards), shard_of(merged.removed, shards)
    return [part_of(merged, owner == shard, gone == shard) for shard in range(shards)]


def living(arrays: Arrays, expire_after_steps: int | None) -> Arrays:
    """Without the slots that stand empty and the rows that had expired."""
    kept = arrays.ids != NO_ID
    if expire_after_steps is not None and len(arrays.stamps):
        kept &= arrays.stamps.astype(np.int64) >= arrays.latest_step - expire_after_steps
    return part_of(arrays, kept, np.ones(len(arrays.removed), bool))


def part_of(arrays: Arrays, rows: np.ndarray, removed: np.ndarray) -> Arrays:
    """The rows and removed ids that are marked."""
    return Arrays(
        ids=arrays.ids[rows],
        words=arrays.words[rows],
        stamps=arrays.stamps[rows] if len(arrays.stamps) else arrays.stamps,
        rows=arrays.rows[rows],
        removed=arrays.removed[removed],
        sightings=arrays.sightings,
        latest_step=arrays.latest_step,
    )
