"""Timelines of one and two ranks against instants worked out on paper (hand_world).

A step of one rank alone: lookup 0.5 + (2 + 0.5) + 4 + 3 = 10 until the rows are read, then
0.5 + 8 + (6 + 0.5) + 12 = 27 until they are on the rank's host, 2 + 3 = 5 to the GPU, 12 of
compute, 6 + 3 = 9 back, and 0.5 + 12 + (7 + 0.5) + 10 + 11 = 41 until they are applied: 104.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from persia_sim.base.vocabulary import Mode
from persia_sim.cluster.incidents import SlowDown, Target
from persia_sim.cluster.scenario import Averaging, Discipline, Noise, Queues, Scenario
from persia_sim.cluster.stamps import Mark
from persia_sim.engine.simulate import Run, simulate
from tests.oracles.max_plus import instants
from tests.persia_sim.hand_world import hand_costs, hand_scenario, law

M = Mark
ALONE = {  # of a batch whose lookup starts at 0
    M.LOOKUP: 0, M.READ: 10, M.ROWS: 37, M.COPY_IN: 37, M.ON_GPU: 42, M.REFRESHED: 42, M.START: 42,
    M.BACKWARD_END: 54, M.UPDATED: 54, M.COPY_OUT: 54, M.COPIED_OUT: 63, M.PUSH: 63,
    M.APPLIED: 104, M.RETURNED: 105,
}  # fmt: skip


def column(run: Run, r: int, s: int) -> dict[Mark, float]:
    return {mark: float(run.stamps[mark, r, s]) for mark in Mark}


@pytest.mark.parametrize("discipline", list(Discipline))
def test_sync_of_one_rank_adds_up_a_batchs_life(discipline):
    steps = 3 if discipline is Discipline.UNSHARED else 1  # else loading would meet the rows
    base = hand_scenario(Mode.SYNC, discipline=discipline, infinite_cpus=False, steps=steps)
    run = simulate(base)
    for s in range(steps):
        # The loader needs 2.25 + 268 / 16 + 96 / 24 = 23; later batches are there before that.
        loaded = 23.0 if s == 0 else column(run, 0, s)[M.LOADED]
        begin = 23.0 + 104 * s
        expected = {M.LOADED: loaded} | {mark: begin + at for mark, at in ALONE.items()}
        assert column(run, 0, s) == pytest.approx(expected, rel=1e-12)
    assert run.makespan_s == pytest.approx(23 + steps * 104 + 1)
    assert run.max_in_flight == 1


def test_loads_follow_each_other_and_stop_where_the_buffer_is_full():
    run = simulate(hand_scenario(Mode.SYNC, steps=5, queues=Queues(dataset=2)))
    # Two batches may lie ready: 0 and 1 at once, 2 from the start of lookup 0 (23), 3 from 127.
    assert run.stamps[M.LOADED, 0].tolist() == [23, 46, 69, 150, 254]


def test_two_ranks_meet_at_the_barrier():
    """One loader serves both; the all-reduce of 904 bytes takes 2 hops and 904 / 113, then 0.5."""
    run = simulate(hand_scenario(Mode.SYNC, ranks=2, steps=2))
    first, second = column(run, 0, 0), column(run, 1, 0)
    assert (first[M.LOOKUP], second[M.LOOKUP]) == (23, 46)
    assert (first[M.BACKWARD_END], second[M.BACKWARD_END]) == (77, 100)
    assert first[M.UPDATED] == second[M.UPDATED] == 100 + 0.5 + 8 + 0.5
    assert first[M.APPLIED] == second[M.APPLIED] == 109 + 9 + 41
    for r in range(2):
        assert column(run, r, 1)[M.LOOKUP] == 159  # all pushes of step 0 are applied
        assert column(run, r, 1)[M.APPLIED] == 159 + 104 + 9


def test_hybrid_hides_the_all_reduce_behind_the_backward_pass():
    """Buckets of 64 and 840 bytes, there after 16/226 and all of the 8 seconds of backward."""
    base = hand_scenario(Mode.HYBRID, ranks=2, steps=1, tau=0)
    for bucket, exposed in ((1e9, 8.5), (64.0, 0.5 + 840 / 113)):
        sync = replace(base.costs.dense_sync, bucket_bytes=bucket)
        run = simulate(replace(base, costs=replace(base.costs, dense_sync=sync)))
        assert run.stamps[M.UPDATED, 0, 0] == pytest.approx(100 + exposed + 0.5)
    slow = replace(sync, inter_latency_s=20.0)  # the first bucket outlives the backward pass
    run = simulate(replace(base, costs=replace(base.costs, dense_sync=slow)))
    first_ready = 92 + 8 * 16 / 226
    both = 2 * 40 + 904 / 113
    assert run.stamps[M.UPDATED, 0, 0] == pytest.approx(first_ready + both + 0.5)


def test_hybrid_starts_a_lookup_when_the_window_opens():
    run = simulate(hand_scenario(Mode.HYBRID, steps=6, tau=1, queues=Queues(dataset=6)))
    # Lookup s waits for the push of s - 2; the loader brings a batch every 23 s until then.
    assert run.stamps[M.LOOKUP, 0].tolist() == [23, 46, 127, 150, 231, 254]
    assert run.stamps[M.APPLIED, 0].tolist() == [127, 150, 231, 254, 335, 358]


def test_a_permit_is_back_when_the_rank_knows():
    run = simulate(hand_scenario(Mode.RAW_HYBRID, steps=4, permits=1))
    assert run.stamps[M.LOOKUP, 0].tolist() == [23, 128, 233, 338]


def test_lookahead_looks_again_after_the_last_push_and_pays_for_it():
    """Every row is pending (each field has one): the second look takes 37 and a copy of 0.5 + 3."""
    run = simulate(hand_scenario(Mode.LOOKAHEAD, steps=3, ahead=1))
    assert run.stamps[M.LOOKUP, 0].tolist() == [23, 46, 167.5]  # applied: step 0
    # Step 0: on the GPU at 65, refreshed at 65 + 40.5, applied 12 + 9 + 41 later.
    assert run.stamps[M.REFRESHED, 0].tolist() == [105.5, 208, 310.5]
    assert run.stamps[M.APPLIED, 0].tolist() == [167.5, 270, 372.5]


def test_async_pulls_and_pushes_the_dense_weights():
    """A copy of 904 bytes at 226 a second takes 4, and one way each for asking and answer."""
    run = simulate(hand_scenario(Mode.ASYNC, steps=2, tau=0), trace=True)
    for s, begin in enumerate((23.0, 23.0 + 104 + 5)):
        assert column(run, 0, s)[M.REFRESHED] == begin + 42
        assert column(run, 0, s)[M.START] == begin + 47
        assert column(run, 0, s)[M.UPDATED] == begin + 59  # its push waits for nobody
        assert column(run, 0, s)[M.APPLIED] == begin + 109


def test_async_ranks_queue_at_the_dense_server():
    """Both pull at once: 4 seconds each on one core, so the second waits for the first."""
    cluster = replace(hand_scenario(ranks=2).cluster, loaders=2)
    cluster = replace(cluster, servers=replace(cluster.servers, cores_per_process=2))
    base = hand_scenario(Mode.ASYNC, ranks=2, steps=1, cluster=cluster, infinite_cpus=False)
    quick = hand_costs(load=law(0.0), worker_pool=law(0.0), worker_forward=law(0.0))
    run = simulate(replace(base, costs=quick))
    gap = run.stamps[M.START] - run.stamps[M.REFRESHED]
    assert sorted(gap[:, 0].tolist()) == [5.0, 9.0]


def test_averaging_stops_compute_for_its_round():
    """A round begins at 70 and takes 9 s; both ranks compute from 62.75 on."""
    cluster = replace(hand_scenario(ranks=2).cluster, loaders=2)
    base = hand_scenario(Mode.ASYNC_AVERAGING, 2, steps=1, cluster=cluster)
    base = replace(base, costs=hand_costs(load=law(0.0)))
    run = simulate(replace(base, averaging=Averaging(period_s=70.0)))
    assert run.stamps[M.START, :, 0].tolist() == [62.75, 62.75]
    compute = run.stamps[M.BACKWARD_END] - run.stamps[M.START]
    assert compute[:, 0].tolist() == [12 + 9, 12 + 9]


def test_averaging_locks_the_replica_of_a_rank_that_waits_for_its_batch():
    """A round begins at 60 and takes 9 s; batches come at 62.75, and what is left of it is waited
    for."""
    cluster = replace(hand_scenario(ranks=2).cluster, loaders=2)
    base = hand_scenario(Mode.ASYNC_AVERAGING, 2, steps=1, cluster=cluster)
    base = replace(base, costs=hand_costs(load=law(0.0)))
    run = simulate(replace(base, averaging=Averaging(period_s=60.0)))
    compute = run.stamps[M.BACKWARD_END] - run.stamps[M.START]
    longer = 60 + 9 - 62.75
    assert compute[:, 0].tolist() == pytest.approx([12 + longer, 12 + longer])


@pytest.mark.parametrize(
    ("target", "part", "more"),
    [
        (Target.RANK, (M.START, M.BACKWARD_END), 24.0),  # 12 s of compute, three times
        (Target.WORKER, (M.LOOKUP, M.READ), 4.0),  # 2 s of asking
        (Target.WORKER, (M.READ, M.ROWS), 12.0),  # 6 s of pooling
        (Target.WORKER, (M.PUSH, M.APPLIED), 14.0),  # 7 s of scattering
        (Target.SERVER, (M.LOOKUP, M.READ), 6.0),  # 3 s of reading
        (Target.SERVER, (M.PUSH, M.APPLIED), 22.0),  # 11 s of updating
    ],
)
def test_a_straggler_takes_three_times_its_own_part(target, part, more):
    base = hand_scenario(Mode.SYNC, steps=3)
    begin, end = part

    def took(scenario: Scenario) -> list[float]:
        stamps = simulate(scenario).stamps
        return (stamps[end] - stamps[begin])[0].tolist()

    plain = took(base)
    always = SlowDown(target=target, index=0, factor=3.0)
    assert took(replace(base, disturbances=(always,))) == [t + more for t in plain]
    twice = (always, replace(always, factor=1.5))
    assert took(replace(base, disturbances=twice)) == [t + more * 3.5 / 2 for t in plain]
    # Step 1 runs from 127 to 231, and no step begins or ends its slow part at these instants.
    once = replace(always, start_s=127.0, end_s=231.0)
    assert took(replace(base, disturbances=(once,))) == [plain[0], plain[1] + more, plain[2]]


def test_a_busy_worker_core_makes_the_second_batch_wait():
    """Two batches reach one core at once: 2 s of asking each, so the second is read 2 s later."""
    cluster = replace(hand_scenario(ranks=2).cluster, loaders=2)
    base = hand_scenario(Mode.SYNC, 2, cluster=cluster, steps=1, costs=hand_costs(load=law(0.0)))
    both = simulate(replace(base, infinite_cpus=False)).stamps
    assert both[M.LOOKUP, :, 0].tolist() == [20.75, 20.75]
    # Unshared NICs; the server's one core: the first is read after 3 s, the second 3 s later.
    assert sorted(both[M.READ, :, 0].tolist()) == [30.75, 33.75]
    two_cores = replace(cluster, embedding_workers=replace(
        cluster.embedding_workers, cores_per_process=2
    ), servers=replace(cluster.servers, cores_per_process=2))  # fmt: skip
    free = simulate(replace(base, infinite_cpus=False, cluster=two_cores)).stamps
    assert free[M.READ, :, 0].tolist() == [30.75, 30.75]


def test_fluid_cards_are_halved_between_two_messages():
    """Both loads of 268 bytes enter one worker's NIC of 16 bytes a second together; then 96 bytes
    go to each rank in 4 s."""
    cluster = replace(hand_scenario(ranks=2).cluster, loaders=2)
    base = hand_scenario(Mode.SYNC, 2, cluster=cluster, steps=1, costs=hand_costs(load=law(0.0)))
    shared_card = simulate(replace(base, discipline=Discipline.FLUID)).stamps
    assert shared_card[M.LOADED, :, 0] == pytest.approx([33.5 + 4, 33.5 + 4])
    one_by_one = simulate(replace(base, discipline=Discipline.FIFO)).stamps
    assert one_by_one[M.LOADED, :, 0] == pytest.approx([16.75 + 4, 33.5 + 4])


def test_streams_cap_a_message_and_a_fan_out_has_one_a_server():
    base = hand_scenario(Mode.SYNC, steps=1)
    link = replace(base.cluster.link, stream_bytes_per_s=8.0)
    run = simulate(replace(base, cluster=replace(base.cluster, link=link)))
    # load 2.25 + 268/8 + 96/8; request 48/8 = 6, rows 96/8 = 12, activations and gradients
    # 192/8 = 24, push 120/8 = 15
    assert run.stamps[M.LOADED, 0, 0] == 2.25 + 33.5 + 12
    gaps = [(M.LOOKUP, M.READ, 12.0), (M.READ, M.ROWS, 43.0), (M.PUSH, M.APPLIED, 58.0)]
    for begin, end, seconds in gaps:
        assert run.stamps[end, 0, 0] - run.stamps[begin, 0, 0] == seconds


def test_noise_multiplies_compute_by_the_seeds_own_factors():
    """The draws again, from numpy's generator: key (seed, purpose 1 and rank), counter 0."""
    base = hand_scenario(Mode.SYNC, ranks=2, steps=6, noise=Noise(gpu_cv=0.5), seed=7)
    run = simulate(base)
    compute = run.stamps[M.BACKWARD_END] - run.stamps[M.START]
    sigma = np.sqrt(np.log(1 + 0.5**2))
    for r in range(2):
        key = np.array([7, (1 << 32) + r], np.uint64)
        draws = np.random.Generator(np.random.Philox(key=key)).standard_normal(6)
        assert compute[r] == pytest.approx(12 * np.exp(sigma * draws - sigma**2 / 2))
    assert np.array_equal(run.stamps, instants(base))
