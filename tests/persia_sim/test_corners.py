"""Corners that users visit: rounds that never end, limits that must hold."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from persia_sim.base.popularity import busiest_extra, mix64
from persia_sim.base.staleness import staleness_in_steps
from persia_sim.base.trace import Kind
from persia_sim.base.vocabulary import Mode
from persia_sim.bounds.closed_form import answer, shared
from persia_sim.cli import SimulateOptions, scenario_of
from persia_sim.cluster.costs import Law
from persia_sim.cluster.demand import demand
from persia_sim.cluster.incidents import SlowDown, Target
from persia_sim.cluster.scenario import (
    DenseHome,
    Discipline,
    Noise,
    Queues,
)
from persia_sim.cluster.stamps import Mark
from persia_sim.engine.simulate import simulate
from persia_sim.presets.costs import CATALOGUE
from persia_sim.report.measure import steady_steps, step_time, throughput
from persia_sim.report.report import report
from persia_sim.report.sweep import Point
from persia_sim.report.sweep import scenario_of as scenario_of_point
from tests.persia_sim.hand_world import hand_costs, hand_scenario
from tests.persia_sim.sim_configurations import small_cluster, small_scenario


def test_a_straggler_throughout_has_a_warm_up_and_a_passing_one_has_none():
    base = small_scenario(Mode.HYBRID, steps=60)
    end = simulate(base).makespan_s
    slow = SlowDown(target=Target.RANK, index=0, factor=2.0)
    usual = steady_steps(simulate(base)).start
    assert steady_steps(simulate(replace(base, disturbances=(slow,)))).start >= 8 == usual
    passing = replace(slow, end_s=end / 20)
    assert steady_steps(simulate(replace(base, disturbances=(passing,)))).start == 0


def test_staleness_and_use_are_those_of_the_steady_steps():
    """Without a bound the queues fill up for long, and the start must not count."""
    base = small_scenario(Mode.HYBRID, tau=None, steps=60)
    run = simulate(base, trace=True)
    assert run.trace is not None
    found = report(run)
    late = staleness_in_steps(run.trace)
    kept = late.missing_steps[late.step >= steady_steps(run).start]
    assert found.staleness is not None and found.staleness.steps_mean == pytest.approx(kept.mean())
    assert late.missing_steps.mean() < kept.mean() * 0.995  # the first lookups missed nothing
    # The utilisation law: what a step asks of a GPU, over the time that a step takes.
    assert found.use["GPU"] == pytest.approx(run.need.compute_s / step_time(run).mean)


def test_the_memory_of_worker_hosts_binds():
    base = small_scenario(Mode.HYBRID, steps=30)
    part = base.cluster.embedding_workers
    scarce = replace(part, host=replace(part.host, memory_bytes_per_s=1e8))
    base = replace(base, cluster=replace(base.cluster, embedding_workers=scarce))
    run = simulate(base)
    bound = shared(base, run.need)["worker memory"]
    assert answer(base).binds == "worker memory"
    assert run.makespan_s > 30 * bound
    assert step_time(run).mean == pytest.approx(bound, rel=0.05)


def test_what_a_law_cannot_use_is_refused_or_said():
    costs = hand_costs()
    rpc = replace(costs.worker_rpc, per_item_s=1.0)
    with pytest.raises(ValueError, match=r"worker_rpc\.per_item_s is 1\.0: a call has a fixed"):
        replace(costs, worker_rpc=rpc)
    with pytest.raises(ValueError, match="merge_pushes is True: sync always merges"):
        small_scenario(Mode.SYNC, merge_pushes=True)


@pytest.mark.parametrize("mode", list(Mode))
@pytest.mark.parametrize("ranks", [8, 64])
def test_the_command_and_a_sweep_mean_the_same_cluster(mode, ranks):
    command = SimulateOptions(mode=mode, ranks=ranks, workers=13, servers=4, batch_per_rank=500)
    point = Point(mode=mode, ranks=ranks, workers=13, servers=4, batch_per_rank=500)
    assert scenario_of(command) == scenario_of_point(point, 100)
    assert scenario_of(command).cluster.loaders == 240 * ranks // 64
    told = replace(command, loaders=7)
    assert scenario_of(told) == scenario_of_point(replace(point, loaders=7), 100)
    assert scenario_of(told).cluster.loaders == 7


def test_asynchronous_dense_weights_are_traffic_unless_asked_otherwise():
    """By default a step moves a copy each way over the NICs of the rank's host and the servers."""
    base = small_scenario(Mode.ASYNC, tau=None, steps=40)
    assert base.home is DenseHome.SERVERS
    rates = {home: throughput(simulate(replace(base, dense_home=home))).mean for home in DenseHome}
    assert rates[DenseHome.APART] > rates[DenseHome.SERVERS]
    run = simulate(base)
    rank_rate, server_rate = (
        base.cluster.nic_rate(role) for role in (base.cluster.nn, base.cluster.servers)
    )
    dense = run.need.dense_bytes
    batch = run.need.fetch.activation_bytes + run.need.input_bytes
    into_hosts = 2 * (dense + batch) / rank_rate  # two ranks a host
    assert answer(base).seconds["GPU host NICs, in"] == pytest.approx(into_hosts)
    asked = run.need.fetch.request_bytes + run.need.push.push_bytes
    into_servers = (dense + asked) * 4 / server_rate
    busiest = run.need.server_shares.reshape(2, 4).sum(1).max()  # of two hosts
    assert answer(base).binds == "server NICs, in"
    assert answer(base).step_s == pytest.approx(into_servers * busiest)
    assert step_time(run).mean == pytest.approx(answer(base).step_s, rel=0.05)
    carried = sum(run.link_bytes.values())
    apart = sum(simulate(replace(base, dense_home=DenseHome.APART)).link_bytes.values())
    assert carried - apart == pytest.approx(40 * 4 * 2 * dense * 2)  # both ways, two NICs each


