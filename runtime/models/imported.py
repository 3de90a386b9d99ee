"""The files that importing the user's model would run, found without running any of them."""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import os
import sys
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from persia_sim.base.files import MOST_DOCUMENT_BYTES, read_regular
from persia_sim.base.rules import OURS
from runtime.data.catalogue import downloads
from runtime.data.schema import read_schema
from runtime.object_store import url_of

_PROJECT = Path(__file__).resolve().parents[2]
_OURS = tuple(_PROJECT / name for name in OURS)
_STANDARD = tuple(Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib"))
_PACKAGES = tuple(Path(sysconfig.get_path(name)).resolve() for name in ("purelib", "platlib"))
_INSTALLED = ("site-packages", "dist-packages")


def files_of_model(name: str) -> dict[str, Path]:
    """Module -> file of all that ``package.module:Class`` brings in from the user's own folders.

    These are the current folder and the one on the path that the model's package lies in, without
    what is installed there and without this project. Empty for a built-in model, and where there is
    no such module. An import whose name is made while it runs is not seen.
    """
    # Where to look: the current folder, and the one that the model's package lies in.
    module, _, attribute = name.partition(":")
    if not attribute:
        return {}
    importlib.invalidate_caches()
    result: dict[str, Path] = {}
    of_module = set(_files(module))  # whatever folder it lies in: it was asked for
    places = [Path(entry).absolute() for entry in sys.path]
    roots = [Path.cwd(), *(p for p in places if any(p in file.parents for _, file in of_module))]

    # Follow the imports from file to file, as far as they are the user's own.
    waiting = list(of_module)
    while waiting:
        imported, file = waiting.pop()
        if imported in result or not ((imported, file) in of_module or _is_users(file, roots)):
            continue
        result[imported] = file
        waiting += [pair for name in _imports(imported, file) for pair in _files(name)]
    return result


def code_sha256(name: str) -> str:
    """Checksum of these files: a class that was edited under its name is another model, and so is
    one whose helpers were. "" for a built-in model, and where there is no such file."""
    digest = hashlib.sha256()
    files = files_of_model(name)
    for module in sorted(files):
        digest.update(f"{module} {hashlib.sha256(files[module].read_bytes()).hexdigest()}".encode())
    return digest.hexdigest() if files else ""


def refuse_code_in(
    folder: Path | None,
    name: str,
    on_warning: Callable[[str], None] = lambda text: None,
    trained: str | None = None,
    *,
    trust: bool = False,
    remedy: str = "add --trust (in Python: trust=True)",
) -> None:
    """Raise ValueError where a model's code lies in ``folder``, or in any folder of a run or an
    export: these come from others, too. And where it may have come with the folder, from beside it,
    unless somebody says to ``trust`` it, as who types the model's name does; ``remedy``: how.

    ``on_warning`` is told the files that will be run, and that they are not those of ``trained``,
    the `code_sha256` of the model's training. Of the user's own code that is as it was trained it
    is told once, and not with each command.
    """
    # Code inside what is read, or what may have come with it.
    files = files_of_model(name).values()
    for file in files:
        for parent in (*file.parents, *file.resolve().parents):
            if _is_result(parent) or (folder is not None and parent.resolve() == folder.resolve()):
                raise ValueError(
                    f"model {name} would run {file}, which lies in {parent}, the folder of a run or"
                    " of an export: code is never taken from there; a model's class must lie"
                    " outside of it"
                )
    for file in files:
        if folder is not None and not trust and _may_come_with(folder, file):
            raise ValueError(
                f"model {name} would run {file}, which lies beside {folder} and may have come with"
                f" it from somebody else: read it, and to run it {remedy}"
            )

    # The user's own: told once, and again where it was edited.
    code = code_sha256(name)
    is_usual = not trust and code == trained
    if files and not (is_usual and _was_noted(code, list(files))):
        on_warning(f"model {name} runs the code in {', '.join(sorted(map(str, files)))}")
    if trained not in (None, code):
        on_warning(f"the code of model {name} was edited since: its new code goes on")


def _was_noted(code: str, files: Sequence[Path]) -> bool:
    """Whether the user was told before that this code runs, from these files; notes it."""
    places = "\n".join(sorted(map(str, files)))
    key = hashlib.sha256(f"{code}\n{places}".encode()).hexdigest()
    notes = downloads() / "code_that_runs.txt"
    with suppress(OSError, ValueError):
        if notes.is_file() and key.encode() in read_regular(notes, MOST_DOCUMENT_BYTES).split():
            return True
        notes.parent.mkdir(parents=True, exist_ok=True)
        with notes.open("a") as file:
            file.write(f"{key}\n")
    return False


def refuse_code_named_in(config: Path, name: str, *, trust: bool, remedy: str) -> None:
    """Refuse code (see `refuse_code_in`) where a file of options names the model: that of a run
    counts as the run, another one as what its user has written, unless it lies below the current
    folder."""
    run = config.parent
    refuse_code_in(run if _is_result(run) else config, name, trust=trust, remedy=remedy)


def refuse_urls_named_in(
    given: Path, data: str, *, trust: bool, remedy: str = "add --trust, or name it by --data.name"
) -> None:
    """Raise ValueError where the data that a run, or a file of options, names are a schema that may
    have come with it from somebody else (see `refuse_code_in`) and that names a URL: nobody here
    has said that it shall be asked."""
    if trust or not data.endswith(".toml") or not (file := Path(data).absolute()).is_file():
        return
    schema, _ = read_schema(file)
    split = schema.split
    joined = (join.file for join in schema.joins)
    names = (schema.file, split.test_file, split.validation_file, *joined)
    urls = [name for name in names if name is not None and url_of(name)]
    if urls and _may_come_with(given, file):
        raise ValueError(
            f"{file} names the URL {urls[0]}, and lies beside {given} and may have come with it"
            f" from somebody else: read it, and to ask for the URL {remedy}"
        )


def _may_come_with(given: Path, file: Path) -> bool:
    """Whether the file lies under the folder that holds the given one, or, however deep each lies,
    in one folder with what is given below the current one: as both do that were in one archive. Of
    what is installed in this environment, and of this project, no file does."""
    place = given.resolve()
    here = Path.cwd().resolve()
    if {*file.resolve().parents} & {*_PACKAGES, *_OURS}:
        return False
    for one in (file, file.resolve()):
        beside = place.is_dir() and place.parent in one.parents
        if beside or here in Path(os.path.commonpath([place, one])).parents:
            return True
    return False


def _is_result(folder: Path) -> bool:
    """Whether a folder is that of a run, of a checkpoint or of an export, whole or not."""
    signs = {
        "config.json": ("env.json", "command.json", "metrics.jsonl", "checkpoints"),
        "state.json": ("dense.pt", "rows"),
        "manifest.json": ("rows",),
    }
    return any(
        (folder / file).is_file() and any((folder / other).exists() for other in beside)
        for file, beside in signs.items()
    )


def is_pythons(module: str) -> bool:
    """Whether a module is Python's own, of which none holds a network; importing some of them
    opens a browser or a window."""
    name = module.partition(".")[0]
    files = [file for _, file in _files(name)]
    if not files:
        return name in sys.stdlib_module_names
    above = {*files[-1].resolve().parents}
    return bool(above & {*_STANDARD}) and not any(folder.name in _INSTALLED for folder in above)


def taken_by_ours(module: str) -> Path | None:
    """The user's own package, or module, that is called as a package of this project, so that
    Python finds ours in its place; None where there is none."""
    name = module.partition(".")[0]
    for entry in map(Path, sys.path if name in OURS else ()):
        for place in (entry.absolute() / name, entry.absolute() / f"{name}.py"):
            is_installed = not {*place.parts}.isdisjoint(_INSTALLED)
            if place.exists() and not is_installed and place.resolve() not in _OURS:
                return place
    return None


def _is_users(file: Path, roots: Sequence[Path]) -> bool:
    above = {*file.parents, *file.resolve().parents}
    if above & {*_STANDARD, *_OURS} or any(folder.name in _INSTALLED for folder in above):
        return False
    return any(root in above for root in roots)


def _files(module: str) -> Iterator[tuple[str, Path]]:
    """The file of a module and of each package above it; less where there is none."""
    parts = module.split(".")
    spec: ModuleSpec | None = None
    for number, part in enumerate(parts):
        # By itself: to find it by its whole name Python would import the packages above it.
        above = list(spec.submodule_search_locations or ()) if spec else None
        spec = PathFinder.find_spec(part, above)
        if spec is None and not number:  # installed in place, by a finder of its own?
            with suppress(ImportError, ValueError):
                spec = importlib.util.find_spec(part)
        if spec is None:
            return
        if spec.origin and Path(spec.origin).is_file():
            yield ".".join(parts[: number + 1]), Path(spec.origin).absolute()


def _imports(module: str, file: Path) -> Iterator[str]:
    """Names that stand behind ``import`` and ``from`` anywhere in a file, made absolute."""
    try:
        tree = ast.parse(file.read_bytes()) if file.suffix == ".py" else None
    except (OSError, SyntaxError, ValueError, RecursionError):
        return
    package = module if file.stem == "__init__" else module.rpartition(".")[0]
    for node in ast.walk(tree) if tree is not None else ():
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1]
            base = [*(above if node.level else ()), node.module]
            yield from (".".join(filter(None, [*base, name.name])) for name in node.names)
