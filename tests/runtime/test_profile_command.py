"""`persia-runtime profile`: what is wrong is told before the work, and its file is a profile."""

from __future__ import annotations

import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from persia_sim.base.vocabulary import Mode
from persia_sim.cli import SimulateOptions, scenario_of
from persia_sim.cluster.demand import Demand, demand
from persia_sim.cluster.machine import Precision
from persia_sim.cluster.workload import Workload
from persia_sim.engine.simulate import simulate
from persia_sim.presets.catalogue import h100_16_cores, this_host, workloads
from persia_sim.presets.costs import CATALOGUE
from persia_sim.presets.profile import read_profile
from persia_sim.report.measure import throughput
from runtime.__main__ import main
from runtime.config import EngineConfig, ModelConfig, SyncConfig, TrainConfig
from runtime.data.open import open_source
from runtime.embedding.config import TableConfig
from runtime.embedding.native.store import use_threads
from runtime.executors.threads import ConcurrentRun
from runtime.profiling import profile as measuring
from runtime.profiling.command import describe_profile
from runtime.profiling.laws import LawPoint, Measurement
from runtime.profiling.stage_times import Drawn
from runtime.rank import learner as learner_module
from runtime.rank.components import assemble
from runtime.rank.staging import StreamStaging
from runtime.run.folder import write_json
from tests.runtime.test_staging import LateStreams

TINY = ["--dim", "4", "--hidden", "8", "--data", "synthetic:criteo-ad:0.0001"]


@pytest.fixture
def no_work(monkeypatch):
    def begun(*_: object) -> None:
        pytest.fail("measuring began")

    monkeypatch.setattr(measuring, "measure_profile", begun)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--dim", "0"], "dim must be >= 1, got 0"),
        (["--dim", "65537"], "dim must be <= 65,536, got 65537"),
        (["--hidden", "16", "0"], "hidden[1] must be >= 1, got 0"),
        (["--hidden"], "hidden must be one or more widths"),
        (["--data="], "data is empty"),
        (["--device", "gpu"], "device must be cpu, cuda, or cuda:1 and so on, got 'gpu'"),
        (["--out="], "--out is empty"),
        (["--out", "FOLDER"], "--out is FOLDER: it is a folder; name a file"),
        (["--out", "FOLDER/notes.json"], "FOLDER/notes.json: it is a file, and no profile"),
        (["--out", "FOLDER/notes.json/p.json"], "FOLDER/notes.json"),
        (["--out", "/proc/profile.json"], "/proc/profile.json"),
        (["--out", "/proc/none/profile.json"], "/proc/none"),
    ],
)  # fmt: skip
def test_a_bad_option_is_told_before_anything_is_measured(words, said, tmp_path, no_work, refused):
    (tmp_path / "notes.json").write_text('{"mine": 1}')
    words = [word.replace("FOLDER", str(tmp_path)) for word in words]
    # A frame breaks long words at the width of the screen.
    found = refused("profile", *words).replace(" ", "")
    assert said.replace("FOLDER", str(tmp_path)).replace(" ", "") in found
    assert (tmp_path / "notes.json").read_text() == '{"mine": 1}'
    assert [file.name for file in tmp_path.iterdir()] == ["notes.json"]


SMALL = """
name = "criteo-ad in small"
fields = 26
dim = 4
rows = 54000
zipf = 1.05
dense_features = 13
mlp = [8, 1]
batch_per_rank = 256
source = "a test"
"""
"""What `TINY` profiles, in the simulator's words."""


def simulated_step_s(profile: dict, folder: Path) -> tuple[float, Demand]:
    """A step of sync with one rank that computes by this profile, and what it asks."""
    write_json(folder / "p.json", profile)
    (folder / "small.toml").write_text(SMALL)
    scenario = scenario_of(SimulateOptions(
        cluster="this-host", workload=str(folder / "small.toml"), profile=folder / "p.json",
        mode="sync", ranks=1, steps=40,
    ))  # fmt: skip
    return 256 / throughput(simulate(scenario)).mean, demand(scenario)


