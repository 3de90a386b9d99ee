"""Stragglers, crashes and checkpoints: in runs, and in formulas."""

from __future__ import annotations

from dataclasses import replace
from math import sqrt

import pytest

from persia_sim.base.trace import Kind
from persia_sim.base.vocabulary import Mode
from persia_sim.cluster.incidents import (
    Checkpoints,
    Crash,
    SlowDown,
    Target,
)
from persia_sim.cluster.scenario import DenseHome, Scenario
from persia_sim.cluster.stamps import Mark
from persia_sim.engine.faults import Disturbed, Losses
from persia_sim.engine.simulate import DeadlockError, simulate
from tests.persia_sim.oracles import Recovery, overhead, random_crashes
from tests.persia_sim.sim_configurations import small_scenario


def crash(target: Target, at_s: float, restart_s: float = 0.2) -> Crash:
    return Crash(target=target, index=0, at_s=at_s, detect_s=0.05, restart_s=restart_s, load_s=0.1)


def disturbed(base: Scenario, events: tuple[SlowDown | Crash, ...]) -> Scenario:
    return replace(base, disturbances=events)


def test_a_transient_slow_down_hurts_only_while_it_lasts():
    base = small_scenario(Mode.HYBRID, steps=40)
    end = simulate(base).makespan_s
    event = SlowDown(target=Target.RANK, index=1, factor=4.0, start_s=end / 4, end_s=end / 2)
    stamps = simulate(disturbed(base, (event,))).stamps[Mark.UPDATED][0]
    plain = simulate(base).stamps[Mark.UPDATED][0]
    early = int((plain < end / 5).sum())
    assert (stamps[:early] == plain[:early]).all()
    assert stamps[-1] > plain[-1]
    assert stamps[-1] - stamps[-4] == pytest.approx(plain[-1] - plain[-4], rel=1e-6)


@pytest.mark.parametrize("target", list(Target))
def test_a_crash_delays_everyone_and_losses_are_counted(target):
    base = small_scenario(Mode.HYBRID, steps=30)
    plain = simulate(base)
    at = float(plain.stamps[Mark.PUSH][0, 10]) + 2.5e-4  # in the worker's hands
    if target is Target.SERVER:
        at = float(plain.stamps[Mark.APPLIED][0, 10] - plain.need.push.server_update_s.max() / 2)
    run = simulate(disturbed(base, (crash(target, at),)), trace=True)
    assert run.makespan_s > plain.makespan_s + 0.2
    assert run.trace is not None
    events = [e for e in run.trace if e.kind in (Kind.PUSH, Kind.LOST_PUSH)]
    assert len(events) == 4 * 30  # every push closed once
    lost = [e for e in events if e.kind == Kind.LOST_PUSH]
    assert len(lost) == run.losses.lost_pushes
    if target is not Target.RANK:  # of a push in one server's hands, one part of eight is lost
        assert run.losses.lost_pushes + run.losses.lost_parts > 0
        assert (run.losses.lost_parts > 0) == (target is Target.SERVER)


def test_a_server_that_never_returns_is_a_deadlock_that_names_who_waits():
    base = small_scenario(Mode.HYBRID, steps=30)
    event = crash(Target.SERVER, 0.05, restart_s=float("inf"))
    with pytest.raises(DeadlockError, match=r"rank 0: lookup waits for all ranks' pushes"):
        simulate(disturbed(base, (event,)))
    alone = disturbed(small_scenario(Mode.ASYNC, steps=30), (event,))
    with pytest.raises(DeadlockError, match=r"rank 0: train waits for the newest rows or dense"):
        simulate(alone)


def test_faults_are_checked():
    with pytest.raises(ValueError, match=r"slow-down factor is 0\.5: must lie in \[1, 10000\]"):
        SlowDown(target=Target.RANK, index=0, factor=0.5)
    with pytest.raises(ValueError, match="index of rank is 9: the cluster has 4"):
        disturbed(small_scenario(), (SlowDown(target=Target.RANK, index=9, factor=2.0),))


def test_a_rank_crash_does_the_work_since_its_checkpoint_again():
    base = small_scenario(Mode.HYBRID, steps=30)
    ends = simulate(base).stamps[Mark.UPDATED][0]
    at, every = float(ends[20] + ends[21]) / 2, float(ends[9])
    written = replace(base, checkpoints=Checkpoints(interval_s=every, write_s=0.0))
    assert simulate(written).stamps.tobytes() == simulate(base).stamps.tobytes()
    run = simulate(disturbed(written, (crash(Target.RANK, at),)))
    saved = 0.0
    for end in ends[:21].tolist():
        saved = end if end - saved >= every else saved
    back_s = 0.05 + 0.2 + 0.1
    assert run.losses.down_s == pytest.approx(back_s)
    assert run.losses.redone_s == pytest.approx(at - saved, rel=1e-9)
    late = run.stamps[Mark.UPDATED][:, 21] - ends[21]
    assert late == pytest.approx([back_s + at - saved] * 4, rel=1e-9)  # everybody went back
    assert (run.stamps[Mark.UPDATED][0, :21] == ends[:21]).all()
    never = simulate(disturbed(base, (crash(Target.RANK, at),)))
    assert never.losses.redone_s == pytest.approx(at)  # no checkpoint: from the start


