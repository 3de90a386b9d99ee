"""Rows that fit or do not: capacity by hand, and tables that keep the rows used last."""

from __future__ import annotations

import json
from dataclasses import replace
from math import exp, inf, log

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from persia_sim.base.popularity import (
    batch_miss_rate,
    characteristic_time,
    expected_distinct,
    lru_after,
    lru_miss_rate,
    zipf_bins,
)
from persia_sim.base.vocabulary import Mode
from persia_sim.cli import SimulateOptions, run
from persia_sim.cluster.memory import FORMATS, Capacity, RowFormat, capacity, fill_s
from persia_sim.cluster.workload import Wire
from persia_sim.engine.simulate import simulate
from persia_sim.presets.catalogue import gcp_100t, workloads
from persia_sim.report.report import report
from tests.persia_sim import sim_configurations  # noqa: F401  # its hypothesis profile
from tests.persia_sim.hand_world import (
    HAND,
    facts_of,
    facts_on,
    hand_scenario,
    hand_workload,
    sync_of_two,
)
from tests.persia_sim.oracles import resident_after

SYN5 = workloads()["criteo-syn5"]


def test_100t_fits_at_dim_128_in_float16_and_nothing_else_does():
    cluster = gcp_100t()
    assert capacity(cluster, SYN5, FORMATS["fp16-lean"]).fits
    for dim in (16, 32, 64):
        narrow = replace(SYN5, dim=dim, rows=1e14 / dim)
        assert not capacity(cluster, narrow, FORMATS["fp16-lean"]).fits
    for name in ("f32-adagrad", "f32-sgd"):
        held = capacity(cluster, SYN5, FORMATS[name])
        assert held.evicted_rows > 0 and held.miss_rate > 0
        with pytest.raises(ValueError, match=r"use at least \d+ server hosts"):
            held.refuse(cluster)


def test_the_remedy_in_the_refusal_is_enough():
    cluster = gcp_100t()
    held = capacity(cluster, SYN5, FORMATS["f32-sgd"])
    with pytest.raises(ValueError) as refusal:
        held.refuse(cluster)
    hosts = int(str(refusal.value).split("at least ")[1].split(" server hosts")[0])
    # 169 processes, of which a host has four.
    assert hosts == 43
    assert capacity(cluster.with_servers(hosts), SYN5, FORMATS["f32-sgd"]).fits


def test_filling_781_billion_rows_takes_days_and_not_the_hours_of_new_ids_only():
    rate = 1.91e6
    all_new_s = SYN5.rows / (rate * SYN5.fields)
    filled_s = fill_s(SYN5, rate, 0.9 * SYN5.rows)
    assert all_new_s / 3600 < 5 and filled_s / 3600 > 10 * 5
    assert resident_after(SYN5, rate * filled_s) == pytest.approx(0.9 * SYN5.rows, rel=1e-6)
    assert fill_s(SYN5, rate, SYN5.rows) == inf


def test_servers_that_were_empty_miss_more_and_hold_less():
    cluster, rows = gcp_100t(), FORMATS["fp16-lean"]
    full = capacity(cluster, SYN5, rows)
    assert full.filled_rows == full.resident_rows and full.miss_rate == 0
    young, older = (capacity(cluster, SYN5, rows, samples) for samples in (1e6, 1e9))
    assert young.filled_rows < older.filled_rows < full.filled_rows
    assert young.miss_rate > older.miss_rate > 0
    assert young.fits and young.evicted_rows == full.evicted_rows
    expected = resident_after(SYN5, 1e9)
    assert older.filled_rows == pytest.approx(expected, rel=1e-3)


def test_the_command_tells_the_misses_of_servers_that_fill_and_charges_them():
    common = {"ranks": 8, "steps": 8, "gpu_cv": 0.0, "mode": Mode.SYNC, "json": True}
    full, young = (
        json.loads(run(SimulateOptions(**common, after_samples=samples))) for samples in (None, 1e6)
    )
    assert full["memory"]["miss_rate"] == 0
    share = capacity(gcp_100t().resized(8), SYN5, FORMATS["fp16-lean"], 1e6).miss_rate
    assert young["memory"]["miss_rate"] == pytest.approx(share)
    assert young["step"]["seconds"] > full["step"]["seconds"]


