"""`python -m tests.house` prints how large the house is, and what one must know to change it.

Lines, words, options, numbers typed into texts; files that name a mode, lines of the core,
functions that stand twice, and the way of one batch of ``examples/run.toml`` through the files.
"""

from __future__ import annotations

import ast
import collections
import importlib.util
import itertools
import os
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

from tests.tree import PACKAGES, ROOT, parsed

ANNEXES = ("runtime/hosts", "runtime/preparing", "runtime/profiling", "persia_sim/sharded")
"""What only runs over several processes and hosts, commands on data before a run and on the costs
of a machine, and systems with their tables on GPUs."""
LEAST_LINES_OF_A_TWIN = 2
TRACED_STEP, STEPS = 20, 40


def python_files(*folders: str) -> list[Path]:
    """Every Python file below these folders of the project."""
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


def lines_of(files: list[Path]) -> int:
    """Lines of all of them."""
    return sum(len(path.read_text().splitlines()) for path in files)


def texts() -> dict[Path, str]:
    """Every page that is written by hand or partly so."""
    return {path: path.read_text() for path in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]}


def options_of_all_commands() -> tuple[int, int]:
    """Commands, and options of all of them, as the site's page of options lists them."""
    spec = importlib.util.spec_from_file_location("build_site", ROOT / "docs/site/build.py")
    assert spec is not None and spec.loader is not None
    site = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(site)
    helps = [site.help_of(module, words) for module, *words in site.COMMANDS]
    return len(helps), sum(len(re.findall(r"^  (?:--|[A-Z])", one, flags=re.M)) for one in helps)


def typed_numbers(text: str) -> tuple[int, int]:
    """Numbers typed by hand, in sentences and in tables: no block that a command writes, no code,
    no heading, no mark of a list."""
    text = re.sub(r"<!-- (?!end)[^>]* -->.*?<!-- end[^>]* -->", "", text, flags=re.S)
    text = re.sub(r"```.*?```", "", text, flags=re.S)
    lines = [line for line in text.splitlines() if not line.startswith(("    ", "#"))]
    lines = [re.sub(r"^\s*\d+\. ", "", line) for line in lines]

    def count(lines: list[str]) -> int:
        prose = re.sub(r"`[^`]*`", "", "\n".join(lines))
        return len(re.findall(r"(?<![\w.])[-+]?\d[\d,]*(?:\.\d+)?(?![\w])", prose))

    in_tables = [line for line in lines if line.startswith("|")]
    return count([line for line in lines if line not in in_tables]), count(in_tables)


def names_a_mode(node: ast.AST) -> bool:
    """Whether `Mode.SYNC` or another mode stands in the expression."""
    return any(
        isinstance(one, ast.Attribute)
        and isinstance(one.value, ast.Name)
        and one.value.id == "Mode"
        and one.attr.isupper()
        for one in ast.walk(node)
    )


def files_that_name_a_mode() -> list[Path]:
    """Files of the packages that name a mode: as a preset, or to ask which one it is."""
    return [path for path in python_files(*PACKAGES) if names_a_mode(parsed(path))]


def questions_for_the_name_of_a_mode() -> list[str]:
    """Places that compare a mode with another, choose by it or match it, in place of its rules."""
    return [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in files_that_name_a_mode()
        for node in ast.walk(parsed(path))
        if (isinstance(node, ast.Compare) and names_a_mode(node))
        or (isinstance(node, ast.match_case) and names_a_mode(node.pattern))
        or (isinstance(node, ast.Subscript) and names_a_mode(node.slice))
    ]


def crossings() -> tuple[int, int]:
    """Combinations of rules times engines, as the test of modes crosses them, and how many of these
    the engine refuses with a sentence."""
    from tests.test_modes import COMBINATIONS, ENGINES  # loads torch

    crossed = len(COMBINATIONS) * len(ENGINES)
    return crossed, crossed - sum(len(carried) for _, carried in ENGINES.values())


