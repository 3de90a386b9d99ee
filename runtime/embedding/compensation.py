"""Delay compensation: gradients of rows that have moved since they were read.

A gradient g was computed on the row w_read and is applied to the row w_now. To first order the
gradient at w_now is g + H (w_now - w_read), and lambda g^2 stands for the diagonal of the Hessian H
(source: Zheng et al. 2017, DC-ASGD, arXiv 1609.08326; Monolith's DcOptimizer does it for rows):

    g + lambda * g * g * (w_now - w_read)

Of a merged step it is the merged gradient G that is compensated, since G is what the update is made
of: then the result depends neither on how many ranks shared the step (law 3) nor on whether they
were computed as one batch (law 14). Ranks may have read the row at different instants, so each
one's part is moved by its own delay: g_r + lambda * G * g_r * (w_now - w_read_r), whose sum is the
formula above where all have read the same.

Gradients are those of a mean over the step's samples: of a row that one of B samples holds, g is
1/B of that sample's gradient and the mean loss's g^2 term is B g^2. So lambda about B is the
natural size here where 1 is for gradients of single samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from runtime.embedding.shard import ShardRows, WholePush
from runtime.embedding.store import ByTable, Handle, RowGradients


def compensated(
    rows: ShardRows, pushes: Sequence[WholePush], shard: int, strength: float
) -> list[WholePush]:
    """These pushes with the gradients of the shard's rows compensated; call under its lock.

    Rows that nobody has written since they were read keep their gradients, to the bit.
    """
    moved = [_moved(rows, handle) for handle, _ in pushes]
    found: list[dict[str, np.ndarray]] = [dict(gradients) for _, gradients in pushes]
    for name in pushes[0][0].plans if pushes else ():
        parts = [handle.plans[name].part(shard) for handle, _ in pushes]
        own = [gradients[name][part] for (_, gradients), part in zip(pushes, parts, strict=True)]
        ids = [
            handle.plans[name].ids[part] for (handle, _), part in zip(pushes, parts, strict=True)
        ]
        merged = own if len(own) == 1 else _merged(ids, own)
        for number, part in enumerate(parts):
            delay = moved[number][name][part]
            more = strength * merged[number] * own[number] * delay
            new = pushes[number][1][name].copy()
            new[part] = np.where(delay != 0, own[number] + more, own[number])
            found[number][name] = new
    return [(handle, new) for (handle, _), new in zip(pushes, found, strict=True)]


def _moved(rows: ShardRows, handle: Handle) -> RowGradients:
    """Per table, by how much the rows of this shard have moved since they were read."""
    now = replace(
        handle,
        values=_copied(handle.values),
        slots=handle.slots and _copied(handle.slots),
        writes=handle.writes and _copied(handle.writes),
    )
    rows.read(now, False, 0)
    return {name: now.values[name] - values for name, values in handle.values.items()}


def _copied(rows: ByTable) -> ByTable:
    return rows.of(rows.flat.copy())


def _merged(ids: Sequence[np.ndarray], gradients: Sequence[np.ndarray]) -> list[np.ndarray]:
    """For each push, the sums over all pushes of the gradients of its rows."""
    distinct, where = np.unique(np.concatenate(ids), return_inverse=True)
    total = np.zeros((len(distinct), gradients[0].shape[1]), gradients[0].dtype)
    places = np.split(where, np.cumsum([len(one) for one in ids])[:-1])
    for place, gradient in zip(places, gradients, strict=True):
        total[place] += gradient  # the ids of one batch are distinct
    return [total[place] for place in places]
