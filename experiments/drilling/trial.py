"""One trial: a run is started, one of its processes is killed, and somebody tries to go on."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from experiments.drilling.roles import alive, processes_of
from experiments.drilling.world import EVALUATED_BATCHES

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
        process = _launch(start, output)
        try:
            process.wait(patience_s)
        except subprocess.TimeoutExpired:
            _end(process)


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
    with log.open("wb") as output:
        process = _launch(start, output, evaluated=run_folder.with_suffix(".evaluated"))
        family: set[int] = set()
        killed, inside, evaluates, killed_at_s = False, False, False, 0.0
        began_s = None
        ends_s = time.monotonic() + patience_s
        while process.poll() is None and time.monotonic() < ends_s:
            time.sleep(LOOK_EVERY_S)
            if killed:
                continue
            if began_s is None:
                began_s = time.monotonic() if _training(run_folder) else None
                continue
            if time.monotonic() < began_s + trial.after_s:
                continue
            inside = _checkpoint_is_open(run_folder)
            evaluates = _evaluates(run_folder, trial.in_evaluation)
            wanted = trial.in_evaluation is not None
            if (trial.in_checkpoint and not inside) or (wanted and not evaluates):
                continue
            roles = processes_of(process.pid)
            family |= {pid for pids in roles.values() for pid in pids}
            if not roles.get(trial.role):
                continue
            victim = random.Random(trial.number).choice(roles[trial.role])
            os.kill(victim, trial.sign)
            killed, killed_at_s = True, time.monotonic()
            ends_s = killed_at_s + patience_s
        hung = process.poll() is None
        if hung:
            _end(process)
        said = _last_line(log)
        resumes = 0
        while not hung and not (run_folder / "summary.json").exists() and resumes < MOST_RESUMES:
            resumes += 1
            process = _launch(_again(start, resume, run_folder), output)
            try:
                process.wait(patience_s)
            except subprocess.TimeoutExpired:
                hung = True
                _end(process)
    ended_s = time.monotonic()
    rest_s = max(0.0, undisturbed_s - (killed_at_s - (began_s or killed_at_s)))
    extra_s = ended_s - killed_at_s - rest_s if killed else 0.0
    left = _outlived(family)
    return Ending(killed, inside, evaluates, hung, left, resumes, extra_s, said)


def _again(start: list[str], resume: list[str], run_folder: Path) -> list[str]:
    """A run that was killed before its first checkpoint was whole has nothing to go on from."""
    from runtime.checkpoint.whole import complete_checkpoints  # late: loads torch

    if complete_checkpoints(run_folder):
        return resume
    shutil.rmtree(run_folder)
    return start


def _launch(
    command: list[str], output: object, evaluated: Path | None = None
) -> subprocess.Popen[bytes]:
    from experiments.drilling.counting import EVALUATED  # late: loads torch

    environment = dict(os.environ)
    if evaluated is not None:
        evaluated.unlink(missing_ok=True)
        environment[EVALUATED] = str(evaluated.resolve())
    return subprocess.Popen(
        [sys.executable, *command], stdin=subprocess.DEVNULL, stdout=output, stderr=output,  # type: ignore[call-overload]
        start_new_session=True, env=environment,
    )  # fmt: skip


def _end(process: subprocess.Popen[bytes]) -> None:
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _outlived(family: set[int]) -> int:
    """Processes of a run that are there a little after it: they have a moment to go."""
    ends_s = time.monotonic() + 3.0
    while any(map(alive, family)) and time.monotonic() < ends_s:
        time.sleep(0.05)
    return sum(map(alive, family))


def _training(run_folder: Path) -> bool:
    """Whether the first checkpoint has begun: batches are trained since a while."""
    from runtime.checkpoint.whole import CHECKPOINTS  # late: loads torch

    return (run_folder / CHECKPOINTS).is_dir()


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


def _last_line(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").replace("\r", "\n").splitlines()]
    return next((line.strip() for line in reversed(lines) if line.strip()), "")
