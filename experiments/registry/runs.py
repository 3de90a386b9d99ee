"""What lies in a folder of runs: finished, interrupted, failed and damaged ones; the list of it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from experiments.sweep import FAILED
from experiments.tables import aligned
from persia_sim.words.command_line import option_values
from persia_sim.words.files import read_document, read_regular
from persia_sim.words.rules import counted
from runtime.config import read_config
from runtime.run.folder import INTERRUPTED, SUMMARY, checked_summary

State = Literal["done", "interrupted", "failed", "unfinished", "damaged"]
CONFIG, ENVIRONMENT = "config.json", "env.json"
HEADER = ("folder", "mode", "tau", "ranks", "data", "seed", "AUC", "when (UTC)", "commit", "state")
_OF_A_POINT = re.compile(r"-[0-9a-f]{8}$")
_INSIDE_A_RUN = {"checkpoints"}


@dataclass(frozen=True, slots=True)
class Run:
    """One run folder, as far as its files can be read."""

    folder: Path
    state: State
    config: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, Any] = field(default_factory=dict)
    summary: Mapping[str, Any] = field(default_factory=dict)
    why: str = ""
    """What is wrong with a damaged one, or what a failed one said."""

    @property
    def sync(self) -> Mapping[str, Any]:
        """The group of options with mode, tau and ranks."""
        return _group(self.config, "sync")

    @property
    def mode(self) -> str:
        """Mode; "-" where it cannot be read."""
        return str(self.summary.get("mode") or self.sync.get("mode") or "-")

    @property
    def tau(self) -> Any:
        """Bound; of a finished run as it was trained."""
        return self.summary["tau"] if "tau" in self.summary else self.sync.get("tau")

    @property
    def data(self) -> str:
        """Name of the data set."""
        return str(_group(self.config, "data").get("name") or "-")

    @property
    def part(self) -> str:
        """Of the data: the rows that it was judged by."""
        return str(_group(self.config, "evaluation").get("part") or "test")

    @property
    def seed(self) -> Any:
        """Seed of the run; None where it cannot be read."""
        return self.summary.get("seed", self.config.get("seed"))

    @property
    def tasks(self) -> Mapping[str, Mapping[str, float | None]]:
        """Task -> its scores; empty as long as the run has not ended."""
        return _group(self.summary, "tasks")

    @property
    def auc(self) -> float | None:
        """Of the first task."""
        first = next(iter(self.tasks.values()), {})
        return first.get("auc")

    @property
    def started(self) -> str:
        """UTC."""
        return str(self.environment.get("started") or "-")

    @property
    def commit(self) -> str:
        """Shortened, with a plus sign where files were changed."""
        found = self.environment.get("commit")
        return (
            f"{str(found)[:8]}{'+' if self.environment.get('modified') else ''}" if found else "-"
        )

    def typed_options(self) -> dict[str, str]:
        """Every option by the name that is typed; what the config does not name has today's
        default.

        Raises ValueError where this version does not know an option of it.
        """
        config = read_config(self.folder / CONFIG)
        return {f"--{name}": str(value) for name, value in option_values(config)}


def is_run(folder: Path) -> bool:
    """Whether a folder is one run's, whole or not."""
    return any((folder / name).is_file() for name in (CONFIG, SUMMARY, FAILED))


def read_run(folder: Path) -> Run:
    """A run folder; nothing about it raises, what is wrong stands in it."""
    read: dict[str, Mapping[str, Any]] = {}
    wrong = []
    for name in (CONFIG, ENVIRONMENT, SUMMARY):
        try:
            found = checked_summary(folder) if name == SUMMARY else read_document(folder / name)
            if not isinstance(found, dict):
                raise ValueError(f"{folder / name} holds no object")
            read[name] = found
        except FileNotFoundError:
            continue
        except OSError as error:
            wrong.append(f"{folder / name} cannot be read: {error.strerror}")
        except ValueError as error:
            wrong.append(str(error))
    state, why = _state(folder, read, wrong)
    config, environment, summary = (read.get(n, {}) for n in (CONFIG, ENVIRONMENT, SUMMARY))
    return Run(folder, state, config, environment, summary, why)