def test_a_step_of_sync_is_simulated_as_the_sum_of_the_stages_that_were_profiled(
    tmp_path, monkeypatch
):
    """Each stage of a sample takes a power of two of microseconds: none can stand for another."""
    each_s = {"worker_forward": 1e-6, "worker_pool": 2e-6, "worker_scatter": 4e-6, "dense": 64e-6}
    work = demand_of_small(tmp_path)
    distinct = work.sent_ids / 256

    def run(config, source, batch):
        stages = {
            name: Measurement(batch * (1 if name == "dense" else 26), batch * seconds)
            for name, seconds in each_s.items()
        }
        ids = batch * distinct
        stages["server_update"] = Measurement(ids, batch * 8e-6)
        at = {"one": 1.0, "distinct": ids, "created": 0.0}
        reads = [
            LawPoint(at, batch * 16e-6),
            LawPoint(at | {"created": ids}, batch * (16e-6 + 32e-6)),
        ]
        return measuring._Run(stages, reads)

    monkeypatch.setattr(measuring, "_in_a_run", run)
    monkeypatch.setattr(measuring, "_loading_s", lambda source, batch: batch * 1e-7)
    found = measuring.measure_profile(4, (8,), TINY[-1], processes=False)
    found["laws"]["worker_rpc"] = {"fixed_s": 0.0}  # not measured: else the catalogue's
    step_s, asked = simulated_step_s(found, tmp_path)
    assert asked.fetch.worker_forward_s == pytest.approx(256 * 1e-6)
    assert asked.fetch.worker_pool_s == pytest.approx(256 * 2e-6)
    assert asked.push.worker_scatter_s == pytest.approx(256 * 4e-6)
    assert asked.push.server_update_s.sum() == pytest.approx(256 * 8e-6)
    assert asked.compute_s == pytest.approx(256 * 64e-6, rel=0.02)  # biases are operations there
    assert found["laws"]["server_create"]["per_item_s"] * distinct == pytest.approx(32e-6)
    # Messages of this host take next to nothing.
    assert step_s == pytest.approx(256 * (1 + 2 + 4 + 8 + 16 + 64) * 1e-6, rel=0.05)


def demand_of_small(folder: Path) -> Workload:
    (folder / "small.toml").write_text(SMALL)
    return scenario_of(
        SimulateOptions(cluster="this-host", workload=str(folder / "small.toml"))
    ).workload


@pytest.mark.long
def test_a_simulated_step_is_the_measured_one_within_a_factor_of_two(tmp_path, monkeypatch):
    """Both by CPU seconds, which other work on the machine does not lengthen much; the measured one
    without the profile's clocks: what twice as many steps of a run take more."""
    monkeypatch.setattr(measuring, "BATCHES", (64, 512))
    found = measuring.measure_profile(4, (8,), TINY[-1], processes=False)
    simulated_s, _ = simulated_step_s(found, tmp_path)

    def run_s(steps: int) -> float:
        source = Drawn(open_source(TINY[-1]), 256 * steps)
        config = TrainConfig(
            rows=TableConfig(dim=4), model=ModelConfig(hidden=(8,)), batch=256, steps=steps,
            sync=SyncConfig(mode=Mode.SYNC), engine=EngineConfig(executor="concurrent"),
        )  # fmt: skip
        with closing(assemble(config, source)) as components:
            components.meter.start()
            began_s = time.process_time()
            ConcurrentRun(components).run()
            return time.process_time() - began_s

    run_s(40)  # threads start, memory is mapped
    measured_s = (min(run_s(200) for _ in range(3)) - min(run_s(100) for _ in range(3))) / 100
    assert 0.5 < simulated_s / measured_s < 2


