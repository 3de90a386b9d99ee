"""One trial: a run is started, one of its processes is killed, and somebody tries to go on.

A run that counts: every rank's batch holds every id once (in async, whose batches are as large
as those of all ranks, once for each rank), and the gradient of each row is 1 whatever the label. A
row that starts at 0 and moves by `RATE` for each sample stands at ``-RATE * samples``, exactly,
because the rate is a power of two: a row's value tells how many pushes were applied to it (law 13).
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from experiments.kept import children_of, ends_in_time
from persia_sim.words.files import atomic_write


@dataclass(frozen=True, slots=True)
class Account:
    """Pushes of a finished run, over all its servers."""

    sent: int
    applied: int
    lost: int
    """Counted as lost by the run itself."""
    silent: int
    """Sum over the servers of what is neither applied nor counted, or applied twice."""


RATE = 2.0**-6
IDS = 64
"""Rows, and samples of a rank's batch."""
EVALUATED_BATCHES = 3
"""Of an evaluation, so that one can be killed between two of them."""
TEST_ROWS = EVALUATED_BATCHES * 8192
EVALUATED = "PERSIA_DRILL_EVALUATED"
"""Environment variable with a file's name: each batch that is evaluated adds a byte to it and takes
`counting.EVALUATION_S`, so that a drill can kill in between."""


def write_world(folder: Path, batches: int, seed: int = 0) -> Path:
    """Write the clicks of so many batches of `IDS` samples, and their schema, whose path it is."""
    folder.mkdir(parents=True, exist_ok=True)
    draw = np.random.default_rng(seed)
    ids = np.concatenate([draw.permutation(IDS) for _ in range(batches)])
    lines = ["user,part,clicked"]
    lines += [f"u{i},train,{c}" for i, c in zip(ids, draw.integers(0, 2, len(ids)), strict=True)]
    lines += [f"u{k % IDS},test,{k % 2}" for k in range(TEST_ROWS)]
    with atomic_write(folder / "clicks.csv") as file:
        file.write("\n".join(lines).encode() + b"\n")
    schema = folder / "clicks.toml"
    with atomic_write(schema) as file:
        file.write(
            b'name = "counting"\nfile = "clicks.csv"\nlabels = ["clicked"]\n'
            b'split = { column = "part", test_equals = "test" }\n\n[[columns]]\nname = "user"\n'
        )
    return schema


def samples_applied(values: np.ndarray) -> np.ndarray:
    """int64 [U]: how many samples' gradients each row has had, from its value [U, d].

    Raises ValueError when the elements of a row differ, or are no whole number of samples: then a
    push was applied in part.
    """
    counts = -np.asarray(values, np.float64) / RATE
    whole = np.rint(counts)
    if (whole != counts).any() or (whole != whole[:, :1]).any():
        row = int(np.flatnonzero((whole != counts).any(1) | (whole != whole[:, :1]).any(1))[0])
        raise ValueError(f"row {row} stands at {values[row]}: a push was applied in part")
    return whole[:, 0].astype(np.int64)


ROLES = {
    "server": "runtime.engines.processes.server_process",
    "loader": "runtime.engines.processes.loader_process",
}
"""Role -> the module that its process runs; the rest are the launcher and its ranks."""


def processes_of(launcher: int) -> dict[str, list[int]]:
    """Role -> process ids, of a run whose first process is ``launcher``.

    A rank is a child of torchrun that trains; without torchrun the launcher trains itself.
    """
    found: dict[str, list[int]] = {"launcher": [launcher]}
    for pid in _descendants(launcher):
        words = _words(pid)
        for role, module in ROLES.items():
            if module in words:
                found.setdefault(role, []).append(pid)
                break
        else:
            if "train" in words and any(w.startswith("RANK=") for w in _words(pid, "environ")):
                found.setdefault("rank", []).append(pid)
    return {role: sorted(pids) for role, pids in found.items()}


def alive(pid: int) -> bool:
    """Whether the process is there and no zombie."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return False
    return state != "Z"


def _descendants(root: int) -> Iterator[int]:
    for pid in children_of(root):
        yield pid
        yield from _descendants(pid)


def _words(pid: int, of: str = "cmdline") -> list[str]:
    try:
        return Path(f"/proc/{pid}/{of}").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return []


LOOK_EVERY_S = 0.01
MOST_RESUMES = 3


@dataclass(frozen=True, slots=True)
class Trial:
    """Whom to kill, and when."""

    number: int
    mode: str
    role: str
    engine: str
    """Where the ranks live: ``threads`` of one process, or ``processes``."""
    world: str
    """``counting``, or ``clicks`` to learn from."""
    after_s: float
    """Seconds after training has begun; inside a checkpoint: after the first that begins then."""
    in_checkpoint: bool
    in_evaluation: int | None = None
    """The number of the evaluation inside which to kill, from 0 on; None: anywhere else."""
    sign: int = signal.SIGKILL


@dataclass(frozen=True, slots=True)
class Ending:
    """What became of a trial."""

    killed: bool
    """False when the run was over before."""
    in_checkpoint: bool
    """Whether a checkpoint was being written at that instant."""
    in_evaluation: bool
    """Whether the run was between two batches of an evaluation."""
    hung: bool
    """Whether the run, or one that went on with it, did not end in time."""
    left_behind: int
    """Processes that outlived the run."""
    resumes: int
    """Times that the run had to be started again."""
    extra_s: float
    """Wall seconds from the kill to the end, less those of the undisturbed rest."""
    said: str
    """The last line of the first run's standard error."""