def test_memory_of_rows_in_bytes():
    """Four servers of 1,000 bytes; a row of 8 numbers of 2 bytes, 1.5 x 4 bytes of state each."""
    rows = RowFormat(
        name="x", value_bytes=2, state_values_per_value=1.5, state_bytes=4, overhead_bytes=26.0,
        source=HAND,
    )  # fmt: skip
    assert rows.row_bytes(8) == 8 * 2 + 8 * 6 + 26 == 90
    base = hand_scenario()
    part = replace(base.cluster.servers, processes_per_host=2, hosts=2, ram_bytes_per_process=1e3)
    cluster = replace(base.cluster, servers=part)
    held = capacity(cluster, hand_workload(rows=60.0), rows)
    # 11 rows fit into 1,000 bytes, 44 into the four servers; 60 rows want 1,350 bytes each.
    assert (held.nominal_rows, held.resident_rows, held.evicted_rows) == (60, 44, 16)
    assert (held.row_bytes, held.bytes_per_server) == (90, 1350)
    assert held.limit_bytes_per_server == 1000 and not held.fits
    # The least used rows are the ones that miss.
    assert 0 < held.miss_rate < 16 / 60 * exp(4 / 20)
    with pytest.raises(
        ValueError,
        match=r"on hand, but 60 rows of 90 bytes need 1.32 KiB: use at least 3 server hosts",
    ):
        held.refuse(cluster)
    uniform = capacity(cluster, hand_workload(rows=60.0, zipf=0.0), rows)
    # 8 draws a batch from 20 values: a row is forgotten T draws after its last, e^(-T/20) = 16/60;
    # half a batch of these lies in the batch itself, which asks for the row once.
    assert uniform.miss_rate == pytest.approx(16 / 60 * exp(4 / 20), rel=1e-6)
    each = replace(hand_workload(rows=60.0, zipf=0.0), wire=Wire(deduplicate=False))
    assert capacity(cluster, each, rows).miss_rate == pytest.approx(16 / 60, rel=1e-6)
    full = capacity(cluster, hand_workload(rows=44.0), rows)
    assert (full.fits, full.evicted_rows, full.miss_rate) == (True, 0, 0)
    full.refuse(cluster)


def test_servers_that_still_fill_have_evicted_nothing():
    options = SimulateOptions(steps=2, row_format="f32-adagrad", evict=True)
    for samples, evicted in ((1e6, "0"), (None, "486 G")):
        told = facts_on(run(replace(options, after_samples=samples)))["Does it fit?"]
        assert told["rows on the servers"].endswith(f"; {evicted} evicted")


def test_bytes_of_the_named_row_formats():
    """128 numbers of 2 or 4 bytes, Adagrad's sum for each, and 90 or 66 bytes beside them."""
    found = {name: rows.row_bytes(128) for name, rows in FORMATS.items()}
    assert found == {"fp16-lean": 256 + 90, "f32-adagrad": 512 + 512 + 66,
                     "f32-adam": 512 + 1024 + 66, "f32-sgd": 512 + 66}  # fmt: skip
    for field, value in (("value_bytes", 0), ("overhead_bytes", -1.0)):
        with pytest.raises(ValueError, match=rf"{field} is {value}: must lie in \["):
            replace(FORMATS["f32-sgd"], **{field: value})
    assert replace(FORMATS["f32-sgd"], value_bytes=1, overhead_bytes=0.0).row_bytes(3) == 3


def test_the_hosts_in_the_refusal_hold_whole_rows():
    """A server of 1,000 bytes holds one row of 600, so ten rows need ten servers, not six."""
    tight = Capacity(10, 4, 600.0, 1500.0, 1000.0, 0.1, 4)
    with pytest.raises(ValueError, match="use at least 10 server hosts, a leaner row format"):
        tight.refuse(hand_scenario().cluster)
    large = Capacity(10, 4, 600 * 2.0**30, 1500.7 * 2**30, 1000.7 * 2**30, 0.1, 4)
    with pytest.raises(ValueError, match=r"is 1,001 GiB on hand, but 10 rows .* need 1,501 GiB"):
        large.refuse(hand_scenario().cluster)
    never = Capacity(10, 0, 6000.0, 1500.0, 1000.0, 1.0, 0)
    with pytest.raises(ValueError, match="use a leaner row format"):
        never.refuse(hand_scenario().cluster)