def test_a_knob_of_dense_weights_is_refused_where_it_is_not_read():
    with pytest.raises(ValueError, match="dense_home is apart: hybrid does not read it; drop it"):
        small_scenario(Mode.HYBRID, dense_home=DenseHome.APART)


@pytest.mark.parametrize("shards", [False, True])
def test_forwarded_rows_are_never_late_and_nobody_waits_for_the_servers(shards):
    """Slow updates at the servers (law 15); later steps read what the workers have applied."""
    slow = small_scenario().costs
    slow = replace(slow, server_update=replace(slow.server_update, fixed_s=0.05))
    again = small_scenario(Mode.LOOKAHEAD, costs=slow, ahead=4, steps=40, trace_shards=shards)
    runs = {
        how: simulate(replace(again, lookahead=how), trace=True) for how in ("reread", "forwarded")
    }
    for run in runs.values():
        assert run.trace is not None
        assert staleness_in_steps(run.trace).missing_steps.max() == 0
        pushes = [e for e in run.trace if e.kind == Kind.PUSH]
        assert len(pushes) == 40 * (8 if shards else 1)
    step_s = {how: step_time(run).mean for how, run in runs.items()}
    assert step_s["reread"] > 0.05 / 0.75
    assert step_s["forwarded"] < step_s["reread"] / 3
    moved = runs["forwarded"].need.forward
    assert moved is not None and moved.exchange_bytes > 0
    with pytest.raises(ValueError, match="lookahead is forwarded: hybrid does not read it"):
        small_scenario(Mode.HYBRID, lookahead="forwarded")


def test_a_small_batch_leaves_a_gpu_idle_and_what_nobody_measured_is_flagged():
    """The catalogue's GPU is known at 512: a step of b below it takes (b + 64) / (512 + 64)."""
    base = small_scenario()

    def of(batch_per_rank: int) -> tuple[float, bool]:
        work = replace(base.workload, batch_per_rank=batch_per_rank)
        need = demand(replace(base, workload=work))
        return need.compute_s, "gpu_efficiency" in need.extrapolated

    at_512, flagged = of(512)
    assert not flagged
    for batch, share in ((1, 65 / 576), (64, 128 / 576), (256, 320 / 576)):
        assert of(batch) == (pytest.approx(at_512 * share), True)
    assert of(65_535) == (pytest.approx(at_512 * 65_535 / 512), True)
    with pytest.raises(ValueError, match="gpu_half_batch is -1: must lie in"):
        replace(base.costs, gpu_half_batch=-1)


def test_one_step_has_no_step_time():
    with pytest.raises(ValueError, match="steps is 1: a time between steps needs >= 2"):
        step_time(simulate(hand_scenario(steps=1)))


@pytest.mark.parametrize("mode", [Mode.SYNC, Mode.HYBRID, Mode.ASYNC])
def test_no_step_is_faster_than_its_bound_under_noise(mode):
    """The bound is of the times that the kept steps have drawn, here where compute binds."""
    costs = hand_costs(gpu_fixed_s=1000.0)
    for ranks in (1, 3):
        noise = Noise(gpu_cv=0.4, server_cv=0.5)
        base = hand_scenario(mode, ranks, costs=costs, steps=30, noise=noise)
        found = report(simulate(base))
        assert found.step_s.mean >= found.bound.step_s * (1 - 1e-9)
        assert found.step_s.mean < found.bound.step_s * 1.3


@pytest.mark.parametrize("free", ["server_lookup", "server_update"])
def test_a_request_that_costs_nothing_has_draws_all_the_same(free):
    """Of the other one; the bound of what both have drawn is a number, and no run is faster."""
    laws = {law: Law(fixed_s=0.5, source="a test") for law in ("server_lookup", "server_update")}
    laws[free] = Law(source="a test")
    cluster = small_cluster(1, 1, 1)
    one = replace(cluster.servers, processes_per_host=1)
    base = small_scenario(
        Mode.SYNC, cluster=replace(cluster, servers=one), costs=replace(CATALOGUE, **laws), steps=3,
        noise=Noise(server_cv=0.3),
    )  # fmt: skip
    for seed in range(20):
        run = simulate(replace(base, seed=seed))
        bound_s = answer(run.scenario, run.need, run.drawn(0, 3)).seconds["window"]
        assert 0.1 < bound_s <= run.makespan_s / 3