def run_undisturbed(start: list[str], run_folder: Path, patience_s: float) -> None:
    """Run to the end; its output is kept beside the folder."""
    log = run_folder.with_suffix(".log")
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output:
        ends_in_time(_launch(start, output), patience_s)


def run_trial(
    trial: Trial,
    start: list[str],
    resume: list[str],
    run_folder: Path,
    log: Path,
    *,
    undisturbed_s: float,
    patience_s: float,
) -> Ending:
    """Start, kill, and resume until the run is finished; ``patience_s`` for each start.

    ``undisturbed_s``: seconds of training of the same run when nobody is killed.
    """
    from runtime.checkpoint.whole import CHECKPOINTS, complete_checkpoints  # late: loads torch

    family: set[int] = set()
    inside = evaluates = False
    began_s = killed_at_s = None
    with log.open("wb") as output:
        process = _launch(start, output, evaluated=run_folder.with_suffix(".evaluated"))
        ends_s = time.monotonic() + patience_s
        while process.poll() is None and (now_s := time.monotonic()) < ends_s:
            time.sleep(LOOK_EVERY_S)
            if killed_at_s is not None:
                continue
            if began_s is None:
                # The first checkpoint has begun: batches are trained since a while.
                began_s = now_s if (run_folder / CHECKPOINTS).is_dir() else None
                continue
            inside = _checkpoint_is_open(run_folder)
            evaluates = _evaluates(run_folder, trial.in_evaluation)
            if (
                now_s < began_s + trial.after_s
                or (trial.in_checkpoint and not inside)
                or (trial.in_evaluation is not None and not evaluates)
            ):
                continue
            roles = processes_of(process.pid)
            family |= {pid for pids in roles.values() for pid in pids}
            if victims := roles.get(trial.role):
                os.kill(random.Random(trial.number).choice(victims), trial.sign)
                killed_at_s = time.monotonic()
                ends_s = killed_at_s + patience_s
        hung = not ends_in_time(process, 0.0)
        words = log.read_text(errors="replace").replace("\r", "\n").splitlines()
        said = next((line.strip() for line in reversed(words) if line.strip()), "")
        resumes = 0
        while not hung and not (run_folder / "summary.json").exists() and resumes < MOST_RESUMES:
            resumes += 1
            again = resume
            if not complete_checkpoints(run_folder):  # nothing to go on from
                shutil.rmtree(run_folder)
                again = start
            hung = not ends_in_time(_launch(again, output), patience_s)
    ended_s, extra_s = time.monotonic(), 0.0
    if killed_at_s is not None:
        trained_s = killed_at_s - (began_s or killed_at_s)
        extra_s = ended_s - killed_at_s - max(0.0, undisturbed_s - trained_s)
    while any(map(alive, family)) and time.monotonic() < ended_s + 3.0:  # a moment to go
        time.sleep(0.05)
    left = sum(map(alive, family))
    return Ending(killed_at_s is not None, inside, evaluates, hung, left, resumes, extra_s, said)


def _launch(
    command: list[str], output: object, evaluated: Path | None = None
) -> subprocess.Popen[bytes]:
    environment = dict(os.environ)
    if evaluated is not None:
        evaluated.unlink(missing_ok=True)
        environment[EVALUATED] = str(evaluated.resolve())
    return subprocess.Popen(
        [sys.executable, *command], stdin=subprocess.DEVNULL, stdout=output, stderr=output,  # type: ignore[call-overload]
        start_new_session=True, env=environment,
    )  # fmt: skip


def _checkpoint_is_open(run_folder: Path) -> bool:
    from runtime.checkpoint.state import NAME as CHECKPOINT_IS_WHOLE  # late: loads torch
    from runtime.checkpoint.whole import CHECKPOINTS

    try:
        folders = [p for p in (run_folder / CHECKPOINTS).iterdir() if p.is_dir()]
    except OSError:
        return False
    return any(not (folder / CHECKPOINT_IS_WHOLE).exists() for folder in folders)


def _evaluates(run_folder: Path, number: int | None) -> bool:
    """Whether this evaluation has read a batch, and not its last one."""
    file = run_folder.with_suffix(".evaluated")
    if number is None or not file.exists():
        return False
    batches = file.stat().st_size
    return batches // EVALUATED_BATCHES == number and batches % EVALUATED_BATCHES > 0
