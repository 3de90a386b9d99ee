"""Laws and schedules by numbers computed by hand, and what a run measures."""

from __future__ import annotations

import pytest

from experiments.validating.cases import Case, held_by, weights_of
from experiments.validating.contention import (
    Host,
    all_busy,
    burdened,
    burdens,
    core_share,
    threads,
)
from experiments.validating.profiling import MeasuredRun, ProfileRun, fit_profile, run_case
from experiments.validating.schedule import contended, schedule
from experiments.validating.stages import TERMS, Costs, costs_by_law
from persia_sim.base.vocabulary import Mode
from runtime.profiling.laws import LawPoint, LinearLaw
from runtime.profiling.stage_times import OF_A_MODE, StageTimes, parts_of

MS = 1e-3
STAGES = {
    "load": 1 * MS, "read": 0.5 * MS, "pool": 0.5 * MS, "forward": 1 * MS, "backward": 1.5 * MS,
    "check": 0.5 * MS, "update": 1 * MS, "scatter": 0.5 * MS, "push": 0.5 * MS,
    "refresh": 0.1 * MS, "pull": 0.0, "served": 0.0, "renewed": 0.0,
}  # fmt: skip
NO_PYTHON = dict.fromkeys(STAGES, 0.0)


def holds(samples: int, occurrences: float, distinct: float, weights: int, dim: int, **more: float):
    """A batch whose MLP is given nothing but vectors; ``more``: other quantities."""
    return {
        "one": 1.0, "shards": 1, "samples": samples, "inputs": 0.0, "dim": dim, "created": 0.0,
        "occurrences": occurrences, "occurrence_floats": occurrences * dim, "distinct": distinct,
        "distinct_floats": distinct * dim, "dense_params": weights,
        "flops": 6 * weights * samples, **more,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("case", "step_ms"),
    [
        (Case(mode=Mode.SYNC), 1 + 0.5 + 0.5 + 1 + 2 + 1 + 0.5 + 0.5),  # all in turn
        (Case(mode=Mode.SYNC, ranks=2), 7 + 0.5 + 0.5),  # one lock: reads and updates in turn
        (Case(mode=Mode.SYNC, latency_s=0.01), 7 + 2 * 10),
        (Case(), 1 + 2 + 1),  # training alone
        (Case(window=0, mode=Mode.RAW_HYBRID), 6),  # the next is loaded before the window opens
        (Case(latency_s=0.01), (6 + 2 * 10) / 5),  # five batches share a round
        (Case(mode=Mode.ASYNC, ranks=2), 0.2 + 1 + 2 + 1),  # each rank's own: nobody waits
        (Case(mode=Mode.ASYNC_AVERAGING), 0.2 + 1 + 2 + 1),
        (Case(mode=Mode.LOOKAHEAD), 0.1 + 0.5 + 1 + 2 + 1 + 0.5 + 0.5),  # load and read are hidden
    ],
    ids=lambda value: value.name if isinstance(value, Case) else "",
)
def test_a_schedule_by_hand(case, step_ms):
    pulls = STAGES if case.mode.has_barrier else STAGES | {"pull": 0.2 * MS}
    found = schedule(case, pulls, 61)  # the steady steps are then whole rounds of five batches
    assert 1e3 * case.updates_per_step * case.batch / found.samples_per_s == pytest.approx(
        step_ms, rel=1e-6
    )


def test_a_window_that_training_fills_is_missed_whole_and_sync_misses_nothing():
    assert schedule(Case(), STAGES, 60).stale_steps == 4
    assert schedule(Case(window=1), STAGES, 60).stale_steps == 1
    assert schedule(Case(mode=Mode.SYNC), STAGES, 60).stale_steps == 0
    # Rows are read before the latency, not behind it: 40 ms of 4 ms steps lie between.
    assert schedule(Case(window=8, latency_s=0.02), STAGES, 90).stale_steps == pytest.approx(8)


