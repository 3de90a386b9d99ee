"""The training loop of the default executor does what the order of a constant lag says."""

from __future__ import annotations

import numpy as np
import pytest

from persia_sim.base.vocabulary import Mode
from runtime.executors.constant_lag import ConstantLagRun
from runtime.executors.given_order import constant_lag_order
from runtime.executors.open import assemble_for
from runtime.run.training import open_executor
from tests.runtime.worlds import ArraySource, TwoTables, assert_same_bytes, config, run

CASES = {
    "sync": {"mode": Mode.SYNC},
    "sync fused": {"mode": Mode.SYNC, "fuse_ranks": True},
    "lookahead": {"mode": Mode.LOOKAHEAD, "ahead": 3},
    "lookahead fused": {"mode": Mode.LOOKAHEAD, "ahead": 3, "fuse_ranks": True},
    "late": {"mode": Mode.HYBRID, "tau": 3},
    "late fused": {"mode": Mode.HYBRID, "tau": 3, "fuse_ranks": True},
    "unmerged": {"mode": Mode.RAW_HYBRID, "tau": 2, "merge_pushes": False},
    "a synchronous start": {"mode": Mode.HYBRID, "tau": 3, "sync_steps": 4},
    "dense late": {"mode": Mode.HYBRID, "tau": 1, "dense_lag": 2},
    "later than the run is long": {"mode": Mode.HYBRID, "tau": 40},
}


@pytest.mark.parametrize("changes", CASES.values(), ids=CASES)
def test_the_loop_gives_the_bytes_and_the_events_of_the_order_of_a_constant_lag(changes):
    """The order is made by `constant_lag`, which knows of no rows, and carried out by replay."""
    settings, source = config(ranks=3, shards=2, **changes), TwoTables(200)
    order = list(constant_lag_order(settings, assemble_for(settings, source).feed))
    loop, events = run(settings, source), run(settings, source, order=order)
    assert_same_bytes(loop, events)
    assert np.array_equal(loop.trace.events, events.trace.events)
    assert loop.meter.losses == events.meter.losses
    assert loop.meter.samples == events.meter.samples == 200
    assert loop.meter.updates == events.meter.updates == len(loop.meter.losses)


@pytest.mark.parametrize("mode", Mode)
def test_the_loop_is_the_default_of_every_mode_with_a_common_step(mode):
    components = assemble_for(config(mode=mode, ranks=2), ArraySource(48))
    assert isinstance(open_executor(components), ConstantLagRun) == mode.has_barrier