def test_memory_in_gib_bytes_rows_and_hours():
    held = Capacity(60.0, 44.0, 345.6, 2560.75 * 2**30, 1280.75 * 2**30, 0.0123, 44.0)
    uniform = hand_workload(rows=60.0, zipf=0.0)
    run = simulate(replace(sync_of_two(), workload=uniform))
    # 2 draws a sample and field, 8 samples a step: 20 (1 - e^(-n/20)) rows a field after n draws.
    draws, rate = -20 * log(1 - 0.9 * 44 / 60), report(run).samples_per_s.mean
    assert fill_s(uniform, rate, 0.9 * 44) == pytest.approx(draws / 2 / rate)
    assert fill_s(uniform, rate, 60.0) == inf
    slow = replace(report(run, held), samples_per_s=replace(report(run).samples_per_s, mean=1e-3))
    hours = draws / 2 / 1e-3 / 3600
    told = facts_of(slow)
    assert told["memory"] == "all of 1,281 GiB on each server; all rows would need 2,561 GiB"
    assert told["size of a row"] == "346 B"
    assert told["rows on the servers"] == "44; 16 evicted"
    assert told["ids without a row"].startswith("1.23 % of a batch")
    assert told["time until 90 % full"].startswith(f"{hours:.1f} h ")


def test_lru_miss_rate_matches_a_simulated_cache():
    rng = np.random.default_rng(1)
    probability, _ = zipf_bins(1000.0, 0.9)
    cache: dict[int, None] = {}
    misses = []
    for number, key in enumerate(rng.choice(1000, 60_000, p=probability).tolist()):
        if number >= 10_000:
            misses.append(key not in cache)
        cache.pop(key, None)
        cache[key] = None
        if len(cache) > 200:
            del cache[next(iter(cache))]
    assert lru_miss_rate(200.0, 1000.0, 0.9) == pytest.approx(np.mean(misses), abs=0.01)
    assert lru_miss_rate(1000.0, 1000.0, 0.9) == 0


def test_a_store_that_fills_has_the_rows_and_misses_of_a_simulated_one():
    probability, _ = zipf_bins(1000.0, 0.9)
    resident: dict[int, list[int]] = {n: [] for n in (50, 200, 1000, 4000)}
    missed: dict[int, list[bool]] = {n: [] for n in resident}
    for seed in range(60):
        rng = np.random.default_rng(seed)
        held: dict[int, None] = {}
        for n, one in enumerate(rng.choice(1000, 4001, p=probability).tolist()):
            if n in resident:
                resident[n].append(len(held))
            for at in missed:
                if at <= n < at + 40:
                    missed[at].append(one not in held)
            held.pop(one, None)
            held[one] = None
            if len(held) > 200:
                held.pop(next(iter(held)))
    for n in resident:
        rows, miss = lru_after(n, 200.0, 1000.0, 0.9)
        assert rows == pytest.approx(np.mean(resident[n]), rel=0.02), n
        error = np.sqrt(miss * (1 - miss) / len(missed[n]))
        assert miss == pytest.approx(np.mean(missed[n]), abs=4 * error + 0.02), n


def test_filling_begins_with_nothing_and_ends_in_the_steady_state():
    assert lru_after(0.0, 100.0, 1e6, 1.05) == (0.0, pytest.approx(1.0))
    rows, miss = lru_after(1e12, 100.0, 1e6, 1.05)
    assert rows == pytest.approx(100.0)
    assert miss == pytest.approx(lru_miss_rate(100.0, 1e6, 1.05))
    before = 1.1
    for draws in np.geomspace(1, 1e9, 30):
        rows, miss = lru_after(float(draws), 1e4, 1e6, 1.05)
        assert miss <= before and 0 < rows <= 1e4 + 1e-6
        before = miss


def missed_of_a_simulated_table(
    rows: int, room: int, exponent: float, draws: int, seed: int
) -> float:
    """Share of the distinct ids of batches that an LRU table does not hold, once it is full."""
    rng = np.random.default_rng(seed)
    probability, _ = zipf_bins(float(rows), exponent)
    held: dict[int, None] = {}
    asked = missed = 0
    most = int(4 * characteristic_time(room, rows, exponent) / draws) + 60
    for batch in rng.choice(rows, (most, draws), p=probability):
        ids = list(dict.fromkeys(batch.tolist()))
        full = len(held) == room
        for one in ids:
            asked, missed = asked + full, missed + (full and one not in held)
            held.pop(one, None)
            held[one] = None
            if len(held) > room:
                del held[next(iter(held))]
    return missed / asked