def test_threads_that_want_more_cores_than_there_are_share_them():
    """Two ranks do 2 x 6 + 1 = 13 ms of work a step in 4 ms: 2 cores need 6.5 ms, one 13."""
    costs = Costs(STAGES, NO_PYTHON)
    for case, cores, least_ms, most in (
        (Case(ranks=2), 1, 13.0, 1.001),
        (Case(ranks=2), 2, 6.5, 1.06),
        (Case(mode=Mode.SYNC, ranks=2), 1, 13.0, 1.06),
    ):
        found, _ = contended(case, costs, Host(cores), 60)
        assert 1e-9 + 512 / found.samples_per_s >= least_ms * MS, case.name
        assert 512 / found.samples_per_s <= most * least_ms * MS, case.name
    plenty, longer = contended(Case(ranks=2), costs, Host(99), 60)
    assert plenty == schedule(Case(ranks=2), STAGES, 60)
    assert parts_of(longer) == pytest.approx(parts_of(STAGES) | {"lookup": MS})


def test_a_core_is_left_to_a_thread_for_its_share():
    assert core_share([], 1) == 1 and core_share([1, 1, 1], 2) == pytest.approx(0.5)
    # Two others: none with 0.3, one with 0.5, both with 0.2.
    assert core_share([0.5, 0.4], 1) == pytest.approx(0.3 + 0.5 / 2 + 0.2 / 3)
    assert core_share([0.5, 0.4], 2) == pytest.approx(0.3 + 0.5 + 0.2 * 2 / 3)
    assert all_busy([0.5, 0.4], 2) == pytest.approx(0.2) and all_busy([1], 2) == 0


def test_a_stage_waits_for_its_share_of_the_seconds_in_which_others_hold_the_interpreter():
    """Two ranks, a ms of Python each, of which forward waits for half: T = T0 + 0.5 ms; 2 cores, so
    nobody else can keep both of them busy."""
    python = NO_PYTHON | {"load": 0.4 * MS, "forward": 0.6 * MS}
    case, host = (
        Case(mode=Mode.SYNC, ranks=2),
        Host(2, among={"forward": 0.5}),
    )
    alone_s = 512 / schedule(case, STAGES, 60).samples_per_s
    found, longer = contended(case, Costs(STAGES, python), host, 60)
    assert longer["forward"] == pytest.approx(STAGES["forward"] + 0.5 * MS)
    assert longer["load"] == STAGES["load"]
    assert 512 / found.samples_per_s == pytest.approx(alone_s + 0.5 * MS, rel=3e-3)
    lonely, _ = contended(Case(mode=Mode.SYNC), Costs(STAGES, python), host, 60)
    assert lonely == schedule(Case(mode=Mode.SYNC), STAGES, 60)  # one thread meets nobody


def test_where_all_cores_are_busy_a_stage_waits_for_more():
    own = threads(Mode.HYBRID, 1, STAGES, STAGES)  # 2, 4 and 1 ms: at 10 steps/s 0.02, 0.04, 0.01
    by = burdens(own, 1, 10.0, Host(2))
    assert [b.rank_s for b in by] == pytest.approx([5 * MS, 3 * MS, 6 * MS])
    assert [b.others_s for b in burdens(own, 3, 10.0, Host(2))] == pytest.approx([14 * MS] * 3)
    assert by[2].crowd == pytest.approx(0.02 * 0.04, rel=0.02)  # others are hardly slowed
    host = Host(2, crowded={"push": 2.0})
    longer = burdened(STAGES, own, by, host, NO_PYTHON)
    expected_s = by[2].factor * STAGES["push"] + 2.0 * by[2].crowd * 6 * MS
    assert longer["push"] == pytest.approx(expected_s)


def test_memory_makes_stages_longer_by_the_other_cores_that_are_busy():
    own = threads(Mode.SYNC, 2, STAGES, NO_PYTHON)
    assert own[0].work_s == pytest.approx(6.5 * MS)  # the update is one rank's
    [found] = burdens(own, 2, 100.0, Host(2, memory=0.2))
    busy = found.factor * 6.5 * MS * 100
    assert found.factor == pytest.approx(1 + 0.2 * busy) and found.rank_s == found.others_s == 0


def flat_laws() -> dict[str, LinearLaw]:
    """Each stage: a fixed part of Python and one that grows with the batch."""
    grows = {
        "load": ("occurrences", 1e-7), "read": ("distinct", 2e-7), "pool": ("occurrences", 1e-7),
        "forward": ("flops", 1e-10), "backward": ("flops", 2e-10), "check": ("inputs", 1e-9),
        "update": ("dense_params", 1e-7), "scatter": ("occurrences", 1e-7),
        "push": ("distinct", 1e-7), "add_gradient": ("dense_params", 3e-9),
        "pull": ("dense_params", 1e-9), "sleep": ("asked_s", 1.0),
        "half": ("distinct_floats", 1e-9),
    }  # fmt: skip
    return {
        name: LinearLaw(dict.fromkeys(TERMS[name], 0.0) | {"one": 2e-4, item: each}, 0.0)
        for name, (item, each) in grows.items()
    }


