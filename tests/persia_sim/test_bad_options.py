"""Options that nobody can have meant: exit 2 and one sentence with name, value and rule."""

from __future__ import annotations

import errno
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from math import inf
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from persia_sim import __main__ as command
from persia_sim.base.rules import Quantity
from persia_sim.base.schema import field_types, notes_of
from persia_sim.cli import SimulateOptions, run
from persia_sim.cli.example import table
from persia_sim.cluster.allreduce import DenseSync
from persia_sim.cluster.cluster import Role
from persia_sim.cluster.machine import Gpu, Host, Reach
from persia_sim.presets.catalogue import MACHINES, costs_of, workloads
from persia_sim.presets.from_file import find_cluster
from persia_sim.sharded.presets import rankers
from persia_sim.sharded.software import SOFTWARE
from tests.persia_sim.sim_configurations import small_cluster
from tests.refusals import assert_names, assert_names_last

SMALL = {"cluster": "this-host", "workload": "taobao-ad", "row_format": "f32-adagrad", "steps": 20}


def refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str
) -> str:
    """What the command says to these arguments; it must exit with 2 and print nothing else."""
    monkeypatch.setattr(sys, "argv", ["persia_sim", *words])
    assert command.main() == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.count("\n") == 1
    return said.err


REFUSED = (
    "--gpu-cv inf", "--gpu-cv -0.1", "--server-cv nan",
    "--mode async_averaging --average-every-s 0",
    "--ranks 1000000", "--ranks 0", "--server-hosts 0", "--worker-hosts -1", "--steps 1",
    "--seed 9223372036854775808", "--slow gpu:0x3", "--slow rank:0",
    "sharded --gpus 0",
    "sharded --batch-per-gpu 0", "--write-timeline /no-such-folder/t.json", "--write-trace /",
    "--after-samples -1", "--after-samples nan", "--mode sync --tau 3", "--mode sync --permits 3",
    "--ahead 2", "--mode async --merge-pushes", "--tau -1", "--batch-per-rank 70000",
    "--write-timeline t.json --timeline-steps 5 500",
)  # fmt: skip
"""The last option is named, with its value."""
WITH_REMEDY = {
    "--trace-shards": "--write-trace", "--timeline-steps 1 2": "--write-timeline",
    "--workload criteo": "criteo-ad",
    "--cluster this_host": "this-host", "--row-format f32": "f32-sgd",
    "--profile no.json": "persia-runtime profile",
}  # fmt: skip
"""What must be named beside it: the option that is lacking, the nearest name, the command."""
OTHERWISE_NAMED = {
    "--slow rank:0x1e99": "factor is 1e+99", "--slow rank:0x99999": "factor is 99999",
    "--ranks 16000 --steps 1000": "lower --steps", "--server-hosts 99999": "servers is 99999",
    "--average-every-s 1": "period_s=1.0",
    "init my/cluster.toml": "my/cluster.toml", "init /etc/passwd/x": "/etc/passwd is a file",
    "init /proc/xx": "/proc/xx", "--slow rank:64x2": "rank is 64",
    "--compare sharded --cluster this-host --workload taobao-ad": "name a machine with GPUs",
}  # fmt: skip


@pytest.fixture
def no_run(monkeypatch):
    monkeypatch.setattr("persia_sim.report.measure.simulate", None)  # a call is a traceback


@pytest.mark.parametrize("words", REFUSED)
def test_a_value_is_refused_before_anything_runs(words, no_run, monkeypatch, capsys):
    assert_names_last(refused(monkeypatch, capsys, *words.split()), words)


@pytest.mark.parametrize("words", WITH_REMEDY)
def test_an_option_that_lacks_another_is_told_which(words, no_run, monkeypatch, capsys):
    told = refused(monkeypatch, capsys, *words.split())
    assert_names(told, words.split()[0].removeprefix("--"), "", WITH_REMEDY[words])


@pytest.mark.parametrize("words", OTHERWISE_NAMED)
def test_what_is_derived_of_options_is_named(words, no_run, monkeypatch, capsys):
    assert OTHERWISE_NAMED[words] in refused(monkeypatch, capsys, *words.split())


def test_tau_0_may_be_said_of_a_mode_that_reads_no_late_rows(monkeypatch, capsys):
    """It is true there, and scripts over bounds need no case of their own."""
    printed = []
    for words in ([], ["--tau", "0"]):
        run_words = ["--cluster", "this-host", "--workload", "taobao-ad", "--steps", "20"]
        monkeypatch.setattr(sys, "argv", ["persia_sim", *run_words, "--mode", "sync", *words])
        assert command.main() == 0
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1]


