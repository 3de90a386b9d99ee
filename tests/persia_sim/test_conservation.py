"""Laws 5, 7 and 9 of a run from its instants and its NICs, not from the trace's own figures."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from persia_sim.engine.run import Run
from persia_sim.engine.simulate import simulate
from persia_sim.model.incidents import Crash, Target
from persia_sim.model.scenario import Averaging, Discipline, Noise
from persia_sim.model.stamps import Mark
from persia_sim.words.staleness import staleness_in_pushes
from persia_sim.words.trace import Kind
from persia_sim.words.vocabulary import Mode
from tests.persia_sim.hand_world import hand_scenario
from tests.persia_sim.sim_configurations import small_scenario

LATE = [Mode.RAW_HYBRID, Mode.HYBRID, Mode.ASYNC]


def carried(run: Run, role: str, way: str) -> float:
    return sum(
        size
        for name, size in run.link_bytes.items()
        if name.startswith(role) and name.endswith(way)
    )


@given(
    mode=st.sampled_from([m for m in Mode if m is not Mode.LOOKAHEAD]),
    ranks=st.integers(1, 3),
    steps=st.integers(1, 6),
    workers=st.integers(1, 3),
    discipline=st.sampled_from(list(Discipline)),
    cpus=st.booleans(),
)
def test_every_byte_of_every_batch_crosses_its_cards_once(
    mode: Mode, ranks: int, steps: int, workers: int, discipline: Discipline, cpus: bool
) -> None:
    """268 from the loader and 96 past the worker, 48 and 120 to the servers, 96 back, 192 to the
    rank and 192 back."""
    rounds = Averaging(period_s=100.0) if mode is Mode.ASYNC_AVERAGING else None
    base = hand_scenario(
        mode, ranks, steps=steps, discipline=discipline, infinite_cpus=cpus, averaging=rounds
    )
    run = simulate(replace(base, cluster=base.cluster.with_workers(workers)))
    batches = ranks * steps
    assert carried(run, "GPU host", "in") == (192 + 96) * batches
    assert carried(run, "GPU host", "out") == 192 * batches
    assert carried(run, "worker host", "out") == (48 + 120 + 192) * batches
    assert carried(run, "worker host", "in") == (268 + 96 + 192) * batches
    assert carried(run, "server host", "in") == (48 + 120) * batches
    assert carried(run, "server host", "out") == 96 * batches


def test_lookahead_carries_its_second_look_too() -> None:
    run = simulate(hand_scenario(Mode.LOOKAHEAD, 2, steps=4, ahead=2))
    assert carried(run, "server host", "out") == 2 * 96 * 8
    assert carried(run, "server host", "in") == (2 * 48 + 120) * 8
    assert carried(run, "GPU host", "in") == (2 * 192 + 96) * 8


@settings(max_examples=20)
@given(st.sampled_from(LATE), st.integers(0, 4), st.integers(0, 3), st.booleans())
def test_no_lookup_starts_before_its_window_opens(
    mode: Mode, tau: int, seed: int, merged: bool
) -> None:
    """The sentence of the contract: all pushes of all steps < s - tau are applied (in async the
    rank's own). And where it binds, some lookup starts at the very instant."""
    merge = {"merge_pushes": merged} if mode.may_merge else {}
    noise = Noise(gpu_cv=0.3, server_cv=0.5)
    run = simulate(small_scenario(mode, tau=tau, steps=12, seed=seed, noise=noise, **merge))
    start, applied = run.stamps[Mark.LOOKUP], run.stamps[Mark.APPLIED]
    at_the_instant = 0
    for r in range(4):
        for s in range(tau + 1, 12):
            before = applied[:, : s - tau] if mode.has_barrier else applied[r, : s - tau]
            assert start[r, s] >= before.max()
            at_the_instant += start[r, s] == before.max()
    assert at_the_instant > 0 or tau > 1 or mode is Mode.ASYNC


@pytest.mark.parametrize("mode", LATE)
def test_missed_pushes_are_others_in_flight_on_average(mode: Mode) -> None:
    """Law 7: versions from the trace on the left; on the right the batches of others that had read
    and were not applied when a push was, counted from the instants."""
    noise = Noise(gpu_cv=0.4, server_cv=1.0)
    merge = {"merge_pushes": False} if mode.may_merge else {}
    run = simulate(small_scenario(mode, tau=3, steps=40, noise=noise, **merge), trace=True)
    assert run.trace is not None
    read, applied = run.stamps[Mark.READ].ravel(), run.stamps[Mark.APPLIED].ravel()
    assert len(np.unique(np.concatenate([read, applied]))) == 2 * len(read)  # no two at once
    gauge = np.array([((read < at) & (applied > at)).sum() for at in applied])
    missed = staleness_in_pushes(run.trace).missed_pushes
    assert missed.sum() == gauge.sum() > 0
    in_between = [((applied > a) & (applied < b)).sum() for a, b in zip(read, applied, strict=True)]
    assert sorted(missed.tolist()) == sorted(in_between)


@pytest.mark.parametrize("mode", [Mode.SYNC, Mode.HYBRID, Mode.ASYNC])
@pytest.mark.parametrize("target", [Target.WORKER, Target.SERVER])
@pytest.mark.parametrize("at", [0.2, 0.4, 0.6, 0.8])
def test_what_was_sent_is_applied_or_counted_as_lost(mode: Mode, target: Target, at: float) -> None:
    base = small_scenario(mode, steps=15)
    end = simulate(base).makespan_s
    crash = Crash(target=target, index=0, at_s=at * end, detect_s=0.01, restart_s=0.02)
    merge = {"merge_pushes": False} if mode is Mode.HYBRID else {}
    run = simulate(replace(base, disturbances=(crash,), **merge), trace=True)
    assert run.trace is not None
    lost = [(e.rank, e.step) for e in run.trace if e.kind == Kind.LOST_PUSH]
    assert len(lost) == len(set(lost)) == run.losses.lost_pushes
    pushes = [(e.rank, e.step) for e in run.trace if e.kind == Kind.PUSH]
    whole = 4 if mode is Mode.SYNC else 1  # merged: one record for the ranks that are not lost
    assert len(pushes) == len(set(pushes))
    if whole == 1:
        assert sorted(pushes + lost) == [(r, s) for r in range(4) for s in range(15)]
    else:
        kept = {s for _, s in pushes}
        assert kept | {s for _, s in lost} == set(range(15))
    last = max(e.version for e in run.trace if e.kind == Kind.PUSH)
    assert last + whole >= 60 - len(lost) >= last  # versions count the applied pushes
    assert np.isfinite(run.stamps).all()  # every batch is trained and closed, lost or not
