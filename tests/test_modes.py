"""A mode is three rules, and an engine refuses those that it does not carry out: with a sentence,
and never by doing what another mode does."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any
from unittest.mock import patch

import pytest

from persia_sim.base.trace import Trace
from persia_sim.base.vocabulary import FRESH_TABLES, RULES, Dense, Mode, Read, Rules, Write
from persia_sim.base.window import constant_lag
from persia_sim.bounds.closed_form import answer
from persia_sim.cluster.scenario import Scenario
from persia_sim.engine.simulate import simulate
from runtime.config import SyncConfig
from runtime.executors.constant_lag import ConstantLagRun
from runtime.executors.given_order import OrderedRun
from runtime.executors.open import assemble_for
from runtime.executors.threads import ConcurrentRun
from runtime.run.session import train
from tests.house import questions_for_the_name_of_a_mode
from tests.persia_sim.sim_configurations import small_scenario
from tests.runtime.worlds import ArraySource, config

COMBINATIONS = [Rules(*rules) for rules in product(Read, Write, Dense)]
BY_RULES = {rules: mode for mode, rules in RULES.items()}


def components(mode: Mode, **changes: Any) -> Any:
    return assemble_for(config(mode=mode, ranks=2, **changes), ArraySource(48))


def order_of(mode: Mode) -> Callable[[], Any]:
    return lambda: list(
        constant_lag(mode, ranks=2, has_batch=lambda k: k < 6, tau=1, average_every=2)
    )


def run_by(executor: Callable[[Any], Any], name: str = "constant_lag") -> Callable[..., Any]:
    def prepared(mode: Mode, **changes: Any) -> Callable[[], Any]:
        assembled = components(mode, executor=name, **changes)
        return lambda: executor(assembled).run()

    return prepared


def simulated_by(engine: Callable[[Scenario], Any]) -> Callable[..., Any]:
    def prepared(mode: Mode) -> Callable[[], Any]:
        scenario = small_scenario(mode)
        return lambda: engine(scenario)

    return prepared


COMMON_STEP = {mode for mode in Mode if mode.has_barrier}
ENGINES: dict[str, tuple[Callable[[Mode], Callable[[], Any]], set[Mode]]] = {
    "the order of the constant lag": (order_of, set(Mode)),
    "the loop of the constant lag": (run_by(ConstantLagRun), COMMON_STEP),
    "the executor of a given order": (run_by(OrderedRun), set(Mode)),
    "the concurrent executor": (run_by(ConcurrentRun, "concurrent"), set(Mode)),
    "the simulator's processes": (simulated_by(simulate), set(Mode)),
    "the closed form": (simulated_by(answer), set(Mode)),
}
"""By the name in its refusal: what prepares a run of a mode, and the modes that it carries out."""


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("rules", COMBINATIONS, ids=str)
def test_an_engine_carries_out_a_combination_of_rules_or_refuses_it(rules, engine):
    prepare, carried = ENGINES[engine]
    if BY_RULES.get(rules) in carried:
        prepare(BY_RULES[rules])()
        return

    # Else the rules take the place of a mode's whose options are made already.
    mode = BY_RULES.get(rules, Mode.HYBRID)
    run = prepare(mode)
    with patch.dict(RULES, {mode: rules}), pytest.raises(ValueError) as refusal:
        run()
    assert f"mode {mode} ({rules}) is not carried out by {engine}" in str(refusal.value)


@pytest.mark.parametrize("engine", ["constant_lag", "replay", "concurrent", "processes"])
@pytest.mark.parametrize("mode", [mode for mode in Mode if mode.may_merge])
def test_an_engine_carries_fresh_tables_out_or_refuses_them(mode, engine):
    """Never silently as late ones."""
    assert mode.rules_with(True) in FRESH_TABLES
    if engine == "processes":
        place = "runtime.hosts.row_processes.CARRIES"
        with patch(place, {mode.rules}), pytest.raises(ValueError, match="servers as processes"):
            components(mode, fresh=("all",), executor="concurrent", servers=1)
        return
    executor = {"constant_lag": ConstantLagRun, "replay": OrderedRun, "concurrent": ConcurrentRun}
    name = "concurrent" if engine == "concurrent" else "constant_lag"
    run_by(executor[engine], name)(mode, fresh=("all",))()
    without = patch(f"{executor[engine].__module__}.CARRIES", {mode.rules})
    with without, pytest.raises(ValueError, match=r"fresh tables ahead.*remove --fresh"):
        executor[engine](components(mode, fresh=("all",), executor=name))


def test_nothing_asks_for_the_name_of_a_mode():
    """Presets name it; what a mode does follows from its rules, so that a new one falls through to
    nothing."""
    assert questions_for_the_name_of_a_mode() == []


def test_every_mode_has_rules_of_its_own():
    assert set(RULES) == set(Mode) and len(BY_RULES) == len(Mode)


@pytest.mark.parametrize("mode", Mode)
def test_the_bound_of_a_trace_means_the_same_in_both_halves(mode):
    """Lookahead reads its rows exactly, however far ahead it fetches them."""
    scenario = small_scenario(mode)
    simulated = simulate(scenario, trace=True).trace
    assert isinstance(simulated, Trace)
    late = {"tau": scenario.tau} if mode.reads_late_rows else {}
    recorded = train(config(mode=mode, ranks=2, **late), ArraySource(48)).trace
    assert simulated.meta["tau"] == recorded.meta["tau"] == (late.get("tau") or 0)
    assert SyncConfig(mode=mode).window == (4 if mode.reads_late_rows else 0)
