"""Sixty runs keep their bits: the report's text, the rate, the order of events.

A rename or a move changes none of them. Whoever changes what is simulated writes them anew
with `python -m tests.persia_sim.test_golden`, and says why in the commit.
"""

from __future__ import annotations

from hashlib import sha256
from itertools import product
from pathlib import Path

import pytest

from persia_sim.base.vocabulary import Mode
from persia_sim.cli.sharded import ShardedOptions, run_sharded
from persia_sim.engine.simulate import simulate
from persia_sim.presets.point import Point, scenario_of
from persia_sim.report.report import report, text

STORED = Path(__file__).with_name("golden.txt")
FAULTS = {
    "none": {},
    "slow": {"slow": ("rank:1x2@0.05-0.2", "server:0x3")},
    "crash": {"crash": ("rank:2@0.1", "worker:0@0.15", "server:1@0.2"), "detect_s": 0.01,
              "restart_s": 0.05, "load_s": 0.02, "checkpoint_every_s": 0.1, "checkpoint_s": 0.01},
}  # fmt: skip
SMALL = {"cluster": "v100-paper", "workload": "criteo-ad", "ranks": 4, "workers": 2, "servers": 2}
OTHERS = {
    "lookahead forwarded": {"mode": Mode.LOOKAHEAD, "lookahead": "forwarded", "ahead": 2},
    "hybrid not merged": {"mode": Mode.HYBRID, "tau": 2, "merge_pushes": False, "permits": 3},
    "async apart": {"mode": Mode.ASYNC, "dense_home": "apart"},
    "hybrid dense on NICs": {"mode": Mode.HYBRID, "dense_on_nics": True, "trace_shards": True},
}
POINTS = {
    f"{mode}, {discipline}, {fault}": {"mode": mode, "discipline": discipline, **FAULTS[fault]}
    for mode, discipline, fault in product(Mode, ("fluid", "fifo", "unshared"), FAULTS)
} | OTHERS  # fmt: skip
SHARDED = {"sharded torchrec": "torchrec", "sharded hugectr": "hugectr"}


def digest(content: bytes) -> str:
    return sha256(content).hexdigest()[:16]


def fingerprint(name: str) -> str:
    """The rate's bits, then digests of the report and of the order of events."""
    if name in SHARDED:
        return digest(run_sharded(ShardedOptions(software=SHARDED[name])).encode())
    result = simulate(scenario_of(Point(**SMALL, steps=12, **POINTS[name])), trace=True)
    figures = report(result)
    events = result.trace.events.tobytes()
    rate = figures.samples_per_s.mean.hex()
    return f"{rate} {digest(text(figures).encode())} {digest(events)}"


@pytest.mark.parametrize("name", [*POINTS, *SHARDED])
def test_a_run_keeps_its_bits(name):
    stored = dict(line.split(": ") for line in STORED.read_text().splitlines())
    assert fingerprint(name) == stored[name]


if __name__ == "__main__":
    lines = [f"{name}: {fingerprint(name)}\n" for name in [*POINTS, *SHARDED]]
    STORED.write_text("".join(lines))
