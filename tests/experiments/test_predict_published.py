"""Rows of a CSV become predictions; constants are found again; misses are told in words."""

from __future__ import annotations

import csv
import os
from dataclasses import replace
from math import exp, log
from pathlib import Path

import numpy as np
import pytest

from experiments.commands import main
from experiments.published.calibration import Constants, fit, log_errors, without_each_series
from experiments.published.descriptions import nodes_of, rankers_of
from experiments.published.gpu_rows import Measured, family_of, measured_of, node_for
from experiments.published.measured_files import MeasuredFiles
from experiments.published.scores import naive_rates, nearest, scaling_ratios, score
from persia_sim.presets.software import BAND_LN, FITTED
from persia_sim.sharded.pipeline import step_s
from persia_sim.sharded.system import System

EXAMPLES = Path(__file__).parent / "examples"
ARGUMENTS = [
    "predict-published", "--rows", str(EXAMPLES / "rows.csv"),
    "--workloads", str(EXAMPLES / "workloads.csv"), "--systems", str(EXAMPLES / "systems.csv"),
]  # fmt: skip


@pytest.fixture
def published() -> Path:
    """The folder of published measurements, which are not part of the project; skips without."""
    place = os.environ.get("PERSIA_PUBLISHED_DIR")
    beside = Path(__file__).parents[3] / "shared" / "reference" / "published"
    folder = Path(place) if place else beside
    if not (folder / "throughput.csv").is_file():
        pytest.skip("PERSIA_PUBLISHED_DIR is not set: no published measurements to read")
    return folder


@pytest.fixture(scope="module")
def rows() -> list[Measured]:
    found, _ = measured_of(
        EXAMPLES / "rows.csv", rankers_of(EXAMPLES / "workloads.csv"),
        nodes_of(EXAMPLES / "systems.csv"),
    )  # fmt: skip
    return found


def planted(rows: list[Measured], logs: np.ndarray) -> list[Measured]:
    """The rows at many batches, measured by a model whose constants are these."""
    reach, software = Constants().applied(logs)
    found = []
    for row in rows:
        for batch in (512, 4096, 32768, 262144):
            other = replace(row, job=replace(row.job, batch=batch), series=f"{row.series} {batch}")
            rate = batch / step_s(other.under(reach, software))
            found.append(replace(other, samples_per_s=rate))
    return found


def test_the_command_predicts_every_row_that_it_understands(tmp_path, capsys):
    assert main([*ARGUMENTS, "--out", str(tmp_path)]) == 0
    with (tmp_path / "predict_published.csv").open() as file:
        lines = {line["id"]: line for line in csv.DictReader(file)}
    assert set(lines) == {"a-1", "a-2", "b-1"}
    for line in lines.values():
        rate = float(line["predicted_samples_per_s"])
        assert float(line["low_90"]) == pytest.approx(rate * exp(-BAND_LN), rel=1e-4)
        assert float(line["high_90"]) == pytest.approx(rate * exp(BAND_LN), rel=1e-4)
        step_ms = float(line["predicted_step_ms"])
        assert step_ms == pytest.approx(1e3 * float(line["global_batch"]) / rate, rel=1e-3)
        assert line["ln_error"] == "" and line["rows_fit"] == "True"
    said = capsys.readouterr().out
    assert "no row has a measurement" in said
    assert "left out: c-1: workload is 'unheard'" in said
    assert "left out: d-1: framework is 'unheard'" in said


@pytest.mark.parametrize("missing", ["rows", "workloads", "systems"])
def test_a_file_that_is_missing_is_a_sentence(missing, tmp_path, capsys):
    words = list(ARGUMENTS)
    words[words.index(f"--{missing}") + 1] = "/no/such.csv"
    with pytest.raises(SystemExit, match="2"):
        main([*words, "--out", str(tmp_path)])
    said = " ".join(capsys.readouterr().err.split())
    assert f"{missing} /no/such.csv is missing" in said


def test_a_file_without_a_line_that_can_be_predicted_is_a_sentence(tmp_path, capsys):
    (tmp_path / "rows.csv").write_text("workload,framework\nunheard,TorchRec\n")
    words = list(ARGUMENTS)
    words[words.index("--rows") + 1] = str(tmp_path / "rows.csv")
    assert main([*words, "--out", str(tmp_path)]) == 2
    assert "rows give nothing to predict: rows-1: workload" in capsys.readouterr().err


def test_the_nearest_series_is_never_the_rows_own(rows):
    measured = [replace(row, samples_per_s=1000.0 * k) for k, row in enumerate(rows, 1)]
    assert nearest(measured[0], measured) is measured[2]
    assert nearest(measured[0], measured[:2]) is None
    # A GPU of the third did 3,000 samples a second; the first has eight.
    assert naive_rates(measured[:1], measured) == [8 * 3000.0]


