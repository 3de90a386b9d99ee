"""One trial: a run is started, something of it is killed or cut, and somebody tries to go on.

A run that counts: every rank's batch holds every id once (in async, whose batches are as large
as those of all ranks, once for each rank), and the gradient of each row is 1 whatever the label. A
row that starts at 0 and moves by `RATE` for each sample stands at ``-RATE * samples``, exactly,
because the rate is a power of two: a row's value tells how many pushes were applied to it (law 13).
"""

from __future__ import annotations

import ctypes
import os
import random
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np

from experiments.drilling.cable import ADDRESSES, HOSTS, Cable
from experiments.result_cache import children_of, ends_in_time
from persia_sim.base.files import atomic_write
from persia_sim.base.vocabulary import Mode


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
"""Batches of an evaluation, so that one can be killed between two of them."""
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
    "server": "runtime.hosts.rows.server_process",
    "worker": "runtime.hosts.pooling.worker_process",
    "loader": "runtime.hosts.loading.loader_process",
}
"""Role -> the module that its process runs; the rest are the launcher and its ranks."""


def processes_of(launcher: int, hosts: Sequence[int] = ()) -> dict[str, list[int]]:
    """Role -> process ids, of a run whose first process is ``launcher``; its servers may be
    children of ``hosts``.

    A rank is a child of torchrun that trains; without torchrun the launcher trains itself.
    """
    processes: dict[str, list[int]] = {"launcher": [launcher], "host": [*hosts]}
    for pid in (pid for root in (launcher, *hosts) for pid in _descendants(root)):
        words = _words(pid)
        for role, module in ROLES.items():
            if module in words:
                processes.setdefault(role, []).append(pid)
                break
        else:
            if "train" in words and any(w.startswith("RANK=") for w in _words(pid, "environ")):
                processes.setdefault("rank", []).append(pid)
    return {role: sorted(pids) for role, pids in processes.items() if pids}


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


_PIDFD_GETFD = 438
"""Number of the system call, on every architecture; Python has no name for it."""


def cut_one(pids: Iterable[int], draw: random.Random) -> bool:
    """Cut a TCP connection of one of these processes: both of its ends lose it, and nobody dies.

    They are this one's children, or theirs. False where none of them has a connection.
    """
    with ExitStack() as ends:
        connections = [ends.enter_context(one) for pid in pids for one in _connections_of(pid)]
        if connections:
            draw.choice(connections).shutdown(socket.SHUT_RDWR)
        return bool(connections)


def _connections_of(pid: int) -> Iterator[socket.socket]:
    """Each TCP connection of a process, shared with it."""
    with suppress(OSError), ExitStack() as undo:  # the process has ended
        process = os.pidfd_open(pid)
        undo.callback(os.close, process)
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError, ValueError):  # it is closed, or only listens
                if not os.readlink(link).startswith("socket:"):
                    continue
                shared = ctypes.CDLL(None).syscall(_PIDFD_GETFD, process, int(link.name), 0)
                connections = socket.socket(fileno=shared)
                if (
                    connections.family in (socket.AF_INET, socket.AF_INET6)
                    and connections.getpeername()
                ):
                    yield connections


class Hosts:
    """`serve`, as on so many hosts, each of them here; with none, a run has servers of its own.
    With a cable they are on both of its ends in turn, and the run begins at the first one."""

    def __init__(self, count: int, log: IO[bytes], cable: Cable | None = None) -> None:
        self._log = log
        self._folder = tempfile.TemporaryDirectory()
        self._cable = cable
        self._secret = Path(self._folder.name) / "secret"
        self._secret.touch(0o600)
        self._secret.write_text(secrets.token_hex(32))
        self._running = [self._started(number) for number in range(count)]

    @property
    def pids(self) -> list[int]:
        """Process ids of the hosts that were started last."""
        return [host.pid for host, _ in self._running]

    def words(self) -> list[str]:
        """What a run is told of its servers; hosts that have died are started again for it."""
        for number, (host, _) in enumerate(self._running):
            if host.poll() is not None:
                self._running[number] = self._started(number)
        at = ["--servers-at", *(name for _, name in self._running)]
        return [*at, "--servers-secret", str(self._secret)] if self._running else []

    def close(self) -> None:
        """End them, and the servers that they have started."""
        for host, _ in self._running:
            host.terminate()
            host.communicate()
        self._folder.cleanup()

    def launch(self, command: list[str], evaluated: Path | None = None) -> subprocess.Popen[bytes]:
        """Start a run with these words; what it says goes to the log."""
        environment = dict(os.environ)
        if evaluated is not None:
            evaluated.unlink(missing_ok=True)
            environment[EVALUATED] = str(evaluated.resolve())
        if self._cable is not None:
            environment[HOSTS] = " ".join(self._cable.names)
        before = self._cable.on(0) if self._cable is not None else []
        return subprocess.Popen(
            [*before, sys.executable, *command, *self.words()],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            start_new_session=True,
            env=environment,
        )

    def _started(self, number: int) -> tuple[subprocess.Popen[bytes], str]:
        """A host, and its address."""
        before = list[str]()
        at = "127.0.0.1"
        if self._cable is not None:
            before = self._cable.on(number % 2)
            at = ADDRESSES[number % 2]
        line = ["serve", "--listen", f"{at}:0", "--secret", str(self._secret)]
        host = subprocess.Popen(
            [*before, sys.executable, "-m", "runtime", *line],
            stdout=subprocess.PIPE,
            stderr=self._log,
        )
        ready = host.stdout.readline().decode()  # ready ... at HOST:PORT; ...
        return host, ready.partition(" at ")[2].partition(";")[0]


