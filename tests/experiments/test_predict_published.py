"""Rows of a CSV become predictions; constants are found again; misses are told in words."""

from __future__ import annotations

import csv
from dataclasses import replace
from math import exp, hypot, log
from pathlib import Path
from statistics import median, pstdev

import pytest

from experiments.__main__ import main
from experiments.published.calibration import (
    naive_rates,
    nearest,
    scaling_ratios,
    score,
)
from experiments.published.descriptions import DATA, hosts_of, rankers_of
from experiments.published.gpu_rows import Measured, MeasuredFiles, measured_of
from persia_sim.cluster.machine import System
from persia_sim.presets.fitted import REACH
from persia_sim.sharded.plan import Strategy
from persia_sim.sharded.software import BAND, SEEN, SOFTWARE, band_ln, generation
from persia_sim.sharded.stages import step_s

EXAMPLES = Path(__file__).parent / "examples"
ARGUMENTS = [
    "predict-published", "--rows", str(EXAMPLES / "rows.csv"),
    "--workloads", str(EXAMPLES / "workloads.csv"), "--systems", str(EXAMPLES / "systems.csv"),
]  # fmt: skip


def test_the_command_predicts_every_row_that_it_understands(tmp_path, capsys, rows):
    jobs = {row.label: row.job for row in rows}
    assert main([*ARGUMENTS, "--out", str(tmp_path)]) == 0
    with (tmp_path / "predict_published.csv").open() as file:
        lines = {line["id"]: line for line in csv.DictReader(file)}
    assert set(lines) == {"a-1", "a-2", "b-1", "d-1"}
    for line in lines.values():
        rate = float(line["predicted_samples_per_s"])
        half = band_ln(jobs[line["id"]])
        assert half > 1.645 * BAND.model, "nobody measured such a model"
        assert float(line["low_90"]) == pytest.approx(rate * exp(-half), rel=1e-4)
        assert float(line["high_90"]) == pytest.approx(rate * exp(half), rel=1e-4)
        step_ms = float(line["predicted_step_ms"])
        assert step_ms == pytest.approx(1e3 * float(line["global_batch"]) / rate, rel=1e-3)
        assert line["ln_error"] == "" and line["rows_fit"] == "True"
    said = capsys.readouterr().out
    assert "no row has a measurement" in said
    assert "left out: c-1 (rows.csv, line 5): workload is 'unheard'" in said
    # A software that is no system's is predicted by the middle of all, as wide as they differ.
    unheard = jobs["d-1"].software
    assert unheard.name == "unheard" and unheard.unmeasured in SOFTWARE
    halves = {name: band_ln(jobs[name]) for name in lines}
    assert max(halves, key=halves.__getitem__) == "d-1"
    assert halves["d-1"] > 1.645 * hypot(unheard.guess_ln, BAND.software)
    said_of_it = f"software 'unheard' (1 rows) is a title: taken for {unheard.unmeasured}"
    assert said_of_it in said


def predicted_of(tmp_path: Path, *changes: dict[str, str]) -> Path:
    """Rows like the first of the examples, each with other cells, in a file."""
    with (EXAMPLES / "rows.csv").open() as file:
        first = next(csv.DictReader(file))
    path = tmp_path / "some rows.csv"
    with path.open("w", newline="") as file:
        columns = dict.fromkeys([*first, *(name for change in changes for name in change)])
        writer = csv.DictWriter(file, list(columns))
        writer.writeheader()
        writer.writerows(first | change for change in changes)
    return path


def predict(path: Path, tmp_path: Path) -> int:
    words = list(ARGUMENTS)
    words[words.index("--rows") + 1] = str(path)
    return main([*words, "--out", str(tmp_path)])