@given(
    exponent=st.floats(0.0, 1.3),
    share=st.floats(0.2, 0.8),
    draws=st.sampled_from([1, 5, 20]),
    seed=st.integers(0, 99),
)
@settings(max_examples=10)
def test_batches_miss_what_a_simulated_table_misses(exponent, share, draws, seed):
    """Che's only approximation is that the characteristic time is no random number: a window of
    that many requests holds capacity rows in the mean, with the variance sum m (1 - m), m the
    chance that a row is missing. A table with that many rows more or less bounds the error; to it
    come six standard errors of eight simulated tables."""
    rows = 300
    room = round(share * rows)
    found = [
        missed_of_a_simulated_table(rows, room, exponent, draws, 8 * seed + k) for k in range(8)
    ]
    probability, _ = zipf_bins(float(rows), exponent)
    missing = np.exp(-probability * characteristic_time(room, rows, exponent))
    spread = float(np.sqrt((missing * (1 - missing)).sum()))
    most = batch_miss_rate(np.inf, draws, room - spread, rows, exponent)
    least = batch_miss_rate(np.inf, draws, room + spread, rows, exponent)
    error = 6 * float(np.std(found, ddof=1)) / np.sqrt(8)
    assert least - error <= np.mean(found) <= most + error


@pytest.mark.parametrize("share", [0.9, 1.1, 3.0])
@pytest.mark.parametrize(("exponent", "draws"), [(0.0, 200), (1.3, 1000)])
def test_tables_of_about_a_batch_miss_what_a_simulated_one_misses(exponent, draws, share):
    """``share``: rows in distinct ids of a batch. Which of them hit depends on where in this batch
    and in the last ones they came first; the characteristic time alone is 0.11 off."""
    rows = 1000
    room = round(share * expected_distinct(draws, float(rows), exponent))
    if room < rows:
        found = [missed_of_a_simulated_table(rows, room, exponent, draws, k) for k in range(6)]
        law = batch_miss_rate(np.inf, draws, room, rows, exponent)
        assert law == pytest.approx(np.mean(found), abs=0.012)


def test_distinct_ids_miss_more_often_than_draws_do():
    """Popular ids are many draws and one distinct id, and they do not miss."""
    each = lru_miss_rate(1000.0, 5000.0, 1.1)
    distinct = batch_miss_rate(np.inf, 800.0, 1000.0, 5000.0, 1.1)
    created = distinct * expected_distinct(800.0, 5000.0, 1.1)
    assert distinct > 2 * each
    assert created == pytest.approx(800 * each, rel=0.02)  # the same rows are made


@given(
    exponent=st.floats(0.0, 1.3), draws=st.floats(1.0, 1e5), room=st.floats(1.0, 1e4),
    before=st.floats(0.0, 1e9),
)  # fmt: skip
def test_a_larger_or_older_table_never_misses_more(exponent, draws, room, before):
    at = batch_miss_rate(before, draws, room, 1e4, exponent)
    assert 0 <= batch_miss_rate(2 * before + 1, draws, room, 1e4, exponent) <= at <= 1 + 1e-12
    assert batch_miss_rate(before, draws, min(1e4, 1.5 * room), 1e4, exponent) <= at + 1e-12


@pytest.mark.parametrize("rows", [1e12, 1e15, 1e18])
def test_a_few_draws_from_any_number_of_rows_are_all_distinct(rows):
    """Each has so small a chance that one minus it is one."""
    assert expected_distinct(1.0, rows, 0.0) == pytest.approx(1, rel=1e-6)
    assert expected_distinct(256.0, rows, 0.0) == pytest.approx(256, rel=1e-6)
    assert lru_after(100.0, rows / 2, rows, 0.0)[0] == pytest.approx(100, rel=1e-6)


def test_an_empty_table_misses_everything_and_one_with_room_for_all_nothing():
    assert batch_miss_rate(0.0, 100.0, 10.0, 1e4, 1.05) == pytest.approx(1.0)
    assert batch_miss_rate(np.inf, 100.0, 1e4, 1e4, 1.05) == 0.0
    assert characteristic_time(1e4, 1e4, 1.05) == np.inf
