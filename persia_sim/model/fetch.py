"""One pass through worker and servers that brings rows: whole, in part, or past a cache."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from persia_sim.model.cluster import Role
from persia_sim.model.row_cache import Kept, Place
from persia_sim.model.scenario import Scenario

ID_BYTES = 8.0
"""An id in a message of the servers that says which copies are invalid."""


@dataclass(frozen=True, slots=True)
class Fetch:
    """One pass through worker and servers that brings rows: bytes on wires, seconds on cores."""

    worker_forward_s: float
    request_bytes: float
    server_s: np.ndarray
    """float64 [servers]: the request of each server, on one core."""
    join_s: float
    """Seconds by which the busiest server of a batch is later than that of the mean batch."""
    server_memory_bytes: float
    """Bytes of server memory moved for it, all servers together."""
    rows_bytes: float
    worker_pool_s: float
    activation_bytes: float
    copy_in_s: float
    cached_bytes: float = 0.0
    """Rows that the worker has itself, read for it."""

    @property
    def forward_memory_bytes(self) -> float:
        """Worker: ids are read and requests written."""
        return 2 * self.request_bytes

    @property
    def pool_memory_bytes(self) -> float:
        """Worker: rows are read and activations written."""
        return self.rows_bytes + self.cached_bytes + self.activation_bytes


def core_speed(kind: Role) -> float:
    """Of a kind of host."""
    return kind.host.core_speed


def part_of(fetch: Fetch, share: float, scenario: Scenario, rank_speed: float) -> Fetch:
    """A fetch of a share of the rows: fixed parts stay, the rest shrinks. ``rank_speed``: of a core
    of the rank's host."""
    costs, cluster = scenario.costs, scenario.cluster
    servers = len(fetch.server_s)

    def part(whole: float, fixed: float) -> float:
        return fixed + (whole - fixed) * share

    worker_speed = cluster.embedding_workers.host.core_speed
    rpc_s = costs.worker_rpc.fixed_s * servers
    server_fixed = costs.server_lookup.fixed_s / np.array(cluster.servers.of_processes(core_speed))
    return replace(
        fetch,
        worker_forward_s=part(
            fetch.worker_forward_s, (costs.worker_forward.fixed_s + rpc_s) / worker_speed
        ),
        request_bytes=fetch.request_bytes * share,
        server_s=server_fixed + (fetch.server_s - server_fixed) * share,
        join_s=fetch.join_s * share,
        server_memory_bytes=fetch.server_memory_bytes * share,
        rows_bytes=fetch.rows_bytes * share,
        worker_pool_s=part(fetch.worker_pool_s, costs.worker_pool.fixed_s / worker_speed),
        activation_bytes=fetch.activation_bytes * share,
        copy_in_s=part(fetch.copy_in_s, costs.copy_in.fixed_s / rank_speed),
    )


def past_cache(fetch: Fetch, scenario: Scenario, kept: Kept) -> Fetch:
    """A fetch of the rows that are not in the cache, with what the cache costs itself.

    Servers and wires see fewer ids; rows that servers have to create are seldom asked for, so none
    of them is in a cache. A worker looks every id up in its cache and copies what is there, at the
    price of a server's find; it sums and scatters every occurrence as before. At a rank the GPU
    reads its own rows; only what is missing is summed, sent and copied. Exact caches are told what
    is invalid with the answers of the servers.
    """
    cache, costs, work = scenario.row_cache, scenario.costs, scenario.workload
    if cache is None or not cache.rows:
        return fetch
    find, forward, pool = costs.server_lookup, costs.worker_forward, costs.worker_pool
    server_speed = np.array(scenario.cluster.servers.of_processes(core_speed))
    worker_speed = scenario.cluster.embedding_workers.host.core_speed
    shares = work.server_shares(len(fetch.server_s))
    ids, row = work.sent_ids, 4.0 * work.dim
    share = kept.distinct if work.wire.deduplicate else kept.occurrences
    saved = share * ids
    found_s = find.per_item_s + find.per_byte_s * row
    told = 0.0 if cache.stale_steps else ID_BYTES * kept.fetched
    smaller = replace(
        fetch,
        worker_forward_s=fetch.worker_forward_s
        - forward.per_byte_s * fetch.request_bytes * share / worker_speed,
        request_bytes=fetch.request_bytes * (1 - share),
        server_s=fetch.server_s - found_s * saved * shares / server_speed,
        join_s=fetch.join_s * (1 - share),
        server_memory_bytes=fetch.server_memory_bytes * (1 - share),
        rows_bytes=fetch.rows_bytes * (1 - share) + told,
        worker_pool_s=fetch.worker_pool_s
        - pool.per_byte_s * fetch.rows_bytes * share / worker_speed,
    )
    if cache.place is Place.WORKER:
        return replace(
            smaller,
            worker_forward_s=smaller.worker_forward_s + find.per_item_s * ids / worker_speed,
            worker_pool_s=smaller.worker_pool_s + find.per_byte_s * row * saved / worker_speed,
            cached_bytes=row * saved,
        )
    unsummed = pool.per_item_s * work.ids_per_batch * kept.occurrences
    absent = work.activation_bytes * kept.occurrences
    if not work.wire.pooled:
        absent = work.distinct_ids * kept.distinct * work.dim * work.wire.activation_value_bytes
    return replace(
        smaller,
        worker_pool_s=smaller.worker_pool_s - unsummed / worker_speed,
        activation_bytes=fetch.activation_bytes - absent + told,
    )
