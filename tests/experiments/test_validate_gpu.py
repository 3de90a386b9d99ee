"""`validate --device`: predictions are in a file before anything runs, of that arithmetic."""

from __future__ import annotations

import pytest

from experiments.__main__ import main
from experiments.benching import bench_peers, validate, validate_gpu, windows
from experiments.benching.bench_peers import OURS
from persia_sim.base.vocabulary import Mode
from runtime.run import profile as measuring
from tests.experiments.raw_runs import read_csv
from tests.experiments.test_benching import Quiet, printed

SMALL = bench_peers.Shape(dim=4, hidden=(8,), rows=2_600)


def small_run(tmp_path, **more):
    sizes = {"batch": 64, "rows": 2_600, "rounds": 2, "window_steps": 4, "threads": 1}
    return validate_gpu.GpuRun(
        out=tmp_path, device="cpu", precision="float32", most_foreign_cores=1000.0, **sizes | more
    )


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(windows, "ForeignLoad", Quiet)
    monkeypatch.setattr(measuring, "BATCHES", (16, 64))
    monkeypatch.setattr(measuring, "REPEATS", 3)
    monkeypatch.setattr(validate_gpu, "DATA", "synthetic:criteo-ad:0.0001")
    monkeypatch.setattr(validate_gpu, "SIMULATED_STEPS", 40)
    monkeypatch.setitem(bench_peers.SHAPES, "paper", SMALL)
    return printed(monkeypatch)


def test_predictions_are_written_before_anything_is_trained(tmp_path, monkeypatch, small):
    seen = []

    def trained(run):
        seen.extend(read_csv(tmp_path / "validate_gpu.csv"))
        return [
            windows.Window(k, name, 1000.0, 0.0, True)
            for k in range(3)
            for name in validate_gpu.MODES
        ]

    monkeypatch.setattr(validate_gpu, "_windows", trained)
    validate_gpu.validate(small_run(tmp_path))
    assert [(row["mode"], row["measured"]) for row in seen] == [("sync", ""), ("hybrid", "")]
    rows = read_csv(tmp_path / "validate_gpu.csv")
    for before, row in zip(seen, rows, strict=True):
        assert row["predicted"] == before["predicted"] and float(row["predicted"]) > 0
        assert float(row["measured"]) == 1000.0
        assert float(row["error"]) == pytest.approx(float(row["predicted"]) / 1000.0 - 1)
    assert small[-1].startswith("goal: hybrid is predicted within 10%")


def test_a_tiny_run_on_a_cpu_is_predicted_and_run(tmp_path, small):
    records = validate_gpu.validate(small_run(tmp_path))
    assert [record["system"] for record in records] == [OURS[0], OURS[2]]
    assert all(float(record["measured"]) > 0 for record in records)
    assert (tmp_path / "profile.json").exists()


def test_the_cluster_is_a_machine_with_that_gpu():
    assert validate_gpu.cluster_of("NVIDIA H200") == "h200-16-cores"
    assert validate_gpu.cluster_of("NVIDIA H100 80GB HBM3") == "h100-16-cores"
    assert validate_gpu.cluster_of("") == "this-host"
    assert Mode.HYBRID in validate_gpu.MODES.values()


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({"threads": 4}, "--precision and --threads are of a GPU"),
        ({"device": "cuda", "fitted_to": "sync"}, "drop --hosts and --fitted-to"),
        ({"device": "gpu"}, "device must be cpu, cuda"),
    ],
)
def test_what_nothing_would_read_is_refused(more, told):
    with pytest.raises(ValueError, match=told):
        validate.Options(**more)


def test_a_dry_run_beside_a_gpu_opens_nothing(tmp_path, capsys):
    words = ["validate", "--device", "cuda", "--dry-run", "--out", str(tmp_path / "out")]
    assert main(words) == 0
    assert "profile of cuda" in capsys.readouterr().out and not (tmp_path / "out").exists()
