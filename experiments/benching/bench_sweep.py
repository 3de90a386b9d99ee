"""Core-seconds of a sweep's point against the same loop in plain torch."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

from experiments.benching.core_seconds import core_seconds
from experiments.benching.windows import (
    Bench,
    Window,
    interleave,
    paired_ratio,
    summarize,
    verdict,
)
from experiments.options import Count, Jobs, Ranks, Seeds, Some, Tau, default_jobs
from experiments.tables import aligned, write_csv

DATA = "kuairand-pure-14d"
GOAL_CORE_S = 5.0
GOAL_SHARE = 0.8
SNAPSHOTS = 5
TRAIN_SAMPLES = 166_932


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(Bench):
    """Core-seconds (user and system, of all processes) a point, beside a plain loop's, in turn."""

    data_dir: Path | None = None
    """Folder with the demo's clicks; else PERSIA_DATA_DIR."""
    ranks: Some[Ranks] = (1, 8)
    """NN workers W."""
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

    schema = CATALOGUE[DATA]()
    file = find_folder(schema, options.data_dir) / schema.file
    windows: list[Window] = []
    settings = [(ranks, batch) for batch in options.batch for ranks in options.ranks]
    scratch = options.out / "points"
    for ranks, batch in settings:
        asked = _Asked(options, file, scratch, ranks, batch).candidates()
        windows += interleave(asked, options.rounds, options.most_foreign_cores)
    shutil.rmtree(scratch, ignore_errors=True)
    write_csv(options.out / "bench_sweep.csv", [asdict(w) for w in windows])
    print(f"core-seconds a point: {DATA}, hybrid tau {options.tau}, {SNAPSHOTS} snapshots")
    print(_points_table(windows, settings))
    print(_goals(windows, settings))
    print(f"{options.out / 'bench_sweep.csv'}")


@dataclass(frozen=True, slots=True)
class _Asked:
    """The four commands of one setting."""

    options: Options
    file: Path
    scratch: Path
    ranks: int
    batch: int

    def candidates(self) -> dict[str, Callable[[], float]]:
        """Name -> core-seconds a point."""
        points = len(self._seeds)
        return {
            _name("point", self.ranks, self.batch): partial(self._measure, self._point, 1),
            _name("plain", self.ranks, self.batch): partial(self._measure, self._plain(1), 1),
            _name("sweep", self.ranks, self.batch): partial(self._measure, self._sweep, points),
            _name("plain sweep", self.ranks, self.batch): partial(
                self._measure, self._plain(points), points
            ),
        }

    @property
    def _seeds(self) -> list[str]:
        return [str(seed) for seed in range(self.options.seeds)]

    @property
    def _every(self) -> str:
        return str(_snapshot_every(self.batch))

    @property
    def _point(self) -> list[str]:
        return [
            "runtime", "train", "--mode", "hybrid", "--tau", str(self.options.tau),
            "--ranks", str(self.ranks), "--batch", str(self.batch), "--data.name", DATA,
            "--evaluate-every-steps", self._every, "--out", str(self.scratch / "point"),
        ]  # fmt: skip

    @property
    def _sweep(self) -> list[str]:
        return [
            "experiments", "staleness-sweep", "--modes", "hybrid", "--taus", str(self.options.tau),
            "--seeds", str(self.options.seeds), "--ranks", str(self.ranks),
            "--batch", str(self.batch), "--data.name", DATA, "--jobs", str(self.options.jobs),
            "--evaluate-every-steps", self._every, "--out", str(self.scratch / "sweep"),
        ]  # fmt: skip

    def _plain(self, points: int) -> list[str]:
        return [
            "experiments.benching.plain_loop", str(self.file), "--taus", str(self.options.tau),
            "--batch", str(self.batch), "--evaluate-every", self._every,
            "--seeds", *self._seeds[:points],
        ]  # fmt: skip

    def _measure(self, words: list[str], points: int) -> float:
        shutil.rmtree(self.scratch, ignore_errors=True)
        environment = dict(os.environ)
        if self.options.data_dir is not None:
            environment["PERSIA_DATA_DIR"] = str(self.options.data_dir)
        return core_seconds([sys.executable, "-m", *words], environment) / points


def _snapshot_every(batch: int) -> int:
    return max(1, TRAIN_SAMPLES // batch // SNAPSHOTS)


def _name(kind: str, ranks: int, batch: int) -> str:
    return f"{kind}, W {ranks}, batch {batch}"


_KINDS = ("point", "plain", "sweep", "plain sweep")


def _points_table(windows: list[Window], settings: list[tuple[int, int]]) -> str:
    cells = []
    for ranks, batch in settings:
        found = [summarize(windows, _name(kind, ranks, batch)) for kind in _KINDS]
        load = max(s.foreign_cores for s in found)
        row = [f"{s.median:.2f} ({s.low:.2f}-{s.high:.2f})" for s in found]
        cells.append([str(ranks), str(batch), *row, f"{load:.2f}"])
    head = ["W", "batch", "one run", "plain, one run", "in a sweep", "plain, in a sweep", "foreign"]
    return aligned(head, cells)


def _goals(windows: list[Window], settings: list[tuple[int, int]]) -> str:
    """The plain loop's cost over ours, paired, and whether ours is within both goals."""
    lines = []
    for ranks, batch in settings:
        ours, plain = (_name(kind, ranks, batch) for kind in ("sweep", "plain sweep"))
        found = summarize(windows, ours)
        within = "met" if found.median <= GOAL_CORE_S else "MISSED"
        line = f"W {ranks}, batch {batch}: {found.median:.2f} core-seconds in a sweep; goal"
        line += f" {GOAL_CORE_S:g}: {within if found.clean else f'{within} (loaded machine)'}"
        lines.append(line)
        for mine, theirs, where in (
            (ours, plain, "in a sweep"),
            (_name("point", ranks, batch), _name("plain", ranks, batch), "one run"),
        ):
            if len({w.round for w in windows}) < 2:
                continue  # an interval needs two pairs
            ratio = paired_ratio(windows, theirs, mine)
            share, low, high = 1 / ratio.mean, 1 / ratio.high, 1 / ratio.low
            lines.append(
                f"  of the plain loop's, {where}: {share:.2f} [{low:.2f}, {high:.2f}];"
                f" goal {GOAL_SHARE:g}: {verdict(ratio, 1 / GOAL_SHARE)}"
            )
    return "\n".join(lines)
