"""Core-seconds of a sweep's point against the same loop in plain torch."""

from __future__ import annotations

import os
import shutil
import sys
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

from experiments.benching.core_seconds import core_seconds
from experiments.benching.windows import Bench, Window, interleave, ratio_of, summarize, verdict
from experiments.options import Count, Jobs, Ranks, Seeds, Some, Tau, default_jobs
from experiments.tables import aligned, leave

DATA = "kuairand-pure-14d"
GOAL_CORE_S = 5.0
GOAL_SHARE = 0.8
SNAPSHOTS = 5
TRAIN_SAMPLES = 166_932
_STUDY = '[[line]]\nname = "hybrid"\nsync.mode = "hybrid"\n'
SCRATCH = "points"
"""Folder of what a command leaves, which no other one finds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(Bench):
    """Core-seconds (user and system, of all processes) a point, beside a plain loop's, in turn."""

    data_dir: Path | None = None
    """Folder with the demo's clicks, as ~/data; else PERSIA_DATA_DIR."""
    ranks: Some[Ranks] = (1, 8)
    """Ranks W."""
    batch: Some[Count] = (128, 1024)
    """Samples per dense update."""
    tau: Tau = 4
    """Bound of the points."""
    seeds: Seeds = 5
    """Points of a sweep, which start up and read the data together; a run alone has one."""
    rounds: Count = 3
    """Each command is measured so often, in turn with the others."""
    jobs: Jobs = field(default_factory=default_jobs)
    """Points of a sweep at a time."""


def run(options: Options) -> None:
    """Measure, then print the table with the goals."""
    from runtime.data.catalogue import CATALOGUE, find_folder

    # Candidates of one setting take turns, so that they see one machine.
    schema = CATALOGUE[DATA]()
    file = find_folder(schema, options.data_dir) / schema.file
    windows: list[Window] = []
    settings = [(ranks, batch) for batch in options.batch for ranks in options.ranks]
    for ranks, batch in settings:
        candidates = {
            _name(kind, ranks, batch): partial(_core_s_a_point, options, *command)
            for kind, command in commands(options, file, ranks, batch).items()
        }
        windows += interleave(candidates, options.rounds, options.most_foreign_cores)

    # The table, and whether the goals are met.
    shutil.rmtree(options.out / SCRATCH, ignore_errors=True)
    print(f"core-seconds a point: {DATA}, hybrid tau {options.tau}, {SNAPSHOTS} snapshots")
    print(_points_table(windows, settings))
    print(_goals(windows, settings))
    leave(options, {"": [asdict(w) for w in windows]})


def commands(
    options: Options, file: Path, ranks: int, batch: int
) -> dict[str, tuple[list[str], int]]:
    """Kind -> the words behind ``python -m``, and how many points they train."""
    # The same samples and snapshots for all.
    scratch = options.out / SCRATCH
    every = max(1, TRAIN_SAMPLES // batch // SNAPSHOTS)
    of_all = f"--batch {batch} --evaluate-every"
    point = f"runtime train --mode hybrid --tau {options.tau} --ranks {ranks} --data.name {DATA}"
    point += f" {of_all}-steps {every} --out"
    study = options.out / "study.toml"
    study.parent.mkdir(parents=True, exist_ok=True)
    study.write_text(_STUDY)
    sweep = f"experiments sweep {study} --seeds {options.seeds} --jobs {options.jobs} --set"
    sweep += f" sync.tau={options.tau} sync.ranks={ranks} data.name={DATA} batch={batch}"
    sweep += f" evaluation.evaluate_every_steps={every} --out"

    # The loop that one would write instead, for one seed and for all.
    plain = ["experiments.benching.plain_loop", str(file)]
    plain += f"--taus {options.tau} {of_all} {every} --seeds".split()
    seeds = [str(seed) for seed in range(options.seeds)]
    return {
        "point": ([*point.split(), str(scratch / "point")], 1),
        "plain": ([*plain, *seeds[:1]], 1),
        "sweep": ([*sweep.split(), str(scratch / "sweep")], options.seeds),
        "plain sweep": ([*plain, *seeds], options.seeds),
    }


def _core_s_a_point(options: Options, words: list[str], points: int) -> float:
    shutil.rmtree(options.out / SCRATCH, ignore_errors=True)
    environment = dict(os.environ)
    if options.data_dir is not None:
        environment["PERSIA_DATA_DIR"] = str(options.data_dir)
    return core_seconds([sys.executable, "-m", *words], environment) / points


def _name(kind: str, ranks: int, batch: int) -> str:
    return f"{kind}, W {ranks}, batch {batch}"


_KINDS = ("point", "plain", "sweep", "plain sweep")


def _points_table(windows: list[Window], settings: list[tuple[int, int]]) -> str:
    cells = []
    for ranks, batch in settings:
        summaries = [summarize(windows, _name(kind, ranks, batch)) for kind in _KINDS]
        load = max(s.foreign_cores for s in summaries)
        row = [f"{s.median:.2f} ({s.low:.2f}-{s.high:.2f})" for s in summaries]
        cells.append([str(ranks), str(batch), *row, f"{load:.2f}"])
    head = ["W", "batch", "one run", "plain, one run", "in a sweep", "plain, in a sweep", "foreign"]
    return aligned(head, cells)


def _goals(windows: list[Window], settings: list[tuple[int, int]]) -> str:
    """The plain loop's cost over ours, paired, and whether ours is within both goals."""
    # The seconds, then the ratio to the plain loop in paired windows.
    lines = []
    for ranks, batch in settings:
        ours, plain = (_name(kind, ranks, batch) for kind in ("sweep", "plain sweep"))
        summary = summarize(windows, ours)
        within = "met" if summary.median <= GOAL_CORE_S else "MISSED"
        line = f"W {ranks}, batch {batch}: {summary.median:.2f} core-seconds in a sweep; goal"
        line += f" {GOAL_CORE_S:g}: {within if summary.clean else f'{within} (loaded machine)'}"
        lines.append(line)
        for mine, theirs, where in (
            (ours, plain, "in a sweep"),
            (_name("point", ranks, batch), _name("plain", ranks, batch), "one run"),
        ):
            if len({w.round for w in windows}) < 2:
                continue  # an interval needs two pairs
            ratio = ratio_of(windows, theirs, mine)
            share = 1 / ratio.mean
            low = 1 / ratio.high
            high = 1 / ratio.low
            lines.append(
                f"  of the plain loop's, {where}: {share:.2f} [{low:.2f}, {high:.2f}];"
                f" goal {GOAL_SHARE:g}: {verdict(ratio, 1 / GOAL_SHARE)}"
            )
    return "\n".join(lines)
