"""`persia-runtime profile`: what is wrong is told before the work, and its file is a profile."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

from persia_sim.cli import Options, scenario_of
from persia_sim.cluster.demand import demand
from persia_sim.cluster.machine import Precision
from persia_sim.presets.catalogue import h100_16_cores, this_host, workloads
from persia_sim.presets.costs import CATALOGUE
from persia_sim.presets.profile import read_profile
from runtime.__main__ import main
from runtime.embedding.native.store import use_threads
from runtime.model_commands import describe_profile
from runtime.rank import learner as learner_module
from runtime.rank.staging import StreamStaging
from runtime.run import profile as measuring
from runtime.run.folder import write_json
from runtime.run.profile import SUMMED_BYTES
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


def test_unknown_data_and_data_of_too_few_samples_are_told(tmp_path, refused):
    out = ["--out", str(tmp_path / "p.json")]
    assert "no data set is called 'nosuch'" in refused("profile", "--data", "nosuch", *out)
    (tmp_path / "few.csv").write_text("user,click\n" + "a,1\nb,0\n" * 50)
    schema = ['name = "few"', 'file = "few.csv"', 'labels = ["click"]',
              "split = { test_fraction = 0.2 }", "[[columns]]", 'name = "user"']  # fmt: skip
    (tmp_path / "few.toml").write_text("\n".join(schema))
    told = refused("profile", "--data", str(tmp_path / "few.toml"), *out)
    assert re.search(r"few.toml has \d+ training samples: must be at least 4,096", told), told
    assert not (tmp_path / "p.json").exists()


def test_a_profile_goes_into_a_new_folder_and_over_an_earlier_one(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(measuring, "REPEATS", 3)
    out = tmp_path / "new" / "p.json"
    assert main(["profile", *TINY, "--out", str(out)]) == 0
    first = read_profile(out)
    assert (first.dim, first.hidden, len(first.gpu.flops_per_s)) == (4, (8,), 5)
    assert first.copies.startswith("none") and not {"copy_in", "copy_out"} & set(first.laws)
    assert first.laws["load"].fitted_items == (64, 4096)
    call, summed = first.laws["worker_rpc"], first.all_reduce
    assert call.fixed_s >= 0 and call.fitted_items[1] > 4 * call.fitted_items[0]
    assert summed is not None and summed.fitted_bytes == (2**14, 2**24) and summed.ranks == 2
    assert summed.fixed_s + summed.per_byte_s * 2**24 > 0
    printed = capsys.readouterr().out
    law = first.laws["server_lookup"]
    [line] = [row for row in printed.splitlines() if row.startswith("  server_lookup")]
    fixed, per_item = re.findall(r"([\d.]+) (?:us|ns)", line)
    assert float(fixed) == pytest.approx(1e6 * law.fixed_s, abs=0.051)
    assert float(per_item) == pytest.approx(1e9 * law.per_item_s, abs=0.051)
    assert "copies: none" in printed
    wider = ["--dim", "8", *TINY[2:], "--no-processes", "--out", str(out)]
    assert main(["profile", *wider]) == 0
    second = read_profile(out)
    assert second.dim == 8 and second.all_reduce is None and "worker_rpc" not in second.laws
    assert [file.name for file in out.parent.iterdir()] == ["p.json"]


def test_copies_of_a_gpu_are_laws_of_bytes_that_the_simulator_charges(tmp_path, monkeypatch):
    monkeypatch.setattr(measuring, "BATCHES", (16, 64))
    monkeypatch.setattr(measuring, "REPEATS", 4)
    monkeypatch.setattr(
        measuring, "open_staging", lambda device, dtype: StreamStaging(dtype, LateStreams())
    )
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "stand-in")
    found = measuring.measure_profile(16, (8,), TINY[-1], processes=False)
    assert "copy_in" in describe_profile(found) and "copies: measured" in describe_profile(found)
    # Steps less copies: on a busy machine no rate that a GPU can have.
    found["gpu"]["flops_per_s"] = [(16, 1e9), (64, 1e9)]
    write_json(tmp_path / "p.json", found)
    scenario = scenario_of(Options(workload="criteo-ad", profile=tmp_path / "p.json"))
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
    pinned = []
    for repeats in (3, 9):
        monkeypatch.setattr(measuring, "REPEATS", repeats)
        streams.clear()
        measuring.measure_profile(4, (8,), TINY[-1], processes=False)
        pinned.append([one.pinned_buffers for one in streams])
    assert pinned[0] == pinned[1]
    of_training, of_copies = pinned[0]
    assert of_training <= 6 and of_copies <= 4


def test_a_profile_says_its_precision_and_threads(tmp_path, monkeypatch):
    monkeypatch.setattr(measuring, "BATCHES", (16, 64))
    monkeypatch.setattr(measuring, "REPEATS", 3)
    out = tmp_path / "p.json"
    words = [*TINY, "--no-processes", "--precision", "bfloat16", "--threads", "2"]
    try:
        assert main(["profile", *words, "--out", str(out)]) == 0
    finally:
        use_threads(1)
    found = read_profile(out)
    assert (found.precision, found.threads) == ("bfloat16", 2)
    assert found.source.endswith("2 threads")


def test_tf32_without_a_gpu_is_refused(tmp_path, no_work, refused):
    told = refused("profile", "--precision", "tf32", "--out", str(tmp_path / "p.json"))
    assert "tf32 is arithmetic of a GPU" in told


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


def test_the_bar_ends_full(monkeypatch):
    monkeypatch.setattr(measuring, "REPEATS", 3)

    def summed(told):
        return [told() or measuring.Measurement(size, 1.0) for size in SUMMED_BYTES]

    monkeypatch.setattr(measuring, "summed", summed)
    for processes in (False, True):
        told: list[int] = []
        measuring.measure_profile(
            4, (8,), TINY[-1], lambda told=told: told.append(1), processes=processes
        )
        assert len(told) == measuring.measurements(processes) >= 35
