"""A tiny time-to-auc: simulated instants, true gradients, and the table of both."""

from __future__ import annotations

import math
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from experiments.statistics import paired_ratio
from experiments.studies import time_to_auc
from experiments.tables import table
from experiments.targets import COLUMNS, first_crossing, target_lines
from persia_sim.base.vocabulary import Mode
from persia_sim.cli import Options as Simulation
from persia_sim.cli import scenario_of
from persia_sim.cluster.stamps import Mark
from persia_sim.engine.simulate import simulate
from runtime.data.open import open_source
from tests.experiments.raw_runs import close, paired, printed_by, raw_runs, read_csv

pytestmark = [pytest.mark.multiproc, pytest.mark.long]  # its runs are made once, for all tests
STEPS, SEEDS, TAU, RANKS = 12, 3, 2, 8
MODES = (Mode.SYNC, Mode.LOOKAHEAD, Mode.HYBRID, Mode.ASYNC)


@pytest.fixture(scope="module")
def ran(tmp_path_factory) -> tuple[Path, str]:
    out = tmp_path_factory.mktemp("time-to-auc")
    options = time_to_auc.Options(
        cluster="v100-2021-09", workload="taobao-ad", modes=MODES, tau=TAU, steps=STEPS,
        snapshots=3, seeds=SEEDS, test_rows=600, out=out, jobs=2,
    )  # fmt: skip
    return out, printed_by(time_to_auc.run, options)


@pytest.fixture(scope="module")
def instants() -> dict[str, np.ndarray]:
    """When each dense update ended, from simulations of this test's own."""
    found = {}
    for mode in MODES:
        options = Simulation(
            cluster="v100-2021-09", workload="taobao-ad", mode=mode, steps=STEPS,
            tau=TAU if mode in (Mode.HYBRID, Mode.ASYNC) else None,
            ahead=TAU if mode is Mode.LOOKAHEAD else None,
        )  # fmt: skip
        ended = simulate(scenario_of(options), trace=True).stamps[Mark.UPDATED]
        found[str(mode)] = ended[0] if mode.has_barrier else np.sort(ended.ravel())
    return found


def own_lines(rows, mode: str, seed: int):
    return [r for r in rows if r["mode"] == mode and int(r["seed"]) == seed]


@pytest.mark.long
def test_aucs_are_those_of_the_run_folders(ran):
    rows, runs = read_csv(ran[0] / "time_to_auc.csv"), raw_runs(ran[0])
    assert {(mode, seed) for mode, _, seed in runs} == {(m, s) for m in MODES for s in range(SEEDS)}
    for (mode, _, seed), run in runs.items():
        own = own_lines(rows, mode, seed)
        assert [float(r["auc"]) for r in own] == [
            line["tasks"]["click"]["auc"] for line in run.lines()
        ]
        assert float(own[-1]["auc"]) == run.auc() and own[-1]["drained"] == "True"
    assert {r["cluster"] for r in rows} == {"v100-2021-09"}


def test_a_snapshot_stands_at_the_simulated_second_of_the_update_before_it(ran, instants):
    rows = read_csv(ran[0] / "time_to_auc.csv")
    for mode in MODES:
        per_update = 8 * (RANKS if mode.has_barrier else 1)
        for row in own_lines(rows, mode, 1):
            update = int(row["samples"]) // per_update
            assert float(row["simulated_s"]) == pytest.approx(instants[mode][update - 1], rel=1e-9)
        assert int(row["samples"]) == STEPS * RANKS * 8, "every sample of the order is trained"


def test_lookahead_learns_exactly_what_sync_learns_in_less_time(ran):
    rows = read_csv(ran[0] / "time_to_auc.csv")
    sync, ahead = own_lines(rows, "sync", 0), own_lines(rows, "lookahead", 0)
    assert [r["auc"] for r in sync] == [r["auc"] for r in ahead]
    assert float(ahead[-1]["simulated_s"]) < float(sync[-1]["simulated_s"])


def printed(told: str, mode: str, of: int = 0) -> list[str]:
    """The cells of a mode's line: of the table of ends (0), or of its targets (1, 2, ...)."""
    line = re.findall(rf"^{mode}  .*$", told, re.MULTILINE)[of]
    return re.split(r" {2,}", line)


