"""metrics.jsonl of a run folder: a line for each evaluation, the last one after draining."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from persia_sim.words.documents import parsed
from persia_sim.words.fields import Count
from persia_sim.words.files import atomic_write, read_regular
from persia_sim.words.records import parse
from runtime.run.folder import Scores, plain

if TYPE_CHECKING:
    from runtime.run.evaluate import Evaluation  # loads torch

NAME = "metrics.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One evaluation."""

    updates: Count
    samples: Count
    drained: bool
    """Whether it is that of the end, after all pushes."""
    tasks: dict[str, Scores]


def read_metrics(run: Path) -> list[Line]:
    """The evaluations of a run folder, none where there is no file.

    The last line of a killed run may be half there, and is left out. Raises ValueError naming the
    file and the line for anything else that no run writes, OSError when it cannot be read.
    """
    file = run / NAME
    try:
        lines = read_regular(file).split(b"\n")
    except FileNotFoundError:
        return []
    found = []
    for number, line in enumerate(lines[:-1], 1):  # behind the last line end: nothing, or half
        where = f"{file}, line {number}"
        found.append(parse(Line, parsed(line, where), where))
    return found


def write_metrics(run: Path, lines: Sequence[Line]) -> None:
    """Begin the file anew with these; a link in its place is replaced, not followed."""
    with atomic_write(run / NAME) as file:
        file.write("".join(_text(plain(line)) for line in lines).encode())


def append_metrics(run: Path, evaluation: Evaluation, *, drained: bool, **counts: int) -> None:
    """Add a line for this evaluation after so many updates and samples; what a killed run had
    evaluated stays."""
    line = {**counts, "drained": drained, "tasks": scores(evaluation)}
    handle = os.open(run / NAME, os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW)
    with os.fdopen(handle, "a") as lines:
        lines.write(_text(plain(line)))


def scores(evaluation: Evaluation) -> dict[str, dict[str, Any]]:
    """Task -> its figures."""
    return {name: score.figures() for name, score in evaluation.tasks.items()}


def best_auc(run: Path) -> dict[str, float]:
    """Per task, of all evaluations, also those before a resume."""
    lines = [line.tasks for line in read_metrics(run)]
    return {
        task: max((auc for line in lines if (auc := line[task]["auc"]) is not None),
                  default=math.nan)
        for task in lines[0]
    }  # fmt: skip


def _text(line: Any) -> str:
    return json.dumps(line, allow_nan=False) + "\n"
