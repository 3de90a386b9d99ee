"""Caches of rows: hit rates beside streams of ids, laws, and what servers and wires are spared."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from persia_sim.cli import Options, run
from persia_sim.cli.build import scenario_of
from persia_sim.engine.simulate import simulate
from persia_sim.model.demand import demand
from persia_sim.model.popularity import zipf_bins
from persia_sim.model.row_cache import (
    NOTHING_KEPT,
    Place,
    RowCache,
    invalidated,
    kept,
    leased,
    visits_of,
)
from persia_sim.model.scenario import Discipline, Noise, Queues, Scenario, WorkerChoice
from persia_sim.model.stamps import Mark
from persia_sim.model.workload import Wire, Workload
from persia_sim.oracle.closed_form import answer, shared
from persia_sim.words.vocabulary import Mode
from tests.oracles.max_plus import instants
from tests.persia_sim.hand_world import HAND, hand_scenario, hand_workload
from tests.persia_sim.sim_configurations import small_scenario, uncontended

REPLICAS, STEPS, ROWS = 16, 240, 30


def one_field(exponent: float, draws: int, **changes: object) -> Workload:
    base = Workload(
        name="one", fields=1, dim=4, rows=ROWS, zipf=exponent, batch_per_rank=draws, source=HAND
    )
    return replace(base, **changes)  # type: ignore[arg-type]


def measured(
    work: Workload, cache: RowCache, ranks: int, caches: int, late: int, seed: int
) -> np.ndarray:
    """Distinct hits, distinct ids, occurrences that hit, fetched ids and ages of hits of replicas
    of one stream: float64 [5, replicas]. Every copy of every cache is followed by itself."""
    rng = np.random.default_rng(seed)
    chance, _ = zipf_bins(work.rows, work.zipf)
    drawn = rng.choice(ROWS, (STEPS, ranks, REPLICAS, work.batch_per_rank), p=chance)
    counts = np.zeros((STEPS, ranks, REPLICAS, ROWS))
    for one in range(work.batch_per_rank):
        np.add.at(counts, (*np.ogrid[:STEPS, :ranks, :REPLICAS], drawn[..., one]), 1)
    hot = np.arange(ROWS) < cache.rows
    fetched_at = np.full((caches, REPLICAS, ROWS), -np.inf)
    found = np.zeros((5, REPLICAS))
    for s in range(STEPS):
        if s > late and not cache.stale_steps:
            pushed = counts[s - late - 1].any(axis=0)
            fetched_at[:, pushed] = -np.inf
        for r in range(ranks):
            at = fetched_at[(s * ranks + r) % caches]
            asked = counts[s, r] > 0
            oldest = s - cache.stale_steps if cache.stale_steps else 0
            valid = asked & (at >= oldest)
            new = asked & hot & ~valid
            ages = np.where(valid, s - np.where(valid, at, 0.0), 0.0)
            if s >= STEPS // 6:  # caches are as they will always be
                of_hits = (counts[s, r] * valid).sum(1)
                sums = valid.sum(1), asked.sum(1), of_hits, new.sum(1), ages.sum(1)
                found += np.array(sums)
            at[new] = s
    return found


def within(values: np.ndarray, expected: float) -> bool:
    """The mean of independent replicas, within six standard errors; and one step of 200."""
    error = 6 * float(values.std(ddof=1)) / np.sqrt(len(values))
    return abs(float(values.mean()) - expected) <= error + 0.005 * max(abs(expected), 1e-3)


@given(
    exponent=st.sampled_from([0.0, 0.7, 1.1]),
    draws=st.integers(1, 6),
    hot=st.sampled_from([3, 12, 30]),
    stale=st.sampled_from([0, 0, 1, 3]),
    late=st.integers(0, 4),
    ranks=st.integers(1, 5),
    caches=st.integers(1, 6),
    seed=st.integers(0, 99),
)
@settings(max_examples=25)
def test_hit_rates_are_those_of_streams_of_ids(
    exponent: float, draws: int, hot: int, stale: int, late: int, ranks: int, caches: int, seed: int
) -> None:
    """No approximation on the schedule of the formula: only the noise of the streams is left."""
    work = one_field(exponent, draws)
    cache = RowCache(place=Place.WORKER, rows=hot, stale_steps=stale)
    hits, ids, occurrences, fetched, ages = measured(work, cache, ranks, caches, late, seed)
    batches = (STEPS - STEPS // 6) * ranks
    said = kept(cache, work, ranks, caches, late)
    assert within(hits / ids, said.distinct)
    assert within(occurrences / (batches * draws), said.occurrences)
    assert within(fetched / batches, said.fetched)
    if stale and said.distinct:
        assert within(ages / np.maximum(hits, 1), said.age_steps)
    if not stale:
        assert said.age_steps == 0


@pytest.mark.parametrize(
    ("ranks", "caches", "expected"),
    [(4, 2, [2]), (3, 3, [1]), (2, 4, [0, 1]), (3, 2, [1, 2]), (64, 100, None), (1, 10**4, [0])],
)
def test_batches_go_to_caches_in_turn(ranks: int, caches: int, expected: list[int] | None) -> None:
    found = visits_of(ranks, caches)
    if expected is not None:
        assert found.tolist() == expected
        return
    each = np.array([[n % caches for n in range(s * ranks, (s + 1) * ranks)] for s in range(25)])
    counts = np.array([np.count_nonzero(each == 99, axis=1)])
    assert len(found) == 25 and found.sum() == counts.sum() == 16 and set(found) == {0, 1}


def test_an_exact_copy_lives_until_a_rank_pushes_its_row() -> None:
    """Two ranks, a cache each, tau 1: a copy is read one step later where neither batch of the step
    before the one that fetched it has the row: q (1 - q)^2 of a half each."""
    missed = invalidated(np.array([0.5]), visits_of(2, 2), 2, 1)
    assert missed == pytest.approx(0.5 * (1 - 0.5 * 0.5**2))
    # tau 2: or two steps later, where the batch between had it not.
    two = invalidated(np.array([0.5]), visits_of(2, 2), 2, 2)
    assert two == pytest.approx(0.5 * (1 - 0.5 * 0.5**2 - 0.5 * 0.5 * 0.5**4))


def test_rows_of_every_batch_are_always_invalid_in_an_exact_cache_and_free_in_a_stale_one() -> None:
    """The rows worth keeping are the ones that every push has: exact caches gain next to nothing
    there, and a copy that serves S further steps is fetched once in S + 1."""
    every = np.array([1.0])
    for late in (0, 1, 4, 30):
        assert invalidated(every, visits_of(8, 8), 8, late) == pytest.approx(1.0, abs=1e-9)
    for stale in (1, 3, 9):
        missed, age = leased(every, visits_of(8, 8), stale)
        assert missed == pytest.approx(1 / (stale + 1), abs=1e-6)
        assert age == pytest.approx((stale + 1) / 2, abs=1e-6)
    # 64 ranks of 8,192 samples read a field's hottest rows in every batch.
    work = one_field(1.05, 8192, rows=1e6)
    exact, stale_ = (
        kept(RowCache(place=Place.RANK, rows=1000, stale_steps=s), work, 64, 64, 4) for s in (0, 4)
    )
    assert exact.distinct < 1e-4 and exact.occurrences < 1e-4
    assert stale_.distinct > 0.1 and stale_.occurrences > 0.4


def test_without_late_rows_an_exact_copy_serves_its_own_step_only() -> None:
    """In sync every row that was read is pushed before the next step reads."""
    work = one_field(0.5, 20)
    cache = RowCache(place=Place.WORKER, rows=ROWS)
    assert kept(cache, work, 4, 4, 0) == replace(
        NOTHING_KEPT, fetched=kept(cache, work, 4, 4, 0).fetched
    )
    # Eight batches of a step at one worker: the first that has a row fetches it for the others.
    shared_by_all = kept(cache, work, 8, 1, 0)
    p, _ = zipf_bins(ROWS, 0.5)
    q = 1 - (1 - p) ** 20
    assert shared_by_all.distinct == pytest.approx(
        1 - (1 - (1 - q) ** 8).sum() / 8 / q.sum(), rel=1e-9
    )


SIZES = st.floats(0.0, 4e3)


@given(
    small=SIZES, more=SIZES, stale=st.integers(1, 40), later=st.integers(0, 40),
    late=st.integers(0, 8), ranks=st.integers(1, 12), caches=st.integers(1, 12),
    exponent=st.floats(0.0, 1.4),
)  # fmt: skip
@settings(max_examples=15)
def test_hits_rise_with_rows_with_staleness_and_with_lateness(
    small: float, more: float, stale: int, later: int, late: int, ranks: int, caches: int,
    exponent: float,
) -> None:  # fmt: skip
    work = one_field(exponent, 64, fields=3, rows=3e3)

    def hits(rows: float, stale: int, late: int) -> float:
        cache = RowCache(place=Place.WORKER, rows=rows, stale_steps=stale)
        found = kept(cache, work, ranks, caches, late)
        assert 0 <= found.distinct <= 1 and 0 <= found.occurrences <= 1
        assert 0 <= found.age_steps <= stale + 1e-9
        return found.distinct

    slack = 1e-9
    for s in (0, stale):
        assert hits(small, s, late) <= hits(small + more, s, late) + slack
    assert hits(small, stale, late) <= hits(small, stale + later, late) + slack
    assert hits(small, 0, late) <= hits(small, 0, late + 1) + slack
    # The push of the batch that fetched an exact copy ends it after `late` steps, so leases of that
    # length fetch no more often. Shorter ones may serve cold rows less well than exactness.
    assert hits(small, 0, late) <= hits(small, max(1, late), late) + slack


CACHES = st.builds(
    RowCache,
    place=st.sampled_from(Place),
    rows=st.sampled_from([0.0, 10.0, 1e4, 1e9]),
    stale_steps=st.integers(0, 3),
)


def with_cache(scenario: Scenario, cache: RowCache) -> Scenario:
    """The cache as far as the mode allows it."""
    if not scenario.mode.reads_late_rows:
        cache = replace(cache, stale_steps=0)
    return replace(scenario, row_cache=cache, lookahead="reread")


@given(uncontended(), CACHES)
@settings(max_examples=10)
def test_the_three_engines_agree_with_a_cache(scenario: Scenario, cache: RowCache) -> None:
    scenario = with_cache(scenario, cache)
    stamps = simulate(scenario).stamps
    assert np.array_equal(stamps, instants(scenario), equal_nan=True)
    long = replace(scenario, noise=Noise(), steps=120)
    returned = instants(long)[Mark.RETURNED].max(0)
    growth = (returned[119] - returned[59]) / 60
    assert growth == pytest.approx(answer(long).step_s, rel=1e-9)


@pytest.mark.parametrize("mode", Mode)
@pytest.mark.parametrize("place", Place)
def test_a_cache_of_no_rows_is_no_cache_to_the_bit(mode: Mode, place: Place) -> None:
    without = small_scenario(mode, noise=Noise(gpu_cv=0.1), steps=8)
    none = replace(without, row_cache=RowCache(place=place, rows=0))
    assert repr(demand(none)) == repr(demand(without))
    assert np.array_equal(simulate(none).stamps, simulate(without).stamps, equal_nan=True)


@pytest.mark.parametrize("mode", Mode)
def test_servers_and_nics_carry_what_is_not_in_the_cache_and_the_bound_holds(mode: Mode) -> None:
    base = small_scenario(mode, steps=10)
    stale = 2 if mode.reads_late_rows else 0
    cache = RowCache(place=Place.WORKER, rows=1e5, stale_steps=stale)
    # Two ranks share a worker, so that sync, too, finds something.
    base = replace(base, cluster=base.cluster.with_workers(1))
    one, two = simulate(base), simulate(replace(base, row_cache=cache))
    found = two.need.kept
    assert found.distinct > 0.01
    batches = 10 * base.cluster.ranks
    plain, less = one.need.fetch, two.need.fetch
    told = 0.0 if stale else 8 * found.fetched
    assert less.request_bytes == pytest.approx(plain.request_bytes * (1 - found.distinct))
    assert less.rows_bytes == pytest.approx(plain.rows_bytes * (1 - found.distinct) + told)
    spared = one.link_bytes["server hosts 0 out"] - two.link_bytes["server hosts 0 out"]
    assert spared == pytest.approx(batches * (plain.rows_bytes - less.rows_bytes), rel=1e-9)
    assert two.busy_s["server cores"] < one.busy_s["server cores"]
    assert two.need.push_bytes == one.need.push_bytes  # pushes are not saved
    assert np.array_equal(two.need.server_update_s, one.need.server_update_s)
    for done in (one, two):
        assert answer(done.scenario, done.need).step_s * 10 <= done.makespan_s * (1 + 1e-9)
    fewer, more = (shared(done.scenario, done.need) for done in (two, one))
    assert fewer["server NICs, in"] < more["server NICs, in"]
    if need := two.need.refresh:  # stale rows are read again from the servers, cache or not
        assert repr(need) == repr(one.need.refresh)


def test_seconds_and_bytes_of_a_cache_by_hand() -> None:
    """One row a field, in every batch; two ranks, leases of one step: every second batch hits."""
    from tests.persia_sim.test_demand_by_hand import scenario_with_every_law

    base = scenario_with_every_law(Mode.HYBRID, tau=1)
    plain = demand(base).fetch
    cache = RowCache(place=Place.WORKER, rows=3, stale_steps=1)
    # Both ranks have one worker: three of four batches hit.
    need = demand(replace(base, row_cache=cache))
    fetch, found = need.fetch, need.kept
    assert (found.distinct, found.occurrences) == pytest.approx((0.75, 0.75), abs=1e-8)
    assert found.fetched == pytest.approx(0.75) and found.age_steps == pytest.approx(2 / 3)
    assert (fetch.request_bytes, fetch.rows_bytes) == pytest.approx((12, 24), rel=1e-8)
    saved = 0.75 * 3 * need.server_shares
    assert plain.server_s - fetch.server_s == pytest.approx(saved * (0.25 + 0.125 * 32) / 0.25)
    # 36 bytes fewer are written as requests; three ids are looked up at a server's price for it.
    asked_s = (-0.25 * 36 + 3 * 0.25) / 2
    assert fetch.worker_forward_s - plain.worker_forward_s == pytest.approx(asked_s)
    # 72 bytes of rows fewer arrive; 2.25 rows are copied out of the cache.
    pooled_s = (-0.125 * 72 + 0.125 * 32 * 2.25) / 2
    assert fetch.worker_pool_s - plain.worker_pool_s == pytest.approx(pooled_s)
    assert fetch.pool_memory_bytes == pytest.approx(plain.pool_memory_bytes)
    assert (fetch.activation_bytes, fetch.copy_in_s) == (plain.activation_bytes, plain.copy_in_s)
    assert need.input_bytes == 96


def test_seconds_and_bytes_of_a_cache_at_the_ranks_by_hand() -> None:
    """Single ids: half of a rank's batches hit, and their vectors do not travel."""
    from tests.persia_sim.test_demand_by_hand import scenario_with_every_law

    base = scenario_with_every_law(Mode.HYBRID, tau=1)
    work = replace(base.workload, ids_per_field=1.0)
    base = replace(base, workload=work)
    cache = RowCache(place=Place.RANK, rows=3, stale_steps=1)
    plain, need = demand(base), demand(replace(base, row_cache=cache))
    assert need.kept.distinct == pytest.approx(0.5, abs=1e-8)
    assert need.fetch.activation_bytes == pytest.approx(plain.fetch.activation_bytes / 2)
    assert need.gradient_bytes == plain.gradient_bytes
    # Ids and where they stand: 3 x 8 and 12 x 4 bytes more from the loader and to the GPU.
    assert need.input_bytes - plain.input_bytes == 72
    assert need.load_s - plain.load_s == pytest.approx(0.5 * 72 / 0.5)
    fewer = 192 / 2 - 72
    copied_s = plain.fetch.copy_in_s - need.fetch.copy_in_s
    assert copied_s == pytest.approx(fewer * (0.25 / 0.5 + 1 / 64))
    # 6 of 12 occurrences are not summed, 48 of 96 bytes of rows do not arrive.
    pooled_s = plain.fetch.worker_pool_s - need.fetch.worker_pool_s
    assert pooled_s == pytest.approx((0.5 * 6 + 0.125 * 48) / 2)
    # Not pooled: distinct rows of 8 halves of 4 bytes; half of the three stay away.
    apart = replace(base, workload=replace(work, wire=Wire(pooled=False)))
    whole, part = demand(apart), demand(replace(apart, row_cache=cache))
    less = whole.fetch.activation_bytes - part.fetch.activation_bytes
    assert less == pytest.approx(1.5 * 8 * 2)
    exact = demand(replace(base, row_cache=replace(cache, stale_steps=0)))
    assert exact.kept.distinct == pytest.approx(0.0, abs=1e-9)  # every batch pushes every row
    assert exact.fetch.rows_bytes - plain.fetch.rows_bytes == pytest.approx(3 * 8)
    assert exact.fetch.activation_bytes - plain.fetch.activation_bytes == pytest.approx(3 * 8)


