"""A rate or a ratio as a range over what nobody knows."""

from dataclasses import asdict, replace
from itertools import pairwise
from math import exp, log
from statistics import NormalDist

import pytest

from persia_sim.base.vocabulary import Mode
from persia_sim.bounds.closed_form import answer
from persia_sim.cluster.scenario import Scenario
from persia_sim.engine.simulate import simulate
from persia_sim.presets.catalogue import MACHINES, SIZED_FOR, workloads
from persia_sim.presets.costs import FITS
from persia_sim.presets.point import Point, scenario_of
from persia_sim.report.figures import figures
from persia_sim.report.hosts import cheapest, sized, unknown_hosts, with_hosts
from persia_sim.report.measure import NARROW, throughput
from persia_sim.report.ranges import (
    ASSUMED_LN,
    DRAWS,
    END,
    HOSTS,
    MODE_LN,
    MODEL_LN,
    NICS,
    WORKERS,
    Input,
    OnServers,
    Range,
    joint_draws,
    range_of,
)
from persia_sim.report.report import report
from persia_sim.report.screen import SPEED, facts, si
from persia_sim.sharded.compare import OnGpus, comparison, job_of, sides
from persia_sim.sharded.sizing import Asked, hybrid_on
from persia_sim.sharded.software import SOFTWARE, band_ln
from persia_sim.sharded.stages import step_s


def scenario(mode: Mode = Mode.HYBRID, cluster: str = "h100-host", **given: object) -> Scenario:
    tau = 16 if mode is Mode.HYBRID else None
    return scenario_of(Point(cluster=cluster, workload="kwai-video", mode=mode, tau=tau, **given))


def slower_workers(of: Scenario, times: float) -> Scenario:
    """By hand: every second of an embedding worker so many times as long."""
    costs = of.costs
    laws = {}
    for name in ("worker_forward", "worker_rpc", "worker_pool", "worker_scatter"):
        law = getattr(costs, name)
        seconds = {p: times * getattr(law, p) for p in ("fixed_s", "per_item_s", "per_byte_s")}
        laws[name] = replace(law, **seconds)
    return replace(of, costs=replace(costs, **laws))


def test_a_ratio_is_printed_with_its_range_and_a_wide_one_by_its_lower_end():
    assert f"{Range(3.6, 4.7, 7.3):.1f}" == "4.7 (3.6 to 7.3)"
    assert f"{Range(3.6, 4.7, 10.9):.1f}" == "at least 3.6"
    assert f"{Range(1e5, 2e5, 2.5e5):,.0f}" == "200,000 (100,000 to 250,000)"
    inputs = (Input("a", 3.0, 6.0), Input("b", 4.0, 5.0), Input("c", 4.5, 4.6))
    found = Range(3.0, 4.0, 6.0, inputs)
    assert found.decisive == "a, and then b" and found.width == 2
    assert Range(1.0, 1.0, 1.0).decisive == "nothing"


def test_a_figure_over_a_range_turns_its_ends():
    dollars = Range(2.0, 4.0, 5.0, (Input("a", 2.5, 4.5),)).under(20.0)
    assert (dollars.low, dollars.value, dollars.high) == (4.0, 5.0, 10.0)
    assert dollars.inputs == (Input("a", 8.0, 20 / 4.5),)
    doubled = dollars.times(2.0)
    assert (doubled.low, doubled.value, doubled.high) == (8.0, 10.0, 20.0)


def test_a_range_is_four_fields_as_json():
    found = asdict(Range(1.0, 2.0, 3.0, (Input("a", 1.5, 2.5),)))
    inputs = ({"name": "a", "low": 1.5, "high": 2.5},)
    assert found == {"low": 1.0, "value": 2.0, "high": 3.0, "inputs": inputs}


@pytest.mark.long
def test_a_side_over_itself_is_one_whatever_isdrawn():
    for mode in (Mode.SYNC, Mode.HYBRID):
        side = OnServers(scenario=scenario(mode, ranks=8, steps=40))
        for simulated in (True, False):
            found = range_of(side, side, simulated=simulated)
            assert (found.low, found.value, found.high, found.inputs) == (1.0, 1.0, 1.0, ())


def test_the_ends_of_an_assumed_constant_are_twice_and_half_of_it():
    assert exp(ASSUMED_LN * END) == pytest.approx(2)
    hybrid = scenario()
    sync = scenario(Mode.SYNC)
    found = range_of(OnServers(scenario=hybrid), OnServers(scenario=sync), simulated=False)
    (workers,) = [each for each in found.inputs if each.name == WORKERS]
    for end, times in ((workers.low, 2.0), (workers.high, 0.5)):
        rates = [answer(slower_workers(s, times)).samples_per_s for s in (hybrid, sync)]
        assert end == pytest.approx(rates[0] / rates[1], rel=1e-9)


