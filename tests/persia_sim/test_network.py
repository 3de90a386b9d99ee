"""Fluid, fifo and unshared NICs against slower solutions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from math import inf
from random import Random
from typing import Any

import pytest
import simpy
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.studies import ablation
from persia_sim.base.vocabulary import Mode
from persia_sim.cluster.scenario import Discipline, Noise, Scenario
from persia_sim.engine import hardware
from persia_sim.engine.simulate import simulate
from persia_sim.network.fair_shares import FairShares
from persia_sim.network.flows import Fifo, Unshared
from persia_sim.network.fluid import Fluid, InOrder
from tests.oracles.max_min import Filled, FilledInOrder, max_min
from tests.persia_sim.oracles import violations
from tests.persia_sim.sim_configurations import small_cluster, small_scenario

Message = tuple[float, tuple[int, ...], float, float]


def ends(
    capacities: list[float],
    messages: list[Message],
    kind: Callable[..., Any] = Fluid,
    roles: list[tuple[int, int] | None] | None = None,
) -> list[float]:
    """When each message (start, path, bytes, streams) of these roles has arrived."""
    env = simpy.Environment()
    network = kind(env, capacities, inf)
    found = [0.0] * len(messages)

    def one(number: int, message: Message):
        start, path, size, streams = message
        yield env.timeout(start)
        yield network.send(path, size, streams, roles[number] if roles else None)
        found[number] = env.now

    for number, message in enumerate(messages):
        env.process(one(number, message))
    env.run()
    return found


def test_cascade_of_two_links_shares_half_half_and_one_and_a_half():
    rates, held_by = max_min([[0], [0, 1], [1]], [1, 1, 1], [inf, inf, inf], {0: 1.0, 1: 2.0})
    assert rates == pytest.approx([0.5, 0.5, 1.5])
    assert held_by == [0, 0, 1]


def test_fifo_serves_in_order_and_unshared_lets_pass():
    messages: list[Message] = [(0, (0, 1), 1, 1), (0, (0, 1), 2, 1), (1, (1,), 1, 1)]
    assert ends([1.0, 1.0], messages, Fifo) == [1, 3, 4]
    assert ends([1.0, 1.0], messages, Unshared) == [1, 2, 2]


def test_messages_of_one_connection_go_in_order_and_share_as_one():
    """Two messages of rank 0 and one of rank 1, over a link of 1 byte a second."""
    messages: list[Message] = [(0, (0,), 1, 1), (0, (0,), 2, 1), (0, (0,), 2, 1)]
    roles = [(0, 7), (0, 7), (1, 7)]
    assert ends([1.0], messages, InOrder, roles) == [2, 5, 4]
    assert ends([1.0], messages, Fluid, roles) == [3, 5, 5]


def test_another_path_kind_or_rank_is_another_connection():
    messages: list[Message] = [(0, path, 1, 1) for path in [(0, 1), (0, 2), (0, 1), (0, 1)]]
    roles = [(0, 7), (0, 7), (0, 8), (1, 7)]
    assert ends([1.0, 9.0, 9.0], messages, InOrder, roles) == [4, 4, 4, 4]


def fifo_by_seconds(capacities: list[int], messages: list[Message]) -> list[int]:
    """When each message has arrived: in every second those sent first take the links that they
    still need, if nobody before them has one. Sizes are multiples of all capacities."""
    left = [{link: size // capacities[link] for link in path} for _, path, size, _ in messages]
    found = [0] * len(messages)
    second = 0
    while any(map(len, left)):
        taken: set[int] = set()
        for number, links in enumerate(left):
            if messages[number][0] <= second and not taken & set(links):
                taken |= set(links)
                left[number] = {link: n - 1 for link, n in links.items() if n > 1}
                found[number] = second + 1 if links else found[number]
        second += 1
    return found


@given(st.data())
def test_in_fifo_a_link_is_idle_only_if_nobody_who_waits_for_it_could_move(data):
    links = data.draw(st.integers(2, 5))
    capacities = data.draw(st.lists(st.sampled_from([1, 2, 3]), min_size=links, max_size=links))
    path = st.lists(st.integers(0, links - 1), min_size=1, max_size=2, unique=True).map(tuple)
    size = st.integers(1, 3).map(lambda n: 6 * n)
    message = st.tuples(st.integers(0, 30), path, size, st.just(1.0))
    messages = sorted(data.draw(st.lists(message, max_size=12)), key=lambda each: each[0])
    assert ends([float(c) for c in capacities], messages, Fifo) == fifo_by_seconds(
        capacities, messages
    )


@pytest.mark.parametrize("kind", [Fifo, Unshared, Fluid, InOrder])
@pytest.mark.parametrize(("streams", "took_s"), [(1, 6.0), (3, 2.0), (5, 1.2), (50, 1.2)])
def test_a_message_in_several_streams_is_as_fast_as_all_of_them_or_its_slowest_link(
    kind, streams, took_s
):
    """12 bytes over links of 10 and 20 bytes a second, in streams of 2 each."""
    env = simpy.Environment()
    sent = kind(env, [10.0, 20.0], 2.0).send((0, 1), 12.0, streams)
    env.run(until=sent)
    assert env.now == pytest.approx(took_s)


@pytest.mark.parametrize("kind", [Fifo, Unshared, Fluid, InOrder])
def test_messages_on_links_without_a_limit_arrive_at_once(kind):
    messages: list[Message] = [(0, (0,), 5, 1), (0, (0,), 7, 3), (2, (0, 1), 9, 1)]
    assert ends([inf, inf], messages, kind) == [0, 0, 2]


@st.composite
def sharing(draw: st.DrawFn) -> tuple[list[list[int]], list[float], list[float], dict[int, float]]:
    links = draw(st.integers(1, 6))
    paths = draw(
        st.lists(
            st.lists(st.integers(0, links - 1), min_size=1, max_size=3, unique=True),
            min_size=1,
            max_size=12,
        )
    )
    positive = st.floats(0.01, 100)
    weights = [float(draw(st.integers(1, 30))) for _ in paths]
    bounds = [draw(positive) for _ in paths]
    return paths, weights, bounds, {link: draw(positive) for link in range(links)}


def naive_max_min(
    paths: list[list[int]], weights: list[float], bounds: list[float], capacities: dict[int, float]
) -> list[Fraction]:
    """Progressive filling as it is defined, in exact fractions: all flows grow at one rate per
    weight until a link is full or a flow at its bound; those stop, and the others go on."""
    rates: dict[int, Fraction] = {}
    room = {link: Fraction(capacity) for link, capacity in capacities.items()}
    ratio = [Fraction(b) / Fraction(w) for b, w in zip(bounds, weights, strict=True)]
    while len(rates) < len(paths):
        growing = [flow for flow in range(len(paths)) if flow not in rates]
        level = {
            link: (left - sum((rates[f] for f in rates if link in paths[f]), Fraction(0))) / load
            for link, left in room.items()
            if (load := sum(Fraction(weights[f]) for f in growing if link in paths[f]))
        }
        least = min([ratio[flow] for flow in growing] + list(level.values()))
        full = {link for link, reached in level.items() if reached == least}
        for flow in growing:
            if ratio[flow] == least or full & set(paths[flow]):
                rates[flow] = least * Fraction(weights[flow])
    return [rates[flow] for flow in range(len(paths))]


@given(sharing())
@pytest.mark.law8
def test_rates_on_any_network_are_those_of_exact_progressive_filling(problem):
    rates, _ = max_min(*problem)
    exact = naive_max_min(*problem)
    assert violations([float(rate) for rate in exact], *problem) == []
    assert rates == pytest.approx([float(rate) for rate in exact], rel=1e-9)


@given(st.integers(2, 300), st.integers(0, 2**32), st.sampled_from([1e-12, 1.0, 1e5]))
def test_however_many_flows_of_whatever_weight_meet_the_solver_ends(flows, seed, scale):
    """A sum of weights from which all were taken again is seldom exactly 0."""
    draws = Random(seed)
    paths = [draws.sample(range(4), draws.randint(1, 3)) for _ in range(flows)]
    weights = [scale * draws.uniform(0.001, 1) for _ in paths]
    bounds = [draws.choice([1e-3, 1.0, 1e9]) for _ in paths]
    capacities = {link: draws.uniform(0.5, 2) for link in range(4)}
    rates, _ = max_min(paths, weights, bounds, capacities)
    assert violations(rates, paths, weights, bounds, capacities, tolerance=1e-6) == []


@given(sharing())
def test_whoever_is_held_back_has_as_much_as_any_on_that_link_and_the_link_is_full(problem):
    paths, weights, bounds, capacities = problem
    rates, held_by = max_min(*problem)
    for path, bound, rate, weight, link in zip(paths, bounds, rates, weights, held_by, strict=True):
        if link < 0:
            assert rate == bound
        else:
            on_it = [flow for flow, other in enumerate(paths) if link in other]
            assert link in path
            assert sum(rates[flow] for flow in on_it) == pytest.approx(capacities[link], rel=1e-9)
            most = max(rates[flow] / weights[flow] for flow in on_it)
            assert rate / weight == pytest.approx(most, rel=1e-9)


def _slow_nic(scenario: Scenario, role: str, factor: float) -> Scenario:
    part = getattr(scenario.cluster, role)
    host = replace(part.host, nic_bytes_per_s=part.host.nic_bytes_per_s / factor)
    cluster = replace(scenario.cluster, **{role: replace(part, host=host)})
    return replace(scenario, cluster=cluster)


@given(st.integers(2, 5), st.lists(st.tuples(st.floats(0, 4), st.integers(0, 2), st.floats(1, 9)),
                                    min_size=1, max_size=8), st.floats(1, 12))  # fmt: skip
@pytest.mark.parametrize("kind", [Fluid, InOrder])
def test_a_fan_out_as_one_message_ends_with_the_last_of_its_single_ones(kind, servers, sent, rate):
    """Three workers send the same share to each of several servers, or from there; a NIC of all
    servers together takes one message of as many streams for as long, beside a message to a rank
    for every fan-out."""
    workers = [4.0, 6.0, 3.0]
    beside: list[Message] = [(at, (w,), size, 1.0) for at, w, size in sent]
    whole: list[Message] = [(at, (w, 3), servers * size, servers) for at, w, size in sent]
    single: list[Message] = [
        (at, (w, 3 + server), size, 1.0) for at, w, size in sent for server in range(servers)
    ]
    one = ends([*workers, servers * rate], [*whole, *beside], kind)
    each = ends([*workers, *[rate] * servers], [*single, *beside], kind)
    last = [max(each[n * servers : (n + 1) * servers]) for n in range(len(sent))]
    assert one == pytest.approx([*last, *each[len(single) :]], rel=1e-6)


@pytest.mark.parametrize("discipline", list(Discipline))
def test_every_byte_that_is_asked_for_is_carried_once(discipline):
    run = simulate(small_scenario(Mode.HYBRID, discipline=discipline))
    need, batches = run.need, run.scenario.cluster.ranks * run.scenario.steps
    sent = dict.fromkeys(("GPU host", "worker host", "server hosts"), 0.0)
    for name, size in run.link_bytes.items():
        sent[next(role for role in sent if name.startswith(role))] += size
    fetch = need.fetch
    to_rank = fetch.activation_bytes + need.push.gradient_bytes
    to_servers = fetch.request_bytes + fetch.rows_bytes + need.push.push_bytes
    assert sent["GPU host"] == pytest.approx(batches * (to_rank + need.input_bytes))
    assert sent["server hosts"] == pytest.approx(batches * to_servers)
    assert sent["worker host"] == pytest.approx(
        batches * (to_rank + to_servers + need.loader_bytes)
    )


Role = tuple[int, int] | None


@st.composite
def racks(draw: st.DrawFn) -> tuple[list[float], list[Message]]:
    """Any network: paths of one to three links in any order, as over the uplinks of two racks, and
    streams of several weights on each; some links have no limit."""
    links = draw(st.integers(2, 6))
    rate = st.sampled_from([0.5, 1.0, 2.0, 4.0, 8.0, 16.0, inf]) | st.floats(0.5, 20)
    capacities = [draw(rate) for _ in range(links)]
    path = st.lists(st.integers(0, links - 1), min_size=1, max_size=3, unique=True).map(tuple)
    start = st.sampled_from([0.0, 0.5, 1.0]) | st.floats(0, 4)
    size = st.sampled_from([1.0, 8.0]) | st.floats(0.5, 20)
    weight = st.sampled_from([1.0, 2.0, 30.0]) | st.floats(0.1, 50)
    message = st.tuples(start, path, size, weight)
    return capacities, draw(st.lists(message, min_size=4, max_size=25))


@st.composite
def hosts(draw: st.DrawFn) -> tuple[list[float], list[Message]]:
    """The network of a cluster: workers send to ranks, and with great weight to all servers, whose
    share leads the others."""
    workers, ranks = draw(st.integers(1, 6)), draw(st.integers(1, 4))
    servers = workers + ranks
    rate = st.sampled_from([4.0, 8.0]) | st.floats(3, 12)
    capacities = [draw(rate) for _ in range(servers)] + [draw(st.floats(0.5, 20))]
    worker, rank = st.integers(0, workers - 1), st.integers(workers, servers - 1)
    path = st.tuples(worker, st.just(servers)) | st.tuples(worker, rank) | st.tuples(worker)
    start = st.sampled_from([0.0, 0.5, 1.0]) | st.floats(0, 8)
    messages = []
    for _ in range(draw(st.integers(5, 60))):
        links = draw(path)
        weight = draw(st.sampled_from([20.0, 30.0])) if servers in links else 1.0
        messages.append((draw(start), links, draw(st.floats(0.5, 20)), weight))
    return capacities, messages


def of_roles(messages: list[Message], seed: int) -> list[Role]:
    draws = Random(seed)
    return [draws.choice([None, (0, 1), (1, 1), (1, 2)]) for _ in messages]


@pytest.mark.long
@settings(max_examples=300)
@given(racks() | hosts(), st.integers(0, 2**32))
@pytest.mark.law8
def test_over_time_any_network_is_shared_as_filling_anew_shares_it(problem, seed):
    roles = of_roles(problem[1], seed)
    for kind, oracle in ((Fluid, Filled), (InOrder, FilledInOrder)):
        assert ends(*problem, kind, roles) == pytest.approx(
            ends(*problem, oracle, roles), rel=1e-9, abs=1e-12
        )


def rates_now(network: Fluid) -> tuple[list[float], list[list[int]], list[float], list[float]]:
    """Of every message on its way: rate, links, weight and bound."""
    crossings = [crossing for link in network._links for crossing in link.crossings.values()]
    flows = dict.fromkeys([flow for crossing in crossings for flow in crossing.flows])
    return (
        [flow.bottleneck.level_now() * flow.weight for flow in flows],
        [[link.number for link in flow.path] for flow in flows],
        [flow.weight for flow in flows],
        [flow.bound.level * flow.weight for flow in flows],
    )


@given(racks() | hosts(), st.sets(st.integers(0, 96), min_size=3))
@pytest.mark.law8
def test_whenever_one_looks_the_rates_are_those_of_exact_filling(problem, eighths):
    """Whether levels were found anew or follow a leader; bounds by links and by streams."""
    capacities, messages = problem
    env = simpy.Environment()
    network = Fluid(env, capacities, 0.75)

    def one(start: float, path: tuple[int, ...], size: float, streams: float):
        yield env.timeout(start)
        yield network.send(path, size, streams)

    for message in messages:
        env.process(one(*message))
    room = {link: capacity for link, capacity in enumerate(capacities) if capacity < inf}
    for eighth in sorted(eighths):
        env.run(until=eighth / 8 + 1e-6)  # what begins at that instant has its rate
        rates, paths, weights, bounds = rates_now(network)
        exact = naive_max_min(paths, weights, bounds, room)
        assert rates == pytest.approx([float(rate) for rate in exact], rel=1e-9)


def looked_at_by(monkeypatch: pytest.MonkeyPatch) -> list[set[int]]:
    """The links at which each change looks, from now on."""
    looked: list[set[int]] = []
    settle = FairShares.settle

    def noted(self: FairShares, now_s: float):
        links = settle(self, now_s)
        looked.append({link.number for link in links})
        return links

    monkeypatch.setattr(FairShares, "settle", noted)
    return looked


def test_a_message_more_in_a_crowd_is_felt_on_its_own_card_alone(monkeypatch):
    """Ten cards send through a slow link, and each full card sends to a receiver of its own, too: a
    message more, on either way, is looked at where it passes."""
    looked = looked_at_by(monkeypatch)
    env = simpy.Environment()
    network = Fluid(env, [1.0] + [2.0] * 10 + [9.0] * 10, inf)
    for card in range(1, 11):
        for _ in range(3):
            network.send((card, 0), 1e6)
        network.send((card, card + 10), 1e6)
        network.send((card, card + 10), 1e6)
    env.run(until=1)
    network.send((3, 13), 1e6)
    env.run(until=2)
    network.send((4, 0), 1e6)
    env.run(until=3)
    assert looked[-2:] == [{3}, {0, 4}]


def test_whoever_is_at_its_bound_shares_the_link_when_its_leader_takes_more():
    """A message at its bound of 3.7 leaves another one 3.8 of a card of 9, until the crowd, which
    takes 1.5, takes 3: then both get 3."""
    messages: list[Message] = [(0, (0, 1), 100, 1), (0, (0,), 100, 1)]
    messages += [(0, (0, 2), 100, 20), (0, (2,), 1.5, 20)]
    capacities = [9.0, 3.7, 3.0]
    filled = ends(capacities, messages, Filled)
    assert ends(capacities, messages) == pytest.approx(filled, rel=1e-9)


def test_a_link_that_has_room_between_two_crowds_is_full_beside_both():
    """Found by chance in an earlier solver."""
    messages: list[Message] = [
        *[(0, (1, 2), 1, 2), (0, (2, 1, 0), 1, 1), (0, (0, 2), 8, 1), (0, (0,), 1, 1)],
        *[(0, (1, 2, 0), 2, 1), (0, (0, 1, 2), 2, 30), (0, (0,), 1, 30), (0, (2, 1), 0.5, 1)],
        *[(0.5, (0, 1), 1, 30), (0.5, (1,), 1, 1)],
        *[(2.5, (2,), 1, 30), (2.5, (1,), 0.5, 1), (2.5, (2,), 1, 1), (2.5, (2,), 8, 30)],
        *[(2.5, (0, 1, 2), 1, 1), (3, (0,), 1, 30), (3, (2, 0), 8, 2), (3, (0, 2), 8, 1)],
        *[(3, (0,), 2, 1), (3, (0, 2), 1, 1)],
    ]
    capacities = [0.5, 0.5, 0.5]
    filled = ends(capacities, messages, Filled)
    assert ends(capacities, messages) == pytest.approx(filled, rel=1e-9)


def test_what_a_crowd_took_of_a_link_is_forgotten_while_others_need_not_share_it():
    """Found by chance in an earlier solver: a card was alone with one message, at its bound, until
    the crowd came back and took what it had taken before."""
    messages: list[Message] = [
        *[(0.0625, (3, 0), 1, 30), (0.625, (1, 0), 1, 30), (0, (1, 0), 0.75, 30)],
        *[(0, (1, 5), 0.5, 1), (0.5, (1, 5), 1, 1), (0, (1, 0), 0.5, 30)],
        *[(0, (2, 0), 1, 30), (0, (1, 5), 0.5, 1), (1, (1, 5), 1, 1)],
    ]
    capacities = [4.5, 4.0, 3.0, 3.0, 1.0, 3.0]
    filled = ends(capacities, messages, Filled)
    assert ends(capacities, messages) == pytest.approx(filled, rel=1e-9)


RUNS: dict[str, Callable[[], Scenario]] = {
    "server NICs": lambda: _slow_nic(small_scenario(), "servers", 40),
    "rank NICs": lambda: _slow_nic(small_scenario(Mode.SYNC), "nn", 100),
    "forwarded": lambda: _slow_nic(
        small_scenario(Mode.LOOKAHEAD, lookahead="forwarded"), "embedding_workers", 40
    ),
}


@pytest.mark.parametrize("discipline", [Discipline.FLUID, Discipline.FLUID_EACH])
@pytest.mark.parametrize("binds", RUNS)
def test_a_run_has_the_instants_of_one_whose_network_is_filled_anew(binds, discipline, monkeypatch):
    """With noise, so that no two batches reach a server at one instant."""
    noise = Noise(gpu_cv=0.1, server_cv=0.3)
    scenario = replace(RUNS[binds](), discipline=discipline, noise=noise)
    run = simulate(scenario)
    filled = {Discipline.FLUID: FilledInOrder, Discipline.FLUID_EACH: Filled}
    monkeypatch.setattr(hardware, "_DISCIPLINES", filled)
    anew = simulate(scenario)
    assert run.stamps == pytest.approx(anew.stamps, rel=1e-9)
    assert run.link_bytes == pytest.approx(anew.link_bytes)


def test_two_links_that_take_a_flow_from_each_other_let_a_third_find_its_level(monkeypatch):
    """Each went by what the third one took before, and was looked at first: for ever."""
    change = ablation.VARIANTS["duplicate ids sent"]
    scenario = change(ablation.scenario_of("Kwai", ablation.Options(steps=8)))
    run = simulate(scenario)
    monkeypatch.setattr(hardware, "_DISCIPLINES", {scenario.discipline: FilledInOrder})
    assert run.stamps == pytest.approx(simulate(scenario).stamps, rel=1e-9)


def test_a_run_on_full_nics_gives_the_same_bytes_again():
    base = small_scenario(Mode.HYBRID, cluster=small_cluster(6, 4, 3), steps=12)
    scenario = _slow_nic(base, "servers", 40)
    first, second = (simulate(scenario, trace=True) for _ in range(2))
    assert first.stamps.tobytes() == second.stamps.tobytes()
    assert first.legs.tobytes() == second.legs.tobytes()
    assert first.trace.events.tobytes() == second.trace.events.tobytes()