BAD = [
    ({"step_ms": "-5"}, "step_ms is '-5': must be > 0"),
    ({"step_ms": "nan"}, "step_ms is 'nan': must be a number"),
    ({"samples_per_s": "nan"}, "samples_per_s is 'nan': must be a number"),
    ({"samples_per_s": "0"}, "samples_per_s is '0': must be > 0"),
    ({"samples_per_s": "1e999"}, "samples_per_s is '1e999': must be > 0 and finite"),
    ({"global_batch": "0"}, "global_batch is '0': must be > 0"),
    ({"global_batch": "4096"}, "per_gpu_batch 1024 on 8 GPUs is another batch"),
    ({"global_batch": "", "per_gpu_batch": ""}, "it or per_gpu_batch must be > 0"),
    ({"nodes": "2"}, "gpus is 8: 2 nodes of 8 GPUs have another number; mend one of the three"),
    ({"gpus": "0"}, "gpus is '0': must be a whole number >= 1"),
    ({"step_ms": "9,5"}, "step_ms is '9,5': a comma stands before three digits only; write 8,192"),
    ({"global_batch": "8,1920"}, "global_batch is '8,1920': a comma stands before three digits"),
    ({"global_batch": "8K", "per_gpu_batch": ""},
     "global_batch is '8K': a letter for thousands or millions is not read; write the number out"),
    ({"precision": "INT4"}, "precision is 'INT4': must be one of fp32, tf32, fp16"),
    ({"optimizer": "Rprop"}, "optimizer is 'Rprop': must be one of sgd, adagrad"),
    ({"software": ""}, "software is '': must name one of hugectr"),
    ({"system": "bix"}, "system is 'bix': is no machine: did you mean box"),
    ({"strategy": "rows"}, "strategy is 'rows': must be one of table, row"),
    ({"storage": "ram"}, "storage is 'ram': must be one of hbm, uvm"),
    ({"reads_files": "maybe"}, "reads_files is 'maybe': must be yes or no"),
    ({"step_ms": "9.0", "samples_per_s": "999"},
     "step_ms is 9.0: samples_per_s gives 999, but 8,192 samples in it 910,222"),
    ({"id": "a-1"}, "id is 'a-1': an earlier line has it; change one"),
]  # fmt: skip


def test_lines_that_cannot_be_meant_are_left_out_with_a_sentence_each(tmp_path, capsys):
    named = [({"id": f"bad-{k}"} | change, said) for k, (change, said) in enumerate(BAD)]
    path = predicted_of(tmp_path, {}, *(change for change, _ in named))
    assert predict(path, tmp_path) == 0
    out = capsys.readouterr().out
    told = [line for line in out.splitlines() if line.startswith("left out: ")]
    assert len(told) == len(BAD) and "1 predictions in" in out
    for number, (line, (change, said)) in enumerate(zip(told, named, strict=True), 3):
        assert line.startswith(f"left out: {change['id']} (some rows.csv, line {number}): ")
        assert said in line


def test_measured_columns_may_differ_as_a_mean_and_a_median_do(tmp_path):
    path = predicted_of(tmp_path, {"step_ms": "8.192", "samples_per_s": "900000"})
    models = rankers_of(EXAMPLES / "workloads.csv"), hosts_of(EXAMPLES / "systems.csv")
    (row,), left_out = measured_of(path, *models)
    assert row.samples_per_s == 900_000 and left_out == []


def test_commas_may_set_off_the_thousands_of_a_number(tmp_path):
    models = rankers_of(EXAMPLES / "workloads.csv"), hosts_of(EXAMPLES / "systems.csv")
    written = predicted_of(tmp_path, {"global_batch": "8,192", "samples_per_s": "1,000,000.5"})
    (row,), _ = measured_of(written, *models)
    assert (row.job.batch, row.samples_per_s) == (8192, 1_000_000.5)


READ = {
    "precision": [({"precision": "fp16"}, "fp16"), ({"precision": ""}, "fp32")],
    "update": [({"optimizer": ""}, "sgd"), ({"optimizer": "rowwise_adagrad"}, "rowwise_adagrad")],
    "gpus": [({"gpus": ""}, 8), ({"gpus": "4", "global_batch": "4096"}, 4)],
    "rows": [({"vocabulary": "2e6"}, 2e6),
             ({"vocabulary": "1000", "vocabulary_per_gpu": "yes"}, 8000.0),
             ({"vocabulary": "1000", "vocabulary_per_gpu": "yes", "software": "hugectr-2"},
              1000.0)],
    "stored": [({"storage": "uvm_cache", "cached_share": "0.05"}, ("uvm_cache", 0.05)),
               ({"storage": "uvm"}, ("uvm", 0.2)), ({}, ("hbm", 0.2))],
    "split": [({"strategy": "data_parallel"}, "data_parallel"),
              ({"software": "hugectr-2"}, "slot")],
    "reads": [({}, True), ({"reads_files": "no"}, False)],
    "wire": [({}, None), ({"wire_bytes": "2"}, 2)],
    "sparse": [({"software": "tf2"}, True), ({"software": "tf2", "sparse_gradients": "no"}, False)],
    "system": [({"system": "p5.48xlarge"}, "p5.48xlarge"), ({"system": "8x-t4"}, "8x-t4")],
}  # fmt: skip
"""What cells mean."""


