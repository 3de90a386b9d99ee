"""Links that hold many flows back at once: the same rates as flow by flow."""

from __future__ import annotations

from fractions import Fraction
from math import inf

import pytest
import simpy
from hypothesis import given, settings
from hypothesis import strategies as st

from persia_sim.network.fluid import Fluid
from tests.persia_sim.test_network import naive_max_min

Message = tuple[float, tuple[int, ...], float, float]


def ends(capacities: list[float], messages: list[Message], hub_flows: int) -> list[float]:
    env = simpy.Environment()
    network = Fluid(env, capacities, inf, hub_flows)
    found = [0.0] * len(messages)

    def one(number: int, message: Message):  # type: ignore[no-untyped-def]
        start, path, size, streams = message
        yield env.timeout(start)
        yield network.send(path, size, streams)
        found[number] = env.now

    for number, message in enumerate(messages):
        env.process(one(number, message))
    env.run()
    return found


@st.composite
def crowded(draw: st.DrawFn) -> tuple[list[float], list[Message]]:
    """Fan-outs through one slow link, and other messages over the same cards."""
    cards = draw(st.integers(2, 6))
    positive = st.floats(0.5, 20)
    capacities = [draw(st.floats(0.5, 8))] + [draw(positive) for _ in range(2 * cards)]
    messages: list[Message] = []
    for _ in range(draw(st.integers(5, 40))):
        card, start = draw(st.integers(1, cards)), draw(st.floats(0, 4))
        if draw(st.booleans()):
            messages.append((start, (card, 0), draw(positive), 30.0))
        else:
            messages.append((start, (card, cards + card), draw(positive), 1.0))
    return capacities, messages


@st.composite
def racks(draw: st.DrawFn) -> tuple[list[float], list[Message]]:
    """Any network: paths of one to three links in any order, as over the uplinks of two racks, and
    streams of several weights on each."""
    links = draw(st.integers(2, 6))
    capacities = [draw(st.sampled_from([0.5, 1.0, 2.0, 4.0, 8.0, 16.0])) for _ in range(links)]
    path = st.lists(st.integers(0, links - 1), min_size=1, max_size=3, unique=True).map(tuple)
    start = st.sampled_from([0.0, 0.5, 1.0]) | st.floats(0, 4)
    message = st.tuples(start, path, st.floats(0.5, 20), st.sampled_from([1.0, 2.0, 30.0]))
    return capacities, draw(st.lists(message, min_size=4, max_size=25))


@given(racks(), st.integers(1, 4))
def test_a_hub_gives_the_same_ends_on_any_network(
    problem: tuple[list[float], list[Message]], hub_flows: int
) -> None:
    single = ends(*problem, hub_flows=10**9)
    assert ends(*problem, hub_flows=hub_flows) == pytest.approx(single, rel=1e-7)


def exact_ends(capacities: list[float], messages: list[Message]) -> list[float]:
    """When each message has arrived: between two events all rates are those of exact progressive
    filling over everything that is on its way. No heap, no memory of earlier rates, no hub."""
    left = {number: Fraction(message[2]) for number, message in enumerate(messages)}
    now, found = Fraction(0), [0.0] * len(messages)
    while left:
        on_its_way = [number for number in left if messages[number][0] <= now]
        later = [Fraction(messages[number][0]) for number in left if messages[number][0] > now]
        rates: dict[int, Fraction] = {}
        if on_its_way:
            paths = [list(messages[number][1]) for number in on_its_way]
            weights = [messages[number][3] for number in on_its_way]
            bounds = [min(capacities[link] for link in path) for path in paths]
            shares = naive_max_min(paths, weights, bounds, dict(enumerate(capacities)))
            rates = dict(zip(on_its_way, shares, strict=True))
        ends = [now + left[number] / rate for number, rate in rates.items()]
        until = min(later + ends)
        for number, rate in rates.items():
            left[number] -= rate * (until - now)
            if left[number] == 0:
                del left[number]
                found[number] = float(until)
        now = until
    return found


@settings(max_examples=25)
@given(racks(), st.integers(1, 4))
def test_over_time_any_network_is_shared_as_exact_filling_shares_it(
    problem: tuple[list[float], list[Message]], hub_flows: int
) -> None:
    capacities, messages = problem[0], problem[1][:9]
    coarse = [(round(8 * s) / 8, path, round(4 * n) / 4, w) for s, path, n, w in messages]
    assert ends(capacities, coarse, hub_flows) == pytest.approx(exact_ends(capacities, coarse))


@given(crowded(), st.integers(1, 8))
def test_a_hub_gives_the_same_ends_as_flow_by_flow(
    problem: tuple[list[float], list[Message]], hub_flows: int
) -> None:
    single = ends(*problem, hub_flows=10**9)
    assert ends(*problem, hub_flows=hub_flows) == pytest.approx(single, rel=1e-8)
