"""Open a store of rows, the pooling that goes with it, and the kernels' threads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

from persia_sim.words.rules import require
from persia_sim.words.schema import Within, fit
from persia_sim.words.trace import TraceRecorder
from runtime.data.batch import Field, Layout
from runtime.embedding.config import TableConfig
from runtime.embedding.native.memory import allowed_bytes
from runtime.embedding.server_rules import ServerRules
from runtime.embedding.sharded import ShardedStore
from runtime.stop import Stop

if TYPE_CHECKING:
    from runtime.embedding.native.pooling import Pooling

MOST_THREADS = 1024


def open_store(
    layout: Layout,
    tables: Sequence[TableConfig],
    *,
    shards: int = 1,
    seed: int = 0,
    recorder: TraceRecorder | None = None,
    rules: ServerRules | None = None,
    stop: Stop | None = None,
) -> ShardedStore:
    """An empty store.

    Raises ValueError for a seed beyond 64 bits, a table named twice, and limits beyond the memory.
    """
    fits = type(seed) is int and 0 <= seed < 2**64
    require(fits, "seed", seed, "must be a whole number >= 0 that fits 64 bits")
    names = [table.name for table in tables]
    twice = sorted({name for name in names if names.count(name) > 1})
    require(not twice, "tables", names, f"{', '.join(twice)} may stand only once")
    _refuse_too_much(tables)
    from runtime.embedding.native.store import NativeStore  # loads the compiled kernels

    return NativeStore(
        layout, tables, shards=shards, seed=seed, recorder=recorder, rules=rules, stop=stop
    )


def open_pooling(fields: Sequence[Field], dims: dict[str, int]) -> Pooling:
    """The pooling of these fields, whose tables have these widths."""
    from runtime.embedding.native.pooling import Pooling  # loads the compiled kernels

    return Pooling(fields, dims)


def use_threads(count: int) -> None:
    """Let one call of the native kernels use this many threads, for the whole process.

    The bytes do not depend on it. One is right where other threads compute meanwhile (hybrid,
    async, several ranks), the number of cores where nothing else does (sync with one rank).
    """
    from runtime.embedding.native.extension import native  # loads the compiled kernels

    fit(count, Annotated[int, Within(1, MOST_THREADS)], "threads of the embedding engine")
    native.set_threads(count)


def _refuse_too_much(tables: Sequence[TableConfig]) -> None:
    """Each table's own limit is checked where it is opened; together they must fit as well."""
    limits = [t.capacity.memory_bytes for t in tables if t.capacity.memory_bytes is not None]
    allowed = allowed_bytes()
    if len(limits) < 2 or max(limits) > allowed:
        return  # of a single table, its own check says more
    rule = (
        f"of {len(limits)} tables need {sum(limits) / 1e9:,.3g} GB together, and this process may"
        f" use {allowed / 1e9:,.3g} GB"
    )
    each = sorted(set(limits))
    require(sum(limits) <= allowed, "capacity.memory_bytes", each, rule, "lower them")
