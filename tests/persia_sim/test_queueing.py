"""The servers against queueing theory; tolerances come from the sample's own interval."""

from __future__ import annotations

from math import factorial

import numpy as np
import pytest
import simpy

from persia_sim.engine.servers import Bank, FifoServer, HostMemory
from persia_sim.insight.measure import Estimate, mean_interval

CUSTOMERS = 60_000


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


def test_m_m_1_wait_is_rho_over_mu_minus_lambda() -> None:
    rng = np.random.default_rng(1)
    wait = waits(1, poisson(rng, 0.7), rng.exponential(1.0, CUSTOMERS))
    agree(mean_interval(wait), 0.7 / 0.3)


def test_m_d_1_waits_half_as_long() -> None:
    rng = np.random.default_rng(2)
    agree(mean_interval(waits(1, poisson(rng, 0.7), np.ones(CUSTOMERS))), 0.7 / 0.3 / 2)


def test_m_g_1_wait_is_pollaczek_khinchine() -> None:
    rng = np.random.default_rng(3)
    service = rng.gamma(2.0, 0.5, CUSTOMERS)  # mean 1, second moment 1.5
    agree(mean_interval(waits(1, poisson(rng, 0.6), service)), 0.6 * 1.5 / (2 * 0.4))


@pytest.mark.parametrize(("cores", "load"), [(2, 0.7), (8, 0.85)])
def test_m_m_c_wait_is_erlang_c(cores: int, load: float) -> None:
    rng = np.random.default_rng(4)
    offered = cores * load
    tail = offered**cores / factorial(cores) / (1 - load)
    queued = tail / (sum(offered**k / factorial(k) for k in range(cores)) + tail)
    wait = waits(cores, poisson(rng, offered), rng.exponential(1.0, CUSTOMERS))
    agree(mean_interval(wait), queued / (cores - offered))


def test_utilisation_law_and_littles_law_hold() -> None:
    rng = np.random.default_rng(5)
    arrivals, service = poisson(rng, 0.5), rng.exponential(1.0, CUSTOMERS)
    server = FifoServer(1)
    delays = np.array([server.visit(t, s) for t, s in zip(arrivals, service, strict=True)])
    leaves = arrivals + delays
    end = leaves.max()
    assert server.busy_s == pytest.approx(service.sum())  # U = X S
    times = np.concatenate([arrivals, leaves])
    change = np.concatenate([np.ones(CUSTOMERS), -np.ones(CUSTOMERS)])
    order = np.argsort(times, kind="stable")
    number = np.cumsum(change[order])[:-1]
    mean_number = (number * np.diff(times[order])).sum() / end
    assert mean_number == pytest.approx(delays.sum() / end, rel=1e-9)  # L = X T


def test_fork_join_of_k_exponentials_takes_the_harmonic_number_at_low_load() -> None:
    rng = np.random.default_rng(6)
    bank = Bank(16, 1, 1, np.inf)
    delays = np.array(
        [bank.visit_each(1e3 * i, rng.exponential(1.0, 16)).max() for i in range(20_000)]
    )
    agree(mean_interval(delays), sum(1 / k for k in range(1, 17)))


def test_tandem_of_exponential_servers_behaves_like_two_m_m_1() -> None:
    rng = np.random.default_rng(7)
    arrivals = poisson(rng, 0.6)
    first, second = rng.exponential(1.0, CUSTOMERS), rng.exponential(0.8, CUSTOMERS)
    between = arrivals + waits(1, arrivals, first) + first
    agree(mean_interval(waits(1, between, second)), 0.6 * 0.8**2 / (1 - 0.48))


def test_closed_network_agrees_with_mean_value_analysis() -> None:
    population, means = 6, (1.0, 0.7, 0.4)
    queue = [0.0] * 3
    for n in range(1, population + 1):
        stay = [mean * (1 + length) for mean, length in zip(means, queue, strict=True)]
        rate = n / sum(stay)
        queue = [rate * time for time in stay]
    rng = np.random.default_rng(8)
    env = simpy.Environment()
    servers = [FifoServer(1) for _ in means]
    passed: list[float] = []

    def customer():  # type: ignore[no-untyped-def]
        while True:
            for server, mean in zip(servers, means, strict=True):
                yield env.timeout(server.visit(env.now, rng.exponential(mean)))
            passed.append(env.now)

    for _ in range(population):
        env.process(customer())
    env.run(until=20_000)
    agree(mean_interval(np.diff(passed)[1000:]), 1 / rate)


@pytest.mark.parametrize("memory", [0.0, 0.5, -0.5])
def test_intervals_cover_the_truth(memory: float) -> None:
    hits = 0
    for seed in range(300):
        shocks = np.random.default_rng(seed).normal(0.0, 1.0, 400)
        series = np.zeros(400)
        for k in range(1, 400):
            series[k] = memory * series[k - 1] + shocks[k]
        estimate = mean_interval(series[100:] + 5.0)
        hits += abs(estimate.mean - 5.0) < estimate.half_width
    assert 0.91 <= hits / 300 <= 0.99  # 95 % nominal; 300 trials have a standard error of 1.3 %


def test_a_periodic_series_gets_a_narrow_interval() -> None:
    series = np.tile([1.0, 2.0, 6.0], 40)
    assert mean_interval(series).relative < 0.04
    rng = np.random.default_rng(0)
    shuffled = [mean_interval(rng.permutation(series)).relative for _ in range(20)]
    assert np.mean(shuffled) > 3 * mean_interval(series).relative


def test_bank_of_one_equals_a_single_server() -> None:
    rng = np.random.default_rng(9)
    arrivals, service = np.cumsum(rng.exponential(1.0, 500)), rng.exponential(2.0, 500)
    bank, server = Bank(1, 3, 1, np.inf), FifoServer(3)
    for t, s in zip(arrivals.tolist(), service.tolist(), strict=True):
        assert bank.visit_each(t, np.array([s]))[0] == server.visit(t, s)


@pytest.mark.parametrize("cores", [1, 2, 6])
def test_bank_is_its_servers_and_the_memory_of_its_hosts(cores: int) -> None:
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
