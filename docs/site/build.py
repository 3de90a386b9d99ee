"""`python docs/site/build.py OUT` builds the site: pages, API, options, gallery, notebooks.

The pages are copied beside what is generated, in the layout of the repository, so that their links
hold. A warning of Sphinx ends the build.
"""

from __future__ import annotations

import contextlib
import csv
import importlib
import io
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from unittest import mock

from experiments.catalogue import BENCHES, STUDIES, Study

ROOT = Path(__file__).resolve().parents[2]
COPIED = (
    "README.md", "ARTIFACT.md", "CONTRIBUTING.md", "CHANGELOG.md", "CITATION.cff", "LICENSE",
    "constraints.txt", "docs", "examples", "paper_figs/out", "persia_sim", "runtime", "experiments",
    "deploy", "notebooks", "tests/oracles",
)  # fmt: skip
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
PAGES = {
    "Begin": ("README", "docs/guides", "docs/words"),
    "Use it": ("docs/training", "docs/simulator", "docs/cluster", "docs/export", "docs/python"),
    "Results": (
        "docs/results/README", "docs/results/simulated", "docs/results/plan", "ARTIFACT", "gallery",
        "docs/benchmarks", "docs/trust",
    ),
    "Reference": ("api", "options", "docs/laws", "docs/batch", "docs/wire"),
    "Notebooks": tuple(f"notebooks/{file.stem}" for file in NOTEBOOKS),
    "Change it": ("docs/extend", "CONTRIBUTING", "CHANGELOG"),
}  # fmt: skip
"""Heading of the sidebar -> its pages, in order."""
WAYS_ON = "What do you want to do?"
"""The section of the README that the first page of the site shows."""
COMMANDS = (
    ("runtime", "train", "all"),
    *(
        ("runtime", n)
        for n in ("evaluate", "predict", "export", "serve", "profile", "describe", "resize")
    ),
    *(("runtime", "data", verb) for verb in ("list", "schema", "check", "get")),
    ("persia_sim",),
    *(("persia_sim", name) for name in ("sharded", "size", "init")),
    *(("persia_sim", kind, "list") for kind in ("machines", "clusters", "workloads")),
    *(("experiments", name) for name, study in (STUDIES | BENCHES).items() if not study.file),
)
"""Module of each command, and its words; ``all``: for every option of it."""
API = {
    "Training": ("runtime.run.session", ("train",)),
    "Options of a run": ("runtime.config", ("TrainConfig",)),
    "Keys of a schema": ("runtime.data.schema", ("Schema", "Column")),
    "Keys of its split": ("runtime.data.split", ("Split",)),
    "A trained model": ("runtime.inference", ("open_model",)),
    "Simulating": ("persia_sim.engine.simulate", ("simulate",)),
    "A cluster": ("persia_sim.cluster.cluster", ("Cluster", "Role", "Link")),
    "A workload": ("persia_sim.cluster.workload", ("Workload",)),
    "Throughput": ("persia_sim.report.measure", ("throughput", "Estimate")),
    "A study": ("experiments", ("sweep",)),
    "Gaps with intervals": ("experiments.gaps", ()),
}
"""Heading -> the module, and its objects; none: all that are public."""


def main(out: Path) -> int:
    """Gather, generate, build; returns Sphinx's exit code."""
    # The pages in the layout of the repository, fresh.
    source = out / "source"
    shutil.rmtree(source, ignore_errors=True)
    for name in COPIED:
        target = source / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_dir():
            ignored = shutil.ignore_patterns("__pycache__", "runs", "*.so", ".ipynb_checkpoints")
            shutil.copytree(ROOT / name, target, ignore=ignored)
        else:
            shutil.copyfile(ROOT / name, target)

    # What is generated: the order of the pages, the API, every option, the gallery.
    (source / "index.md").write_text(_index())
    (source / "api.rst").write_text(_api())
    (source / "options.md").write_text(_options(COMMANDS))
    (source / "gallery.md").write_text(_gallery(STUDIES.values()))
    for notebook in NOTEBOOKS:
        _render(notebook, source / "notebooks")

    # Every page is read anew (-E): of one that is unchanged nobody would hear a warning again.
    words = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-E", "-b", "html"]
    words += ["-c", str(source / "docs/site"), str(source), str(out / "html")]
    return subprocess.run(words, check=False).returncode


def _index() -> str:
    """The page that a visitor meets first: the README's question and answer, and its ways on.

    The pages themselves stand in the sidebar.
    """
    opening, *sections = (ROOT / "README.md").read_text().split("\n## ")
    ways = next(section for section in sections if section.startswith(WAYS_ON))
    lines = [opening, "", f"## {ways}", "", "[How to install it](README.md), and all else.", ""]
    for heading, pages in PAGES.items():
        lines += ["```{toctree}", ":hidden:", f":caption: {heading}", "", *pages, "```", ""]
    return "\n".join(lines)


def _api() -> str:
    lines = ["API", "===", ""]
    for heading, (module, names) in API.items():
        lines += [heading, "-" * len(heading), ""]
        if not names:
            lines += [f".. automodule:: {module}", "   :members:", ""]
        for name in names:
            kind = "autoclass" if name[0].isupper() else "autofunction"
            lines += [f".. {kind}:: {module}.{name}", ""]
    return "\n".join(lines)


def _options(commands: Iterable[tuple[str, ...]]) -> str:
    lines = ["# Every option of every command", ""]
    for module, *words in commands:
        program = {"persia_sim": "persia-sim"}.get(module, f"persia-{module}")
        name = " ".join([program, *(word for word in words if word != "all")])
        every = " all" if "all" in words else ""
        lines += [f"## {name}", "", "```text", f"$ {name} --help{every}"]
        lines += [help_of(module, words), "```", ""]
    return "\n".join(lines)


def help_of(module: str, words: list[str]) -> str:
    """What a command prints at ``--help``, by its own parser in this process."""
    main = importlib.import_module(f"{module}.__main__").main
    typed = [*words, "--help"]
    printed = io.StringIO()
    with (
        contextlib.redirect_stdout(printed),
        contextlib.suppress(SystemExit),
        mock.patch.object(sys, "argv", [module, *typed]),
    ):
        main() if module == "persia_sim" else main(typed)
    return printed.getvalue().rstrip()


def _gallery(studies: Iterable[Study]) -> str:
    with (ROOT / "docs/results/index.csv").open(newline="") as file:
        commands = {row["file"]: row["command"] for row in csv.DictReader(file)}
    lines = ["# Gallery", "", "Every stored figure with the command that makes it.", ""]
    for study in studies:
        pictures = [name for name in study.pictures if (ROOT / "paper_figs/out" / name).is_file()]
        if pictures:
            command = commands.get(study.csv[0], f"persia-experiments {study.name}")
            lines += [f"## {study.title}", "", study.caption, "", f"    {command}", ""]
            lines += [f"![{study.title}](paper_figs/out/{name})\n" for name in pictures]
    return "\n".join(lines)


def _render(notebook: Path, folder: Path) -> None:
    """A notebook as a page, with the outputs and pictures that are stored in it."""
    from nbconvert import MarkdownExporter  # comes with Jupyter

    text, resources = MarkdownExporter().from_filename(str(notebook))
    for name, picture in resources["outputs"].items():
        own = f"{notebook.stem}_{name}"
        (folder / own).write_bytes(picture)
        text = text.replace(f"![png]({name})", f"![a figure of {notebook.stem}]({own})")
    (folder / f"{notebook.stem}.md").write_text(text)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "build/site"))
