"""What a trace must obey that comes from a file: nobody knows who wrote it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from persia_sim.words.events import ALL, Event, Kind
from persia_sim.words.vocabulary import Mode

_OF_ROWS = (Kind.LOOKUP, Kind.REFRESH, Kind.PUSH, Kind.LOST_PUSH)
_OF_ROUNDS = (Kind.AVERAGE_READ, Kind.AVERAGE_WRITE)
_BY_ALL_RANKS = (Kind.PUSH, Kind.DENSE_UPDATE)


def refuse_impossible(columns: Sequence[np.ndarray], meta: Any, name: str) -> None:
    """Raise ValueError for columns or facts that no run could have written.

    ``columns`` are those of `Event`, in its order. The message names the file, the first row that
    is wrong, its value and the rule.
    """
    _check_shape(columns, name)
    mode, ranks, shards = _facts(meta, name)
    kind, rank, step, shard, version = columns
    rows = len(kind)

    def check(holds: np.ndarray, column: np.ndarray, what: str, rule: str) -> None:
        if not holds.all():
            row = int(np.flatnonzero(~holds)[0])
            raise ValueError(f"trace {name}, row {row}: {what} is {column[row]}: {rule}")

    known = _kinds_of(mode)
    names = ", ".join(f"{int(k)} {k.name.lower()}" for k in known)
    check(np.isin(kind, known), kind, "kind", f"mode {mode} has {names}")
    whole = (rank == ALL) & np.isin(kind, _BY_ALL_RANKS)
    check(whole | ((rank >= 0) & (rank < ranks)), rank, "rank",
          f"must be 0 to {ranks - 1}, or {ALL} for a push or update of all ranks")  # fmt: skip
    first = meta.get("first_step") or 0
    most = min(first + rows, 2**31)
    steps = min(most, *(meta[k] for k in ("updates", "steps") if _bounds_steps(meta, k)), most)
    check((step >= first) & (step < steps), step, "step", f"must be {first} to {steps - 1}")
    check((shard >= ALL) & (shard < shards), shard, "shard", f"must be {ALL} to {shards - 1}")
    check(version >= ALL, version, "version", f"must be >= 0, or {ALL} for unknown")
    _check_doubles(columns, name)
    of_rows = np.flatnonzero(np.isin(kind, _OF_ROWS))
    for k in np.unique(shard[of_rows]):
        here = of_rows[shard[of_rows] == k]
        _check_versions(version[here], kind[here] == Kind.PUSH, here, ranks, f"{name}, shard {k}")


def _check_shape(columns: Sequence[np.ndarray], name: str) -> None:
    for field, column in zip(Event._fields, columns, strict=True):
        if column.ndim != 1 or not np.issubdtype(column.dtype, np.integer):
            raise ValueError(
                f"trace {name}: {field} is {column.dtype} of shape {column.shape}:"
                " must be a column of integers"
            )
    lengths = {len(column) for column in columns}
    if len(lengths) > 1:
        raise ValueError(f"trace {name}: its columns have {sorted(lengths)} rows: must be equal")


def _facts(meta: Any, name: str) -> tuple[Mode, int, int]:
    """Mode, ranks and shards; without a number of shards any may occur."""
    if not isinstance(meta, dict):
        raise ValueError(f"trace {name}: its facts are {meta!r}: must be a JSON object")
    if meta.get("mode") not in list(Mode):
        raise ValueError(f"trace {name}: mode is {meta.get('mode')!r}: must be one of "
                         + ", ".join(Mode))  # fmt: skip
    for fact in ("ranks", "shards", "steps", "updates", "first_step"):
        value = meta.get(fact)
        needed = fact == "ranks"
        if not _is_count(value) and (needed or value is not None):
            raise ValueError(f"trace {name}: {fact} is {value!r}: must be a whole number >= 1")
    return Mode(meta["mode"]), meta["ranks"], meta.get("shards") or 2**31


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _bounds_steps(meta: dict[str, Any], fact: str) -> bool:
    """Updates bound the steps of a recorded run, steps those of a simulated one."""
    simulated = meta.get("order") == "simulated"
    return meta.get(fact) is not None and simulated == (fact == "steps")


def _kinds_of(mode: Mode) -> list[Kind]:
    rows = [Kind.LOOKUP, *([Kind.REFRESH] if mode is Mode.LOOKAHEAD else [])]
    rows += [Kind.PUSH, Kind.LOST_PUSH]
    if mode.has_barrier:
        return [*rows, Kind.DENSE_UPDATE]
    if mode is Mode.ASYNC:
        return [*rows, Kind.DENSE_PULL, Kind.DENSE_PUSH]
    return [*rows, Kind.DENSE_PUSH, *_OF_ROUNDS]


def _check_doubles(columns: Sequence[np.ndarray], name: str) -> None:
    """A push is applied or lost, once; the number of the round tells averagings apart."""
    kind, rank, step, shard, version = columns
    round_ = np.where(np.isin(kind, _OF_ROUNDS), version, ALL)
    closes = np.where(kind == Kind.LOST_PUSH, int(Kind.PUSH), kind)
    first = _first_of_each(np.column_stack([closes, rank, step, shard, round_]))
    doubled = np.flatnonzero(first != np.arange(len(kind)))
    merged = np.flatnonzero((kind == Kind.PUSH) & (rank == ALL)).tolist()
    whole = {(int(step[row]), int(shard[row])): row for row in merged}
    if whole:  # of a merged step, nobody pushes alone
        for row in np.flatnonzero((kind == Kind.PUSH) & (rank != ALL)).tolist():
            if (int(step[row]), int(shard[row])) in whole:
                first[row] = whole[int(step[row]), int(shard[row])]
                doubled = np.append(doubled, row)
    if len(doubled):
        at = int(doubled.min())
        raise ValueError(
            f"trace {name}, row {at}: {Kind(kind[at]).name.lower()} of rank {rank[at]}, step"
            f" {step[at]}, shard {shard[at]} is the event of row {first[at]} again:"
            " each happens once"
        )


def _first_of_each(table: np.ndarray) -> np.ndarray:
    """For each row, the number of the first row that is equal to it."""
    _, first, which = np.unique(table, axis=0, return_index=True, return_inverse=True)
    found: np.ndarray = first[which.ravel()]
    return found


def _check_versions(
    version: np.ndarray, is_push: np.ndarray, rows: np.ndarray, ranks: int, where: str
) -> None:
    """A shard's version grows with its pushes, by one for each batch, and with nothing else."""
    unknown = version == ALL
    if unknown.all():
        return
    if unknown.any():
        raise ValueError(
            f"trace {where}, row {rows[unknown][0]}: version is {ALL}, unknown, but others of the"
            " shard are known: must be all or none"
        )
    grown = np.diff(version)
    wrong = np.flatnonzero(np.where(is_push[:-1], (grown < 0) | (grown > ranks), grown != 0))
    if len(wrong):
        at = int(wrong[0])
        raise ValueError(
            f"trace {where}, row {rows[at + 1]}: version is {version[at + 1]} after {version[at]}"
            f" in row {rows[at]}: it grows by a push, by at most {ranks}, and by nothing else"
        )