FAR = {
    "[servers]\nhosts = 1000000000000": "", '[nn.host]\ngpu = "H100"': "h100",
    '[nn]\nhost = "m2-ultramem-416"': "is_host_core = true", "[nn]\nhosts = 4": "ranks",
    "[nn]\nhosts = 0": "", "[servers]\nhosts = 20000": "servers of mine",
    "loaders = 1000000000000": "", "[link]\nlatency_s = inf": "",
    "[servers.host]\nnic_bytes_per_s = 1e-300": "m2-ultramem-416",
    "[nn.host]\ncore_speed = inf": "a2-highgpu-8g", "[nn.host]\nusd_per_hour = inf": "",
    "[costs.load]\nfixed_s = inf": "", "[costs.dense_sync]\noverhead_s = inf": "all-reduce",
    "[costs.dense_sync]\nintra_bytes_per_s = 1e-300": "all-reduce",
    "loaders = 1\n[nn.host]\ncore_speed = 0.01\n[costs.load]\nper_item_s = 0.01": "(loaders)",
}  # fmt: skip
"""What no cluster has: what must be named beside the key and its value."""
DERIVED = ("hosts = 4", "hosts = 20000", "per_item_s = 0.01", 'host = "m2-ultramem-416"')


@pytest.mark.parametrize("text", FAR)
def test_a_cluster_that_cannot_be_is_a_sentence_and_no_traceback(
    text, tmp_path, monkeypatch, capsys
):
    path = tmp_path / "mine.toml"
    path.write_text(f'base = "gcp-100t"\n{text}\n')
    told = refused(monkeypatch, capsys, "--cluster", str(path))
    key, value = text.splitlines()[-1].split(" = ")
    if text.endswith(DERIVED):
        assert FAR[text] in told
    else:
        assert_names(told, key, value.strip('"'), FAR[text])


def example_files() -> dict[str, tuple[str, str]]:
    """Every file that `init` writes, with all that may stand in it: its text, and the command."""
    small = replace(small_cluster(4, 2, 2), name="mine")
    for role in ("nn", "embedding_workers", "servers"):  # of no machine that has a name
        one = getattr(small, role)
        small = replace(small, **{role: replace(one, host=replace(one.host, source="mine"))})
    cluster = table(small)
    model = rankers()["dlrm"]
    run_small = "--steps 3 --tau 0 --row-format f32-adagrad --cluster"
    return {
        "cluster": (cluster + "\n" + table(costs_of("gcp-100t"), "costs"),
                    "--workload taobao-ad " + run_small),
        "workload": (table(workloads()["taobao-ad"]), run_small + " this-host --workload"),
        "model": (table(replace(model, tables=model.tables[:2])), "sharded --model"),
        "system": (table(MACHINES["dgx-h100"]), "sharded --gpus 16 --system"),
        "software": (table(SOFTWARE["torchrec"]), "sharded --model dlrm --software"),
    }  # fmt: skip


ABSURD = ("nan", "inf", "1e300", "1e-300", "0", "-1")
ABSURD_WHOLE = ("nan", "0", "-1", str(2**63 - 1))
NUMBER = re.compile(r"(?<![\w\".])-?(?:inf|\d[\d_.]*(?:e[-+]?\d+)?)(?![\w.\"])")


def with_absurd_numbers(text: str) -> Iterator[tuple[str, str]]:
    """The text with one number changed, and what was changed: each to all of its kind."""
    start = 0
    for line in text.splitlines(keepends=True):
        name, _, value = line.partition("=")
        if value and not line.startswith("#") and '"' not in value:
            for found in NUMBER.finditer(text, start + len(name), start + len(line)):
                for absurd in ABSURD_WHOLE if found[0].isdigit() else ABSURD:
                    yield f"{name}= {absurd}", text[: found.start()] + absurd + text[found.end() :]
        start += len(line)


@pytest.mark.long
@pytest.mark.parametrize(("kind", "numbers"), [("cluster", 90), ("workload", 14), ("model", 15),
                                               ("system", 10), ("software", 9)])  # fmt: skip
def test_each_number_of_each_file_is_refused_or_gives_sane_figures(
    kind, numbers, tmp_path, monkeypatch, capsys
):
    text, words = example_files()[kind]
    path, tried = tmp_path / f"{kind}.toml", 0
    for what, changed in with_absurd_numbers(text):
        path.write_text(changed)
        monkeypatch.setattr(sys, "argv", ["persia_sim", *words.split(), str(path)])
        status, said, tried = command.main(), capsys.readouterr(), tried + 1
        if status:
            assert status == 2 and said.err.count("\n") == 1 and not said.out, what
        else:
            figures = re.findall(r"(?<![\w.])-?\d[\d,]*\.?\d*(?:e[-+]?\d+)?", said.out)
            assert not re.search(r"\b(nan|inf)\b| 0 samples/s", said.out), what + said.out
            assert all(abs(float(f.replace(",", ""))) < 1e15 for f in figures), what + said.out
    assert tried >= numbers * len(ABSURD_WHOLE)