CUTS = {"cable": 5.0, "one-way": 5.0, "long-cut": 60.0}
"""For how many seconds a cable is out; the short cuts nobody may notice."""
RESIZED_WITHIN_S = 10.0
"""From a wish for other servers to the death of a process: in most of them the run has not begun
again by then."""
LOOK_EVERY_S = 0.01
MOST_RESUMES = 3
CUT_OFF_S = 70.0
"""By then a server on another host has noticed that its run is gone."""


@dataclass(frozen=True, slots=True)
class Trial:
    """What to kill or cut, and when."""

    number: int
    mode: str
    role: str
    engine: str
    """Where the ranks live: ``threads`` of one process, ``processes``, or those of a ``cluster``,
    whose servers are on other hosts; of two hosts ``threads apart`` on one, ``processes apart`` on
    both."""
    world: str
    """``counting``, or ``clicks`` to learn from."""
    after_s: float
    """Seconds after training has begun; inside a checkpoint: after the first that begins then."""
    in_checkpoint: bool
    in_evaluation: int | None = None
    """The number of the evaluation inside which to kill, from 0 on; None: anywhere else."""


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
    last_line: str
    """The last line of the first run's standard error."""


@contextmanager
def serving(hosts: int, log: Path, *, apart: bool = False) -> Iterator[tuple[Hosts, Cable | None]]:
    """Hosts whose words, and those of their runs, go to the log; ``apart``: joined by a cable."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with ExitStack() as ends:
        output = ends.enter_context(log.open("wb"))
        cable = ends.enter_context(closing(Cable())) if apart else None
        yield ends.enter_context(closing(Hosts(hosts, output, cable))), cable


def run_undisturbed(
    start: list[str], run_folder: Path, patience_s: float, hosts: int = 0, *, apart: bool = False
) -> None:
    """Run to the end; its output is kept beside the folder."""
    with serving(hosts, run_folder.with_suffix(".log"), apart=apart) as (served, _):
        ends_in_time(served.launch(start), patience_s)


def run_trial(
    trial: Trial,
    start: list[str],
    resume: list[str],
    run_folder: Path,
    log: Path,
    *,
    undisturbed_s: float,
    patience_s: float,
    hosts: int = 0,
    apart: bool = False,
) -> Ending:
    """Start, kill or cut, and resume until the run is finished; ``patience_s`` for each start.

    ``undisturbed_s``: seconds of training of the same run when nobody is killed. ``hosts``: how
    many of them serve its rows; ``apart``: at the ends of a cable.
    """
    from runtime.checkpoint.places import CHECKPOINTS  # late: loads torch

    family: set[int] = set()
    inside = evaluates = False
    began_s = killed_at_s = mended_s = None
    with serving(hosts, log, apart=apart) as (served, cable):
        process = served.launch(start, run_folder.with_suffix(".evaluated"))
        ends_s = time.monotonic() + patience_s
        while process.poll() is None and (now_s := time.monotonic()) < ends_s:
            time.sleep(LOOK_EVERY_S)
            if mended_s is not None and now_s > mended_s:
                _mend(cable)
                mended_s = None
            if killed_at_s is not None:
                continue
            if began_s is None:
                # The first checkpoint has begun: batches are trained since a while.
                began_s = now_s if (run_folder / CHECKPOINTS).is_dir() else None
                continue

            # Strike at the trial's moment: after so many seconds, in a checkpoint, or in an
            # evaluation.
            inside = _checkpoint_is_open(run_folder)
            evaluates = _evaluates(run_folder, trial.in_evaluation)
            if (
                now_s < began_s + trial.after_s
                or (trial.in_checkpoint and not inside)
                or (trial.in_evaluation is not None and not evaluates)
            ):
                continue
            roles = processes_of(process.pid, served.pids)
            family |= {pid for role, pids in roles.items() if role != "host" for pid in pids}
            if _struck(trial, roles, cable, run_folder):
                killed_at_s = time.monotonic()
                ends_s = killed_at_s + patience_s
                mended_s = killed_at_s + CUTS.get(trial.role, 0.0)

        # Go on as often as it takes.
        hung = not ends_in_time(process, 0.0)
        _mend(cable)
        last_line = _last_line(log)
        resumes = 0
        while not hung and not (run_folder / "summary.json").exists() and resumes < MOST_RESUMES:
            resumes += 1
            again = start if _starts_anew(run_folder) else resume
            hung = not ends_in_time(served.launch(again), patience_s)
        ended_s = time.monotonic()
        extra_s = 0.0
        leaves_s = ended_s + (CUT_OFF_S if hosts else 3.0)
        while any(map(alive, family)) and time.monotonic() < leaves_s:  # a moment to go
            time.sleep(0.05)
        left = sum(map(alive, family))
    if killed_at_s is not None:
        trained_s = killed_at_s - (began_s or killed_at_s)
        extra_s = ended_s - killed_at_s - max(0.0, undisturbed_s - trained_s)
    return Ending(
        killed_at_s is not None, inside, evaluates, hung, left, resumes, extra_s, last_line
    )


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").replace("\r", "\n").splitlines()
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


def _starts_anew(run_folder: Path) -> bool:
    """Whether there is nothing to go on from; what is left of the run is removed then."""
    from runtime.checkpoint.places import complete_checkpoints  # late: loads torch

    if complete_checkpoints(run_folder):
        return False
    shutil.rmtree(run_folder)
    return True


def _struck(
    trial: Trial,
    roles: dict[str, list[int]],
    cable: Cable | None,
    run_folder: Path,
) -> bool:
    """Whether what the trial is about was there to be killed, or cut."""
    draw = random.Random(trial.number)
    if cable is not None:
        cable.cut(one_way=trial.role == "one-way", host=draw.randrange(2))
        return True
    if trial.role == "connection":
        return cut_one([*roles.get("rank", []), *roles.get("server", [])], draw)
    if trial.role == "resize":
        return _resized(trial, draw, roles["launcher"][0], run_folder)
    return _killed(trial.role, roles, draw)


ON_ITS_HOST = ("launcher", "server", "loader", "rank")
"""Who is killed beside something else that goes wrong."""


def _mend(cable: Cable | None) -> None:
    """What was cut passes again."""
    if cable is not None:
        cable.mend()


def _resized(trial: Trial, draw: random.Random, launcher: int, run_folder: Path) -> bool:
    """Whether somebody was killed while the run changes the number of its servers: as it ends its
    step, as rows are written, between its processes, or as rows are read."""
    # One more server, or one less; it is taken half a second later.
    wanted = draw.choice((1, 3))
    words = ["-m", "runtime", "resize", str(run_folder), "--servers", str(wanted)]
    subprocess.Popen([sys.executable, *words], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    time.sleep(draw.uniform(0.0, RESIZED_WITHIN_S))

    # In late modes pushes are lost with a server, of rows that another one may have by now.
    late = Mode(trial.mode).reads_late_rows
    victims = ("launcher", "loader") if late else ON_ITS_HOST
    roles = processes_of(launcher)
    return _killed(draw.choice([role for role in victims if role in roles]), roles, draw)


def _killed(role: str, roles: dict[str, list[int]], draw: random.Random) -> bool:
    victims = roles.get(role, [])
    if victims:
        with suppress(ProcessLookupError):  # it has just ended by itself
            os.kill(draw.choice(victims), signal.SIGKILL)
    return bool(victims)


def _checkpoint_is_open(run_folder: Path) -> bool:
    from runtime.checkpoint.places import CHECKPOINTS  # late: loads torch
    from runtime.checkpoint.places import STATE as CHECKPOINT_IS_WHOLE

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