def test_a_fitted_constant_moves_by_the_spread_of_its_fit():
    sync = scenario(Mode.SYNC, "v100-paper")
    law = OnServers(scenario=sync).drawn({WORKERS: END}).costs.worker_pool
    by = log(sync.costs.worker_pool.per_byte_s / law.per_byte_s)
    assert by == pytest.approx(1.645 * FITS["path_s_per_byte"].spread, rel=1e-3)


def test_messages_never_reach_more_than_their_nics():
    side = OnServers(scenario=scenario())
    nominal = side.scenario.cluster.servers.host.nic_bytes_per_s
    rates = [
        side.drawn({NICS: z}).cluster.servers.host.nic_bytes_per_s / nominal
        for z in (-END, 0.0, END)
    ]
    assert rates == pytest.approx([0.6, 1.0, 1.0])


def test_the_model_itself_may_be_off_and_a_ratio_sees_only_what_modes_do_not_share():
    side = OnServers(scenario=scenario())
    other = OnServers(scenario=scenario(Mode.SYNC))
    one = {each.name: each for each in range_of(side, simulated=False).inputs}
    two = {each.name: each for each in range_of(side, other, simulated=False).inputs}
    model = one["errors of the model"]
    assert model.high / model.low == pytest.approx(exp(2 * END * MODEL_LN))
    assert "errors of the model" not in two
    for name in ("errors of the model in hybrid, tau 16", "errors of the model in sync"):
        assert abs(log(two[name].high / two[name].low)) == pytest.approx(2 * END * MODE_LN)


def test_draws_cover_each_input_evenly_and_do_not_depend_on_other_inputs():
    draws = joint_draws(["a", "b"])
    assert len(draws) == DRAWS == 32
    for name in ("a", "b"):
        parts = sorted(NormalDist().cdf(draw[name]) for draw in draws)
        assert parts == pytest.approx([(k + 0.5) / 32 for k in range(32)])
    assert [draw["b"] for draw in joint_draws(["b"])] == [draw["b"] for draw in draws]
    assert [draw["a"] for draw in draws] != [draw["b"] for draw in draws]


@pytest.mark.long
def test_a_simulated_range_holds_its_value_and_its_closed_form_is_near():
    hybrid = OnServers(scenario=scenario())
    sync = OnServers(scenario=scenario(Mode.SYNC))
    found = range_of(hybrid, sync)
    rates = [throughput(simulate(side.scenario)).mean for side in (hybrid, sync)]
    assert found.value == pytest.approx(rates[0] / rates[1])
    assert found.low < found.value < found.high
    by_bound = range_of(hybrid, sync, value=found.value, simulated=False)
    assert by_bound.value == found.value
    assert found.low == pytest.approx(by_bound.low, rel=0.4)
    assert found.high == pytest.approx(by_bound.high, rel=0.4)


def test_inputs_stand_in_the_order_in_which_they_move_the_figure():
    found = range_of(OnServers(scenario=scenario(Mode.SYNC)), simulated=False)
    moves = [abs(log(each.high / each.low)) for each in found.inputs]
    assert moves == sorted(moves, reverse=True)
    assert found.decisive.startswith(WORKERS)


@pytest.mark.long
def test_numbers_of_hosts_that_nobody_knows_are_those_of_half_and_twice_the_rate():
    hybrid = scenario()
    sides = [
        OnServers(scenario=each, hosts=unknown_hosts("h100-host", hybrid))
        for each in (hybrid, scenario(Mode.SYNC))
    ]
    found = range_of(*sides, simulated=False)
    (end,) = [each for each in found.inputs if each.name == HOSTS]
    for ratio, rate in ((end.low, 2.5e5), (end.high, 1e6)):
        cluster = sized(hybrid, rate, "f32-adagrad").cluster
        rates = [answer(replace(s.scenario, cluster=cluster)).samples_per_s for s in sides]
        assert ratio == pytest.approx(rates[0] / rates[1])


def test_a_split_that_nobody_published_is_from_a_third_to_two_thirds():
    hosts = unknown_hosts("v100-paper", scenario(cluster="v100-paper"))
    counts = [(c.embedding_workers.hosts, c.servers.hosts) for c in map(hosts, (0.5, 1.0, 2.0))]
    assert counts == [(33, 67), (50, 50), (67, 33)]
    assert unknown_hosts("gcp-100t", scenario(cluster="v100-paper")) is None


