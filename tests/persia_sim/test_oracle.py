"""SimPy against the max-plus recursion and the closed form, where both must be exact."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given

from persia_sim.engine.simulate import simulate
from persia_sim.model.demand import demand
from persia_sim.model.scenario import Discipline, Noise, Scenario
from persia_sim.model.stamps import Leg, Mark
from persia_sim.oracle.closed_form import answer
from persia_sim.words.vocabulary import Mode
from tests.oracles.max_plus import instants
from tests.persia_sim.sim_configurations import small_scenario, uncontended


@given(uncontended())
def test_simpy_equals_max_plus_bit_for_bit_without_contention(scenario: Scenario) -> None:
    simulated, oracle = simulate(scenario).stamps, instants(scenario)
    for mark in Mark:
        assert np.array_equal(simulated[mark], oracle[mark]), mark.name


@given(uncontended())
def test_closed_form_is_the_growth_rate_of_the_recursion(scenario: Scenario) -> None:
    scenario = replace(scenario, noise=Noise(), steps=240)
    returned = instants(scenario)[Mark.RETURNED].max(0)
    # Over a multiple of every period (steps to 5, tasks to 4) the growth is the cycle mean.
    growth = (returned[239] - returned[119]) / 120
    assert growth == pytest.approx(answer(scenario).step_s, rel=1e-9)


def test_an_answer_without_rows_still_has_its_latency() -> None:
    scenario = small_scenario(discipline=Discipline.UNSHARED, infinite_cpus=True)
    need = demand(scenario)
    empty = replace(need, fetch=replace(need.fetch, rows_bytes=0.0))
    run = simulate(scenario, need=empty)
    assert np.array_equal(run.stamps, instants(scenario, empty))
    answered = run.legs[Leg.ANSWERED] - run.stamps[Mark.READ]
    assert answered == pytest.approx(scenario.cluster.link.latency_s)


def test_oracle_refuses_contention() -> None:
    with pytest.raises(ValueError, match="exact only without contention"):
        instants(small_scenario(discipline=Discipline.FIFO))


def test_oracle_is_instant_on_the_large_cluster() -> None:
    from persia_sim.presets.catalogue import gcp_100t, workloads
    from persia_sim.presets.costs import CATALOGUE

    scenario = Scenario(
        cluster=gcp_100t(),
        workload=workloads()["criteo-syn5"],
        costs=CATALOGUE,
        mode=Mode.HYBRID,
        tau=4,
        steps=30,
        discipline=Discipline.UNSHARED,
        infinite_cpus=True,
        noise=Noise(gpu_cv=0.05),
    )
    assert np.array_equal(instants(scenario), simulate(scenario).stamps)
