"""Persia's published rates: all that were measured, each with the error of reading it off."""

from __future__ import annotations

from dataclasses import dataclass
from math import hypot
from pathlib import Path

from experiments.published.descriptions import number, read_csv
from persia_sim.words.vocabulary import Mode

DATA = Path(__file__).resolve().parent
RUN_NOISE = 0.05
"""Standard deviation of the log of a measured rate: machines and runs differ by so much."""
MODES = {"hybrid": Mode.HYBRID, "sync": Mode.SYNC, "async": Mode.ASYNC_AVERAGING}


@dataclass(frozen=True, slots=True)
class Point:
    """One published rate."""

    cluster: str
    workload: str
    mode: Mode
    gpus: int
    samples_per_s: float
    digitisation: float
    """Standard deviation of reading it off a plot, relative."""

    @property
    def series(self) -> str:
        """Points of one figure's one line."""
        return f"{self.workload.rstrip('12345')} {self.mode}"

    @property
    def spread(self) -> float:
        """Of its logarithm: run and reading together."""
        return hypot(RUN_NOISE, self.digitisation)


def points(data: Path = DATA) -> list[Point]:
    """Persia's points; bars that only halve another bar are no measurement and left out."""
    found = []
    for line in read_csv(data / "throughput_public.csv", "published"):
        gpus = int(line["gpus"])
        if line["system"] == "Persia" and (gpus > 1 or "dashed" in line["note"]):
            rate = number(line, "samples_per_s")
            found.append(Point(line["cluster"], line["dataset"], Mode.HYBRID, gpus, rate,
                               150 / rate))  # fmt: skip
    for line in read_csv(data / "throughput_kwai.csv", "published"):
        rate = number(line, "samples_per_s")
        found.append(Point(line["cluster"], line["dataset"], MODES[line["mode"]],
                           int(line["gpus"]), rate, 4000 / rate))  # fmt: skip
    for line in read_csv(data / "throughput_model_size.csv", "published"):
        rate = number(line, "samples_per_s")
        found.append(Point(line["cluster"], line["workload"], MODES[line["mode"]], 64, rate,
                           15000 / rate))  # fmt: skip
    return found