def test_the_printed_ends_are_recomputed_from_runs_and_simulation(ran, instants):
    runs = raw_runs(ran[0])
    finals = finals_of(runs)
    for mode in MODES:
        _, seconds, auc, gap = printed(ran[1], mode)
        assert seconds == f"{instants[mode][-1]:.1f}"
        assert auc == f"{np.mean(finals[mode]):.4f}"
        if mode is Mode.SYNC:
            assert gap == "-"
        elif mode is Mode.LOOKAHEAD:
            assert gap == "+0.00 ± 0.00"
        else:
            mean, half = paired(finals[mode], finals["sync"])
            assert gap == f"{1e3 * mean:+.2f} ± {1e3 * half:.2f}"


def finals_of(runs) -> dict[str, list[float]]:
    return {
        mode: [next(r for k, r in runs.items() if k[0] == mode and k[2] == s).auc()
               for s in range(SEEDS)]
        for mode in MODES
    }  # fmt: skip


def reaches(rows, mode: str, seed: int, target: float) -> float:
    """When a curve from (0 s, 0.5) first meets the target; inf where it does not."""
    at = {0.0: 0.5} | {
        float(r["simulated_s"]): float(r["auc"]) for r in own_lines(rows, mode, seed)
    }
    seconds, aucs = np.array(list(at)), np.array(list(at.values()))
    above = np.flatnonzero(aucs >= target)
    if not len(above):
        return np.inf
    high = above[0]
    return float(np.interp(target, aucs[high - 1 : high + 1], seconds[high - 1 : high + 1]))


