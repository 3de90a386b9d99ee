"""What a lookup and a push cost a rank against the number of servers, as a table:

    .venv/bin/python -m tests.runtime.engines.rows.lookup_cost

CPU time of the rank's thread, which a busy machine disturbs less than a clock does. Servers are
threads of a few processes.
"""

from __future__ import annotations

import time

import numpy as np

from experiments.tables import aligned
from runtime.data.batch import Batch
from tests.runtime.engines.rows.test_many_servers import PAPERS_SERVERS, light_servers

SERVERS = (1, 4, 16, 64, PAPERS_SERVERS)
SAMPLES = 4096
STEPS = 70
NOT_TIMED = 10


def cost_of(servers: int) -> list[float]:
    """Milliseconds of the rank's core: tenth percentile of a lookup, and of a push."""
    random = np.random.default_rng(5)
    nothing = np.zeros((SAMPLES, 0), np.float32)
    taken_s = []
    with light_servers(servers) as store:
        for step in range(STEPS):
            ids = random.integers(0, 20_000, (SAMPLES, 2)).astype(np.uint64).ravel()
            handle = store.begin(0, step, Batch(ids, None, nothing, nothing))
            began_s = time.thread_time()
            store.look_up(handle)
            read_s = time.thread_time()
            store.give((handle, dict(handle.values)))
            taken_s.append((read_s - began_s, time.thread_time() - read_s))
            store.drain()
    return [1e3 * float(s) for s in np.quantile(taken_s[NOT_TIMED:], 0.1, axis=0)]


def main() -> None:
    """The table."""
    lines = []
    for servers in SERVERS:
        lookup_ms, push_ms = cost_of(servers)
        lines.append([str(servers), f"{lookup_ms:.2f}", f"{push_ms:.2f}"])
    print(aligned(["servers", "lookup [ms]", "push [ms]"], lines))


if __name__ == "__main__":
    main()