def _state(folder: Path, read: Mapping[str, Any], wrong: list[str]) -> tuple[State, str]:
    if wrong:
        return "damaged", wrong[0]
    if SUMMARY in read:
        if CONFIG in read:
            return "done", ""
        return "damaged", f"{folder} has a summary but no {CONFIG}"
    if (folder / FAILED).is_file():
        return "failed", read_regular(folder / FAILED).decode(errors="replace").strip()
    if (folder / INTERRUPTED).is_file():
        return "interrupted", ""
    return "unfinished", ""


def runs_below(root: Path) -> Iterator[Run]:
    """All runs in a folder, itself included, by path.

    Raises ValueError where there is no such folder.
    """
    if not root.is_dir():
        raise ValueError(f"{root} is no folder; name one with runs, as in `runs list runs`")
    waiting = [root]
    while waiting:  # no recursion: folders may be nested deeper than Python's own stack
        folder = waiting.pop()
        try:
            if is_run(folder):
                yield read_run(folder)
                continue
            inside = [p for p in folder.iterdir() if p.is_dir() and not p.is_symlink()]
        except OSError as error:
            why = f"{folder} cannot be looked into: {error.strerror}"
            yield Run(folder, "damaged", why=why)
            continue
        kept = [path for path in inside if path.name not in _INSIDE_A_RUN]
        waiting += sorted(kept, reverse=True)


def the_run(folder: Path) -> Run:
    """One run that can be read.

    Raises ValueError where the folder is none, or is damaged.
    """
    if not folder.is_dir():
        raise ValueError(f"{folder} is no folder; `runs list` shows those that are there")
    if not is_run(folder):
        raise ValueError(
            f"{folder} is no run: it holds no {CONFIG}; `runs list {folder}` looks below it"
        )
    found = read_run(folder)
    if found.state == "damaged":
        raise ValueError(f"{found.why}; the run in {folder} is damaged and is not read further")
    if not found.config:
        raise ValueError(f"{folder} is no run: it holds no {CONFIG}")
    return found


def is_sweep(folder: Path) -> bool:
    """Whether a folder holds points: runs whose names end in the checksum of their config."""
    if not folder.is_dir() or is_run(folder):
        return False
    return any(_OF_A_POINT.search(p.name) and is_run(p) for p in folder.iterdir() if p.is_dir())


def listing(root: Path) -> str:
    """The table, with one line of counts and one about each run that cannot be used."""
    runs = list(runs_below(root))
    if not runs:
        return f"no runs in {root}"
    lines = [aligned(HEADER, [cells(run, root) for run in runs]), counts(runs)]
    lines += [f"{_name(run, root)}: {run.why.splitlines()[0]}" for run in runs if run.why]
    return "\n".join(lines)


def cells(run: Run, root: Path) -> list[str]:
    """One line of the table."""
    tau = "-" if run.mode in ("sync", "lookahead", "-") else str(run.tau)
    return [
        _name(run, root),
        run.mode,
        "unbounded" if tau == "None" else tau,
        str(run.sync.get("ranks", "-")),
        run.data,
        "-" if run.seed is None else str(run.seed),
        "-" if run.auc is None else f"{run.auc:.4f}",
        run.started.replace("T", " ").removesuffix("Z"),
        run.commit,
        run.state,
    ]


def counts(runs: Sequence[Run]) -> str:
    """How many, and in which states."""
    states = Counter(run.state for run in runs)
    told = ", ".join(f"{states[name]} {name}" for name in get_args(State) if states[name])
    return f"{counted(len(runs), 'run')}: {told}"


def _name(run: Run, root: Path) -> str:
    return "." if run.folder == root else str(run.folder.relative_to(root))


def _group(document: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = document.get(name)
    return found if isinstance(found, dict) else {}
