"""What `persia-runtime train` accepts is meant, and what it refuses it says in a sentence."""

from __future__ import annotations

import errno
import fcntl
import io
import json
import os
import pty
import re
import subprocess
import sys
import termios
from contextlib import redirect_stderr, redirect_stdout, suppress
from zipfile import ZipFile

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from persia_sim import cli
from persia_sim.base.command_line import options_of
from persia_sim.base.trace import Trace
from persia_sim.base.vocabulary import Mode
from runtime import train_command
from runtime.__main__ import main
from runtime.config import TrainConfig
from runtime.executors.replayable import config_facts
from runtime.guarded import NOT_STORED
from runtime.hosts.torchrun import launched
from runtime.run.folder import claimed
from runtime.train_options import COMMON, read_train

OPTIONS = [f"--{option.name}" for option in options_of(TrainConfig)]
POOL = [
    "", " ", "0", "1", "2", "-1", "1.5", "inf", "-inf", "nan", "1e400", "1e12", str(10**30), "None",
    "True", "x", "[1]", "hybird", "hybrid", "concurent", "concurrent", "replay", "adm", "adam",
    "float23", "float64", "../none/x", "\u00e9",
]  # fmt: skip


@settings(max_examples=35, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.tuples(st.sampled_from(OPTIONS), st.sampled_from(POOL)), min_size=1, max_size=3))
def test_any_options_are_accepted_or_refused_naming_one_of_them(tmp_path_factory, pairs):
    out = tmp_path_factory.getbasetemp() / "absurd"
    told = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stderr(told), redirect_stdout(told):
        patch.setattr(train_command, "train_in_folder", lambda *_: None)
        code = main(["train", "--out", str(out), *(f"{name}={value}" for name, value in pairs)])
    assert code in (0, 2), told.getvalue()
    assert "Traceback" not in told.getvalue()
    if code == 2:
        said = re.sub(r"[\s_-]", "", told.getvalue())
        names = [re.sub(r"[_-]", "", name.rpartition(".")[2]) for name, _ in pairs]
        assert any(name in said for name in names), (pairs, told.getvalue())


def test_without_data_a_run_trains_on_the_synthetic_stream_and_says_so(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.delenv("PERSIA_DATA_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    words = ["train", "--steps", "2", "--batch", "16", "--test-rows", "200", "--model.hidden", "4"]
    assert main([*words, "--out", str(tmp_path / "run")]) == 0
    assert capsys.readouterr().out.startswith(
        "no real data found: training on the synthetic stream; for real clicks run"
        " `persia-runtime data get kuairand-pure-14d`"
    )
    assert json.loads((tmp_path / "run" / "config.json").read_text())["data"]["name"] == "synthetic"
    # Whoever names data means them.
    named = [*words, "--data.name", "kuairand-pure-14d", "--out", str(tmp_path / "other")]
    assert main(named) == 2
    assert "no data of kuairand-pure-14d" in capsys.readouterr().err


def a_text(path):
    path.write_text("kind,rank\n1,2\n")


def a_folder(path):
    path.mkdir()


def a_torn_archive(path):
    Trace.of([], mode="hybrid", tau=2, ranks=1).save(path, compress=False)
    path.write_bytes(path.read_bytes().replace(b"NUMPY", b"\0\xff\xfeAB"))


def another_archive(path):
    with ZipFile(path, "w") as archive:
        archive.writestr("a.txt", "a")


def nothing(path):
    pass


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (a_text, "it is a file, but no .npz archive; name the trace.npz of a run"),
        (a_folder, "it is no file; name the trace.npz of a run"),
        (a_torn_archive, "is damaged; record it again, or name the trace.npz"),
        (another_archive, "it lacks kind"),
        (nothing, "does not exist; correct the path"),
    ],
)
def test_what_is_no_trace_is_refused_before_any_data_is_read(
    tmp_path, refused, monkeypatch, make, says
):
    make(tmp_path / "t.npz")
    monkeypatch.setattr(train_command, "train_in_folder", lambda *_: pytest.fail("training began"))
    replay = ["--mode", "hybrid", "--executor", "replay", "--trace", str(tmp_path / "t.npz")]
    text = refused("train", *replay)
    assert says in text
    assert "pickle" not in text and text.isascii()


