"""The event loop, and cores against queueing theory."""

from __future__ import annotations

import gc
from math import factorial

import numpy as np
import pytest
import simpy
from hypothesis import given
from hypothesis import strategies as st

from persia_sim.engine.clock import Clock, NothingLeftError, Process, Running
from persia_sim.engine.hardware import Bank, FifoServer, HostMemory
from persia_sim.report.measure import Estimate, mean_interval
from tests.persia_sim import sim_configurations  # noqa: F401  # its hypothesis profile

CUSTOMERS = 120_000


def waits(cores: int, arrivals: np.ndarray, services: np.ndarray) -> np.ndarray:
    server = FifoServer(cores)
    delays = [server.visit(t, s) for t, s in zip(arrivals.tolist(), services.tolist(), strict=True)]
    return np.array(delays) - services


def agree(estimate: Estimate, expected: float, confidence: float = 2.0) -> None:
    """Within twice the 95 % half width (about 4 standard errors: once in 16,000 seeds)."""
    assert abs(estimate.mean - expected) < confidence * estimate.half_width
    assert estimate.relative < 0.15, "the sample is too small to say anything"


def poisson(rng: np.random.Generator, rate: float) -> np.ndarray:
    return np.cumsum(rng.exponential(1 / rate, CUSTOMERS))


@pytest.mark.parametrize(("cores", "load"), [(1, 0.7), (2, 0.7), (8, 0.85)])
def test_m_m_c_wait_is_erlang_c(cores, load):
    rng = np.random.default_rng(4)
    offered = cores * load
    tail = offered**cores / factorial(cores) / (1 - load)
    queued = tail / (sum(offered**k / factorial(k) for k in range(cores)) + tail)
    wait = waits(cores, poisson(rng, offered), rng.exponential(1.0, CUSTOMERS))
    agree(mean_interval(wait), queued / (cores - offered))


@pytest.mark.parametrize("memory", [0.0, 0.5, -0.5])
def test_intervals_cover_the_truth(memory):
    hits = 0
    for seed in range(300):
        shocks = np.random.default_rng(seed).normal(0.0, 1.0, 400)
        series = np.zeros(400)
        for k in range(1, 400):
            series[k] = memory * series[k - 1] + shocks[k]
        estimate = mean_interval(series[100:] + 5.0)
        hits += abs(estimate.mean - 5.0) < estimate.half_width
    assert 0.91 <= hits / 300 <= 0.99  # 95 % nominal; 300 trials have a standard error of 1.3 %


def test_a_periodic_series_gets_a_narrow_interval():
    """240 values: its batches of 40 are no whole periods, so that their means differ a little."""
    series = np.tile([1.0, 2.0, 6.0], 80)
    assert mean_interval(series).relative < 0.04
    rng = np.random.default_rng(0)
    shuffled = [mean_interval(rng.permutation(series)).relative for _ in range(20)]
    assert np.mean(shuffled) > 3 * mean_interval(series).relative


def test_bank_of_one_equals_a_single_server():
    rng = np.random.default_rng(9)
    arrivals, service = np.cumsum(rng.exponential(1.0, 500)), rng.exponential(2.0, 500)
    bank, server = Bank(1, 3, 1, np.inf), FifoServer(3)
    for t, s in zip(arrivals.tolist(), service.tolist(), strict=True):
        assert bank.visit_each(t, np.array([s]))[0] == server.visit(t, s)


