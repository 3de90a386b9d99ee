"""The modes' timeline, and the ablation."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from experiments.studies import ablation, modes_timeline
from experiments.studies.ablation import ALL_ON, HALF_ROWS, MERGING, VARIANTS, WINDOW
from persia_sim.base.vocabulary import Mode
from persia_sim.cluster.demand import demand
from persia_sim.cluster.stamps import Mark
from persia_sim.engine.simulate import simulate
from persia_sim.report.measure import throughput
from tests.experiments.raw_runs import read_csv


def of_step(bars, step):
    return {b.stage: (b.start_s, b.end_s) for b in bars if b.step == step}


def lasts(bar: tuple[float, float]) -> float:
    return bar[1] - bar[0]


def test_in_hybrid_the_all_reduce_begins_inside_the_backward_pass():
    options = modes_timeline.Options(steps=16, shown=2)
    for mode, overlaps in ((Mode.RAW_HYBRID, False), (Mode.HYBRID, True)):
        run = modes_timeline.simulated(options, mode)
        bars = of_step(modes_timeline.bars_of(run, range(8, 10)), 8)
        assert (bars["dense_sync"][0] < bars["backward"][1] - 1e-6) == overlaps
        assert bars["dense_sync"][1] > bars["backward"][1]
        whole_s = run.need.all_reduce_s
        assert lasts(bars["dense_sync"]) >= whole_s - 1e-9


def test_the_table_has_the_steps_of_one_rank_from_the_middle_of_the_run(tmp_path, capsys):
    options = modes_timeline.Options(
        modes=("sync", "hybrid"), steps=16, shown=2, cluster_ranks=2, out=tmp_path
    )
    modes_timeline.run(options)
    told = capsys.readouterr().out
    rows = read_csv(tmp_path / "modes_timeline.csv")
    assert {(r["mode"], r["step"]) for r in rows} == set(product(("sync", "hybrid"), "89"))
    for mode in (Mode.SYNC, Mode.HYBRID):
        starts = modes_timeline.simulated(options, mode).stamps[Mark.START]
        step_s = np.diff(starts[0, 5:14]).mean()
        own = [r for r in rows if r["mode"] == mode]
        assert float(own[0]["mean_step_s"]) == pytest.approx(step_s, abs=1e-7)
        assert min(float(r["start_s"]) for r in own) == 0
        assert f"{1e3 * step_s:.1f}" in told
        assert all(float(r["start_s"]) < float(r["end_s"]) for r in own)


@pytest.fixture(scope="module")
def ablated(tmp_path_factory):
    out = tmp_path_factory.mktemp("ablation")
    options = ablation.Options(places=("100T-10Gbit",), ranks=2, steps=16, out=out)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("builtins.print", lambda *_, **__: None)
        ablation.run(options)
    return options, read_csv(out / "ablation.csv")


@pytest.mark.parametrize("place", ["Kwai", "100T"])
def test_slow_nics_are_those_that_rows_travel_by_and_the_all_reduce_keeps_its_own(place):
    options = ablation.Options()
    usual, slow = (ablation.scenario_of(name, options) for name in (place, f"{place}-10Gbit"))
    assert demand(slow).all_reduce_s == demand(usual).all_reduce_s > 0
    roles = slow.cluster.nn, slow.cluster.embedding_workers, slow.cluster.servers
    assert {slow.cluster.nic_rate(role) for role in roles} == {1.25e9 * 0.97}


def test_each_variant_is_simulated_beside_the_one_with_everything_on(ablated):
    options, rows = ablated
    assert [row["variant"] for row in rows] == list(VARIANTS)
    base = float(rows[0]["value"])
    for row in rows:
        assert float(row["difference"]) == pytest.approx(float(row["value"]) / base - 1)
        assert row["binds"] and row["where"] == "100T-10Gbit, 2 GPUs"
    scenario = ablation.scenario_of("100T-10Gbit", options)
    assert (scenario.mode, scenario.tau, scenario.merges) == (Mode.HYBRID, 4, True)
    sync = replace(scenario, mode=Mode.SYNC, tau=None, merge_pushes=None)
    by_name = {row["variant"]: float(row["value"]) for row in rows}
    assert by_name["neither (sync)"] == pytest.approx(throughput(simulate(sync)).mean)
    assert by_name["neither (sync)"] < by_name["all-reduce not overlapped"] < by_name[ALL_ON]


def test_variants_change_one_thing_each():
    options = ablation.Options()
    base = ablation.scenario_of("100T-10Gbit", options)
    assert base.cluster.nic_rate(base.cluster.servers) == 0.97 * 10e9 / 8
    wire = base.workload.wire
    changed = {name: change(base) for name, change in VARIANTS.items()}
    assert changed[ALL_ON] == base
    assert changed[WINDOW] == replace(base, tau=0)
    assert changed[MERGING].merges is False
    half = changed[HALF_ROWS].workload
    assert half.wire == replace(wire, row_value_bytes=2)
    assert half.rows_bytes / base.workload.rows_bytes == (128 + 1) / (2 * 128)
    assert changed["lookahead, forwarded"].lookahead == "forwarded"
    assert changed["lookahead, forwarded"].steps_ahead == base.tau


def test_a_second_ablation_simulates_only_what_is_missing(ablated, monkeypatch):
    options, rows = ablated

    def again(_):
        raise AssertionError("simulated again")

    monkeypatch.setattr(ablation, "_rate", again)
    found = ablation.simulated(options)
    assert [f"{r['value']}" for r in found] == [row["value"] for row in rows]
    with pytest.raises(AssertionError, match="again"):
        ablation.simulated(replace(options, steps=17))