def test_a_trace_of_another_run_says_what_to_give(tmp_path, refused, monkeypatch):
    monkeypatch.setattr(train_command, "train_in_folder", lambda *_: None)
    recorded = ["--mode", "hybrid", "--ranks", "2", "--seed", "3", "--data.epochs", "2"]
    made = {"recorded": config_facts(read_train([*recorded, "--data.shuffle"]).run)}
    made["simulated"] = {"mode": "hybrid", "tau": 4, "ranks": 64, "batch_per_rank": 512}
    made["simulated"] |= {"order": "simulated", "steps": 10}
    for name, facts in made.items():
        Trace.of([], **facts).save(tmp_path / f"{name}.npz")
        replay = ["--executor", "replay", "--trace", str(tmp_path / f"{name}.npz")]
        options = refused("train", *replay).partition("to replay it, give: ")[2].split()
        assert {"--mode", "--ranks"} <= set(options)
        out = ["--out", str(tmp_path / f"{name}-out")]
        assert main(["train", *replay, *options, *out]) == 0, "what is to be given is enough"


def small(out, *words):
    data = ["--data.name", "synthetic", "--data.rows", "1024", "--test-rows", "200"]
    return main(["train", *data, "--batch", "64", *words, "--out", str(out)])


def test_a_run_says_what_was_evicted_and_what_it_was_too_short_for(tmp_path, capsys):
    assert small(tmp_path / "a", "--rows.capacity.rows", "50", "--steps", "40") == 0
    said = capsys.readouterr().out
    summary = json.loads((tmp_path / "a" / "summary.json").read_text())
    assert summary["rows_evicted"] > 1000
    assert re.search(rf"  rows evicted +{summary['rows_evicted']:,}\n", said)
    dropped = f"{summary['row_gradients_dropped']:,}, whose row was not there"
    assert re.search(rf"  gradients dropped +{dropped}\n", said)
    assert "note: --steps 40 asked for, the data gave 16" in said
    assert "the trained model is not kept; --checkpoint-every end keeps it" in said
    assert small(tmp_path / "b", "--steps", "2", "--checkpoint-every", "end") == 0
    assert not re.search("evicted|asked for|not kept", capsys.readouterr().out)