@pytest.mark.parametrize("cores", [1, 2, 6])
def test_bank_is_its_servers_and_the_memory_of_its_hosts(cores):
    """Bursts that find free cores, then none, then some again; sometimes only the last is asked."""
    rng = np.random.default_rng(cores)
    shares = np.array([0.4, 0.6])
    bank = Bank(4, cores, 2, 5.0, shares)
    servers = [FifoServer(cores) for _ in range(4)]
    memory = [HostMemory(5.0) for _ in range(2)]
    now = 0.0
    for visit in range(300):
        now += float(rng.exponential(4.0 if visit % 40 < 30 else 0.1))
        service, size = rng.exponential(3.0, 4), float(rng.choice([1.0, 2.0]))
        host = [memory[h].visit(now, size * shares[h]) for h in range(2)]
        expected = [
            max(server.visit(now, float(s)), host[k // 2])
            for k, (server, s) in enumerate(zip(servers, service, strict=True))
        ]
        if rng.random() < 0.5:
            assert bank.longest(now, service, size) == pytest.approx(max(expected), rel=1e-12)
        else:
            assert bank.visit(now, service, size) == pytest.approx(expected, rel=1e-12)
    assert bank.busy_s == pytest.approx([server.busy_s for server in servers])
    assert bank.memory_busy_s == pytest.approx([each.busy_s for each in memory])


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
                yield delay if isinstance(env, Clock) else env.timeout(delay)
            elif what == "meet" and number % 2:
                waited, met = met, env.event()
                waited.succeed()
                yield env.timeout(delay)
            elif what == "meet":
                yield simpy.AnyOf(env, [met, env.timeout(9.0)])
            elif what == "child":
                env.process(nap(delay))  # nobody waits for it
            else:
                yield simpy.AllOf(env, [end_of(env.process(nap(delay))), env.timeout(1.0)])
            told.append((env.now, number, what))

    processes = [env.process(one(number, plan)) for number, plan in enumerate(plans)]
    return simpy.AllOf(env, list(map(end_of, processes))), told


def end_of(process: simpy.Process | Running) -> simpy.Event:
    return process.ended if isinstance(process, Running) else process


def test_events_are_counted_as_they_are_given():
    env = Clock()
    for number in range(3):
        assert env.events == number
        env.timeout(float(number))
    env.run_until(env.timeout(2.0))
    assert (env.now, env.events) == (2.0, 4)


@given(PLANS)
def test_events_happen_in_simpys_order(plans):
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


def test_what_a_process_raises_ends_the_run():
    clock = Clock()
    clock.process(failing(clock))
    with pytest.raises(ValueError, match="a pipe burst"):
        clock.run_until(clock.event())


def test_nothing_left_to_happen_is_an_error_and_a_negative_delay_too():
    clock = Clock()
    with pytest.raises(NothingLeftError):
        clock.run_until(clock.event())
    with pytest.raises(ValueError, match="Negative delay"):
        clock.timeout(-1.0)
    with pytest.raises(ValueError, match="Negative delay"):
        clock.run_until(clock.process(x for x in [-1.0]).ended)


@pytest.mark.parametrize("collects", [True, False])
def test_a_run_leaves_the_collector_of_cycles_as_it_was(collects):
    seen: list[bool] = []

    def looks() -> Process:
        yield clock.timeout(2)
        seen.append(gc.isenabled())

    clock, before = Clock(), gc.isenabled()
    try:
        gc.enable() if collects else gc.disable()
        clock.run_until(clock.process(looks()).ended)
        assert (seen, clock.now, gc.isenabled()) == ([False], 2.0, collects)
        with pytest.raises(NothingLeftError):
            clock.run_until(clock.event())
        assert gc.isenabled() is collects
    finally:
        gc.enable() if before else gc.disable()


def test_processes_leave_no_reference_cycles_behind():
    """By kind: threads of other tests leave garbage of their own."""
    kinds = (Running, simpy.Event)

    def alive() -> int:
        return sum(isinstance(thing, kinds) for thing in gc.get_objects())

    def left(processes: int) -> int:
        before = alive()
        clock = Clock()
        end, _ = story(clock, [[("sleep", 1.0), ("child", 0.5), ("all", 1.0)]] * processes)
        clock.run_until(end)
        del end, clock
        return alive() - before

    collects = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        assert left(50) == left(2)
    finally:
        gc.enable() if collects else gc.disable()


def test_what_happens_at_once_comes_next():
    clock = Clock()
    assert clock.peek() == float("inf")
    clock.timeout(2.0)
    assert clock.peek() == 2.0
    clock.event().succeed()
    assert clock.peek() == 0.0
