"""Slow processes, and servers that stand still."""

from __future__ import annotations

from dataclasses import replace

import pytest

from persia_sim.base.vocabulary import Mode
from persia_sim.cluster.incidents import Outage, SlowDown, Target
from persia_sim.cluster.stamps import Mark
from persia_sim.engine.faults import Disturbed
from persia_sim.engine.simulate import simulate
from tests.persia_sim.sim_configurations import small_scenario


def test_a_transient_slow_down_hurts_only_while_it_lasts():
    base = small_scenario(Mode.HYBRID, steps=40)
    end = simulate(base).makespan_s
    event = SlowDown(target=Target.RANK, index=1, factor=4.0, start_s=end / 4, end_s=end / 2)
    stamps = simulate(replace(base, disturbances=(event,))).stamps[Mark.UPDATED][0]
    plain = simulate(base).stamps[Mark.UPDATED][0]
    early = int((plain < end / 5).sum())
    assert (stamps[:early] == plain[:early]).all()
    assert stamps[-1] > plain[-1]
    assert stamps[-1] - stamps[-4] == pytest.approx(plain[-1] - plain[-4], rel=1e-6)


def test_a_server_that_stands_still_is_waited_for_and_loses_nothing():
    """With cores or without limits of them."""
    for infinite in (False, True):
        base = small_scenario(Mode.SYNC, infinite_cpus=infinite)
        plain = simulate(base)
        at_s = plain.makespan_s / 2
        run = simulate(replace(base, disturbances=(Outage(index=3, at_s=at_s, for_s=3.0),)))
        more = run.makespan_s - plain.makespan_s
        assert 3.0 - plain.makespan_s < more < 3.0 + plain.makespan_s
        before = plain.stamps[Mark.UPDATED] < at_s
        assert (run.stamps[Mark.UPDATED][before] == plain.stamps[Mark.UPDATED][before]).all()


def test_disturbances_are_checked():
    with pytest.raises(ValueError, match=r"slow-down factor is 0\.5: must lie in \[1, 10000\]"):
        SlowDown(target=Target.RANK, index=0, factor=0.5)
    with pytest.raises(ValueError, match="index of rank is 9: the cluster has 4"):
        small_scenario(disturbances=(SlowDown(target=Target.RANK, index=9, factor=2.0),))
    with pytest.raises(ValueError, match="index of server is 8: the cluster has 8"):
        small_scenario(disturbances=(Outage(index=8, at_s=0.0, for_s=1.0),))


@pytest.mark.parametrize("mode", [Mode.HYBRID, Mode.LOOKAHEAD, Mode.ASYNC])
def test_a_run_in_which_nothing_is_slow_asks_nobody_about_it(mode, monkeypatch):
    def asked(*_: object) -> None:
        raise AssertionError("a run without disturbances asked about them")

    for name in ("factor", "at_servers"):
        monkeypatch.setattr(Disturbed, name, asked)
    scenario = small_scenario(mode)
    simulate(scenario, trace=True)
    slow = SlowDown(target=Target.RANK, index=0, factor=2.0)
    with pytest.raises(AssertionError, match="asked about them"):
        simulate(replace(scenario, disturbances=(slow,)))