def test_every_occurrence_travels_or_each_id_once() -> None:
    work = one_field(1.0, 40, rows=1000)
    base = replace(small_scenario(), workload=work)
    cache = RowCache(place=Place.WORKER, rows=100, stale_steps=2)
    for wire, which in ((Wire(), "distinct"), (Wire(deduplicate=False), "occurrences")):
        scenario = replace(base, workload=replace(work, wire=wire))
        plain, need = demand(scenario), demand(replace(scenario, row_cache=cache))
        share = getattr(need.kept, which)
        assert need.kept.occurrences > need.kept.distinct
        assert need.fetch.rows_bytes == pytest.approx(plain.fetch.rows_bytes * (1 - share))


def test_lookups_miss_what_window_permits_and_buffers_let_them() -> None:
    base = small_scenario(tau=3)
    assert base.late_steps == 3
    assert replace(base, permits=2).late_steps == 1
    assert replace(base, tau=None).late_steps == 10 + 10 + 1 + 10 + 1
    tight = Queues(lookup_tasks=1, forwarded=1, on_gpu=1)
    assert replace(base, tau=None, queues=tight).late_steps == 5
    assert small_scenario(Mode.SYNC).late_steps == 0
    assert small_scenario(Mode.LOOKAHEAD, ahead=2).late_steps == 2