def test_what_a_stage_costs_in_sync_it_costs_in_every_mode_beside_what_a_mode_adds():
    held = holds(10, 260, 100, 1000, 16, created=20)
    laws = flat_laws()
    alone = costs_by_law(laws, held, Mode.SYNC, ranks=1)
    assert alone.stages["update"] == pytest.approx(2e-4 + 1e-7 * 1000)
    assert alone.stages["read"] == pytest.approx(2e-4 + 100 * 2e-7)
    assert alone.python["read"] == 2e-4 and alone.python["backward"] == 0
    found = costs_by_law(laws, held, Mode.SYNC, ranks=3).stages
    assert found["update"] == pytest.approx(2e-4 + 1e-7 * 1000 + 2 * (2e-4 + 3e-9 * 1000))
    for mode in Mode:
        stages = costs_by_law(laws, held, mode, ranks=1).stages
        for name in stages.keys() - set(OF_A_MODE):
            assert stages[name] == alone.stages[name], (mode, name)
        assert stages["refresh"] == (alone.stages["read"] if mode.prefetches_rows else 0)
        assert stages["pull"] == pytest.approx(2e-4 + 1e-6 if mode.has_dense_server else 0)
    own = costs_by_law(laws, held, Mode.ASYNC, ranks=3).stages  # applied by each rank alone
    assert own["update"] == alone.stages["update"]


def test_rows_at_servers_are_read_by_a_call_and_updated_beside_it():
    held, laws = holds(10, 260, 100, 1000, 16), flat_laws()
    here = costs_by_law(laws, held, Mode.SYNC, ranks=1).stages
    half = costs_by_law(laws, held, Mode.SYNC, ranks=1, half=True).stages
    rounding_s = sum(half.values()) - sum(here.values())
    assert rounding_s == pytest.approx(4 * laws["half"](held)), "twice here, once on each way"
    del laws["push"]
    for name, seconds in (("served", 3e-4), ("servers", 9e-4)):
        laws[name] = LinearLaw(dict.fromkeys(TERMS[name], 0.0) | {"one": seconds}, 0.0)
    found = costs_by_law(laws, held, Mode.SYNC, ranks=1)
    assert found.stages == here | {"served": 3e-4, "push": 0.0} and found.python["served"] == 0
    # A late mode's call does not wait for the rest of the servers' work, which cores must do.
    late = costs_by_law(laws, held, Mode.HYBRID, ranks=1).stages
    assert late["served"] == 3e-4 and late["push"] == pytest.approx(6e-4)
    ahead = costs_by_law(laws, held, Mode.LOOKAHEAD, ranks=1).stages
    assert ahead["renewed"] == 3e-4 and ahead["refresh"] == here["read"]


