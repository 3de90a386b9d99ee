"""Fresh tables: exact rows beside late ones, with a push of their own (`--fresh`)."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from unittest.mock import patch

import numpy as np
import pytest

from persia_sim.__main__ import main
from persia_sim.base.staleness import staleness_in_steps
from persia_sim.base.vocabulary import COMMON_STEP, Kind, Mode
from persia_sim.bounds.closed_form import answer, cycles, latencies
from persia_sim.cluster.demand import demand
from persia_sim.cluster.scenario import Discipline, Scenario
from persia_sim.cluster.stamps import Leg, Mark
from persia_sim.cluster.tables import Table
from persia_sim.engine.simulate import simulate
from persia_sim.presets.catalogue import MACHINES
from persia_sim.presets.point import Point, scenario_of
from persia_sim.report.critical_path import blame_of_resources, critical_path
from persia_sim.sharded.sizing import Asked, hybrid_on
from persia_sim.sharded.software import SOFTWARE
from tests.oracles.max_plus import instants
from tests.persia_sim.sim_configurations import small_scenario

USER = Table(name="user", rows=1e6, dim=16, zipf=0.9)
ITEM = Table(name="item", fields=("bought", "seen"), rows=1e4, dim=8, ids_per_sample=(1.0, 9.0))
SHOP = {
    "fields": 0, "ids_per_field": 1.0, "dim": 0, "rows": 0.0, "tables": (USER, ITEM),
}  # fmt: skip


def alone(scenario: Scenario) -> Scenario:
    return replace(scenario, discipline=Discipline.UNSHARED, infinite_cpus=True)


@pytest.mark.parametrize("mode", [Mode.HYBRID, Mode.RAW_HYBRID])
@pytest.mark.parametrize(
    ("fresh", "tau", "changes"),
    [
        (("1",), 2, {}),
        (("7",), 0, {"merge_pushes": True}),
        (("25",), None, {"permits": 3}),
        (("26",), 3, {"merge_pushes": None}),
        (("all",), 1, {}),
    ],
)
def test_the_processes_do_what_the_recursion_says_to_the_bit(mode, fresh, tau, changes):
    noisy = replace(small_scenario().noise, gpu_cv=0.3, server_cv=0.2)
    scenario = alone(small_scenario(mode, fresh=fresh, tau=tau, noise=noisy, steps=30, **changes))
    assert (simulate(scenario).stamps == instants(scenario)).all()


@pytest.mark.parametrize("steps_back", [0, 1, 4])
def test_with_every_table_fresh_the_time_is_that_of_lookahead(steps_back):
    """With none it is that of hybrid; also where NICs and cores are shared."""
    fresh = small_scenario(fresh=("all",), tau=steps_back or 1, merge_pushes=None)
    ahead = small_scenario(Mode.LOOKAHEAD, ahead=steps_back or 1)
    for change in (lambda s: s, alone):
        assert (simulate(change(fresh)).stamps == simulate(change(ahead)).stamps).all()
        assert answer(change(fresh)).seconds == answer(change(ahead)).seconds
    named = replace(small_scenario().workload, **SHOP)
    both = replace(fresh, workload=named, fresh=("item", "user"))
    assert repr(demand(both)) == repr(demand(replace(both, fresh=("all",))))
    none = simulate(small_scenario(fresh=()))
    assert (none.stamps == simulate(small_scenario()).stamps).all()
    assert np.isnan(none.legs[Leg.FRESH_APPLIED]).all()


def test_more_fresh_fields_are_never_faster():
    for made in (small_scenario, lambda **c: alone(small_scenario(**c))):
        steps = [answer(made(fresh=(str(n),) if n else ())).step_s for n in range(27)]
        assert all(before <= after * (1 + 1e-12) for before, after in pairwise(steps))
        assert steps[0] < steps[-1]


def test_the_step_is_the_larger_of_hybrids_and_of_its_own_push_and_look():
    """Law 15: without contention, by the mean delay round each cycle."""
    for count in (1, 13, 25):
        scenario = alone(small_scenario(fresh=(str(count),), steps=120))
        need = demand(scenario)
        life = latencies(scenario, need)
        own_s = life.refresh_s + life.compute_s + life.sync_s + life.exact_s
        assert cycles(scenario, need)["refresh"] == pytest.approx(own_s, rel=1e-12)
        starts = simulate(scenario).stamps[Mark.START][0]
        found_s = (starts[-1] - starts[60]) / (len(starts) - 61)
        assert found_s == pytest.approx(answer(scenario).step_s, rel=1e-6)


def test_fresh_rows_miss_nothing_and_the_others_up_to_tau():
    scenario = small_scenario(fresh=("3",), tau=2, steps=40)
    for change in ({}, {"trace_shards": True}, {"merge_pushes": True}):
        run = simulate(replace(scenario, **change), trace=True)
        assert run.trace.meta["fresh"] == ["3"]
        exact = staleness_in_steps(run.trace.of_fresh_tables())
        assert len(exact.missing_steps) and not exact.missing_steps.any()
        late = staleness_in_steps(run.trace)
        assert 0 < late.missing_steps.max() <= late.oldest_missing_steps.max() <= 2
    kinds = set(run.trace.events[:, 0].tolist())
    assert {Kind.LOOKUP, Kind.REFRESH, Kind.FRESH_PUSH, Kind.PUSH, Kind.DENSE_UPDATE} == kinds


def test_two_pushes_carry_what_one_did():
    """Ids, rows and gradients of both together; the fresh one is sent first."""
    whole = demand(small_scenario())
    parted = demand(small_scenario(fresh=("5",)))
    for name in ("gradient_bytes", "push_bytes", "update_memory_bytes"):
        both = sum(getattr(push, name) for push in parted.pushes)
        assert both == pytest.approx(getattr(whole.push, name), rel=1e-12), name
    assert parted.fresh.push_bytes == pytest.approx(whole.push.push_bytes * 5 / 26, rel=1e-12)
    assert parted.refresh.activation_bytes < whole.fetch.activation_bytes * 5 / 26
    run = simulate(small_scenario(fresh=("5",)))
    assert (run.legs[Leg.FRESH_AT_WORKER] < run.legs[Leg.AT_WORKER]).all()
    assert (run.stamps[Mark.APPLIED] >= run.legs[Leg.FRESH_APPLIED]).all()
    assert run.makespan_s == pytest.approx(sum(critical_path(run).values()))
    assert run.makespan_s == pytest.approx(sum(blame_of_resources(run).values()))


def test_a_field_means_its_whole_table():
    work = replace(small_scenario().workload, **SHOP)
    assert work.parted(("seen",))[0].tables == (ITEM,)
    assert work.parted(("user",))[1].tables == (ITEM,)
    assert work.parted(("item", "bought", "user")) == (work, None)
    assert work.parted(()) == (None, work)


def test_one_field_of_88_hides_behind_hybrids_step():
    """On the host of 8 H100: its own cycle is shorter than what binds hybrid."""
    point = Point(cluster="h100-host", workload="kwai-video", tau=16, steps=20)
    hybrid, one, every = (
        answer(scenario_of(replace(point, fresh=fresh))) for fresh in ((), ("1",), ("all",))
    )
    assert one.seconds["refresh"] < hybrid.step_s / 2 < every.step_s / 4
    assert hybrid.step_s <= one.step_s < 1.01 * hybrid.step_s


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"fresh": ("27",)}, "fresh is 27: the workload has 26 fields"),
        ({"fresh": ("user",)}, "fresh is user: no table has a name"),
        ({"mode": Mode.SYNC, "tau": None, "merge_pushes": None, "fresh": ("1",)}, "does not read"),
        ({"mode": Mode.ASYNC, "merge_pushes": None, "fresh": ("1",)}, "does not read it"),
    ],
)
def test_what_cannot_be_fresh_is_refused(changes, words):
    with pytest.raises(ValueError, match=words):
        small_scenario(**changes)


@pytest.mark.parametrize("engine", [simulate, answer])
def test_an_engine_that_does_not_carry_fresh_tables_refuses_them(engine):
    place = f"{engine.__module__}.CARRIES"
    with patch(place, COMMON_STEP), pytest.raises(ValueError, match=r"ahead.*remove --fresh"):
        engine(small_scenario(fresh=("1",)))


def test_size_pays_for_fresh_fields():
    """On the same machines hybrid with all rows exact is slower than with none."""
    asked = Asked(
        workload=small_scenario().workload, samples_per_s=2e6, tau=4, rows="f32-adagrad",
        software=SOFTWARE["torchrec"],
    )  # fmt: skip
    gpu, host = MACHINES["p5.48xlarge"], MACHINES["c2-standard-30"]
    late = hybrid_on(asked, gpu, host, host)
    exact = hybrid_on(replace(asked, fresh=("all",)), gpu, host, host)
    assert exact.scenario.fresh == ("all",) and late.scenario.fresh == ()
    on_same = replace(exact.scenario, fresh=())
    assert answer(exact.scenario).step_s > answer(on_same).step_s


def test_the_command_takes_a_count_or_names(capsys, monkeypatch):
    words = "persia-sim --cluster h100-host --workload kwai-video --tau 16 --steps 12 --fresh 1"
    monkeypatch.setattr("sys.argv", words.split())
    assert main() == 0
    assert "hybrid, tau 16, fresh 1" in capsys.readouterr().out
    monkeypatch.setattr("sys.argv", [*words.split()[:-1], "user"])
    assert main() == 2
    assert "fresh is user" in capsys.readouterr().err