def twins(*folders: str) -> list[list[str]]:
    """Functions of two lines or more whose arguments and bodies are equal."""
    places: dict[str, list[str]] = collections.defaultdict(list)
    for path in python_files(*folders):
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                body = node.body[1:] if ast.get_docstring(node) else node.body
                if (
                    not body
                    or (body[-1].end_lineno or 0) - body[0].lineno + 1 < LEAST_LINES_OF_A_TWIN
                ):
                    continue
                key = ast.dump(node.args) + ast.dump(ast.Module(body, []))
                places[key].append(f"{path.relative_to(ROOT)}:{node.lineno} {node.name}")
    return [found for found in places.values() if len(found) > 1]


def way_of_a_batch(executor: str) -> tuple[int, int, int]:
    """Files and functions that one batch of a hybrid run comes by, and how often the next function
    stands in another file: of each thread by itself, so that it is the same in every run."""
    command = [sys.executable, "-m", "tests.house", executor]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    printed = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    ).stdout
    files, functions, changes = map(int, printed.split()[-3:])
    return files, functions, changes


def trace_a_batch(executor: str) -> tuple[int, int, int]:
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
        thread, file = threading.get_ident(), frame.f_code.co_filename
        is_ours = file.startswith((f"{ROOT}/runtime", f"{ROOT}/persia_sim"))
        if thread in traced and event == "call" and is_ours and not is_repeated(frame):
            calls[thread].append((file, frame.f_code.co_qualname))

    # The run of the examples, as its page has it.
    os.chdir(ROOT / "examples")
    changes = {"sync.mode": "hybrid", "sync.tau": 4, "sync.ranks": 1, "engine.executor": executor}
    config = with_changes(read_config(Path("run.toml")), {**changes, "steps": STEPS})
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

    # Comprehensions and lambdas, which have no name, are no functions to know.
    every = {call for of_thread in calls.values() for call in of_thread}
    hops = sum(
        before[0] != after[0]
        for of_thread in calls.values()
        for before, after in itertools.pairwise(of_thread)
    )
    return len({file for file, _ in every}), sum(not name.endswith(">") for _, name in every), hops


def counts() -> Iterator[tuple[str, str, str]]:
    """What is counted, its goal (if there is one), and what it is today."""
    for package in PACKAGES:
        yield f"lines of {package}", "", f"{lines_of(python_files(package)):,}"
    yield "lines of source", "67,500", f"{lines_of(python_files(*PACKAGES)):,}"
    kernels = [path for path in (ROOT / "runtime").rglob("*.?pp") if path.is_file()]
    yield "lines of C++", "", f"{lines_of(kernels):,}"
    yield "lines of tests", "54,000", f"{lines_of(python_files('tests')):,}"
    yield "words of *.md", "42,000", f"{sum(len(text.split()) for text in texts().values()):,}"
    commands, options = options_of_all_commands()
    yield f"options of {commands} commands", "510", f"{options:,}"
    prose, tables = (
        sum(found) for found in zip(*map(typed_numbers, texts().values()), strict=True)
    )
    yield "numbers typed into sentences", "150", f"{prose:,} (and {tables:,} into tables)"
    asked = questions_for_the_name_of_a_mode()
    yield "files that name a mode", "8", f"{len(files_that_name_a_mode())}, and {len(asked)} ask it"
    crossed, refused = crossings()
    yield "rules crossed with engines", "all", f"{crossed}, {refused} of them refused"
    annexes = [
        f for name in ANNEXES for f in [*python_files(name), *ROOT.glob(name)] if f.is_file()
    ]
    core = lines_of(python_files("runtime", "persia_sim")) - lines_of(annexes)
    yield "lines of the core", "37,000", f"{core:,}"
    yield (
        "functions that stand twice",
        "0",
        f"{len(twins(*PACKAGES, 'tests'))}",
    )
    for executor in ("constant_lag", "concurrent"):
        files, functions, changes = way_of_a_batch(executor)
        today = f"{files} files, {functions} functions, {changes} changes of file"
        yield f"one batch, {executor}", "79 changes" if executor == "constant_lag" else "", today


def main() -> None:
    """Print the table."""
    if sys.argv[1:]:
        print(*trace_a_batch(sys.argv[1]))
        return
    for what, goal, today in [("what", "goal", "today"), *counts()]:
        print(f"{what:<28}  {goal:>10}  {today}", flush=True)


if __name__ == "__main__":
    main()