def test_the_host_of_h100_has_as_many_hosts_beside_it_as_size_takes():
    cluster = scenario().cluster
    hosts = [getattr(cluster, role).host for role in ("nn", "embedding_workers", "servers")]
    asked = Asked(
        workload=scenario().workload,
        samples_per_s=SIZED_FOR["h100-host"],
        tau=16,
        rows="f32-adagrad",
        software=SOFTWARE["torchrec"],
    )
    found = hybrid_on(asked, *hosts).scenario.cluster
    for role in ("nn", "embedding_workers", "servers"):
        assert getattr(found, role).hosts == getattr(cluster, role).hosts, role


def test_hosts_are_sized_for_a_rate_as_few_as_reach_it():
    found = sized(scenario(), 5e5, "f32-adagrad")
    workers = found.cluster.embedding_workers.hosts
    servers = found.cluster.servers.hosts
    assert answer(found).samples_per_s >= 5e5
    assert answer(with_hosts(found, workers - 1, servers)).samples_per_s < 5e5
    assert answer(with_hosts(found, 256, servers - 1)).samples_per_s < 5e5
    # Sync waits for its rows on any number of hosts: more are of no use from some on.
    most = sized(scenario(Mode.SYNC), 5e5, "f32-adagrad")
    plenty = answer(with_hosts(most, 256, most.cluster.servers.hosts)).samples_per_s
    assert answer(most).samples_per_s >= 0.99 * plenty and plenty < 5e5


@pytest.mark.parametrize("mode", [Mode.SYNC, Mode.HYBRID])
def test_a_sample_costs_least_on_the_cheapest_hosts(mode):
    found = cheapest(scenario(mode), "f32-adagrad")

    def usd(of: Scenario) -> float:
        return of.cluster.usd_per_hour / answer(of).samples_per_s

    every = [with_hosts(found, w, s) for w in range(1, 33) for s in range(2, 17)]
    assert usd(found) == pytest.approx(min(map(usd, every)))


@pytest.mark.parametrize("software", ["", *SOFTWARE])
def test_more_is_never_slower_by_the_draws_of_an_input(software):
    side = OnServers(scenario=scenario(Mode.SYNC))
    if software:
        side = OnGpus(job=job_of(scenario(), SOFTWARE[software]), samples_per_s=1.0)
    for name in side.inputs:
        rates = [side.bound({name: z}) for z in (-2.0, -END, 0.0, END, 2.0)]
        assert all(a <= b * (1 + 1e-12) for a, b in pairwise(rates)), name


def test_a_report_says_what_its_rate_may_be_on_the_screen_and_as_json():
    found = report(simulate(scenario(ranks=8, steps=40)))
    expected = range_of(
        OnServers(scenario=found.run.scenario), value=found.samples_per_s.mean, simulated=False
    )
    assert figures(found, {})["throughput"]["range"] == asdict(expected)
    (line,) = [text for name, text in facts(found, NARROW)[SPEED] if name == "what it may be"]
    assert expected.decisive in line and si(expected.low, "samples/s") in line


def test_both_sides_of_a_comparison_have_one_draw_and_its_ratio_a_range():
    run = simulate(scenario_of(Point(workload="criteo-ad", ranks=8, steps=60)))
    found = comparison(run)
    ours, theirs = (side.samples_per_s.mean for side in sides(run))
    assert found.times.value == pytest.approx(ours / theirs)
    assert found.times.low < found.times.value < found.times.high
    names = [each.name for each in found.times.inputs]
    assert "errors of the model of torchrec" in names and "errors of the model" in names
    assert asdict(found)["times"]["inputs"][0]["name"] == names[0]
    band = found.lines[0].partition("90 % band ")[2].replace(",", "").split(" to ")
    low, high = map(float, band)
    assert low < ours < high


def test_a_side_on_gpus_is_as_uncertain_as_sharded_says_of_its_rate():
    job = job_of(scenario(), SOFTWARE["torchrec"])
    alone = range_of(OnGpus(job=job, samples_per_s=job.batch / step_s(job)))
    # Constants of one class move together here, and each by itself there.
    assert log(alone.high / alone.low) == pytest.approx(2 * band_ln(job), rel=0.3)


def test_size_says_what_the_rate_of_hybrid_may_be():
    hosts = [MACHINES[name] for name in ("a2-highgpu-8g", "c2-standard-30", "m2-ultramem-416")]
    asked = Asked(
        workload=workloads()["criteo-ad"],
        samples_per_s=5e5,
        tau=4,
        rows="f32-adagrad",
        software=SOFTWARE["torchrec"],
    )
    choice = hybrid_on(asked, *hosts)
    alone = range_of(OnServers(scenario=choice.scenario), simulated=False)
    assert choice.band == (alone.low, alone.high)
    assert alone.low < choice.samples_per_s < alone.high