def test_targets_are_recomputed_from_the_curves(ran):
    rows, found = read_csv(ran[0] / "time_to_auc.csv"), read_csv(ran[0] / "time_to_auc_targets.csv")
    ends = np.array(finals_of(raw_runs(ran[0]))["sync"])
    assert [r["mode"] for r in found] == [str(m) for m in MODES] * 3
    for place, row in enumerate(found):
        mode, goals = row["mode"], 0.5 + float(row["target_share"]) * (ends - 0.5)
        close(row["target_auc"], goals.mean())
        own = [reaches(rows, mode, seed, goals[seed]) for seed in range(SEEDS)]
        sync = [reaches(rows, "sync", seed, goals[seed]) for seed in range(SEEDS)]
        assert int(row["reached"]) == np.isfinite(own).sum() and int(row["seeds"]) == SEEDS
        told = printed(ran[1], mode, of=1 + place // len(MODES))
        if np.isfinite(own).all():
            close(row["seconds"], np.mean(own))
            half = stats.t.ppf(0.975, SEEDS - 1) * stats.sem(own)
            close(row["seconds_half_width_95"], half)
            assert told[3] == f"{np.mean(own):.1f} ± {half:.1f}"
        else:
            assert row["seconds"] == "nan" and row["ratio_to_sync"] == "nan"
            late = SEEDS - int(row["reached"])
            assert told[3].startswith(f"not reached by {late} of {SEEDS} seeds, > ")
        if np.isfinite([*own, *sync]).all():
            close(row["ratio_to_sync"], stats.gmean(np.divide(own, sync)))
        assert row["usd"] == "nan", "this cluster has no price"
    assert float(found[0]["target_share"]) == 0.9


def test_the_plan_names_runs_samples_and_folder(capsys, tmp_path):
    out = tmp_path / "plan"
    time_to_auc.run(time_to_auc.Options(steps=50, seeds=2, out=out, dry_run=True))
    told = capsys.readouterr().out
    assert "3 simulated runs of 50 steps on gcp-100t" in told
    assert "with 2 seeds, 512 samples a step" in told
    assert not out.exists()


def test_the_trained_data_are_the_synthetic_streams_by_default():
    name = time_to_auc.Options().data.name
    assert open_source(name).provenance().name.startswith("synthetic")


AUCS = st.lists(st.floats(0.4, 0.9), min_size=1, max_size=6)


def test_the_drained_end_counts_in_place_of_the_snapshot_at_its_instant():
    assert not first_crossing([1, 2, 2], [0.5, 0.7, 0.6], 0.65).reached
    assert first_crossing([1, 2, 2], [0.5, 0.6, 0.7], 0.65).at == pytest.approx(1.75)


@given(AUCS, st.floats(0.51, 0.9))
def test_a_crossing_is_where_the_line_between_snapshots_has_the_target(aucs, target):
    at = [float(n) for n in range(1, len(aucs) + 1)]
    found = first_crossing(at, aucs, target)
    assert found.reached == (max(aucs) >= target)
    if not found.reached:
        assert found.at == at[-1]
        return
    left = math.ceil(found.at) - 1  # the snapshot before; -1 would be the start
    line = [0.5, *aucs]
    share = found.at - left
    assert line[left] + share * (line[left + 1] - line[left]) == pytest.approx(target, abs=1e-9)
    assert all(auc < target for auc in aucs[:left])


def test_a_ratio_to_what_took_no_time_is_not_known():
    """Else it is a paired t test of logarithms: see the tests of windows."""
    assert math.isnan(paired_ratio([0.0, 1.0], [1.0, 1.0]).mean)


def of_ways(ways: dict[str, dict[int, list[tuple[float, ...]]]], *shares: float, usd=0.0):
    """Lines of ways: mode -> seed -> second, samples and AUC of each snapshot."""
    snapshots = [
        (mode, seed, *point)
        for mode, own in ways.items()
        for seed, points in own.items()
        for point in points
    ]
    return target_lines(snapshots, "sync", shares, usd_per_hour=usd)


def way(*aucs: float, speed: float = 1.0) -> list[tuple[float, ...]]:
    return [(n / speed, 1e6 * n, auc) for n, auc in enumerate(aucs, start=1)]


def test_time_cost_and_censoring_of_a_target_by_hand():
    """The climb of sync ends at 0.7; half of it is 0.6."""
    ways = {
        "sync": {0: way(0.6, 0.7), 1: way(0.6, 0.7)},
        "fast": {0: way(0.6, 0.7, speed=4), 1: way(0.55, 0.65, speed=4)},
    }
    lines = of_ways(ways, 0.5, 1.0, usd=7200)
    sync, fast, _, never = lines
    assert sync["target_auc"] == pytest.approx(0.6) and sync["seconds"] == pytest.approx(1.0)
    assert fast["ratio_to_sync"] == pytest.approx(math.sqrt(0.25 * 0.375))
    # seconds 0.3125 at 7,200 $/h are 0.625 $; sync needs a million samples
    assert fast["seconds"] == pytest.approx(0.3125) and fast["usd"] == pytest.approx(0.625)
    assert fast["usd_per_million_samples_of_sync"] == pytest.approx(0.625)
    assert fast["samples"] == pytest.approx(1.25e6)
    assert math.isnan(of_ways(ways, 0.5)[1]["usd"]), "no price"
    assert (never["reached"], never["not_before_s"]) == (1, 0.5)
    unknown = ("seconds", "ratio_to_sync", "usd_per_million_samples_of_sync")
    assert all(math.isnan(never[name]) for name in unknown)
    told = table(lines, COLUMNS).splitlines()
    assert re.split(r" {2,}", told[-1])[3] == "not reached by 1 of 2 seeds, > 0.5 s"


def test_each_seed_has_the_target_of_syncs_run_of_that_seed():
    """Half a climb is 0.6 and 0.55, which sync reaches at once in each stream; the mean's half,
    0.575, would be late in seed 1."""
    ways = {
        "sync": {0: way(0.6, 0.7), 1: way(0.55, 0.6)},
        "x": {0: way(0.6, 0.7), 1: way(0.55)},
    }
    sync, other = of_ways(ways, 0.5)
    assert sync["target_auc"] == pytest.approx(0.575)
    assert (sync["seconds"], sync["seconds_half_width_95"]) == pytest.approx((1.0, 0.0))
    assert other["reached"] == 2 and other["ratio_to_sync"] == pytest.approx(1.0)


def test_seconds_to_a_target_are_held_against_those_of_the_same_seeds():
    def way(end_s: float) -> list[tuple[float, ...]]:
        return [(end_s, 1.0, 0.7)]

    ways = {"sync": {0: way(1.0), 1: way(2.0)}, "hybrid": {1: way(4.0), 0: way(3.0)}}
    _, hybrid = of_ways(ways, 1.0)
    assert hybrid["ratio_to_sync"] == pytest.approx(math.sqrt(3.0 * 2.0))
    assert hybrid["ratio_to_sync_low_95"] != hybrid["ratio_to_sync_high_95"]
    _, other = of_ways({"sync": ways["sync"], "hybrid": {1: way(4.0), 2: way(3.0)}}, 1.0)
    assert math.isnan(other["ratio_to_sync"]), "as many seeds, and not the same"