def test_a_folder_that_cannot_be_written_and_a_full_disk_are_told_with_their_folder(
    tmp_path, capsys, monkeypatch
):
    (tmp_path / "file").write_text("")
    assert small(tmp_path / "file" / "run") == 2
    assert "cannot be written: Not a directory; name another one with --out" in (
        capsys.readouterr().err
    )

    def full(file, **arrays):
        file.write(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("numpy.savez_compressed", full)
    run = tmp_path / "full"
    told = f"{run / 'predictions.npz'}: No space left on device; the disk is full"
    for more, remedy in [([], "run train as before"), (["--checkpoint-every", "end"], "--resume")]:
        assert small(run, "--steps", "1", *more) == NOT_STORED
        said = capsys.readouterr().err
        assert told in said and remedy in said
        assert not list(run.glob("predictions*"))
    monkeypatch.undo()
    assert main(["train", "--resume", str(run)]) == 0


def test_a_run_keeps_what_was_typed_and_reads_back_from_its_config(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["--data.name", "synthetic", "--steps", "2", "--test-rows", "200", "--out", "one"]
    assert main(["train", *words]) == 0
    assert json.loads((tmp_path / "one/command.json").read_text()) == {"train": words}
    again = ["--config", "one/config.json", "--out", "two"]
    assert main(["train", *again]) == 0
    one, two = (json.loads((tmp_path / f / "summary.json").read_text()) for f in ("one", "two"))
    assert one["tasks"] == two["tasks"]


def test_a_folder_is_not_taken_from_another_run_or_from_a_stranger(tmp_path, refused):
    begin = ["--data.name", "synthetic", "--steps", "1", "--out"]
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/config.json").write_text("precious")
    assert "is not of a run here" in refused("train", *[*begin, str(tmp_path / "mine")])
    assert (tmp_path / "mine/config.json").read_text() == "precious"
    (tmp_path / "file").write_text("")
    assert "is a file" in refused("train", *[*begin, str(tmp_path / "file")])
    assert "Not a directory" in refused("train", *[*begin, str(tmp_path / "file/below")])
    (tmp_path / "busy").mkdir()
    with (tmp_path / "busy/lock").open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        assert "another run is filling" in refused("train", *[*begin, str(tmp_path / "busy")])
    with claimed(tmp_path / "busy"):
        pass


def test_help_and_version_load_no_torch():
    probe = (
        "import sys, runtime.__main__ as c\n"
        "try: c.main(['train', '--help'])\n"
        "except SystemExit: pass\n"
        "c.main(['--version']); print(sorted({'torch', 'pandas', 'simpy'} & set(sys.modules)))"
    )
    found = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True)
    assert found.stdout.splitlines()[-1] == "[]", found.stdout + found.stderr
    assert found.stdout.splitlines()[-2].startswith("persia-testbed ")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_mistake_that_all_ranks_make_is_said_by_rank_0(rank, monkeypatch, capsys):
    """The others leave torchrun the time to end them, and say it after that only."""
    place = dict.fromkeys(("LOCAL_RANK", "GROUP_RANK"), "0") | {"RANK": str(rank)}
    place |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    place |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    said_before = []
    monkeypatch.setattr(
        train_command.time, "sleep", lambda s: said_before.append(capsys.readouterr().err)
    )
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    monkeypatch.setattr("runtime.hosts.torchrun.launched", lambda: launched(place))
    assert main(["train", "--mode", "sync", "--tau", "3"]) == 2
    assert said_before == ([""] if rank else [])
    assert "tau is not used by mode sync" in capsys.readouterr().err


def test_help_shows_the_usual_options_and_help_all_every_one(capsys):
    shown = []
    for words in (["--help"], ["--help", "all"]):
        with pytest.raises(SystemExit) as end:
            main(["train", *words])
        assert end.value.code == 0
        lines = [n for n in capsys.readouterr().out.splitlines() if n.startswith("  --")]
        shown.append({name for line in lines for name in re.findall(r"--([\w.-]+)", line)})
    usual, every = shown
    assert usual == {*COMMON, "data", "model", "no-dry-run", "no-json"} < every
    taken = {option.name for option in options_of(TrainConfig) if option.is_taken}
    assert every >= taken - {"tables"}
    assert "rows.name" not in every  # refused, whatever is typed


@pytest.mark.parametrize(("words", "stands_for"), [("hybrid", 4.688), ("async", 1.562)])
def test_a_sample_of_a_simulated_order_stands_for_those_of_the_step_not_of_a_whole_share(
    tmp_path, capsys, words, stands_for
):
    """300 samples a step of three simulated ranks, 64 of these: 21 or 22 a rank."""
    mode, order = words.split()[0], tmp_path / "order.npz"
    cli.run(
        cli.SimulateOptions(
            ranks=3, batch_per_rank=100, mode=Mode(mode), steps=2, write_trace=order
        )
    )
    replay = ["--ranks", "3", "--executor", "replay", "--trace", str(order)]
    assert small(tmp_path / "run", "--mode", *words.split(), *replay) == 0
    (told,) = [line for line in capsys.readouterr().out.splitlines() if "stands for" in line]
    assert f" {stands_for} of the simulated" in told


@pytest.mark.long
def test_a_terminal_sees_the_loss_and_the_auc_as_they_come(tmp_path):
    mine, terminal = pty.openpty()
    termios.tcsetwinsize(terminal, (40, 160))
    words = "--data synthetic --data.rows 20000 --test-rows 500 --evaluate-every-steps 5 --out"
    command = [sys.executable, "-m", "runtime", "train", *words.split(), str(tmp_path / "run")]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=terminal) as run:
        os.close(terminal)
        seen = b""
        with suppress(OSError):  # the end of a terminal
            while some := os.read(mine, 65536):
                seen += some
    os.close(mine)
    assert run.returncode == 0, seen
    assert re.search(rb"samples/s, loss=0\.\d{4}, AUC=0\.\d{4}\]", seen), seen


def test_names_in_a_schema_never_steer_the_terminal(tmp_path, capsys, refused):
    rows = "".join(f"{k % 7},{k % 2}\n" for k in range(300))
    (tmp_path / "rows.csv").write_text("user,label\n" + rows)
    schema = tmp_path / "mine.toml"
    schema.write_text(
        'name = "a\\u001b[2Jb"\nfile = "rows.csv"\ntasks = ["t\\u001b[1mx"]\n'
        '[split]\ntest_fraction = 0.3\n[[columns]]\nname = "user"\n'
    )
    words = ["--data.name", str(schema), "--steps", "2", "--out", str(tmp_path / "run")]
    assert main(["train", *words]) == 0
    told = capsys.readouterr()
    assert "a\\x1b[2Jb: test" in told.err + told.out and "t\\x1b[1mx" in told.out
    assert "\x1b" not in told.err + told.out
    schema.write_text('name = "\\u001b[2J"\nfil = "rows.csv"\n')
    assert "\x1b" not in refused("train", *["--data.name", str(schema)])
