"""Cost laws, measured profiles, and the flags that they raise."""

from __future__ import annotations

import json
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from persia_sim.base.vocabulary import Mode
from persia_sim.cli import SimulateOptions, run, scenario_of
from persia_sim.cluster.costs import Costs, Law
from persia_sim.cluster.demand import demand
from persia_sim.presets.catalogue import this_host
from persia_sim.presets.costs import CATALOGUE
from persia_sim.presets.profile import read_profile
from tests.persia_sim.sim_configurations import small_scenario

PROFILE: dict[str, Any] = {
    "schema": 3,
    "source": "bench of 2026-01-01",
    "dim": 16,
    "hidden": [256, 128],
    "laws": {
        "server_lookup": {
            "fixed_s": 1e-5, "per_item_s": 2e-7, "spread": 0.05, "fitted_items": [10, 100]
        }
    },
    "gpu": {"device": "cpu", "fixed_s": 1e-3, "flops_per_s": [[64, 20e9], [512, 70e9]]},
}  # fmt: skip


def write(path: Path, profile: object) -> Path:
    path.write_text(json.dumps(profile))
    return path


def measured(path: Path, **changes: object) -> Costs:
    """The catalogue with this profile on the small GPU cluster."""
    scenario = small_scenario()
    read = read_profile(write(path, PROFILE | changes))
    return read.apply(scenario.cluster, scenario.workload, CATALOGUE)[1]


def test_a_profile_replaces_laws_and_says_so(tmp_path):
    costs = measured(tmp_path / "profile.json")
    speed = small_scenario().cluster.servers.host.core_speed  # of the laws' core it is 1
    assert costs.server_lookup(100.0) == pytest.approx(3e-5 * speed)
    assert costs.server_update == CATALOGUE.server_update
    assert "bench of 2026-01-01" in costs.source


def test_a_measured_law_is_charged_as_measured_on_any_core(tmp_path):
    """The hosts of the 100T run have cores of 0.75 and 0.89; every law takes 3 ms there."""
    names = ("load", "worker_forward", "worker_pool", "worker_scatter", "server_lookup",
             "server_update", "copy_in", "copy_out")  # fmt: skip
    laws = {name: {"fixed_s": 3e-3} for name in names} | {"worker_rpc": {"fixed_s": 0.0}}
    plain = small_scenario()
    plain = replace(plain, cluster=plain.cluster.with_gpu(pcie_bytes_per_s=1e18))
    roles = plain.cluster.nn, plain.cluster.embedding_workers, plain.cluster.servers
    assert [role.host.core_speed for role in roles] == [0.75, 0.89, 0.75]
    need = demand(replace(plain, costs=measured(tmp_path / "profile.json", laws=laws)))
    fetch = need.fetch
    found = [need.load_s, fetch.worker_forward_s, fetch.worker_pool_s, need.push.worker_scatter_s,
             *fetch.server_s, *need.push.server_update_s, fetch.copy_in_s,
             need.push.copy_out_s]  # fmt: skip
    assert found == pytest.approx([3e-3] * len(found))


def test_the_rate_of_a_cpu_makes_the_core_of_this_host_and_nothing_of_a_gpu(tmp_path):
    work = small_scenario().workload
    profile = read_profile(write(tmp_path / "profile.json", PROFILE))
    cluster, costs = profile.apply(this_host(), work, CATALOGUE)
    for batch, rate in ((64, 20e9), (512, 70e9)):
        assert costs.efficiency(batch) * cluster.gpu.fp32_flops == pytest.approx(rate)
    assert costs.gpu_fixed_s == 1e-3
    gpu = measured(tmp_path / "profile.json")
    assert gpu.gpu_efficiency == CATALOGUE.gpu_efficiency and gpu.gpu_fixed_s == 0
    assert "the rate of a cpu is not used for a A100" in gpu.source


def test_the_rate_of_a_gpu_is_a_share_of_the_clusters_peak_and_not_above_it(tmp_path):
    gpu = {"device": "A100", "fixed_s": 0, "flops_per_s": [[64, 3.9e12], [512, 9.75e12]]}
    costs = measured(tmp_path / "profile.json", gpu=gpu)
    assert costs.gpu_efficiency == ((64, pytest.approx(0.2)), (512, pytest.approx(0.5)))
    # A measured step has moved its activations: they are not charged again.
    work = replace(small_scenario().workload, batch_per_rank=512)
    need = demand(small_scenario(workload=work, costs=costs))
    assert need.compute_s == pytest.approx(512 * work.flops_per_sample / 9.75e12)
    gpu["flops_per_s"] = [[64, 30e12]]
    with pytest.raises(
        ValueError, match=r"at batch_per_rank 64 is 3e\+13: a A100.* has 1\.95e\+13 at most"
    ):
        measured(tmp_path / "profile.json", gpu=gpu)


