"""What torchrun says to a process, and what it is told."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from persia_sim.base.trace import Trace
from runtime import __main__ as commands
from runtime import train_options
from runtime.guarded import guarded
from runtime.hosts.torchrun import Launch, launched
from runtime.stop import Interrupted
from tests.runtime.spawned import Command

ENVIRONMENT = {
    "RANK": "1", "LOCAL_RANK": "1", "GROUP_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29411", "TORCHELASTIC_USE_AGENT_STORE": "True",
}  # fmt: skip
LAUNCH = Launch(
    rank=1,
    local_rank=1,
    ranks=2,
    ranks_here=2,
    host="127.0.0.1",
    port=29411,
    agent_has_store=True,
)


def test_the_environment_says_where_a_process_stands():
    assert launched(ENVIRONMENT) == LAUNCH
    assert launched({}) is None
    assert launched({"WORLD_SIZE": "1", "RANK": "0", "SLURM_STEP_NUM_TASKS": "1"}) is None
    there = launched(ENVIRONMENT | {"WORLD_SIZE": "4", "RANK": "3"})
    assert there == replace(LAUNCH, rank=3, ranks=4)
    assert there.spans_hosts and not LAUNCH.spans_hosts


NOT_TORCHRUNS = {
    "RANK": ["5", "2", "-1", "x", "", "1.0", "9" * 5000],
    "LOCAL_RANK": ["2", "-1", "x"],
    "WORLD_SIZE": ["0", "-1", "x", ""],
    "LOCAL_WORLD_SIZE": ["0", "x"],
    "MASTER_ADDR": ["", "no.such.host.invalid", "a..b", "x" * 300, None],
    "MASTER_PORT": ["99999", "-1", "0", "x", "", None],
}


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name in NOT_TORCHRUNS for value in NOT_TORCHRUNS[name]]
)
def test_a_variable_that_torchrun_would_not_give_is_named(name, value):
    given = ENVIRONMENT | {name: value}
    with pytest.raises(ValueError, match=f"^{name} is .* start with torchrun"):
        launched({k: v for k, v in given.items() if v is not None})


@pytest.mark.parametrize("missing", ["LOCAL_RANK", "GROUP_RANK", "RANK"])
def test_several_processes_that_would_train_alone_are_refused(missing):
    """As srun and mpirun start them, and scripts that set some of the variables."""
    given = {k: v for k, v in ENVIRONMENT.items() if k != missing}
    with pytest.raises(ValueError, match=f"WORLD_SIZE is '2', but {missing} of torchrun are not"):
        launched(given)
    for name in ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"):
        with pytest.raises(
            ValueError, match=f"{name} is '4', but RANK, LOCAL_RANK, .* train alone"
        ):
            launched({name: "4"})


def test_a_wrong_variable_ends_the_command_in_one_sentence():
    """It waited for 300 s, in silence."""
    wrong = {"MASTER_ADDR": "no.such.host.invalid"}
    found = subprocess.run(
        [sys.executable, "-m", "runtime", "train", *SMALL], env=os.environ | ENVIRONMENT | wrong,
        capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert found.returncode == 2
    assert re.fullmatch(r"error: MASTER_ADDR is .* in one process\n", found.stderr)


def test_torchrun_decides_ranks_executor_and_servers_unless_they_are_typed():
    run = train_options.read_train(["--mode", "hybrid", "--latency-s", "0.01"], LAUNCH).run
    assert (run.sync.ranks, run.engine.executor, run.engine.servers) == (2, "concurrent", 1)
    run = train_options.read_train(["--ranks", "2", "--servers", "3"], LAUNCH).run
    assert (run.sync.ranks, run.engine.servers) == (2, 3)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--ranks", "4"], "--ranks is 4, but torchrun started 2 processes, .* --nproc-per-node 4"),
        (
            ["--executor", "constant_lag"],
            "--executor constant_lag runs in one process; start it without torchrun",
        ),
        (["--servers", "0"], "--servers 0 keeps the rows inside one process, and torchrun started"),
    ],
)
def test_what_ranks_as_processes_cannot_do_is_refused(words, sentence):
    with pytest.raises(ValueError, match=sentence):
        train_options.read_train(words, LAUNCH)


AT = ["--servers", "1", "--servers-at", "10.0.0.1:7800", "--servers-secret", "secret"]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--out", "a"], "4 ranks, 2 of them on this host, and servers .* add --servers-at HOST"),
        (AT, "2 of them on this host, which name their run folder .* add --out"),
    ],
)
def test_what_ranks_on_several_hosts_cannot_do_is_refused(words, sentence):
    with pytest.raises(ValueError, match=sentence):
        train_options.read_train(words, replace(LAUNCH, ranks=4))


def agent() -> None:
    """What `torchrun` carries out."""
    from torch.distributed.run import main  # late: no other test needs it

    main()


def torchrun(
    folder: Path, *words: str, restarts: int = 0, **environment: str
) -> tuple[int | None, str, str]:
    """Exit code and words of two ranks that it starts; they find modules in the folder."""
    options = ["--standalone", "--nproc-per-node=2", f"--max-restarts={restarts}"]
    options += ["-m", "runtime", "train", *words]
    seen = os.environ | {"PYTHONPATH": path_with(folder)} | environment
    return Command(folder, *options, main=agent, environment=seen).ended()


SMALL = ["--data.name", "synthetic", "--steps", "30", "--batch", "64", "--test-rows", "2000"]


def path_with(folder: Path) -> str:
    return f"{folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"


@pytest.mark.long
def test_a_mistake_is_one_sentence_in_torchruns_report_too(tmp_path):
    (tmp_path / "thready.py").write_text(SPLIT)
    words = ["--out", str(tmp_path / "run"), "--model.name", "thready:Net"]
    code, _, told = torchrun(tmp_path, *SMALL, *words)
    assert code
    sentence = "model thready:Net failed in forward: KeyError: 'rank 1 only'"
    assert f"error: {sentence}" in told
    root = told.split("Root Cause")[1]
    assert sentence in root
    assert "error_file: <N/A>" not in root


SPLIT = """
import os
import signal
from runtime.models.networks import FeedForward

