"""The clock against SimPy itself: the same processes meet in the same order."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import simpy
from hypothesis import given
from hypothesis import strategies as st

from persia_sim.engine.clock import Clock, NothingLeftError, Process
from tests.persia_sim import sim_configurations  # noqa: F401  # its hypothesis profile

Told = list[tuple[float, int, str]]

DELAYS = st.sampled_from([0.0, 0.0, 1.0, 1.0, 2.5])  # ties, which a wrong order would show
PLANS = st.lists(
    st.lists(st.tuples(st.sampled_from(["sleep", "meet", "child", "all"]), DELAYS), max_size=5),
    min_size=1,
    max_size=6,
)


def story(env: simpy.Environment, plans: list[list[tuple[str, float]]]) -> tuple[simpy.Event, Told]:
    """Processes that sleep, meet at events, start others and wait for several; what they tell."""
    told: Told = []
    met = env.event()

    def nap(delay: float) -> Process:
        yield env.timeout(delay)
        told.append((env.now, -1, "nap"))

    def one(number: int, plan: list[tuple[str, float]]) -> Process:
        nonlocal met
        for what, delay in plan:
            if what == "sleep":
                yield env.timeout(delay)
            elif what == "meet" and number % 2:
                waited, met = met, env.event()
                waited.succeed()
                yield env.timeout(delay)
            elif what == "meet":
                yield simpy.AnyOf(env, [met, env.timeout(9.0)])
            elif what == "child":
                env.process(nap(delay))  # nobody waits for it
            else:
                yield simpy.AllOf(env, [env.process(nap(delay)), env.timeout(1.0)])
            told.append((env.now, number, what))

    processes = [env.process(one(number, plan)) for number, plan in enumerate(plans)]
    return simpy.AllOf(env, processes), told


def test_events_are_counted_as_they_are_given() -> None:
    env = Clock()
    for number in range(3):
        assert env.events == number
        env.timeout(float(number))
    env.run_until(env.timeout(2.0))
    assert (env.now, env.events) == (2.0, 4)


@given(PLANS)
def test_events_happen_in_simpys_order(plans: list[list[tuple[str, float]]]) -> None:
    plain = simpy.Environment()
    end, expected = story(plain, plans)
    plain.run(until=end)
    clock = Clock()
    end, found = story(clock, plans)
    clock.run_until(end)
    assert found == expected
    assert clock.now == plain.now


def failing(env: Clock) -> Process:
    yield env.timeout(1.0)
    raise ValueError("a pipe burst")


@pytest.mark.parametrize("wait", [lambda e, p: e.event(), lambda e, p: simpy.AllOf(e, [p])])
def test_what_a_process_raises_ends_the_run(
    wait: Callable[[Clock, simpy.Event], simpy.Event],
) -> None:
    clock = Clock()
    end = wait(clock, clock.process(failing(clock)))
    with pytest.raises(ValueError, match="a pipe burst"):
        clock.run_until(end)


def test_a_process_may_catch_what_another_has_raised() -> None:
    clock, told = Clock(), []

    def careful() -> Process:
        try:
            yield clock.process(failing(clock))
        except ValueError as error:
            told.append(str(error))

    clock.run_until(clock.process(careful()))
    assert told == ["a pipe burst"]


def test_nothing_left_to_happen_is_an_error_and_a_negative_delay_too() -> None:
    clock = Clock()
    with pytest.raises(NothingLeftError):
        clock.run_until(clock.event())
    with pytest.raises(ValueError, match="Negative delay"):
        clock.timeout(-1.0)


@pytest.mark.parametrize("collects", [True, False])
def test_a_run_leaves_the_collector_of_cycles_as_it_was(collects: bool) -> None:
    seen: list[bool] = []

    def looks() -> Process:
        yield clock.timeout(2)
        seen.append(gc.isenabled())

    clock, before = Clock(), gc.isenabled()
    try:
        gc.enable() if collects else gc.disable()
        clock.run_until(clock.process(looks()))
        assert (seen, clock.now, gc.isenabled()) == ([False], 2.0, collects)
        with pytest.raises(NothingLeftError):
            clock.run_until(clock.event())
        assert gc.isenabled() is collects
    finally:
        gc.enable() if before else gc.disable()


def test_processes_leave_no_reference_cycles_behind() -> None:
    def left(processes: int) -> int:
        gc.collect()
        clock = Clock()
        end, _ = story(clock, [[("sleep", 1.0), ("child", 0.5), ("all", 1.0)]] * processes)
        clock.run_until(end)
        del end, clock
        return gc.collect()  # the clock's own, and those of the story

    assert left(50) == left(2)


def test_what_happens_at_once_comes_next() -> None:
    clock = Clock()
    assert clock.peek() == float("inf")
    clock.timeout(2.0)
    assert clock.peek() == 2.0
    clock.event().succeed()
    assert clock.peek() == 0.0