WRONG_UNITS = {
    "[servers.host]\nnic_bytes_per_s = 400": "400 Gbit/s are 5e+10, 400 GB/s are 4e+11",
    "[nn.host]\nram_bytes = 512": "512 GB are 5.12e+11, 512 TB are 5.12e+14",
    "[nn.host.gpu]\nfp16_flops = 312.0": "312 GFLOPS are 3.12e+11, 312 TFLOPS are 3.12e+14",
    "[nn.host.gpu]\nhbm_bytes_per_s = 3350": "3350 GB/s are 3.35e+12, 3350 TB/s are 3.35e+15",
    "[nn.host]\ncore_speed = 2600": "machines have 0.01 to 100 times the speed of the measured",
    "[servers]\nram_bytes_per_process = 80": "80 GB are 8e+10, 80 TB are 8e+13",
    "[servers.host]\nusd_per_hour = 45251": "45251 dollars a month are 61.9877",
    "[costs.worker_pool]\nfixed_s = 5": "machines have 0 to 1 seconds; 5 ms are 0.005, 5 us are 5e",
    "[costs.load]\nper_byte_s = 5e-4": "machines have 0 to 1e-06 seconds; 0.0005 us are 5e-10",
    "[link]\nlatency_s = 50": "machines have 0 to 1 seconds; 50 ms are 0.05, 50 us are 5e-05",
    "[costs.load]\nper_item_s = 9": "9 us are 9e-06, 9 ns are 9e-09",
    "[costs.dense_sync]\nbucket_bytes = 25": "machines have 1000 to 1e+17 bytes; 25 MB are 2.5e+07",
}


@pytest.mark.parametrize("text", WRONG_UNITS)
def test_a_figure_in_another_unit_names_what_was_probably_meant(
    text, tmp_path, monkeypatch, capsys
):
    part, line = text.split("]\n")
    (path := tmp_path / "mine.toml").write_text(f'base = "gcp-100t"\n{text}\n')
    said = refused(monkeypatch, capsys, "--cluster", str(path))
    key, value = line.split(" = ")
    assert f"{part[1:]}.{key} is {float(value):g}: " in said and WRONG_UNITS[text] in said


def test_rows_of_so_many_bits_are_no_bytes(tmp_path, monkeypatch, capsys):
    (path := tmp_path / "rows.toml").write_text('base = "f32-adam"\nvalue_bytes = 16\n')
    said = refused(monkeypatch, capsys, "--row-format", str(path))
    assert "value_bytes is 16: machines have 1 to 8 bytes; 16 bits are 2" in said


def test_what_is_no_limit_and_the_extremes_of_a_caller_are_believed(tmp_path):
    text = "[nn.host]\nmemory_bytes_per_s = inf\n[link]\nlatency_s = 0\n"
    (path := tmp_path / "mine.toml").write_text(f'base = "gcp-100t"\n{text}')
    cluster = find_cluster(str(path))[0]
    assert (cluster.nn.host.memory_bytes_per_s, cluster.link.latency_s) == (inf, 0)
    assert replace(cluster.nn.host, nic_bytes_per_s=400.0).nic_bytes_per_s == 400


RECORDS = {
    "nn": Role, "nn.host": Host, "nn.host.gpu": Gpu, "costs.dense_sync": DenseSync,
    "costs.reach": Reach,
}  # fmt: skip
"""Tables of a cluster's file, and what is made of them."""


def figures_without_default() -> list[tuple[str, str]]:
    """Figures of machines that have a limit also where they are left out: table and name."""
    return [
        (table, name)
        for table, record in RECORDS.items()
        for name, quantity in notes_of(record, Quantity).items()
        if record.__dataclass_fields__[name].default != inf and quantity.may[1] == inf
    ]


@pytest.mark.parametrize(("table", "name"), figures_without_default())
def test_no_machine_of_a_file_has_a_figure_without_limit(
    table, name, tmp_path, monkeypatch, capsys
):
    (path := tmp_path / "mine.toml").write_text(f'base = "gcp-100t"\n[{table}]\n{name} = inf\n')
    said = refused(monkeypatch, capsys, "--cluster", str(path))
    sentence = f"{table}.{name} is inf: machines have "
    if "None" in str(field_types(RECORDS[table])[name]):  # numbers that need not be there
        sentence = f"{table}.{name} must be a finite number, got inf"
    assert sentence in said