def seen(row: Measured, what: str) -> object:
    table = row.job.ranker.tables[0]
    found = {
        "precision": row.job.precision, "update": row.job.ranker.update, "rows": table.rows,
        "gpus": row.job.system.gpus, "stored": (table.storage, table.cached_share),
        "split": row.job.software.strategy, "reads": row.job.reads_files,
        "wire": row.job.wire_bytes, "sparse": row.job.software.sparse_gradients,
        "system": row.job.system.host.name,
    }  # fmt: skip
    return found[what]


@pytest.mark.parametrize(
    ("what", "k"), [(what, k) for what in READ for k in range(len(READ[what]))]
)
def test_a_cell_says_what_its_column_is_called(what, k, tmp_path):
    (change, expected), models = READ[what][k], rankers_of(EXAMPLES / "workloads.csv")
    path = predicted_of(tmp_path, change)
    (row,), left_out = measured_of(path, models, hosts_of(EXAMPLES / "systems.csv"))
    assert seen(row, what) == expected and left_out == []


@pytest.mark.parametrize(
    ("title", "named"),
    [
        ("HugeCTR 26.03", {"hugectr", "hugectr-v07", "hugectr-2", "hugectr-3"}),
        ("TensorFlow 1 + Horovod", {"tf2", "tf2-plain", "tf2-copies"}),
        ("PyTorch 2.9", {"torch", "torch-fused", "torch-graphs"}),
        ("TorchRec 1.2", {"torchrec"}),
        ("mine", set()),
    ],
)
def test_a_title_means_the_middle_of_all_and_those_that_it_names_twice(title, named, tmp_path):
    """With a model that none of them was measured with."""
    models = rankers_of(EXAMPLES / "workloads.csv"), hosts_of(EXAMPLES / "systems.csv")
    asked = [{"id": "a", "software": title}, *({"id": n, "software": n} for n in SOFTWARE)]
    (row, *others), _ = measured_of(predicted_of(tmp_path, *asked), *models)
    steps = {other.family: log(step_s(other.job)) for other in others}
    twice = [*steps.values(), *(steps[name] for name in named)]
    found = log(step_s(row.job))
    assert found == steps[row.family], "it has the constants of one of them"
    nearest_to = min(abs(step - median(twice)) for step in twice)
    assert abs(found - median(twice)) == nearest_to and row.job.software.name == title
    assert row.job.software.guess_ln == pytest.approx(pstdev(twice))
    half = 1.645 * hypot(row.job.software.guess_ln, BAND.known, BAND.software)
    assert band_ln(row.job) >= half


@pytest.mark.parametrize(
    ("title", "workload", "strategy", "meant"),
    [
        ("HugeCTR 26.03", "dlrm_dcnv2", "", {"hugectr"}),
        ("TensorFlow 1", "outbrain_wd", "data_parallel", {"tf2-copies"}),
        ("PyTorch", "ncf_ml20m", "", {"torch"}),
        ("mine", "sok_demo", "", {"tf2", "tf2-plain"}),
    ],
)
def test_a_title_means_none_that_was_measured_with_other_models_alone(
    title, workload, strategy, meant, tmp_path
):
    folder = DATA / "gpu"
    models = rankers_of(folder / "workloads.csv", folder / "workload_tables.csv"), {}
    cells = {"workload": workload, "system": "dgx-a100-80", "software": title}
    (row,), _ = measured_of(predicted_of(tmp_path, cells | {"strategy": strategy}), *models)
    assert row.family in meant


def test_nothing_measured_shows_the_predictions(tmp_path, capsys):
    many = [{"id": f"x-{k}", "global_batch": "", "per_gpu_batch": str(k)} for k in range(64, 89)]
    assert predict(predicted_of(tmp_path, *many), tmp_path) == 0
    out = capsys.readouterr().out
    assert "x-64" in out and "x-83" in out and "x-84" not in out
    assert "... and 5 more in the CSV" in out


def test_a_job_measured_once_and_listed_twice_is_one_point_without_nan(tmp_path, capsys):
    twice = {"id": "a"}, {"id": "b", "step_ms": "9"}
    assert predict(predicted_of(tmp_path, *twice), tmp_path) == 0
    said = capsys.readouterr()
    assert "nan" not in said.out and "Warning" not in said.err
    (line,) = [x for x in said.out.splitlines() if x.startswith("all (one point a class)")]
    assert line.split()[5] == "1"
    # Its guess is of the project's own steps: no other line of the file is of another series.
    assert line.split()[10] != "-"


