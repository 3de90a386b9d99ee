"""`python -m tests.house` prints how much of the code one must know to change one thing.

Counts by reading the source, and by tracing one batch of ``examples/run.toml``. Beside each count
stands its goal, and the most that ``tests/test_house.py`` lets it be: counts can only fall.
"""

from __future__ import annotations

import ast
import collections
import itertools
import os
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from tests.tree import ROOT

PACKAGES = ("runtime", "persia_sim", "experiments", "paper_figs")

PRIVATE_WORDS = frozenset(
    [
        "told",
        "said",
        "found",
        "own",
        "kept",
        "lent",
        "goodbye",
        "patiently",
        "life",
        "filling",
        "comeback",
    ]
)
"""Words of ours where the field has a term: received, payload, result, restore, close, retry."""

LEAST_LINES_OF_A_LONG_BODY = 16


@dataclass(frozen=True)
class Source:
    """One file of a package, as text and as a tree."""

    path: Path
    lines: tuple[str, ...]
    tree: ast.Module


def files_in(folder: str) -> list[Path]:
    """Every Python file below a folder of the project."""
    return sorted((ROOT / folder).rglob("*.py"))


@cache
def sources(package: str) -> tuple[Source, ...]:
    """Every Python file below ``package``."""
    result = []
    for path in files_in(package):
        text = path.read_text()
        result.append(Source(path, tuple(text.splitlines()), ast.parse(text)))
    return tuple(result)


def all_sources() -> Iterator[Source]:
    """Every Python file of the four packages."""
    for package in PACKAGES:
        yield from sources(package)


def names_in(tree: ast.AST) -> Iterator[str]:
    """Each place where an identifier is written: variables, attributes, arguments, definitions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.arg) or (isinstance(node, ast.keyword) and node.arg):
            yield node.arg
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name


def parts_of(name: str) -> list[str]:
    """The words of an identifier: ``tests_found`` and ``TestsFound`` are tests and found."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower().split("_")


def private_words() -> collections.Counter[str]:
    """How often a private word is part of a name."""
    return collections.Counter(
        word
        for source in all_sources()
        for name in names_in(source.tree)
        if not name.endswith("NotFoundError")  # Python's own
        for word in parts_of(name)
        if word in PRIVATE_WORDS
    )


def comment_lines(source: Source) -> list[int]:
    """Numbers, from 1, of lines that hold a comment and nothing else."""
    return [
        number
        for number, line in enumerate(source.lines, 1)
        if line.lstrip().startswith("#") and not line.lstrip().startswith("#!")
    ]


def functions_in(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Every function and method, also those inside others."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def long_bodies_without_waypoint() -> list[str]:
    """Functions whose body has more than 15 lines of code and no line of comment."""
    result = []
    for source in all_sources():
        comments = comment_lines(source)
        for function in functions_in(source.tree):
            body = function.body[1:] if ast.get_docstring(function) else function.body
            if not body:
                continue
            first, last = body[0].lineno, body[-1].end_lineno or 0
            length = sum(1 for line in source.lines[first - 1 : last] if line.strip())
            has_comment = any(function.lineno <= number <= last for number in comments)
            if length >= LEAST_LINES_OF_A_LONG_BODY and not has_comment:
                result.append(f"{source.path.relative_to(ROOT)}:{function.lineno} {function.name}")
    return result


def pointing_docstrings() -> list[str]:
    """Docstrings, and notes under a field or a constant, whose first word points at something that
    the sentence does not name."""
    result = []
    for source in all_sources():
        for node in ast.walk(source.tree):
            if not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
                continue
            text = node.value.value
            if isinstance(text, str) and re.match(r"\s*(Of|The same|Those|As|With)\b", text):
                place = f"{source.path.relative_to(ROOT)}:{node.lineno}"
                result.append(f"{place} {text.splitlines()[0]}")
    return result


def tuple_assignments() -> list[str]:
    """Assignments ``a, b = x, y`` of a tuple of names to a tuple of values."""
    result = []
    for source in all_sources():
        for node in ast.walk(source.tree):
            if (
                isinstance(node, ast.Assign)
                and isinstance(node.value, ast.Tuple)
                and isinstance(node.targets[0], ast.Tuple)
            ):
                result.append(f"{source.path.relative_to(ROOT)}:{node.lineno}")
    return result


def format_skips() -> list[str]:
    """Places that the formatter must not touch."""
    return [
        f"{source.path.relative_to(ROOT)}:{number}"
        for source in all_sources()
        for number, line in enumerate(source.lines, 1)
        if "fmt: skip" in line
    ]


def classes_named_twice() -> dict[str, list[str]]:
    """Public class names that two files of one package define."""
    result = {}
    for package in PACKAGES:
        places: dict[str, list[str]] = collections.defaultdict(list)
        for source in sources(package):
            for node in ast.walk(source.tree):
                if isinstance(node, ast.ClassDef):
                    places[node.name].append(str(source.path.relative_to(ROOT)))
        result.update({f"{package}: {n}": p for n, p in sorted(places.items()) if len(p) > 1})
    return result


class Way(NamedTuple):
    """The way of one batch through the code."""

    files: int
    functions: int
    """By name; what stands inside one of them belongs to it."""
    nameless: int
    """Comprehensions and lambdas among the calls; from Python 3.12 on most of them are none."""
    changes: int
    """How often the next function that is called stands in another file: of each thread by itself,
    over its own work on this batch. A wait that looks again counts once."""


TRACED_STEP, STEPS = 20, 40


def way_of_a_batch(executor: str) -> Way:
    """Where one batch of a hybrid run comes by: Python functions of the runtime and of what it
    shares with the simulator. The same in every run: it is what a reader follows thread by thread,
    not how far threads happened to be ahead of each other."""
    command = [sys.executable, "-m", "tests.house", executor]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    printed = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    ).stdout
    return Way(*map(int, printed.split()[-4:]))