def test_another_width_of_rows_is_refused_and_another_mlp_is_said(tmp_path):
    with pytest.raises(ValueError, match=r"dim of .* is 8: rows of criteo-ad have dim 16; measure"):
        measured(tmp_path / "profile.json", dim=8)
    assert "at an MLP of 256-128" in measured(tmp_path / "profile.json").source
    same = measured(tmp_path / "profile.json", hidden=[4096, 2048, 1024, 512, 256])
    assert "MLP" not in same.source


def test_use_outside_the_fitted_range_is_flagged(tmp_path):
    far = replace(small_scenario(), costs=measured(tmp_path / "profile.json"))
    assert demand(far).extrapolated == ("server_lookup",)
    assert demand(small_scenario(costs=CATALOGUE)).extrapolated == ()
    two = replace(CATALOGUE, gpu_efficiency=((512, 0.3), (8192, 0.4)))
    for batch, told in ((511, ("gpu_efficiency",)), (512, ()), (8192, ())):
        work = replace(small_scenario().workload, batch_per_rank=batch)
        assert demand(small_scenario(workload=work, costs=two)).extrapolated == told


SUMMED = {"ranks": 2, "fixed_s": 2e-4, "per_byte_s": 1e-9, "fitted_bytes": [1e3, 1e6]}


def test_a_measured_all_reduce_is_a_ring_of_this_hosts_ranks_and_flagged_outside(tmp_path):
    """Two ranks: what was measured. Four: three times the hops, 3/2 of the bytes' seconds."""
    work = small_scenario().workload
    profile = read_profile(write(tmp_path / "profile.json", PROFILE | {"all_reduce": SUMMED}))
    cluster, costs = profile.apply(this_host(), work, CATALOGUE)
    sync = costs.dense_sync
    assert sync.seconds(1e6, 2, 2) == pytest.approx(2e-4 + 1e-3)
    assert sync.seconds(1e6, 4, 4) == pytest.approx(3 * 2e-4 + 1.5 * 1e-3)
    assert not sync.extrapolates(1e6) and sync.extrapolates(1.1e6) and sync.extrapolates(999)
    host = replace(cluster.nn.host, cores=2, gpus=2)
    two = replace(cluster, nn=replace(cluster.nn, host=host)).with_ranks(2)
    assert (two.nn.hosts, two.nn.processes) == (1, 2)
    with pytest.raises(ValueError, match="ranks is 3: this host has cores for 2; say hosts of"):
        two.with_ranks(3)
    scenario = small_scenario(cluster=two, costs=costs)
    sync_s = demand(replace(scenario, mode=Mode.SYNC, tau=None, merge_pushes=None)).all_reduce_s
    assert sync_s == pytest.approx(2e-4 + 1e-9 * 4 * sum(work.layer_params))
    assert ("dense_sync" in demand(scenario).extrapolated) == (4 * sum(work.layer_params) > 1e6)
    small = replace(scenario, workload=replace(work, mlp=(8, 1)))
    assert "dense_sync" not in demand(small).extrapolated
    gpu = measured(tmp_path / "profile.json", all_reduce=SUMMED)
    assert gpu.dense_sync == CATALOGUE.dense_sync and "is not used for GPUs" in gpu.source


def test_where_nothing_is_copied_nothing_is_charged_and_a_gpu_keeps_its_bus(tmp_path):
    work, said = small_scenario().workload, {"copies": "none: one memory"}
    profile = read_profile(write(tmp_path / "profile.json", PROFILE | said))
    cluster, costs = profile.apply(this_host(), work, CATALOGUE)
    scenario = small_scenario(cluster=cluster, costs=costs)
    assert demand(scenario).push.copy_out_s < 1e-9 and demand(scenario).fetch.copy_in_s < 1e-9
    assert "one memory" in costs.copy_in.source
    assert measured(tmp_path / "profile.json", **said).copy_in == CATALOGUE.copy_in


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"all_reduce": SUMMED | {"ranks": 1}}, "all_reduce: ranks is 1: must lie in"),
        ({"all_reduce": SUMMED | {"fitted_bytes": [2, 1]}}, r"fitted_bytes is .*must be \[least"),
        ({"copies": 3}, "copies must be text, got 3"),
        ({"schema": 1}, "schema is 1: must be 3; measure again"),
        ({"lawz": {}}, "lawz is unknown: did you mean laws"),
        ({"laws": {"lookup": {}}}, "laws.lookup is unknown: did you mean server_lookup"),
        ({"laws": {"load": {"fixed_s": 1, "slope": 1}}}, "laws.load.slope is unknown"),
        ({"laws": {"load": {}}}, "laws.load is {}: must hold one of fixed_s, per_byte_s, per_item"),
        ({"laws": {"load": {"fixed_s": -1}}}, "laws.load: fixed_s is -1.0: must lie in"),
        ({"laws": {"load": {"fixed_s": "1"}}}, "laws.load.fixed_s must be a number, got '1'"),
        ({"laws": []}, r"laws must be a table of names and values, got \[\]"),
        ({"gpu": {"speed": 1}}, "gpu.speed is unknown"),
        ({"gpu": {"fixed_s": 0, "device": "cpu"}}, "gpu.flops_per_s is missing"),
        ({"laws": {}, "gpu": None}, "gpu must be a table, got None"),
    ],
)
def test_a_wrong_profile_is_refused_by_name(tmp_path, change, message):
    with pytest.raises(ValueError, match=message):
        read_profile(write(tmp_path / "profile.json", PROFILE | change))


