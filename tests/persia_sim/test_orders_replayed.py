"""Orders of single servers, trained for real on as many shards."""

from __future__ import annotations

from dataclasses import replace

import pytest

from persia_sim.engine.simulate import simulate
from persia_sim.model.scenario import Noise
from persia_sim.words.staleness import staleness_in_pushes
from persia_sim.words.vocabulary import Mode
from tests.persia_sim.sim_configurations import small_scenario
from tests.runtime.worlds import ArraySource, config, run

SHARDS = 8  # server processes of the small cluster


@pytest.mark.parametrize(
    ("mode", "merge"), [(Mode.HYBRID, True), (Mode.HYBRID, False), (Mode.LOOKAHEAD, True)]
)
def test_an_order_by_server_trains_and_its_versions_are_the_stores(mode: Mode, merge: bool) -> None:
    noise = Noise(gpu_cv=0.3, server_cv=1.5)
    choice = {"merge_pushes": merge} if mode is Mode.HYBRID else {}
    base = small_scenario(mode, noise=noise, trace_shards=True, steps=20, **choice)
    order = simulate(base, trace=True).trace
    assert order is not None
    late = {"tau": base.tau, **choice} if mode is Mode.HYBRID else {}
    chosen = config(mode=mode, ranks=4, shards=SHARDS, steps=20, **late)
    world = run(chosen, ArraySource(600), order=order)
    simulated = staleness_in_pushes(order).mean_by_shard()
    trained = staleness_in_pushes(world.trace).mean_by_shard()
    assert set(trained) == set(simulated)
    for missed, in_flight in trained.values():
        assert missed == in_flight
    again = run(chosen, ArraySource(600), order=simulate(replace(base), trace=True).trace)
    assert again.state()["rows.values"].tobytes() == world.state()["rows.values"].tobytes()
