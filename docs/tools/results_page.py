"""`python docs/tools/results_page.py` writes what the pages quote: of the stored tables, and of the
screens that commands print. What it writes stands between two marks of a page."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from textwrap import fill

import lateness_blocks as lateness
import simulator_blocks as simulator
import speed_blocks as speed
import study_blocks as studies
import which_mode_blocks as which_mode

from experiments.paper.claims import answers
from experiments.paper.claims import markdown as claims_table

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "docs" / "results" / "README.md"
README = ROOT / "README.md"
GUIDES = ROOT / "docs" / "guides.md"
BENCHMARKS = ROOT / "docs" / "benchmarks.md"
SIMULATOR = ROOT / "docs" / "simulator.md"
SIMULATED = ROOT / "docs" / "results" / "simulated.md"
ARTIFACT = ROOT / "ARTIFACT.md"
TRANSCRIPT = ROOT / "examples" / "first_day.txt"


def first_run() -> str:
    """What the guide's first table is, as the first day's transcript has it."""
    text = TRANSCRIPT.read_text()
    shown = text[text.index("clicked, clicks.toml") : text.index("table: out/sweep")]
    return f"```\n{shown.rstrip()}\n```"


def demo() -> str:
    """What the demo says under its plan, as it was stored: the table and the advice."""
    text = (ROOT / "examples" / "demo.txt").read_text()
    _, shown, table, advice, _ = re.split(r"\n\n|\ntable: ", text)
    return f"```\n{shown}\n\n{table}\n\n{fill(advice, width=118)}\n```"


def screen() -> str:
    """What the command above the block prints, typed in `examples/`."""
    command = re.search(r"## The screen\n\n    persia-sim (.*)\n", SIMULATOR.read_text())
    assert command is not None
    words = [sys.executable, "-m", "persia_sim", *shlex.split(command[1])]
    printed = subprocess.run(
        words, cwd=ROOT / "examples", capture_output=True, text=True, check=True
    ).stdout
    return f"```\n{printed}```"


def claims() -> str:
    """The paper's claims beside the stored numbers."""
    return claims_table(answers(ROOT / "no run at all"))


BLOCKS: dict[Path, dict[str, Callable[[], str]]] = {
    README: {"answer": which_mode.answer},
    RESULTS: {
        "which mode": which_mode.which_mode_table,
        "oracle": which_mode.oracle_table,
        "own hosts": which_mode.own_hosts,
        "lateness: order": lateness.order_table,
        "lateness: chosen": lateness.chosen_table,
        "lateness: windows": lateness.window_table,
        "lateness: lengths": lateness.length_table,
        "lateness: hypotheses": lateness.hypothesis_table,
        "lateness: taus": lateness.tau_table,
        "lateness: fresh": lateness.fresh_table,
        "lateness: fields": lateness.field_table,
        "models": lateness.models_table,
        "demo": studies.demo_table,
        "treatments": studies.treatments_table,
        "presets": studies.presets_table,
    },
    BENCHMARKS: {
        "roofline": speed.roofline_table,
        "wire": speed.wire_table,
        "faults": speed.faults_table,
    },
    GUIDES: {"demo": demo, "first run": first_run},
    SIMULATOR: {
        "screen": screen,
        "errors": simulator.errors_table,
        "held": simulator.held_table,
        "three sources": simulator.costs_table,
        "validate": simulator.validate_table,
    },
    SIMULATED: {"modes": simulator.timeline_table},
    ARTIFACT: {"claims": claims},
}
"""By page: what is written between its marks."""


def written(page: Path) -> str:
    """A page's text with each block put between its marks."""
    text = page.read_text()
    for name, block in BLOCKS[page].items():
        start = f"<!-- {name} -->"
        end = f"<!-- end of {name.removeprefix('lateness: ')} -->"
        head, rest = text.split(start)
        text = f"{head}{start}\n{block()}\n{end}{rest.split(end)[1]}"
    return text


if __name__ == "__main__":
    for page in BLOCKS:
        page.write_text(written(page))