def test_a_profile_in_which_nothing_was_measured_is_refused(tmp_path):
    empty = {"schema": 3, "source": "x", "laws": {}}
    with pytest.raises(ValueError, match="without laws and gpu: nothing in it was measured"):
        read_profile(write(tmp_path / "profile.json", empty))


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where the numbers of a document stand."""
    if isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from leaves(inner, (*path, key))
    elif not isinstance(value, str):
        yield path


@given(
    st.sampled_from([place for place in leaves(PROFILE) if place != ("dim",)]),  # may be null
    st.one_of(
        st.none(), st.booleans(), st.text(max_size=3), st.just([]), st.just({}),
        st.sampled_from([float("nan"), float("inf"), -1, -1e-9, 10**400]),
    ),
)  # fmt: skip
def test_junk_in_the_place_of_any_number_is_one_sentence(tmp_path_factory, place, junk):
    document = deepcopy(PROFILE)
    inner: Any = document
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = junk
    path = write(tmp_path_factory.mktemp("junk") / "profile.json", document)
    with pytest.raises(ValueError) as refused:
        read_profile(path)
    said = str(refused.value)
    assert ("\n" not in said and str(path) in said) or place == ("schema",)


@given(st.binary(max_size=40))
def test_any_bytes_are_a_profile_or_one_sentence(tmp_path_factory, content):
    path = tmp_path_factory.mktemp("junk") / "profile.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=str(path)):
        read_profile(path)


def test_a_missing_or_broken_profile_says_what_to_do(tmp_path):
    with pytest.raises(ValueError, match="does not exist; write it with"):
        read_profile(tmp_path / "none.json")
    with pytest.raises(ValueError, match="is not a plain file"):
        read_profile(tmp_path)
    (tmp_path / "deep.json").write_text("[" * 100_000)
    with pytest.raises(ValueError, match="nested too deeply"):
        read_profile(tmp_path / "deep.json")
    (tmp_path / "twice.json").write_text('{"schema": 2, "schema": 3}')
    with pytest.raises(ValueError, match=r"profile .*twice.json .*'schema' stands there twice"):
        read_profile(tmp_path / "twice.json")


def test_what_the_runtime_measures_is_what_the_simulator_computes_with(tmp_path, monkeypatch):
    """End to end: measure, write, read, simulate; a step takes the rate of the file."""
    pytest.importorskip("torch")
    from runtime.profiling import profile as measuring
    from runtime.run.folder import write_json

    monkeypatch.setattr(measuring, "BATCHES", (16, 64))
    monkeypatch.setattr(measuring, "MOST_STEPS", 18)
    found = measuring.measure_profile(16, (8,), "synthetic:criteo-ad:0.0001", processes=False)
    path = tmp_path / "profile.json"
    write_json(path, found)
    kept = json.loads(path.read_text())
    assert (kept["dim"], kept["hidden"], kept["gpu"]["device"]) == (16, [8], "cpu")
    options = SimulateOptions(
        cluster="this-host", workload="taobao-ad", row_format="f32-adagrad", batch_per_rank=64,
        steps=12, profile=path, tau=2,
    )  # fmt: skip
    scenario = scenario_of(options)
    [(_, _), (batch, rate)] = kept["gpu"]["flops_per_s"]
    work = scenario.workload.flops_per_sample * batch
    assert demand(scenario).compute_s == pytest.approx(work / rate, rel=1e-12)
    law = kept["laws"]["server_lookup"]
    ids = scenario.workload.sent_ids
    expected = law["fixed_s"] + law["per_item_s"] * ids
    assert demand(scenario).fetch.server_s.sum() == pytest.approx(expected, rel=1e-12)
    # A worker's items are occurrences, there and here; a server's are distinct ids.
    pool, met = kept["laws"]["worker_pool"], scenario.workload.ids_per_batch
    assert pool["fitted_items"] == [16 * 26, 64 * 26] and met == 64 * 14 > ids
    expected = pool["fixed_s"] + pool["per_item_s"] * met
    assert demand(scenario).fetch.worker_pool_s == pytest.approx(expected, rel=1e-12)
    assert law["fitted_items"][1] < 64 * 26
    said = run(options)
    assert "measured by runtime profile" in said and "at an MLP of 8, another one" in said


def test_every_constant_has_a_source():
    for name in CATALOGUE.__slots__:
        law = getattr(CATALOGUE, name)
        if isinstance(law, Law):
            assert law.source, name