def test_copies_of_a_gpu_are_laws_of_bytes_that_the_simulator_charges(tmp_path, monkeypatch):
    monkeypatch.setattr(measuring, "BATCHES", (16, 64))
    monkeypatch.setattr(measuring, "REPEATS", 4)
    monkeypatch.setattr(
        measuring, "open_staging", lambda device, dtype: StreamStaging(dtype, LateStreams())
    )
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "stand-in")
    monkeypatch.setattr(measuring, "MOST_STEPS", 18)
    found = measuring.measure_profile(16, (8,), TINY[-1], processes=False)
    assert "copy_in" in describe_profile(found) and "copies: measured" in describe_profile(found)
    # Steps less copies: on a busy machine no rate that a GPU can have.
    found["gpu"]["flops_per_s"] = [(16, 1e9), (64, 1e9)]
    write_json(tmp_path / "p.json", found)
    scenario = scenario_of(SimulateOptions(workload="criteo-ad", profile=tmp_path / "p.json"))
    law, bytes_in = found["laws"]["copy_in"], scenario.workload.activation_bytes
    bytes_in += scenario.workload.input_bytes
    expected = law["fixed_s"] + law["per_byte_s"] * bytes_in
    assert demand(scenario).fetch.copy_in_s == pytest.approx(expected, rel=1e-6)
    here, _ = read_profile(tmp_path / "p.json").apply(this_host(), scenario.workload, CATALOGUE)
    assert here.gpu.pcie_bytes_per_s == 1e18  # a core of the host copies nothing


def test_copies_are_from_pinned_memory_that_is_used_again(monkeypatch):
    """A step that keeps its buffers would make new ones in the middle of what is timed."""
    monkeypatch.setattr(measuring, "BATCHES", (16,))
    streams = []

    def staging(device, dtype):
        streams.append(LateStreams())
        return StreamStaging(dtype, streams[-1])

    monkeypatch.setattr(measuring, "open_staging", staging)
    monkeypatch.setattr(learner_module, "open_staging", staging)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "stand-in")
    monkeypatch.setattr(measuring, "MOST_STEPS", 18)
    pinned = []
    for repeats in (3, 9):
        monkeypatch.setattr(measuring, "REPEATS", repeats)
        streams.clear()
        measuring.measure_profile(4, (8,), TINY[-1], processes=False)
        pinned.append([one.pinned_buffers for one in streams])
    assert pinned[0] == pinned[1]
    of_steps, of_run, of_copies = pinned[0]
    assert of_steps <= 6 and of_run <= 6 and of_copies <= 4


@pytest.mark.long
def test_a_profile_says_its_precision_and_threads(tmp_path, monkeypatch):
    monkeypatch.setattr(measuring, "BATCHES", (16, 64))
    out = tmp_path / "p.json"
    words = [*TINY, "--no-processes", "--precision", "bfloat16", "--threads", "2"]
    try:
        assert main(["profile", *words, "--out", str(out)]) == 0
    finally:
        use_threads(1)
    found = read_profile(out)
    assert (found.precision, found.threads) == ("bfloat16", 2)
    assert found.source.endswith("2 threads")


def test_a_rate_is_used_for_the_arithmetic_in_which_it_was_measured_alone(tmp_path):
    """Of one profile of float32, fp16 was once predicted to run as fast."""
    document = {
        "schema": 3, "source": "by hand", "dim": 16, "precision": "float32",
        "gpu": {"device": "NVIDIA H100", "fixed_s": 0.0, "flops_per_s": [[4096, 5e13]]},
    }  # fmt: skip
    work = workloads()["criteo-ad"]
    shares = {}
    for precision in ("float32", "bfloat16"):
        write_json(tmp_path / "p.json", document | {"precision": precision})
        profile = read_profile(tmp_path / "p.json")
        for wanted in (Precision.FP32, Precision.FP16):
            of_wanted = replace(work, precision=wanted)
            _, costs = profile.apply(h100_16_cores(), of_wanted, CATALOGUE)
            shares[precision, wanted] = costs.gpu_efficiency
            told = f"the rate was measured in {precision} and is not used for {wanted}"
            assert (told in costs.source) == (_IN[precision] is not wanted)
    chip = h100_16_cores().gpu
    assert shares["float32", Precision.FP32] == ((4096, 5e13 / chip.fp32_flops),)
    assert shares["bfloat16", Precision.FP16] == ((4096, 5e13 / chip.fp16_flops),)
    assert shares["float32", Precision.FP16] == CATALOGUE.gpu_efficiency


_IN = {"float32": Precision.FP32, "bfloat16": Precision.FP16}