@pytest.mark.parametrize("kind", ["workload", "model"])
def test_rows_are_counted_one_by_one(kind, tmp_path, monkeypatch, capsys):
    text, words = example_files()[kind]
    (path := tmp_path / "mine.toml").write_text(re.sub(r"(?m)^rows = .*$", "rows = 139.9", text))
    said = refused(monkeypatch, capsys, *words.split(), str(path))
    assert "rows is 139.9: must be a whole number of rows; 139.9 million are 1.399e+08" in said


@pytest.mark.parametrize("text", ["ids_per_field = inf", "rows = inf", "zipf = inf", "dim = 0"])
def test_a_workload_that_cannot_be_is_a_sentence(text, tmp_path, monkeypatch, capsys):
    path = tmp_path / "mine.toml"
    path.write_text(f'base = "taobao-ad"\n{text}\n')
    said = refused(monkeypatch, capsys, "--workload", str(path))
    assert f"{text.replace(' =', ' is')}: must lie in [" in said


def test_a_full_disk_says_what_to_do(monkeypatch, capsys):
    def full(options: SimulateOptions) -> str:
        raise OSError(errno.ENOSPC, "No space left on device", "/tmp/order.npz")

    monkeypatch.setattr(command, "run", full)
    assert refused(monkeypatch, capsys) == (
        "error: /tmp/order.npz: No space left on device; free some space and run again\n"
    )


def test_what_would_come_after_the_end_is_refused():
    with pytest.raises(ValueError, match=r"slow-down of server 0 \(seconds\) is 900"):
        run(SimulateOptions(**SMALL | {"slow": ("server:0x2@900-901",)}))


NUMBERS = (
    "--gpu-cv",
    "--server-cv",
    "--tau",
    "--permits",
    "--ahead",
    "--average-every-s",
    "--ranks",
    "--batch-per-rank",
    "--server-hosts",
    "--worker-hosts",
    "--seed",
    "--steps",
)


@settings(max_examples=60)
@given(
    st.sampled_from(NUMBERS),
    st.sampled_from(["nan", "inf", "-inf", "-1", "1e400", "-1e-9", str(-(2**70))]),
    st.sampled_from(["sync", "lookahead", "hybrid", "async", "async_averaging"]),
)
def test_no_number_of_the_command_may_be_absurd(name, value, mode):
    """Numbers that no option takes, whatever the mode: exit 2 and one sentence."""
    words = ["persia_sim", "--mode", mode, f"{name}={value}"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", words)
        try:
            assert command.main() == 2
        except SystemExit as wrong_type:  # the parser's own sentence
            assert wrong_type.code == 2


def test_ctrl_c_in_a_long_simulation_ends_in_one_line(tmp_path):
    words = ["--steps", "100000", "--ranks", "8"]
    code = "import sys; from persia_sim.__main__ import main; print('up', flush=True)"
    code += "; sys.exit(main())"
    process = subprocess.Popen(
        [sys.executable, "-c", code, *words],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )  # fmt: skip
    assert process.stdout is not None and process.stdout.readline() == "up\n"
    try:
        process.communicate(timeout=1.2)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
    out, said = process.communicate(timeout=120)
    assert (process.returncode, out, said) == (130, "", "interrupted: nothing was written\n")


INTERRUPTED_WHILE_IT_LOADS = """
import os, signal, sys
from persia_sim.__main__ import main

class Interrupting:
    def find_spec(self, name, path=None, target=None):
        if name == "numpy.random._generator":
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupting())
code = main()
assert "numpy.random._generator" in sys.modules, "its modules are loaded whole, or not at all"
sys.exit(code)
"""


def test_ctrl_c_while_numpy_loads_is_not_lost(tmp_path):
    """Its compiled modules swallow it, so it waits until they are there."""
    ended = subprocess.run(
        [sys.executable, "-c", INTERRUPTED_WHILE_IT_LOADS, "--steps", "100000", "--ranks", "8"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        timeout=120,
    )
    said = (ended.returncode, ended.stdout, ended.stderr)
    assert said == (130, "", "interrupted: nothing was written\n")


def test_a_terminal_gets_one_bar_and_a_pipe_none(monkeypatch, capsys):
    from persia_sim.base.vocabulary import Mode
    from persia_sim.engine.rank import pushes_of
    from persia_sim.engine.simulate import simulate
    from tests.persia_sim.sim_configurations import small_scenario

    for mode in (Mode.SYNC, Mode.ASYNC):
        told: list[int] = []
        scenario = small_scenario(mode)
        simulate(scenario, on_push=lambda told=told: told.append(1))
        assert len(told) == pushes_of(scenario) == 4 * 12 * (1 + mode.has_dense_server)
    run(SimulateOptions(**SMALL))
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setattr(sys.modules["persia_sim.cli.command"], "BAR_AFTER_S", 0.0)
    run(SimulateOptions(**SMALL))
    assert " pushes" in capsys.readouterr().err
