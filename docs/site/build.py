"""`python docs/site/build.py OUT` builds the site: pages, API, every option, the gallery.

The pages are copied beside what is generated, in the layout of the repository, so that their links
hold. A warning of Sphinx ends the build.
"""

from __future__ import annotations

import csv
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from experiments.catalogue import BENCHES, STUDIES, Study

ROOT = Path(__file__).resolve().parents[2]
COPIED = (
    "README.md", "ARTIFACT.md", "CONTRIBUTING.md", "CHANGELOG.md", "CITATION.cff", "LICENSE",
    "constraints.txt", "docs", "examples", "paper_figs/out", "persia_sim", "runtime", "experiments",
    "deploy", "notebooks",
)  # fmt: skip
PAGES = {
    "Begin": ("README", "docs/guides", "docs/words"),
    "Use it": ("docs/training", "docs/simulator", "docs/cluster"),
    "Results": (
        "docs/results/README", "docs/results/simulated", "docs/results/plan", "ARTIFACT", "gallery",
        "docs/benchmarks",
    ),
    "Reference": ("api", "options", "docs/laws", "docs/batch", "docs/wire"),
    "Change it": ("docs/extend", "CONTRIBUTING", "CHANGELOG"),
}  # fmt: skip
"""Heading of the sidebar -> its pages, in order."""
COMMANDS = (
    ("persia-runtime train --help all", ("runtime", "train", "--help", "all")),
    *(
        (f"persia-runtime {name} --help", ("runtime", name, "--help"))
        for name in ("evaluate", "predict", "export", "profile", "serve")
    ),
    ("persia-sim --help", ("persia_sim", "--help")),
    ("persia-sim sharded --help", ("persia_sim", "sharded", "--help")),
)
API = {
    "Training": ("runtime.run.session", ("train",)),
    "Options of a run": ("runtime.config", ("TrainConfig",)),
    "A trained model": ("runtime.inference", ("open_model",)),
    "Simulating": ("persia_sim.engine.simulate", ("simulate",)),
    "A cluster": ("persia_sim.cluster.cluster", ("Cluster", "Role", "Link")),
    "A workload": ("persia_sim.cluster.workload", ("Workload",)),
    "Throughput": ("persia_sim.report.measure", ("throughput", "Estimate")),
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
    studies = [
        (f"persia-experiments {name} --help", ("experiments", name, "--help"))
        for name in STUDIES | BENCHES
    ]
    (source / "options.md").write_text(_options([*COMMANDS, *studies]))
    (source / "gallery.md").write_text(_gallery(STUDIES.values()))

    words = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html"]
    words += ["-c", str(source / "docs/site"), str(source), str(out / "html")]
    return subprocess.run(words, check=False).returncode


def _index() -> str:
    lines = ["# persia-testbed", "", "What hybrid training of recommenders gains and loses.", ""]
    for heading, pages in PAGES.items():
        lines += ["```{toctree}", f":caption: {heading}", ":maxdepth: 2", "", *pages, "```", ""]
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


def _options(commands: list[tuple[str, tuple[str, ...]]]) -> str:
    lines = ["# Every option of every command", ""]
    for title, words in commands:
        found = subprocess.run(
            [sys.executable, "-m", *words], capture_output=True, text=True, check=True, cwd=ROOT
        )
        lines += [f"## {title.removesuffix(' all').removesuffix(' --help')}", ""]
        lines += ["```text", f"$ {title}", found.stdout.rstrip(), "```", ""]
    return "\n".join(lines)


def _gallery(studies: Iterable[Study]) -> str:
    with (ROOT / "docs/results/index.csv").open(newline="") as file:
        commands = {row["file"]: row["command"] for row in csv.DictReader(file)}
    lines = ["# Gallery", "", "Every stored figure with the command that makes it.", ""]
    for study in studies:
        picture = ROOT / "paper_figs/out" / study.png
        if study.png and picture.is_file():
            command = commands.get(study.csv[0], f"persia-experiments {study.name}")
            lines += [f"## {study.title}", "", study.caption, "", f"    {command}", ""]
            lines += [f"![{study.title}](paper_figs/out/{study.png})", ""]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "build/site"))