class Net(FeedForward):
    def forward(self, dense, embeddings):
        if os.environ["RANK"] == "1":
            raise KeyError("rank 1 only")
        return super().forward(dense, embeddings)
"""


MORTAL = """
import os, signal, time, torch
from pathlib import Path
from runtime.models.networks import FeedForward

class Net(FeedForward):
    batches = 0

    def forward(self, dense, embeddings):
        assert torch.get_num_threads() == 2, torch.get_num_threads()
        self.batches += self.training
        if self.batches == 30 and os.environ.get("RANK") == "1":
            killed = Path(os.environ["RUN"] + ".killed")
            if not killed.exists():
                while not list(Path(os.environ["RUN"]).glob("checkpoints/*/state.json")):
                    time.sleep(0.02)
                killed.touch()
                os.kill(os.getpid(), signal.SIGKILL)
        return super().forward(dense, embeddings)
"""


@pytest.mark.long
def test_a_rank_that_is_killed_costs_the_steps_since_the_last_checkpoint_and_no_byte(
    tmp_path, monkeypatch
):
    """Law 11 by torchrun itself: it starts all ranks anew, and they go on without being told.

    One command, one folder: loaders, evaluations on the way, threads against OMP_NUM_THREADS=1.
    """
    words = ["--data.name", "synthetic", "--steps", "60", "--batch", "64", "--test-rows", "500"]
    words += ["--model.name", "mortal:Net", "--threads", "2", "--evaluate-every-steps", "20"]
    run, threads, replay = (tmp_path / name for name in ("run", "threads", "replay"))
    (tmp_path / "mortal.py").write_text(MORTAL)
    monkeypatch.syspath_prepend(tmp_path)
    code, said, told = torchrun(
        tmp_path, *words, "--checkpoint-every", "20", "--loaders", "1",
        "--out", str(run), restarts=1, RUN=str(run),
    )  # fmt: skip
    assert code == 0, told
    assert said.count("run folder: ") == 1, "one rank tells it"
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["samples"], summary["ranks"]) == (60 * 64, 2)
    assert len(summary["resumed_at_samples"]) == 1
    assert summary["bound_by"].endswith(tuple(f"of the time of rank {rank})" for rank in range(2)))
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["updates"] for line in lines] == [20, 40, 60, 60]
    config = json.loads((run / "config.json").read_text())
    assert (config["sync"]["ranks"], config["engine"]["executor"]) == (2, "concurrent")
    words += ["--ranks", "2"]
    concurrent = ["--executor", "concurrent", "--checkpoint-every", "20"]
    assert commands.main(["train", *words, *concurrent, "--out", str(threads)]) == 0
    again = ["--executor", "replay", "--trace", str(run / "trace.npz")]
    assert commands.main(["train", *words, *again, "--out", str(replay)]) == 0
    assert len(Trace.load(run / "trace.npz")) == 60 * (2 + 1 + 1)
    arrays = [np.load(out / "predictions.npz")["predictions"] for out in (run, threads, replay)]
    assert arrays[0].tobytes() == arrays[1].tobytes() == arrays[2].tobytes()


PARTS = """
import os, signal
from pathlib import Path
from runtime.models.networks import FeedForward as Net
from runtime.hosts.rank_process import GroupedRank

close, killed = GroupedRank.close, Path(os.environ["RUN"] + ".killed")

def closed(rank):
    if not rank.leads and not killed.exists():
        while not Path(os.environ["RUN"], "summary.json").exists():
            pass
        killed.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    close(rank)

GroupedRank.close = closed
"""


@pytest.mark.long
def test_a_rank_that_dies_as_all_part_undoes_no_finished_run(tmp_path):
    """torchrun starts all again: there is nothing left to do. And the words of the start are read
    again, those of a file among them."""
    (tmp_path / "parts.py").write_text(PARTS)
    (tmp_path / "run.toml").write_text("[model]\nhidden = [8]\n")
    run = tmp_path / "run"
    words = ["--config", str(tmp_path / "run.toml"), "--checkpoint-every", "end"]
    words += ["--model.name", "parts:Net", "--out", str(run)]
    code, said, told = torchrun(tmp_path, *SMALL, *words, restarts=1, RUN=str(run))
    assert code == 0, told
    assert (tmp_path / "run.killed").exists()
    assert said.count(f"the run in {run} is finished: nothing is left to do") == 1


def test_a_rank_that_follows_into_an_interruption_is_not_the_root_cause(tmp_path, monkeypatch):
    """torchrun takes the earliest failure, and dates one that wrote none when it sees it."""
    monkeypatch.setattr("runtime.guarded.time.sleep", lambda seconds: None)
    reports = []
    for text in ("interrupted by SIGUSR1 after 10 steps", ""):
        file = tmp_path / f"error-{len(reports)}"
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))

        def interrupted(text: str = text) -> None:
            raise Interrupted(text)

        assert guarded(interrupted) == 75
        reports.append(json.loads(file.read_text())["message"])
    assert [report["extraInfo"]["follows"] for report in reports] == ["False", "True"]
    assert reports[0]["message"].startswith("interrupted by SIGUSR1")
