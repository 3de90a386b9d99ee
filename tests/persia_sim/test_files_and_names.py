"""Clusters, workloads and models from files, and names in one import."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from enum import Enum
from pathlib import Path

import pytest

import persia_sim
from persia_sim import __main__ as command
from persia_sim.base.vocabulary import Mode
from persia_sim.cli import SimulateOptions
from persia_sim.cli.example import write_examples
from persia_sim.cluster.cluster import IN_ONE_ZONE
from persia_sim.cluster.incidents import SlowDown
from persia_sim.cluster.machine import Precision
from persia_sim.cluster.tables import Storage, Table
from persia_sim.engine.simulate import simulate
from persia_sim.presets.catalogue import CLUSTERS, GPUS, MACHINES, costs_of, workloads
from persia_sim.presets.costs import CATALOGUE
from persia_sim.presets.from_file import (
    find_cluster,
    read_cluster,
)
from persia_sim.presets.point import Point, scenario_of
from persia_sim.sharded.command import ShardedOptions, job_of, run_sharded
from persia_sim.sharded.compare import job_of as compared_job
from persia_sim.sharded.plan import HostTime
from persia_sim.sharded.presets import find_software, ranker_of, rankers, read_model
from persia_sim.sharded.software import SOFTWARE
from persia_sim.sharded.stages import device_step_s, stages, step_s


def written(tmp_path: Path, text: str, name: str = "mine.toml") -> Path:
    path = tmp_path / name
    path.write_text(text)
    return path


def answer(monkeypatch, capsys, *words: str) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["persia_sim", *words])
    code = command.main()
    said = capsys.readouterr()
    return code, said.out, said.err


def test_a_file_may_give_only_what_differs_from_a_preset(tmp_path):
    path = written(
        tmp_path,
        'base = "gcp-100t"\nranks = 16\n[nn]\nhosts = 2\nhost = "p5.48xlarge"\n'
        "[servers]\nhosts = 40\n[costs.load]\nfixed_s = 0.5\n",
    )
    cluster, costs = read_cluster(path)
    preset = CLUSTERS["gcp-100t"]()
    assert cluster.name == "mine" and cluster.gpu == GPUS["h100"]
    assert cluster == replace(
        preset, name="mine", ranks=16, nn=replace(preset.nn, hosts=2, host=MACHINES["p5.48xlarge"]),
        servers=replace(preset.servers, hosts=40),
    )  # fmt: skip
    assert costs == replace(
        costs_of("gcp-100t"), load=replace(costs_of("gcp-100t").load, fixed_s=0.5)
    )


def test_a_part_may_be_a_presets_name(tmp_path):
    path = written(tmp_path, 'base = "gcp-100t"\n[servers]\nhost = "c2-standard-30"\n'
                   "processes_per_host = 1\ncores_per_process = 28\n"
                   "ram_bytes_per_process = 1e11\n")  # fmt: skip
    assert read_cluster(path)[0].servers.host == MACHINES["c2-standard-30"]


def test_a_machine_may_start_from_one_of_the_catalogue_and_a_network_from_the_usual_one(tmp_path):
    path = written(
        tmp_path,
        '[nn]\nhosts = 2\n[nn.host]\nbase = "p5.48xlarge"\nnic_bytes_per_s = 3.125e9\n'
        '[embedding_workers]\nhost = "c2-standard-30"\nhosts = 1\n'
        '[servers]\nhost = "c2-standard-30"\nhosts = 1\n[link]\nstream_bytes_per_s = 1e9\n',
    )
    cluster, _ = read_cluster(path)
    known = MACHINES["p5.48xlarge"]
    changed = {"name": "p5.48xlarge, edited", "usd_per_hour": 0.0, "nic_bytes_per_s": 3.125e9}
    assert cluster.nn.host == replace(known, **changed, source="a file, from p5.48xlarge")
    assert cluster.link == replace(IN_ONE_ZONE, stream_bytes_per_s=1e9)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            '[nn.host]\nbase = "p5.48xlarg"',
            "nn.host.base is 'p5.48xlarg', a machine that is not in",
        ),
        ("[nn.host]\nbase = 5", "nn.host.base must be a name, got 5"),
        ("rankz = 3", "rankz is unknown: did you mean ranks?"),
        (
            "[servers]\nhosts = 0",
            "servers: hosts (of type m2-ultramem-416) is 0: must lie in [1, 100,000]",
        ),
        ("[servers.host]\ncores = 1.5", "servers.host.cores must be a whole number, got 1.5"),
        ('[nn.host]\ngpu = "h1000"', "gpu is 'h1000': did you mean h100?"),
        (
            '[embedding_workers]\nhost = "c6i.32xlarge"',  # no machine with GPUs is proposed
            "embedding_workers.host is 'c6i.32xlarge', a machine that is not in the catalogue:"
            " known: 2 x E5-2680 v4, c2-standard-30, m2-ultramem-416 (`persia-sim machines list`",
        ),
        ("[nn.host]\ngpu = 7", "gpu must be a table, got 7"),
        ('ranks = "many"', "ranks must be a whole number, got 'many'"),
        ("[link]\nlatency_s = -1.0", "link: latency_s of the link is -1.0: must lie in [0, 1e+06]"),
        ("[costs.load]\nper_second = 1", "costs.load.per_second is unknown"),
        ("[link]\nlatency_s = nan", "link.latency_s must be a finite number, got nan"),
    ],
)
def test_a_wrong_value_in_a_file_is_a_sentence(text, said, tmp_path, monkeypatch, capsys):
    first = "" if text.startswith("[") else text + "\n"
    rest = text if text.startswith("[") else ""
    path = written(tmp_path, f'{first}base = "gcp-100t"\n{rest}')
    code, out, err = answer(monkeypatch, capsys, "--cluster", str(path))
    assert code == 2 and out == "" and err.count("\n") == 1
    assert f"cluster {path}: " in err and said in err


def test_a_missing_file_names_the_command_that_writes_one(monkeypatch, capsys):
    code, _, said = answer(monkeypatch, capsys, "--workload", "none.toml")
    assert code == 2 and "workload none.toml does not exist; write an example" in said


def test_a_run_from_files_is_the_run_of_the_presets_that_they_hold(tmp_path, monkeypatch, capsys):
    write_examples(tmp_path)
    written(tmp_path, 'base = "gcp-100t"\n')
    written(tmp_path, 'base = "criteo-syn1"\nbatch_per_rank = 1024\nrows = 1e10\n', "based.toml")
    common = ["--steps", "8", "--ranks", "8", "--gpu-cv", "0", "--row-format", "f32-adam"]
    paths = ["--cluster", str(tmp_path / "mine.toml"), "--workload",
             str(tmp_path / "workload.toml")]  # fmt: skip
    _, by_file, _ = answer(monkeypatch, capsys, *paths, *common)
    _, by_name, _ = answer(monkeypatch, capsys, "--workload", str(tmp_path / "based.toml"), *common)
    one, other = (said[said.index("  batch ") :] for said in (by_file, by_name))
    assert one == other and "throughput" in one


def test_tables_of_different_shapes_and_places_are_read(tmp_path):
    path = written(
        tmp_path,
        "dense_macs = 1e6\ndense_params = 1e6\n"
        "[[tables]]\nrows = 1e9\ndim = 64\nids_per_sample = [50]\nstorage = 'uvm_cache'\n"
        "cached_share = 0.1\nzipf = 0.9\n"
        "[[tables]]\nrows = 100\ndim = 8\ncount = 3\n",
    )
    large, small = read_model(path).tables
    assert (large.storage, large.cached_share, large.zipf) == (Storage.UVM_CACHE, 0.1, 0.9)
    assert large.ids_per_sample == (50.0,) and small.count == 3
    slow = job_of(ShardedOptions(model=str(path), batch_per_gpu=512))
    quick = replace(
        slow, ranker=replace(slow.ranker, tables=(replace(large, storage=Storage.HBM), small))
    )
    assert step_s(slow) > step_s(quick)


def test_software_may_start_from_a_preset(tmp_path):
    path = written(tmp_path, 'base = "torchrec"\npipeline = "semi_sync"\nhost_s = 0.001\n')
    found = find_software(str(path))
    assert found.pipeline == "semi_sync" and found.host_s == 0.001
    assert found.id_s == 0.2e-9 and found.name == "mine"


def test_a_workload_of_the_simulator_keeps_its_sizes_as_tables_on_gpus():
    for workload in workloads().values():
        ranker = ranker_of(workload)
        assert ranker.ids * workload.batch_per_rank == pytest.approx(workload.ids_per_batch)
        rows = sum(t.count * t.rows for t in ranker.tables)
        assert rows == pytest.approx(workload.rows)
        assert ranker.dense_params == workload.weights


def test_the_sharded_screen_gives_rate_band_memory_and_price(monkeypatch, capsys):
    words = ["sharded", "--model", "dlrm", "--system", "p4d.24xlarge", "--software", "hugectr"]
    code, said, _ = answer(monkeypatch, capsys, *words)
    assert code == 0
    job = job_of(ShardedOptions(model="dlrm", system="p4d.24xlarge", software="hugectr"))
    rate = job.batch / step_s(job)
    assert f"throughput    {rate:,.0f} samples/s" in said
    gpu_s, host_s = device_step_s(stages(job), job.software), stages(job).host_s
    assert job.host_time is HostTime.HIDDEN and step_s(job) == max(gpu_s, host_s)
    assert f"GPU {gpu_s * 1e3:.3f}, host {host_s * 1e3:.3f}: the longer\n" in said
    assert f"$32.77 an hour, ${32.77 / rate / 3600 * 1e6:.5f} a million samples" in said
    assert "borrowed" not in said, "MLPerf's own model and software"
    for word in ("90 % band", "lookup", "exchange", "update", "on the fullest of GPUs"):
        assert word in said
    assert "loading       free: batches are taken to lie in the hosts' memory in time\n" in said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--model dlrmm", "--model is 'dlrmm': did you mean dlrm?"),
        ("--system dgx-h10", "--system is 'dgx-h10': did you mean dgx-h100?"),
        ("--software torchrek", "did you mean torchrec?"),
        ("--model x.csv", " (or give a file that ends in .toml)"),
        ("--model none.toml", "model none.toml does not exist"),
    ],
)
def test_an_unknown_name_is_a_sentence(words, said, monkeypatch, capsys):
    code, out, err = answer(monkeypatch, capsys, "sharded", *words.split())
    assert code == 2 and out == "" and said in err


def test_a_table_too_large_for_the_gpus_is_told():
    said = run_sharded(ShardedOptions(model="criteo-syn5", gpus=64, anyway=True))
    assert "THEY DO NOT FIT" in said


def test_every_machine_says_where_its_figures_are_from():
    for host in MACHINES.values():
        assert host.source and (host.gpu is None) == (host.gpus == 0)
        dated = host.source.endswith(("check before you spend", ", 2021-11"))
        assert dated == (host.usd_per_hour > 0)
    wanted = {"v100", "a100-40", "a100-80", "h100", "h200", "b200", "l4"}
    assert set(GPUS) == wanted
    rates = {host.nic_bytes_per_s * 8 / 1e9 for host in MACHINES.values()}
    assert {10.0, 25.0, 100.0, 400.0} <= rates
    assert {host.rdma for host in MACHINES.values() if host.gpus} == {True, False}


def test_one_import_gives_what_a_simulation_needs():
    cluster = persia_sim.presets.cluster("this-host")
    assert isinstance(cluster, persia_sim.Cluster)
    scenario = persia_sim.Scenario(
        cluster=cluster, workload=persia_sim.presets.workload("taobao-ad"),
        costs=find_cluster("this-host")[1], mode=persia_sim.Mode.HYBRID, tau=2,
        steps=12,
    )  # fmt: skip
    assert persia_sim.throughput(persia_sim.simulate(scenario)).mean > 0
    assert set(persia_sim.__all__) >= {"simulate", "Cluster", "Workload", "presets"}
    with pytest.raises(AttributeError, match="no attribute 'clusters'"):
        _ = persia_sim.clusters


def test_the_one_import_is_instant():
    probe = "import sys, persia_sim; print(sorted({'numpy', 'simpy'} & set(sys.modules)))"
    found = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True)
    assert found.stdout.strip() == "[]", found.stderr


@pytest.mark.parametrize("ask", ["cluster", "workload"])
def test_a_name_that_no_preset_has_lists_those_there_are(ask):
    with pytest.raises(ValueError, match=f"--{ask} is 'nobody': "):
        getattr(persia_sim.presets, ask)("nobody")


ESCAPES = "\x1b[2J\x1b]0;got\x07\u202e"


@pytest.mark.parametrize("where", ["name", "key", "host", "file"])
def test_a_name_from_a_file_never_steers_the_terminal(where, tmp_path, monkeypatch, capsys):
    named = "small" + (ESCAPES if where == "name" else "")
    path = tmp_path / ("mine" + ("\x1b[2J" if where == "file" else "") + ".toml")
    text = f'base = "this-host"\nname = {json.dumps(named)}\n'
    text += f"{json.dumps(ESCAPES)} = 1\n" if where == "key" else ""
    if where == "host":
        text += f"[servers]\nhosts = 0\n[servers.host]\nname = {json.dumps(ESCAPES)}\n"
    path.write_text(text if where != "file" else "hosts = 1\n")
    words = ["--workload", "taobao-ad", "--row-format", "f32-adagrad", "--steps", "3", "--cluster"]
    code, out, err = answer(monkeypatch, capsys, *words, str(path))
    assert code == (0 if where == "name" else 2)
    assert all(c.isprintable() or c == "\n" for c in out + err)
    assert "\\x1b[2J" in out + err


@pytest.mark.parametrize("words", [["--cluster"], ["--workload"], ["sharded", "--model"]])
def test_a_base_that_is_no_name_is_one_sentence(words, tmp_path, monkeypatch, capsys):
    path = written(tmp_path, 'base = ["gcp-100t"]\n', "listed.toml")
    code, _, said = answer(monkeypatch, capsys, *words, str(path))
    assert code == 2 and f"base of {path} is ['gcp-100t']: " in said


def test_rows_may_be_kept_as_a_file_says(tmp_path, monkeypatch, capsys):
    path = written(tmp_path, 'base = "f32-adam"\noverhead_bytes = 10.0\n', "rows.toml")
    common = ["--workload", "taobao-ad", "--cluster", "v100-2021-09", "--steps", "3"]
    _, said, _ = answer(monkeypatch, capsys, *common, "--row-format", str(path))
    assert f" {16 * 12 + 10} B as rows\n" in said
    path.write_text('base = "f32-adam"\nvalue_bytes = 0\n')
    code, _, said = answer(monkeypatch, capsys, *common, "--row-format", str(path))
    assert code == 2 and "value_bytes is 0: must lie in [1, " in said


def test_memory_counts_optimiser_state_but_for_the_run_that_had_none(monkeypatch, capsys):
    _, said, _ = answer(monkeypatch, capsys, "--steps", "2")
    assert " 346 B as fp16-lean\n" in said
    words = ["--steps", "2", "--workload", "avazu-ad", "--cluster", "v100-2021-09"]
    _, said, _ = answer(monkeypatch, capsys, *words)
    assert " 194 B as f32-adagrad\n" in said


@pytest.mark.parametrize(
    ("text", "name", "kept"),
    [
        ('base = "criteo-syn1"', "mine.toml", " 346 B as fp16-lean\n"),  # 2 * 128 + 90
        ('base = "avazu-ad"', "criteo-syn.toml", " 194 B as f32-adagrad\n"),  # 8 * 16 + 66
    ],
)
def test_rows_of_a_workload_from_a_file_are_kept_as_its_bases(
    text, name, kept, tmp_path, monkeypatch, capsys
):
    written(tmp_path, text, name)
    monkeypatch.chdir(tmp_path)
    _, said, _ = answer(monkeypatch, capsys, "--steps", "2", "--workload", name)
    assert kept in said


def test_a_workload_of_the_simulator_is_a_model_with_tables_on_gpus(tmp_path):
    path = written(tmp_path, 'base = "avazu-ad"\n', "avazu.toml")
    by_file = job_of(ShardedOptions(model=str(path))).ranker
    assert replace(by_file, name="avazu-ad") == ranker_of(workloads()["avazu-ad"])


def test_a_workload_on_gpus_has_its_own_batch_and_arithmetic_unless_told(tmp_path):
    """As `--compare sharded` has it; a model of tables says neither."""
    text = 'base = "avazu-ad"\nbatch_per_rank = 4096\nprecision = "tf32"\n'
    own = ShardedOptions(model=str(written(tmp_path, text, "own.toml")), gpus=16)
    assert (job_of(own).batch, job_of(own).precision) == (16 * 4096, "tf32")
    told = job_of(replace(own, batch_per_gpu=100, precision=Precision.FP32))
    assert (told.batch, told.precision) == (1600, "fp32")
    for name, batch, precision in (("avazu-ad", 512, "fp32"), ("dlrm", 8192, "fp16")):
        job = job_of(ShardedOptions(model=name))
        assert (job.batch, job.precision) == (8 * batch, precision)
    compared = compared_job(
        scenario_of(Point(cluster="v100-2021-09", workload=own.model)), SOFTWARE["torchrec"]
    )
    assert (compared.per_gpu, compared.precision) == (4096, "tf32")


def test_a_model_of_layers_has_their_multiplications_and_weights(tmp_path):
    tables = "[[tables]]\nrows = 1e6\ndim = 10\ncount = 3\n"
    layers = written(tmp_path, f"mlp = [20, 1]\ndense_features = 2\n{tables}", "layers.toml")
    ranker = job_of(ShardedOptions(model=str(layers))).ranker
    assert (ranker.dense_macs, ranker.dense_params) == (32 * 20 + 20, 33 * 20 + 21)
    assert ranker.widths == 30 + 20 + 1
    wrong = written(tmp_path, f'mlp = ["20"]\n{tables}', "wrong.toml")
    with pytest.raises(ValueError, match=r"wrong\.toml: mlp\[0\] must be a whole number"):
        job_of(ShardedOptions(model=str(wrong)))


CHOICES = {
    "mode": (lambda value: replace(scenario_of(Point(steps=8)), mode=value), "hybrid"),
    "mode of a point": (lambda value: Point(mode=value), "hybrid"),
    "mode of the command": (lambda value: SimulateOptions(mode=value), "hybrid"),
    "discipline": (lambda value: Point(discipline=value), "fifo"),
    "precision": (lambda value: replace(workloads()["criteo-ad"], precision=value), "fp16"),
    "fabric": (lambda value: replace(MACHINES["dgx-a100"], fabric=value), "pcie"),
    "algorithm": (lambda value: replace(CATALOGUE.dense_sync, algorithm=value), "ring"),
    "target": (lambda value: SlowDown(target=value, index=0, factor=2.0), "rank"),
    "strategy": (lambda value: replace(SOFTWARE["torchrec"], strategy=value), "row"),
    "host_time": (lambda value: replace(SOFTWARE["torchrec"], host_time=value), "partly"),
    "storage": (lambda value: Table(rows=10, dim=4, storage=value), "uvm"),
    "update": (lambda value: replace(rankers()["dlrm"], update=value), "sgd"),
    "pipeline": (lambda value: ShardedOptions(pipeline=value), "base"),
}
"""What is one of some words, of every record that has such a field."""


@pytest.mark.parametrize("name", CHOICES)
def test_a_choice_may_be_its_word_and_what_is_none_is_a_sentence(name):
    make, word = CHOICES[name]
    field = name.split()[0]
    chosen = getattr(make(word), field)
    assert chosen == word and isinstance(chosen, Enum)
    for wrong in (f"{word}d", 3):
        with pytest.raises(ValueError, match=f"{field} must be one of .*{wrong!r}"):
            make(wrong)


def test_a_scenario_of_words_runs_as_one_of_its_modes():
    base = scenario_of(Point(cluster="v100-2021-09", workload="criteo-ad", steps=8))
    named = replace(base, mode="sync", tau=None)
    assert simulate(named).makespan_s == simulate(replace(base, mode=Mode.SYNC)).makespan_s
    job = job_of(ShardedOptions(precision="fp32"))
    assert step_s(job) == step_s(job_of(ShardedOptions(precision=Precision.FP32)))