def trace_a_batch(executor: str) -> Way:
    """`way_of_a_batch` in this process, which is of no other use afterwards."""
    from persia_sim.base.command_line import with_changes
    from runtime.config import read_config
    from runtime.rank.feed import Feed
    from runtime.rank.stages import RankStages
    from runtime.run.record import run_into
    from runtime.stop import Turns

    # Each thread notes the functions of ours that it calls while it is at one step: from its first
    # call for that step to its first for the next.
    calls: dict[int, list[tuple[str, str]]] = collections.defaultdict(list)
    traced: set[int] = set()
    looked: dict[FrameType, set[str]] = collections.defaultdict(set)

    def noting(stage: Callable[..., object], step_of: Callable[..., int]) -> Callable[..., object]:
        def noted(*arguments: object) -> object:
            mark = traced.add if step_of(*arguments) == TRACED_STEP else traced.discard
            mark(threading.get_ident())
            return stage(*arguments)

        return noted

    def is_repeated(frame: FrameType) -> bool:
        """How often a wait looks whether it is over depends on the other threads: note one look."""
        caller = frame.f_back
        while caller is not None and caller.f_code is not Turns.wait_until.__code__:
            caller = caller.f_back
        if caller is None:
            return False
        name = frame.f_code.co_qualname
        was_called = name in looked[caller]
        looked[caller].add(name)
        return was_called

    def note(frame: FrameType, event: str, _: object) -> None:
        thread = threading.get_ident()
        file = frame.f_code.co_filename
        ours = (f"{ROOT}/runtime", f"{ROOT}/persia_sim")
        if thread not in traced or event != "call" or not file.startswith(ours):
            return
        if not is_repeated(frame):
            calls[thread].append((file, frame.f_code.co_qualname))

    # The run of the examples, as its page has it.
    os.chdir(ROOT / "examples")
    config = with_changes(
        read_config(Path("run.toml")),
        {
            "sync.mode": "hybrid",
            "sync.tau": 4,
            "sync.ranks": 1,
            "engine.executor": executor,
            "steps": STEPS,
            "data.keep": False,
        },
    )
    Feed.take = noting(Feed.take, lambda feed, rank, step: step)  # type: ignore
    for name in ("forward_backward", "push"):
        stage = noting(getattr(RankStages, name), lambda rank, batch: batch.handle.step)
        setattr(RankStages, name, stage)
    threading.setprofile(note)
    sys.setprofile(note)
    try:
        with tempfile.TemporaryDirectory() as folder:
            run_into(Path(folder) / "run", config)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)

    every = {call for of_thread in calls.values() for call in of_thread}
    nameless = {call for call in every if call[1].endswith(">")}
    changes = sum(
        before[0] != after[0]
        for of_thread in calls.values()
        for before, after in itertools.pairwise(of_thread)
    )
    files = {file for file, _ in every}
    return Way(len(files), len(every - nameless), len(nameless), changes)


class Count(NamedTuple):
    """A count of the source, with what it should be."""

    what: str
    goal: str
    today: float
    most: float
    """Held by `tests/test_house.py`."""


def counts_of_the_source() -> list[Count]:
    """Everything that reading the source tells."""
    lines = sum(len(source.lines) for source in all_sources())
    words = private_words()
    comments = sum(len(comment_lines(source)) for source in all_sources())
    twice = classes_named_twice().keys() - {"experiments: Options"}
    return [
        Count("words of ours as names", "100", sum(words.values()), 34),
        Count("of these told and said", "0", words["told"] + words["said"], 0),
        Count("long bodies without a waypoint", "0", len(long_bodies_without_waypoint()), 0),
        Count("docstrings that begin by pointing", "0", len(pointing_docstrings()), 0),
        Count("tuples to tuples in 1,000 lines", "2", 1e3 * len(tuple_assignments()) / lines, 0.5),
        Count("fmt: skip", "data only", len(format_skips()), 13),
        Count("class names that stand twice", "0", len(twice), 0),
        Count("comments in 1,000 lines", "more", 1e3 * comments / lines, 1e3),
    ]


WAYS = {
    "constant_lag": Way(files=22, functions=100, nameless=0, changes=90),
    "concurrent": Way(files=24, functions=130, nameless=0, changes=130),
}
"""Executor -> what the way of one batch should be at most."""
MOST = {
    "constant_lag": Way(files=22, functions=89, nameless=24, changes=79),
    "concurrent": Way(files=25, functions=129, nameless=33, changes=129),
}
"""What it is today: `tests/test_house.py` holds it."""


def main() -> None:
    """Print the table: what is counted, its goal, and what it is today."""
    if sys.argv[1:]:
        print(*trace_a_batch(sys.argv[1]))
        return
    table = [("what", "goal", "today")]
    for count in counts_of_the_source():
        table.append((count.what, count.goal, f"{count.today:.3g}"))
    for executor, goal in WAYS.items():
        way = way_of_a_batch(executor)
        for name in ("files", "functions", "changes"):
            today = f"{getattr(way, name)}"
            if name == "functions":
                today += f" (and {way.nameless} comprehensions and lambdas)"
            if name == "changes" and executor == "concurrent":
                today += " (within each of its three threads)"
            label = "changes of file" if name == "changes" else name
            table.append((f"one batch, {executor}: {label}", f"{getattr(goal, name)}", today))
    widths = [max(len(row[column]) for row in table) for column in range(2)]
    for what, goal_text, today in table:
        print(f"{what:<{widths[0]}}  {goal_text:>{widths[1]}}  {today}")


if __name__ == "__main__":
    main()