@pytest.mark.parametrize(
    ("mode", "cache", "changes", "said"),
    [
        (Mode.SYNC, {"stale_steps": 1}, {}, "row_cache.stale_steps is 1: sync reads no late rows"),
        (Mode.LOOKAHEAD, {}, {"lookahead": "forwarded"}, "forwarded lookahead keeps the rows"),
        (Mode.HYBRID, {}, {"worker_choice": WorkerChoice.RANDOM}, "choose the workers by spread"),
        (Mode.HYBRID, {"rows": 1e12}, {}, "of rows at a worker that has"),
        (Mode.HYBRID, {"rows": -1.0}, {}, r"row_cache\.rows is -1\.0: must be >= 0"),
        (Mode.HYBRID, {"stale_steps": -1}, {}, r"stale_steps is -1: must lie in \[0, 10000\]"),
    ],
)
def test_what_no_cache_can_do_is_refused(
    mode: Mode, cache: dict[str, object], changes: dict[str, object], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        made = RowCache(**({"place": Place.WORKER, "rows": 10.0} | cache))  # type: ignore[arg-type]
        small_scenario(mode, row_cache=made, **changes)


def test_ranks_that_get_sums_of_rows_have_no_rows_to_keep() -> None:
    base = hand_scenario(Mode.HYBRID, workload=hand_workload())
    with pytest.raises(ValueError, match="workers sum the 2 rows of a field"):
        replace(base, row_cache=RowCache(place=Place.RANK, rows=1))


def test_contention_where_rows_bind_is_less_with_a_cache() -> None:
    """Rows are all that the one server's NIC carries: the step follows their bytes."""
    base = small_scenario(Mode.HYBRID, tau=4, steps=60, discipline=Discipline.FLUID)
    slow = replace(base.cluster.servers.host, nic_bytes_per_s=2e7)
    cluster = replace(base.cluster, servers=replace(base.cluster.servers, host=slow, hosts=1))
    base = replace(base, cluster=cluster)
    cached = replace(base, row_cache=RowCache(place=Place.WORKER, rows=1e6, stale_steps=4))
    plain, less = answer(base), answer(cached)
    assert plain.binds.startswith("server NICs") and less.step_s < plain.step_s
    whole, part = (simulate(s).makespan_s / 60 for s in (base, cached))
    assert plain.step_s <= whole and less.step_s <= part < whole


def test_the_screen_says_what_a_cache_finds_spares_and_costs() -> None:
    common = {"cluster": "v100-2021-09", "workload": "criteo-ad", "ranks": 2, "steps": 4}
    exact = run(Options(**common, row_cache=Place.WORKER, row_cache_rows=1e5))  # type: ignore[arg-type]
    old = run(Options(**common, row_cache=Place.RANK, row_cache_rows=1e5, row_cache_stale=3))  # type: ignore[arg-type]
    assert "row cache" not in run(Options(**common))  # type: ignore[arg-type]
    [first], [second] = (
        [line for line in said.splitlines() if line.startswith("row cache")]
        for said in (exact, old)
    )
    assert "1e+05 rows at each worker, exact: has " in first and "invalidations " in first
    assert "at each rank, 3 steps stale: has " in second and "steps old" in second
    scenario = scenario_of(Options(**common, row_cache=Place.RANK, row_cache_rows=1e5,
                                   row_cache_stale=3))  # type: ignore[arg-type]  # fmt: skip
    found = demand(scenario).kept
    assert f"has {found.distinct:.1%} of distinct ids, {found.occurrences:.1%} of all" in second
    assert f"hits {found.age_steps:.2f} steps old" in second


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"row_cache_rows": 1e3}, "--row-cache-rows is set but --row-cache is not"),
        ({"row_cache_stale": 1}, "--row-cache-stale is set but --row-cache is not"),
        ({"row_cache": Place.RANK}, "--row-cache-rows is not set: say how many"),
        (
            {"row_cache": Place.RANK, "row_cache_rows": 1e3, "row_cache_stale": 2,
             "trace": Path("order.npz")},
            "--row-cache-stale is 2 and --trace is set",
        ),
    ],
)  # fmt: skip
def test_options_of_a_cache_that_mean_nothing_are_refused(
    options: dict[str, object], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        run(Options(**options))  # type: ignore[arg-type]
