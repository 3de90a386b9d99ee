"""Imports run one way: between the layers, and between the rooms inside each of them."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from tests.tree import parsed

ROOT = Path(__file__).parent.parent
FORBIDDEN = {
    "persia_sim": {"torch", "runtime", "experiments", "paper_figs"},
    "runtime": {"simpy", "experiments", "paper_figs"},
    "experiments": set(),
    "paper_figs": {"torch", "simpy", "persia_sim", "runtime", "experiments"},
}
ROOMS = {
    "persia_sim": [
        "base", "cluster", "presets", "network", "bounds", "engine", "report", "sharded",
        "cli", "__main__",
    ],
    "runtime": [
        "files", "stop", "object_store", "store_claim", "data", "embedding", "process", "config",
        "models", "dense", "rank", "checkpoint", "executors", "run", "serving", "inference",
        "model_commands", "guarded", "train_options", "hosts", "train_command", "describe_command",
        "preparing", "profiling", "__main__",
    ],
    "experiments": [
        "catalogue", "options", "statistics", "tables", "targets", "result_cache", "points",
        "deriving", "gaps", "sweeping", "option_values", "study_file", "search", "line_search",
        "theory", "choosing", "published", "drilling", "lateness", "validating", "paper",
        "studies", "benching", "__main__",
    ],
    "runtime.hosts": [
        "torchrun", "resize", "merge_recordings", "wire", "launch", "rows", "pooling", "loading",
        "dense", "row_processes", "rank_process", "ranks", "ray",
    ],
}  # fmt: skip
"""Bottom first: a room imports from rooms before it, never from one after it. The doors to annexes
alone lead upward."""


@cache
def imported_modules(file: Path) -> frozenset[str]:
    found: set[str] = set()
    for node in ast.walk(parsed(file)):
        if isinstance(node, ast.Import):
            found.update(name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            found.update([node.module, *(f"{node.module}.{name.name}" for name in node.names)])
    return frozenset(found)


def files_of(package: str) -> list[Path]:
    return list((ROOT / package.replace(".", "/")).rglob("*.py"))


def room_of(package: str, file: Path) -> str:
    return file.relative_to(ROOT).with_suffix("").parts[len(package.split("."))]


@pytest.mark.parametrize("package", FORBIDDEN)
def test_a_layer_imports_only_what_lies_below(package):
    for file in (ROOT / package).rglob("*.py"):
        wrong = {name.split(".")[0] for name in imported_modules(file)} & FORBIDDEN[package]
        assert not wrong, f"{file.relative_to(ROOT)} imports {sorted(wrong)}"


@pytest.mark.parametrize("package", ROOMS)
def test_every_room_has_its_place(package):
    found = {room_of(package, file) for file in files_of(package)} - {"__init__"}
    assert found <= set(ROOMS[package]), f"rooms without a place: {found - set(ROOMS[package])}"


def is_door(file: Path, module: str) -> bool:
    """Whether the file is one that may open what the module lies behind."""
    places = DOORS.get(behind_a_door(module) or "", set())
    return any(place.startswith(f"{file.relative_to(ROOT)} ") for place in places)


@pytest.mark.parametrize("package", ROOMS)
def test_a_room_imports_only_rooms_below(package):
    order = {room: number for number, room in enumerate(ROOMS[package])}
    for file in files_of(package):
        for name in imported_modules(file):
            room = name.removeprefix(f"{package}.").split(".")[0]
            if name.startswith(f"{package}.") and room in order and not is_door(file, name):
                own = order.get(room_of(package, file), len(order))
                upward = f"{file.relative_to(ROOT)} imports {name}, a room above it"
                assert order[room] <= own, upward


def test_modules_of_the_embedding_store_name_each_other_one_way():
    """Also for types alone: what server and engines share lies below both."""
    files = (ROOT / "runtime" / "embedding").rglob("*.py")
    modules = {".".join(f.relative_to(ROOT).with_suffix("").parts): f for f in files}
    named = {m: imported_modules(f) & modules.keys() - {m} for m, f in modules.items()}
    assert named["runtime.embedding.server"]  # the names are those of modules
    TopologicalSorter(named).prepare()  # raises CycleError with the modules of a cycle


def test_the_runtime_knows_of_the_simulator_only_its_base():
    for file in (ROOT / "runtime").rglob("*.py"):
        for name in imported_modules(file):
            if name.startswith("persia_sim."):
                assert name.startswith("persia_sim.base"), f"{file.relative_to(ROOT)}: {name}"


@pytest.mark.parametrize(
    ("statement", "absent"),
    [
        ("import persia_sim.base.window", "simpy torch pandas"),
        ("import runtime, runtime.config", "torch pandas simpy"),
        ("import runtime.__main__, experiments.__main__", "torch numpy simpy"),
        ("import persia_sim.cli, persia_sim.engine.simulate", "torch pandas matplotlib"),
        ("import runtime.hosts.ray.actors", "torch pandas simpy"),
    ],
)
def test_importing_loads_nothing_of_these(statement, absent):
    if "hosts.ray" in statement:
        pytest.importorskip("ray", reason="Ray is not installed (the extra `cluster`)")
    probe = f"import sys; {statement}; print(sorted(set({absent.split()!r}) & set(sys.modules)))"
    found = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True)
    assert found.stdout.strip() == "[]", found.stdout + found.stderr


ANNEXE = "runtime.hosts"
"""What only several processes and hosts need. (The simulator's, `persia_sim.sharded`, has no door:
only the command line above it leads there.)"""
DOORS = {
    "runtime.hosts.row_processes": {"runtime/executors/open.py rows_of"},
    "runtime.hosts.merge_recordings": {"runtime/executors/open.py merged_trace"},
    "runtime.hosts.loading": {"runtime/executors/open.py opened"},
    "runtime.hosts.ranks": {"runtime/train_command.py _train_as_rank"},
    "runtime.hosts.torchrun": {"runtime/train_command.py _dispatch"},
    "runtime.hosts.ray": {"runtime/train_command.py _dispatch"},
    "runtime.hosts.resize": {
        f"runtime/train_command.py {function}"
        for function in ("_train_alone", "_go_on_resized", "_train_as_rank", "train_in_folder")
    },
}
"""What of it the core opens, late, and the functions that do; the rest lies behind these."""
ALSO_THERE = {"runtime/executors/open.py opened": "runtime.hosts.row_processes"}
"""Loaders are processes, too: their door starts them."""


def behind_a_door(module: str) -> str | None:
    """The door that the module lies behind, or the annexe itself; None for the core."""
    places = (*DOORS, ANNEXE)
    return next((one for one in places if f"{module}.".startswith(f"{one}.")), None)


def imports_that_run(file: Path) -> Iterator[tuple[str, str]]:
    """Function ("" at the top) and module of each import, but for those of types alone."""

    def visit(node: ast.AST, function: str) -> Iterator[tuple[str, str]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
                continue
            if isinstance(child, ast.Import):
                yield from ((function, name.name) for name in child.names)
            elif isinstance(child, ast.ImportFrom) and child.module:
                names = (f"{child.module}.{name.name}" for name in child.names)
                yield from ((function, name) for name in (child.module, *names))
            inner = child.name if isinstance(child, ast.FunctionDef) else function
            yield from visit(child, inner)

    return visit(parsed(file), "")


def test_the_core_of_the_runtime_reaches_its_annexe_by_the_doors_alone():
    """An annexe is a room that one may leave closed: nothing but its door loads it."""
    opened: dict[str, set[str]] = {}
    for file in files_of("runtime"):
        if behind_a_door(".".join(file.relative_to(ROOT).with_suffix("").parts)):
            continue
        for function, module in imports_that_run(file):
            place = f"{file.relative_to(ROOT)} {function}".strip()
            door = behind_a_door(module)
            if door is not None and ALSO_THERE.get(place) != door:
                opened.setdefault(door, set()).add(place)
    assert opened == DOORS


PACKAGES = ("persia_sim", "runtime", "experiments", "paper_figs")
MOST_LINES_OF_A_FUNCTION = 80
"""A function is seen whole on a screen and a half."""


@pytest.mark.parametrize("package", PACKAGES)
def test_a_function_is_seen_whole(package):
    for file in (ROOT / package).rglob("*.py"):
        for node in ast.walk(parsed(file)):
            if isinstance(node, ast.FunctionDef):
                lines = (node.end_lineno or 0) - node.lineno + 1
                assert lines <= MOST_LINES_OF_A_FUNCTION, f"{file}: {node.name} has {lines} lines"