def test_a_run_that_is_faster_than_its_draws_allow_is_refused():
    from persia_sim.engine.simulate import check

    run = simulate(small_scenario(Mode.HYBRID, noise=Noise(gpu_cv=0.3), steps=20))
    check(run)
    with pytest.raises(AssertionError, match="faster than the training loop allows"):
        check(replace(run, computed_s=run.computed_s * 3))


@pytest.mark.parametrize(
    ("servers", "fields", "draws", "zipf", "distinct", "model_error"),
    [(12, 4, 5000, 1.1, True, 0.0), (3, 2, 500, 1.05, True, 0.0), (8, 1, 40, 0.0, False, 0.0),
     (120, 3, 300, 0.8, True, 0.12)],
)  # fmt: skip
def test_the_last_server_of_a_fan_out_is_as_late_as_in_drawn_batches(
    servers, fields, draws, zipf, distinct, model_error
):
    """Counts of 1,000 values a field in 4,000 batches: within five standard errors of their mean,
    0.2 % for 128 counts in place of all, and where servers get ten ids what the docstring says."""
    batches, random = 4000, np.random.default_rng(1)
    chance = np.arange(1.0, 1001.0) ** -zipf
    chance = np.tile(chance / chance.sum(), fields)
    home = (mix64(np.arange(len(chance), dtype=np.uint64)) % np.uint64(servers)).astype(int)
    mean = -np.expm1(draws * np.log1p(-chance)) if distinct else draws * chance
    size = (batches, len(chance))
    met = random.random(size) < mean if distinct else random.poisson(mean, size)
    counts = met @ np.eye(servers)[home]
    extra = counts.max(1) - np.bincount(home, mean, servers).max()
    error = 5 * extra.std() / batches**0.5
    found = busiest_extra(servers, ((fields, draws, 1000.0, zipf),), distinct)
    assert extra.mean() == pytest.approx(found, abs=error + (0.002 + model_error) * found)


def test_the_last_server_of_a_fan_out_is_later_than_the_mean_one():
    """Uniform ids without repeats: Poisson numbers at each server, whose largest is known."""
    from scipy import stats

    work = replace(small_scenario().workload, fields=1, rows=1e12, zipf=0.0, dim=8)
    for servers, ids in ((120, 13_000), (120, 1_500), (8, 400), (8, 65_000)):
        batch = replace(work, batch_per_rank=ids)
        mean = ids / servers
        counts = np.arange(int(mean + 12 * mean**0.5) + 20)
        largest = float((1 - stats.poisson(mean).cdf(counts) ** servers).sum())
        # All its own error is that 128 counts stand for all: 0.2 % of what is above the mean.
        assert batch.busiest_extra(servers) == pytest.approx(largest - mean, rel=0.002)
    assert batch.busiest_extra(1) == 0.0
    # Where every server meets every row there is nothing to chance.
    few = replace(work, rows=8.0, fields=1, batch_per_rank=60_000)
    assert few.busiest_extra(4) == pytest.approx(0, abs=1e-6)


def test_the_wait_for_the_busiest_server_is_in_the_lookup_and_the_push():
    slow = replace(
        small_scenario().costs,
        server_lookup=replace(small_scenario().costs.server_lookup, per_item_s=1e-5),
    )
    base = small_scenario(
        Mode.SYNC, costs=slow, discipline=Discipline.UNSHARED, infinite_cpus=True,
        cluster=small_cluster(2, 2, 4),
    )  # fmt: skip
    need = simulate(base).need
    extra = base.workload.busiest_extra(16)
    per_id = 1e-5 + 0.31e-9 * 4 * base.workload.dim
    assert need.fetch.join_s == pytest.approx(extra * per_id / 0.75)
    without = replace(
        need,
        fetch=replace(need.fetch, join_s=0.0),
        push=replace(need.push, update_join_s=0.0),
    )
    ends = [simulate(base, need=n).stamps[Mark.APPLIED].max() for n in (need, without)]
    each = need.fetch.join_s + need.push.update_join_s
    assert ends[0] - ends[1] == pytest.approx(base.steps * each, rel=1e-6)


@pytest.mark.parametrize("queue", [name for name in Queues.__slots__ if name != "at_servers"])
def test_every_queue_can_bind(queue):
    """Behind each queue stands a slow stage, so a queue of one holds fewer batches."""
    costs = replace(CATALOGUE, gpu_fixed_s=0.05)
    if queue in ("backward", "copied_back", "push_tasks"):
        costs = replace(CATALOGUE, server_update=replace(CATALOGUE.server_update, fixed_s=0.3))
    base = small_scenario(Mode.ASYNC, costs=costs, tau=None, noise=Noise(gpu_cv=0.5), steps=40)
    short = simulate(replace(base, queues=replace(Queues(), **{queue: 1})))
    long = simulate(base)
    assert short.stamps.tobytes() != long.stamps.tobytes()
    assert short.max_in_flight <= long.max_in_flight
