"""What lies in a folder of runs: finished, interrupted, failed and damaged ones; the list of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from experiments.sweeping import FAILED, words_of_failure
from experiments.tables import aligned
from persia_sim.base.command_line import option_values
from persia_sim.base.files import read_document
from persia_sim.base.rules import counted
from persia_sim.base.vocabulary import Mode
from runtime.config import read_config
from runtime.run.folder import ENDING, SUMMARY, checked_summary

State = Literal["done", "interrupted", "failed", "unfinished", "damaged"]
CONFIG = "config.json"
ENVIRONMENT = "env.json"
LATE_MODES = frozenset(str(mode) for mode in Mode if mode.reads_late_rows)
"""Modes whose name goes with a bound, in a list or table."""
HEADER = ("folder", "mode", "tau", "ranks", "data", "seed", "AUC", "when (UTC)", "commit", "state")
_INSIDE_A_RUN = {"checkpoints"}


@dataclass(frozen=True, slots=True)
class RunFolder:
    """One run folder, as far as its files can be read."""

    folder: Path
    state: State
    config: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, Any] = field(default_factory=dict)
    summary: Mapping[str, Any] = field(default_factory=dict)
    why: str = ""
    """What is wrong with a damaged run, or the last words of a failed one."""

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
        """Part of the data that the run was judged by."""
        evaluation = _group(self.config, "evaluation")
        return str(evaluation.get("eval_split") or evaluation.get("part") or "test")

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
        """AUC of the first task."""
        return self.auc_of(next(iter(self.tasks), ""))

    def auc_of(self, task: str) -> float | None:
        """AUC of a task; None where it has none."""
        return self.tasks.get(task, {}).get("auc")

    @property
    def started(self) -> str:
        """When the run began, in UTC."""
        return str(self.environment.get("started") or "-")

    @property
    def commit(self) -> str:
        """The commit, shortened, with a plus sign where files were changed."""
        commit = self.environment.get("commit")
        if not commit:
            return "-"
        return f"{str(commit)[:8]}{'+' if self.environment.get('modified') else ''}"

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


def read_run(folder: Path) -> RunFolder:
    """A run folder as it is; nothing about it raises, what is wrong stands in the result."""
    # Read whatever is there; each file may be missing, unreadable or damaged.
    documents: dict[str, Mapping[str, Any]] = {}
    wrong = []
    for name in (CONFIG, ENVIRONMENT, SUMMARY):
        try:
            document = checked_summary(folder) if name == SUMMARY else read_document(folder / name)
            if not isinstance(document, dict):
                raise ValueError(f"{folder / name} holds no object")
            documents[name] = document
        except FileNotFoundError:
            continue
        except OSError as error:
            wrong.append(f"{folder / name} cannot be read: {error.strerror}")
        except ValueError as error:
            wrong.append(str(error))

    # Its state follows from which of them there are.
    state, why = _state(folder, documents, wrong)
    return RunFolder(
        folder,
        state,
        config=documents.get(CONFIG, {}),
        environment=documents.get(ENVIRONMENT, {}),
        summary=documents.get(SUMMARY, {}),
        why=why,
    )


def _state(folder: Path, documents: Mapping[str, Any], wrong: list[str]) -> tuple[State, str]:
    if wrong:
        return "damaged", wrong[0]
    if SUMMARY in documents:
        if CONFIG in documents:
            return "done", ""
        return "damaged", f"{folder} has a summary but no {CONFIG}"
    try:
        words = words_of_failure(folder)
    except (OSError, ValueError) as error:
        return "damaged", str(error)
    if words is not None:
        return "failed", words
    if (folder / ENDING).is_file():
        return "interrupted", ""
    return "unfinished", ""


def runs_below(root: Path) -> Iterator[RunFolder]:
    """All runs in a folder, itself included, by path.

    Raises ValueError where there is no such folder.
    """
    if not root.is_dir():
        raise ValueError(f"{root} is no folder; name one with runs, as in `runs list runs`")

    # No recursion: folders may be nested deeper than Python's own stack.
    waiting = [root]
    while waiting:
        folder = waiting.pop()
        try:
            if is_run(folder):
                yield read_run(folder)
                continue
            inside = [p for p in folder.iterdir() if p.is_dir() and not p.is_symlink()]
        except OSError as error:
            why = f"{folder} cannot be looked into: {error.strerror}"
            yield RunFolder(folder, "damaged", why=why)
            continue

        # The last is taken first, so that runs come by path.
        subfolders = [path for path in inside if path.name not in _INSIDE_A_RUN]
        waiting += sorted(subfolders, reverse=True)


def the_run(folder: Path) -> RunFolder:
    """One run that can be read.

    Raises ValueError where the folder is none, or is damaged.
    """
    if not folder.is_dir():
        raise ValueError(f"{folder} is no folder; `runs list` shows those that are there")
    if not is_run(folder):
        raise ValueError(
            f"{folder} is no run: it holds no {CONFIG}; `runs list {folder}` looks below it"
        )
    run = read_run(folder)
    if run.state == "damaged":
        raise ValueError(f"{run.why}; the run in {folder} is damaged and is not read further")
    if not run.config:
        raise ValueError(f"{folder} is no run: it holds no {CONFIG}")
    return run


def listing(root: Path) -> str:
    """The table, with one line of counts and one about each run that cannot be used."""
    runs = list(runs_below(root))
    if not runs:
        return f"no runs in {root}"
    lines = [aligned(HEADER, [cells(run, root) for run in runs]), counts(runs)]
    lines += [f"{_name(run, root)}: {run.why.splitlines()[0]}" for run in runs if run.why]
    return "\n".join(lines)


def cells(run: RunFolder, root: Path) -> list[str]:
    """One line of the table."""
    tau = str(run.tau) if run.mode in LATE_MODES else "-"
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


def counts(runs: Sequence[RunFolder]) -> str:
    """How many runs there are, and in which states."""
    states = Counter(run.state for run in runs)
    by_state = ", ".join(f"{states[name]} {name}" for name in get_args(State) if states[name])
    return f"{counted(len(runs), 'run')}: {by_state}"


def _name(run: RunFolder, root: Path) -> str:
    return "." if run.folder == root else str(run.folder.relative_to(root))


def _group(document: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    group = document.get(name)
    return group if isinstance(group, dict) else {}