def test_a_profile_recovers_the_host_that_made_its_runs():
    """Laws from runs by themselves; memory and waiting from pairs, of several shares of a core."""
    among = {"load": 0.2, "scatter": 0.1, "forward": 0.5}
    crowded = {"forward": 0.8, "scatter": 0.2}
    truth = Host(2, 0.15, among, crowded, dense_cv=0.02)
    laws, runs = flat_laws(), {}
    cases = [
        Case(mode=Mode.SYNC, batch=batch, dim=dim, hidden=(dim,))
        for batch, dim in ((8, 4), (64, 4), (64, 8), (128, 8))
    ]
    cases += [
        Case(mode=Mode.SYNC, copies=copies, batch=batch, hidden=(4,), dim=4)
        for copies in (2, 3, 4) for batch in (64, 256)
    ]  # fmt: skip
    for case in cases:
        run = ProfileRun(case, 30)
        costs = costs_by_law(laws, held_by(case, 30), case.mode, 1)
        [own] = threads(case.mode, 1, costs.stages, costs.python)
        steps_per_s = 0.5 / own.work_s
        [by] = burdens([own], case.copies, steps_per_s, truth)
        cpu = {  # holds what memory costs, and no waiting
            stage: by.growth ** (case.copies > 1) * costs.stages[stage] for stage in own.stages
        }
        wall = burdened(costs.stages, [own], [by], truth, NO_PYTHON)
        measured = StageTimes(wall, NO_PYTHON | cpu, 0.02)
        runs[run] = [MeasuredRun(steps_per_s * case.batch, 0.0, measured, 0.0)]
    weights = [holds(1, 0, 0, n, 1) for n in (10, 100, 1000)]
    added = [LawPoint(q, laws["add_gradient"](q)) for q in weights]
    found = fit_profile(runs, {"add_gradient": added}, 2)
    for name in ("load", "forward", "push", "backward", "pool", "add_gradient"):
        assert found.laws[name].terms == pytest.approx(laws[name].terms, abs=1e-12, rel=1e-3), name
    assert found.host.memory == pytest.approx(0.15, rel=0.1)
    for stage in ("load", "pool", "scatter", "forward", "check", "backward"):
        close = {"rel": 0.1, "abs": 0.02}
        assert found.host.among[stage] == pytest.approx(among.get(stage, 0.0), **close), stage
        assert found.host.crowded[stage] == pytest.approx(crowded.get(stage, 0.0), rel=0.2, abs=0.1)
    assert found.host.dense_cv == 0.02 and found.host.cores == 2


def test_what_a_batch_holds_is_counted_in_its_stream():
    case = Case(batch=256, ranks=2, mode=Mode.LOOKAHEAD, shards=3)
    held = held_by(case, 64)  # 128 batches of 128: one chunk of the stream
    chunk = next(case.source().chunks("train"))
    assert [held[n] for n in ("samples", "occurrences", "shards")] == [128, 128 * 26, 3]
    distinct = [len(set(chunk.rows(k, k + 128).ids.tolist())) for k in range(0, chunk.size, 128)]
    assert held["distinct"] == pytest.approx(sum(distinct) / len(distinct))
    seen, new, met = set(), 0, 0
    for k in range(0, chunk.size, 128):
        ids = set(chunk.rows(k, k + 128).ids.tolist())
        if k >= 128 * 2 * (64 // 3):
            new, met = new + len(ids - seen), met + len(ids)
        seen |= ids
    assert held["created"] / held["distinct"] == pytest.approx(new / met) and 0 < new < met
    assert held_by(Case(bag=3, batch=128), 90)["occurrences"] == pytest.approx(
        2 * 128 * 26, rel=0.02
    )
    assert weights_of(26 * 16 + 13, (256, 128)) == 429 * 256 + 256 * 128 + 128


def test_a_run_measures_every_stage_of_every_mode():
    for mode in (Mode.SYNC, Mode.LOOKAHEAD, Mode.HYBRID, Mode.ASYNC, Mode.ASYNC_AVERAGING):
        ranks = 1 if mode.has_barrier else 2
        case = Case(mode=mode, ranks=ranks, batch=32, dim=4, hidden=(8,), shards=2)
        found = run_case(case, 30)
        parts = parts_of(found.measured.wall)
        assert found.samples_per_s > 0 and all(seconds > 0 for seconds in parts.values())
        assert found.measured.cpu["read"] > 0 and found.measured.dense_cv > 0
        assert (found.measured.cpu["refresh"] > 0) == mode.prefetches_rows
        assert (found.measured.cpu["pull"] > 0) != mode.has_barrier
        assert found.measured.cpu["update"] > 0 and found.measured.cpu["check"] > 0
        assert 0 <= found.stale_steps <= (4 if mode.reads_late_rows else 0)


def test_short_queues_keep_rows_young_as_the_runtimes_do():
    """A queue of one: the batch that trains is missed, and the one before it, whose push is on its
    way. With the queues of a usual run the window decides."""
    stages = dict.fromkeys(STAGES, 0.0)
    stages |= {"load": 0.8e-3, "read": 0.6e-3, "pool": 0.3e-3, "forward": 3.5e-3}
    stages |= {"backward": 5e-3, "scatter": 0.6e-3, "push": 0.9e-3}
    for queue, window, missed in ((1, 4, 2), (1, 16, 2), (None, 4, 4)):
        assert schedule(Case(queue=queue, window=window), stages, 160).stale_steps == missed