def test_in_async_a_crashed_rank_goes_back_alone():
    base = small_scenario(Mode.ASYNC, steps=30, tau=None, dense_home=DenseHome.APART)
    plain = simulate(base)
    at = float(plain.stamps[Mark.BACKWARD_END][0, 15])
    run = simulate(disturbed(base, (crash(Target.RANK, at),)))
    ends, before = run.stamps[Mark.UPDATED][:, -1], plain.stamps[Mark.UPDATED][:, -1]
    assert ends[0] > before[0] + at
    assert ends[1:] == pytest.approx(before[1:], rel=0.05)
    assert run.losses.redone_s == pytest.approx(at / 4)  # the mean over four loops
    often = Checkpoints(interval_s=at / 3, write_s=0.01)
    written = simulate(replace(base, checkpoints=often)).losses
    least, most = (0.01 * number for number in (written.checkpoints - 1, written.checkpoints))
    assert 0 < least < written.writing_s <= most + 1e-12, "each loop writes for itself, one is told"


def test_a_server_forgets_or_everybody_goes_back():
    base = small_scenario(Mode.HYBRID, steps=30)
    plain = simulate(base)
    at = float(plain.stamps[Mark.UPDATED][0, 15])
    base = replace(base, checkpoints=Checkpoints(interval_s=at / 2, write_s=0.01))
    alone = crash(Target.SERVER, at)
    partial = simulate(disturbed(base, (alone,))).losses
    full = simulate(disturbed(base, (replace(alone, full=True),))).losses
    assert partial.redone_s == 0 and partial.forgotten_pushes > 0
    assert full.redone_s > 0 and full.forgotten_pushes == full.lost_pushes == 0
    with pytest.raises(ValueError, match="crash full is True: a rank does not read it"):
        replace(crash(Target.RANK, 1.0), full=True)


def test_a_push_in_the_hands_of_a_server_is_lost_unless_everybody_goes_back():
    base = small_scenario(Mode.HYBRID, steps=30)
    plain = simulate(base)
    at = float(plain.stamps[Mark.APPLIED][0, 10] - plain.need.push.server_update_s.max() / 2)
    alone = crash(Target.SERVER, at)
    partial = simulate(disturbed(base, (alone,))).losses
    full = simulate(disturbed(base, (replace(alone, full=True),))).losses
    assert partial.lost_parts > 0 and partial.redone_s == 0
    assert full.lost_parts == full.lost_pushes == 0 and full.redone_s == pytest.approx(at)


def test_a_rank_that_never_returns_is_a_deadlock():
    for mode in (Mode.HYBRID, Mode.ASYNC):
        base = small_scenario(mode, steps=30)
        event = crash(Target.RANK, 0.05, restart_s=float("inf"))
        with pytest.raises(DeadlockError, match="deadlock at"):
            simulate(disturbed(base, (event,)))


@pytest.mark.parametrize("mode", list(Mode))
@pytest.mark.parametrize("share", [0.3, 0.9])
@pytest.mark.parametrize("target", [Target.WORKER, Target.SERVER])
def test_what_waits_for_ever_never_happens(mode, share, target):
    """Whatever batch it held: no run ends, and no clock stands, at infinity."""
    base = small_scenario(mode, steps=8)
    at_s = share * simulate(base).makespan_s
    event = crash(target, at_s, restart_s=float("inf"))
    with pytest.raises(DeadlockError, match=r"deadlock at \d"):
        simulate(disturbed(base, (event,)))


def test_what_several_servers_forget_of_a_push_is_counted_once():
    base = small_scenario(Mode.HYBRID, steps=30)
    end = simulate(base).makespan_s
    at_once = replace(crash(Target.SERVER, 0.5 * end, 0.0), detect_s=0.0, load_s=0.0)
    early, late = at_once, replace(at_once, at_s=0.9 * end)
    other = replace(late, index=1)
    found = [
        simulate(disturbed(base, events)).losses.forgotten_pushes
        for events in ((early,), (early, late), (late,), (late, other))
    ]
    assert 0 < found[0] < found[1] == found[2] == found[3] < 30 * 4


@pytest.mark.long
@pytest.mark.parametrize("factor", [0.4, 2.5])
def test_the_overhead_of_runs_with_checkpoints_is_dalys(factor):
    """Random crashes inside simulated runs against the closed form, within four standard errors."""
    base = small_scenario(Mode.HYBRID, steps=200)
    useful = simulate(base).makespan_s
    policy = Recovery(mtbf_s=useful / 12, checkpoint_s=useful / 2000, back_s=useful / 300)
    every = factor * sqrt(2 * policy.checkpoint_s * policy.mtbf_s)  # in units of Young's interval
    base = replace(base, checkpoints=Checkpoints(interval_s=every, write_s=policy.checkpoint_s))
    found, intervals = [], []
    for seed in range(8):
        crashes = random_crashes(policy.mtbf_s, 10 * useful, 4, policy.back_s, seed)
        run = simulate(disturbed(base, crashes))
        found.append(run.makespan_s / useful - 1)
        intervals.append(useful / max(1, run.losses.checkpoints))
    mean = sum(found) / len(found)
    error = (sum((x - mean) ** 2 for x in found) / (len(found) - 1) / len(found)) ** 0.5
    # A checkpoint waits for the end of a step, so the interval that is kept is a little longer.
    kept = sum(intervals) / len(intervals)
    assert mean == pytest.approx(overhead(policy, kept), abs=4 * error)


@pytest.mark.parametrize("mode", [Mode.HYBRID, Mode.LOOKAHEAD, Mode.ASYNC])
def test_a_run_in_which_nothing_breaks_asks_nobody_about_faults(mode, monkeypatch):
    def asked(*_: object) -> None:
        raise AssertionError("a run without disturbances asked about them")

    for name in ("factor", "at_servers", "worker_back", "worker_lost", "servers_lost"):
        monkeypatch.setattr(Disturbed, name, asked)
    scenario = small_scenario(mode)
    assert simulate(scenario, trace=True).losses == Losses()
    slow = SlowDown(target=Target.RANK, index=0, factor=2.0)
    with pytest.raises(AssertionError, match="asked about them"):
        simulate(replace(scenario, disturbances=(slow,)))
