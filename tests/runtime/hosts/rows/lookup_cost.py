"""What a lookup and a push cost a rank, and the servers, against the number of servers, as a table:

    .venv/bin/python -m tests.runtime.hosts.rows.lookup_cost

CPU time, which a busy machine disturbs less than a clock does. Servers are threads of a few
processes. Each number of servers has its turn in each of three rounds.
"""

from __future__ import annotations

import multiprocessing
import os
import time

import numpy as np

from experiments.tables import aligned
from runtime.data.batch import Batch
from tests.runtime.hosts.rows.test_many_servers import PAPERS_SERVERS, light_servers

PAPERS_HOSTS = 30
SERVERS = (1, 4, 16, PAPERS_HOSTS, 64, PAPERS_SERVERS)
ROUNDS = 3
SAMPLES = 4096
STEPS = 70
NOT_TIMED = 10


def cost_of(servers: int) -> list[float]:
    """Milliseconds of a core: of the rank's thread for a lookup and for a push (tenth percentile of
    the steps), and of all servers for both (mean)."""
    random = np.random.default_rng(5)
    nothing = np.zeros((SAMPLES, 0), np.float32)
    taken_s = []
    before_s = 0.0
    with light_servers(servers) as store:
        for step in range(STEPS):
            if step == NOT_TIMED:
                before_s = server_seconds()
            ids = random.integers(0, 20_000, (SAMPLES, 2)).astype(np.uint64).ravel()
            handle = store.begin(0, step, Batch(ids, None, nothing, nothing))
            began_s = time.thread_time()
            store.look_up(handle)
            read_s = time.thread_time()
            store.give((handle, dict(handle.values)))
            taken_s.append((read_s - began_s, time.thread_time() - read_s))
            store.drain()
        of_servers_s = (server_seconds() - before_s) / (STEPS - NOT_TIMED)
    of_rank_s = np.quantile(taken_s[NOT_TIMED:], 0.1, axis=0)
    return [1e3 * float(s) for s in (*of_rank_s, of_servers_s)]


def server_seconds() -> float:
    """The CPU time of the processes that have the servers, of user and system."""
    ticks = 0
    for process in multiprocessing.active_children():
        with open(f"/proc/{process.pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def main() -> None:
    """The table: medians of the rounds."""
    costs = [[cost_of(servers) for servers in SERVERS] for _ in range(ROUNDS)]
    lines = []
    for servers, milliseconds in zip(SERVERS, np.median(costs, axis=0), strict=True):
        lines.append([str(servers), *(f"{ms:.2f}" for ms in milliseconds)])
    print(aligned(["servers", "lookup [ms]", "push [ms]", "of all servers [ms]"], lines))


if __name__ == "__main__":
    main()