def test_scores_are_medians_and_shares_of_log_errors():
    found = score([log(1.1), -log(1.1), log(1.5), float("nan")])
    assert found.points == 3 and found.median == pytest.approx(log(1.1))
    assert found.within_20 == pytest.approx(2 / 3)
    assert found.mean == pytest.approx(log(1.5) / 3)


def test_scaling_ratios_compare_with_the_fewest_gpus_at_one_batch(rows):
    one = replace(rows[0], samples_per_s=100.0)
    node = one.job.system.node
    two = replace(one, job=replace(one.job, system=System(node=node, gpus=16)), samples_per_s=150.0)
    (found,) = scaling_ratios([one, two], [100.0, 180.0])
    assert (found.gpus, found.measured, found.predicted) == ((8, 16), 1.5, 1.8)


def test_a_fit_finds_the_constants_that_made_the_measurements(rows):
    constants = Constants()
    names, truth = constants.names, constants.start()
    moved = {"torchrec.host_s": 0.4, "tf2.host_s": -0.3}
    for name, by in moved.items():
        truth[names.index(name)] += by
    measured = planted(rows, truth)
    found = fit(measured)
    errors = log_errors(measured, *found.applied())
    assert np.abs(errors).max() < 0.03
    known = dict(zip(names, found.identified(), strict=True))
    for name in moved:
        assert found.logs[names.index(name)] == pytest.approx(truth[names.index(name)], abs=0.1)
        assert known[name]
    # No row is of OneFlow: its constants stay where they start, and the table says so.
    here = names.index("oneflow.host_s")
    assert found.logs[here] == constants.start()[here] and not known["oneflow.host_s"]


def test_a_series_left_out_is_predicted_by_the_others(rows):
    measured = planted(rows[:1], Constants().start())
    odd = replace(measured[-1], series="odd", samples_per_s=3.0 * measured[-1].samples_per_s)
    together = [*measured[:3], odd]
    held = without_each_series(together, fit(together))
    assert held[-1] == pytest.approx(log(3.0), abs=0.1)  # nothing of it leaked into the constants


@pytest.mark.parametrize(
    ("line", "family"),
    [
        ({"framework": "HugeCTR"}, "hugectr"),
        ({"framework": "HugeCTR", "newest_round": "v0.7"}, "hugectr-v07"),
        ({"framework": "TF2 + Horovod hybrid-parallel"}, "tf2"),
        ({"framework": "TF2 distributed-embeddings"}, "tf2-de"),
        ({"framework": "TorchRec TrainPipelineSparseDist"}, "torchrec"),
        ({"framework": "PyTorch", "extra": "CUDA graphs"}, "torch-graphs"),
        ({"framework": "PyTorch", "round": "v1.0"}, "torch-graphs"),
        ({"framework": "PyTorch"}, "torch"),
    ],
)
def test_software_is_known_by_its_name(line, family):
    assert family_of(line) == family


def test_a_machine_is_found_by_its_gpus():
    nodes = nodes_of(EXAMPLES / "systems.csv")
    box = nodes["box"]
    a100 = replace(box.accelerator, name="A100-SXM4-40GB")
    more = {
        "sxm": replace(box, name="sxm", accelerator=a100),
        "large": replace(box, name="large", accelerator=replace(a100, name="A100-SXM4-80GB")),
        "l40s": replace(box, name="l40s", accelerator=replace(a100, name="L40S")),
    }
    assert node_for({"accelerator": "NVIDIA A100-SXM-80GB"}, more).name == "large"
    assert node_for({"system": "1xA100-40"}, more).name == "sxm"
    assert node_for({"accelerator": "L40S"}, more).name == "l40s"
    with pytest.raises(ValueError, match="no machine of the systems file has such GPUs"):
        node_for({"accelerator": "TPU v4"}, more)


def test_published_steps_are_met_and_the_presets_are_what_the_fit_finds(published):
    """Goals: median below 12 %, nine in ten below 35 %, scaling ratios within 15 %."""
    files = [published / "throughput.csv", published / "mlperf_classes.csv"]
    named = MeasuredFiles(workloads=published / "workloads.csv", systems=published / "systems.csv")
    rows, _ = named.load(files)
    rows = [row for row in rows if row.samples_per_s]
    found = fit(rows, first=Constants().preset())
    for name, value in zip(found.constants.names, found.logs, strict=True):
        assert log(FITTED[name].value) == pytest.approx(value, abs=0.03), name
    rates = [row.job.batch / step_s(row.job) for row in rows]
    errors = [log(rate / row.samples_per_s) for rate, row in zip(rates, rows, strict=True)]
    assert score(errors).median < log(1.12) and score(errors).p90 < log(1.35)
    ratios = [log(r.predicted / r.measured) for r in scaling_ratios(rows, rates)]
    assert np.median(np.abs(ratios)) < log(1.15)
    naive = naive_rates(rows, rows)
    baseline = [log(n / row.samples_per_s) for n, row in zip(naive, rows, strict=True)]
    assert score(baseline).median > 3 * score(errors).median
