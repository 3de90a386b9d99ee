"""Where the item of a clicked sample stands among all items: Recall@K and NDCG@K of full ranking.

A list is one test sample with a 1: its own columns with those of each item of a table in turn. The
items that its user (the schema's ``group``) has in other samples with a 1, of whatever part, are
left out of its list, as RecBole leaves out those seen in training; without a group nothing is.
Equal predictions share the places that they take together.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from persia_sim.base.rules import Refused
from runtime.data.batch import Batch, Layout
from runtime.data.files import files_of
from runtime.data.ids import VALUE_MASK
from runtime.data.items import Items, read_items
from runtime.data.source import Part, Source
from runtime.run.evaluate import HeldOut
from runtime.run.scores import TOP, at_top

_PAIRS_AT_ONCE = 1 << 15  # of a list and an item: bounds memory, changes no figure
_OTHERS: tuple[Part, ...] = ("train", "validation")


def rank_against(
    file: Path,
    source: Source,
    held_out: HeldOut,
    predictions: Callable[[Iterable[Batch]], Generator[np.ndarray, None, None]],
) -> dict[str, Any]:
    """The figures of the first task over all items of a table; ``predictions`` gives float [B, T]
    of each batch in turn. Raises ValueError for data, tasks and tables that have no such lists."""
    # What is ranked: the items, and the test samples with a 1 whose item is among them.
    layout = source.layout
    files = files_of(source)
    if files is None:
        raise Refused("rank_against", "needs data with columns, and a synthetic stream has none")
    if layout.tasks[0] in layout.regression:
        rule = f"ranks by clicks, and {layout.tasks[0]} is a regression"
        raise Refused("rank_against", f"{rule}; leave it out")
    items = read_items(files.schema, file)
    clicked = [_clicked(batch) for batch in held_out]
    lists = Batch.concat([one for one in clicked if one.size] or clicked[:1])
    item = items.number_of(lists.of_field(items.place))
    without = int((item < 0).sum())
    lists, item = lists.take(np.flatnonzero(item >= 0)), item[item >= 0]
    if not lists.size:
        raise Refused(
            "rank_against", f"{file} has the item of no test sample with a 1; is it of these data?"
        )

    # What each user has clicked elsewhere.
    users, user = np.unique(_users(layout, lists), return_inverse=True)
    pairs = [_pairs_of(lists, layout, items, users)]
    if layout.group is not None:
        streams = (map(_clicked, source.chunks(part)) for part in _OTHERS)
        for batch in (batch for stream in streams for batch in stream):
            pairs.append(_pairs_of(batch, layout, items, users))
    known = np.unique(np.concatenate(pairs))

    # List by list, some at once: all items but those, and the sample's own.
    at_once = max(1, _PAIRS_AT_ONCE // len(items.ids))
    starts = range(0, lists.size, at_once)
    every = np.arange(len(items.ids))

    def crossed(start: int) -> Batch:
        some = np.arange(start, min(start + at_once, lists.size))
        samples = lists.take(np.repeat(some, len(every)))
        return items.in_place(samples, np.tile(every, len(some)))

    sums, judged = np.zeros(2), 0
    for start, predicted in zip(starts, predictions(map(crossed, starts)), strict=True):
        of_list = np.repeat(np.arange(start, start + len(predicted) // len(every)), len(every))
        candidate = np.tile(every, len(predicted) // len(every))
        is_own = candidate == item[of_list]
        others = np.isin(user[of_list] * len(every) + candidate, known)
        kept = is_own | ~(others if layout.group is not None else np.zeros(len(is_own), bool))
        sizes = np.bincount(of_list[kept] - start)
        has_choice = int((sizes > 1).sum())
        if has_choice:
            found = at_top(is_own[kept], predicted[kept, 0], of_list[kept], TOP)
            sums += has_choice * np.array(found)
            judged += has_choice
    recall, ndcg = (float(one) for one in sums / judged) if judged else (np.nan, np.nan)
    return {
        "task": layout.tasks[0],
        "items": len(every),
        "lists": judged,
        "lists_without_item": without,
        f"recall@{TOP}": recall,
        f"ndcg@{TOP}": ndcg,
        "left_out": "" if layout.group is None else layout.group,
    }


def _clicked(batch: Batch) -> Batch:
    return batch.take(np.flatnonzero(batch.labels[:, 0] > 0))


def _users(layout: Layout, batch: Batch) -> np.ndarray:
    """uint64 [B]; without a group all are one."""
    groups = layout.groups(batch)
    return np.zeros(batch.size, np.uint64) if groups is None else groups


def _pairs_of(batch: Batch, layout: Layout, items: Items, users: np.ndarray) -> np.ndarray:
    """int64: number of the user times the items, plus the item, of samples of these users."""
    item, of = items.number_of(batch.of_field(items.place)), _users(layout, batch)
    user = np.minimum(np.searchsorted(users, of), len(users) - 1)
    meant = (users[user] == of) & (item >= 0)
    if layout.absent_group is not None:  # who is not known has no other samples
        meant &= of & VALUE_MASK != np.uint64(layout.absent_group)
    result: np.ndarray = (user * len(items.ids) + item)[meant]
    return result