@pytest.mark.parametrize(
    ("option", "old", "new", "said"),
    [
        ("rows", ",software,", ",family,", "it has no column software"),
        ("rows", "gpus,", "cards,", "it has no column gpus"),
        ("workloads", "8000000", "0", "line 2: total_rows is 0: 8 tables have >= 1 row each"),
        ("workloads", ",8,512,512", ",-8,512,512", "line 2: lookups_per_sample is '-8'"),
        ("systems", "300,1500", "300,0", "hbm_bytes_per_s of GPU X100-SXM-40GB is 0.0"),
    ],
)
def test_a_bad_file_is_named_with_line_and_column(option, old, new, said, tmp_path, capsys):
    path = tmp_path / f"{option}.csv"
    path.write_text((EXAMPLES / f"{option}.csv").read_text().replace(old, new))
    words = list(ARGUMENTS)
    words[words.index(f"--{option}") + 1] = str(path)
    assert main([*words, "--out", str(tmp_path)]) == 2
    told = capsys.readouterr().err
    assert said in told and str(path) in told


def test_tables_without_a_column_are_named(tmp_path, capsys):
    path = tmp_path / "tables.csv"
    path.write_text("workload,rows,dim\nmine,10,4\n")
    assert main([*ARGUMENTS, "--tables", str(path), "--out", str(tmp_path)]) == 2
    told = capsys.readouterr().err
    assert f"header of tables {path}" in told and "no column lookups_per_sample" in told


def test_a_file_without_a_line_that_can_be_predicted_is_a_sentence(tmp_path, capsys):
    header = "workload,software,system,gpus,global_batch"
    (tmp_path / "rows.csv").write_text(f"{header}\nunheard,torchrec,box,8,8192\n")
    words = list(ARGUMENTS)
    words[words.index("--rows") + 1] = str(tmp_path / "rows.csv")
    assert main([*words, "--out", str(tmp_path)]) == 2
    assert "nothing to predict: rows-1 (rows.csv, line 2): workload" in capsys.readouterr().err


def test_the_nearest_series_is_never_the_rows_own(rows):
    named = rows[:3]  # the last is of software that nobody knows, and like what stands for it
    measured = [replace(row, samples_per_s=1000.0 * k) for k, row in enumerate(named, 1)]
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
    node = one.job.system.host
    two = replace(one, job=replace(one.job, system=System(host=node, gpus=16)), samples_per_s=150.0)
    assert scaling_ratios([one, two], [100.0, 180.0]) == [(1.8, 1.5)]


def test_the_projects_own_measurements_are_whole_and_can_be_read_beside_others(published):
    folder = DATA / "gpu"
    named = MeasuredFiles(
        workloads=(EXAMPLES / "workloads.csv", folder / "workloads.csv"),
        systems=(EXAMPLES / "systems.csv", folder / "systems.csv"),
    )
    rows, left_out = named.load([EXAMPLES / "rows.csv", folder / "rows.csv"])
    own = [row for row in rows if row.samples_per_s]
    assert len(own) == len(published) == 290 and len(rows) == 294
    assert not [why for why in left_out if "line 5" not in why]
    assert {row.family for row in own} == SEEN.keys()
    copies = [row for row in own if row.job.software.strategy is Strategy.DATA_PARALLEL]
    assert len(copies) == 18 and all(row.job.system.gpus > 1 for row in copies)
    under = copies[0].under(REACH, SOFTWARE)
    assert under.software.strategy is Strategy.DATA_PARALLEL and not under.plan.sharded.sent.any()
    with (folder / "rows.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert all(line["source"] for line in lines), "every figure says where it was read"
    assert len({line["id"] for line in lines}) == len(lines)


@pytest.mark.parametrize(
    ("cells", "expected"),
    [
        ({}, (2, True, None, True)),
        (
            {"gpus_per_switch": "4", "peer_to_peer": "no", "bridge_GBps": "112", "rdma": "no"},
            (4, False, 112e9, False),
        ),
        ({"peer_to_peer": "yes", "rdma": "yes"}, (2, True, None, True)),
    ],
)
def test_a_systems_file_may_say_how_a_box_hangs_together_and_that_its_nics_have_no_rdma(
    cells, expected, tmp_path
):
    with (EXAMPLES / "systems.csv").open() as file:
        line = next(csv.DictReader(file)) | cells
    path = tmp_path / "systems.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(line))
        writer.writeheader()
        writer.writerow(line)
    host = hosts_of(path)["box"]
    found = host.gpus_per_switch, host.peer_to_peer, host.bridge_bytes_per_s, host.rdma
    assert found == expected


def test_a_machine_is_of_its_generation_and_of_boxes_without_nvlinks():
    hosts = hosts_of(DATA / "gpu" / "systems.csv")
    assert generation(hosts["8x-a100-pcie-80"], 8) == "A100 by PCIe"
    assert generation(hosts["8x-a100-pcie-80"], 1) == generation(hosts["dgx-a100-40"], 8) == "A100"
