"""Every study and bench by name: what the list says of it, and how `paper` runs it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Size = Literal["quick", "full"]


@dataclass(frozen=True, slots=True)
class Study:
    """One study or bench; its module has `Options`, a dataclass, and `run(options)`.

    A study with a title is one of those that `paper` runs, with its defaults at full size.
    """

    name: str
    """Name of the command; module, figure and table have it, too."""
    says: str
    """A line for the list."""
    minutes: float | None
    """Minutes that the defaults take on 2 cores; None: any."""
    title: str = ""
    caption: str = ""
    """What is read from the figure, in one or two sentences; no outcome."""
    tables: tuple[str, ...] = ("",)
    """Ends of the tables' names behind ``stem``."""
    file: str = ""
    """The study's file in experiments/sweeps, where it is one: its command is that of `sweep`."""
    quick: str = ""
    """Arguments of `paper` at quick size."""
    quick_minutes: float = 1.0
    """Minutes at quick size, on 2 cores."""

    @property
    def stem(self) -> str:
        """Stem of the module, the tables and the figure."""
        return self.name.replace("-", "_")

    @property
    def csv(self) -> tuple[str, ...]:
        """Tables that the study writes into its folder."""
        return tuple(f"{self.stem}{end}.csv" for end in self.tables)

    @property
    def pictures(self) -> tuple[str, ...]:
        """Files that figures of its tables have, where these are drawn."""
        return tuple(name.replace(".csv", ".png") for name in self.csv)

    def arguments(self, size: Size) -> tuple[str, ...]:
        """Arguments at a size, but for `--out`."""
        return tuple(self.quick.split()) if size == "quick" else ()

    def minutes_of(self, size: Size) -> float:
        """Minutes on 2 cores, as written down above."""
        return self.quick_minutes if size == "quick" else self.minutes or 0.0


def _by_name(*studies: Study) -> dict[str, Study]:
    return {study.name: study for study in studies}


STUDIES = _by_name(
    Study("paper", "every piece below, then the paper's claims beside what was found", 20),
    Study(
        name="which-mode",
        says="which mode for your log on your cluster: samples/s, $ and AUC of each, and advice",
        minutes=1,
        title="Which mode to take: what it gains, what it loses",
        caption="Left: simulated samples per second over those of sync, by cluster. Right: test AUC"
        " minus that of sync when lookups miss the last 16 updates, with 95 % intervals, on each"
        " stream and on earlier test windows of it, in time order (filled) and with the training"
        " rows shuffled (open), by the stored runs of the study of lateness.",
        quick_minutes=1,
    ),
    Study("which-mode-oracle", "what which-mode decides about drawn logs, beside the truth", 40),
    Study(
        name="demo",
        says="AUC lost by hybrid and async against sync, with intervals",
        minutes=4,
        title="AUC lost by late rows and late dense weights",
        caption="Test AUC minus that of sync, paired by seed, with 95 % intervals over seeds and"
        " test samples. Left of zero a mode has lost accuracy.",
        quick_minutes=4,
        file="demo.toml",
    ),
    Study("sweep", "any study from its file: lines of options, each held against another", None),
    Study("tune", "the best rates of each mode, as files", None, file="tune.toml"),
    Study("models", "what late rows cost, by model and data set", None, file="models.toml"),
    Study("daily", "tomorrow's data: each day judged before it trains, in each mode", None),
    Study(
        name="lateness",
        says="what late rows and dense weights cost: order of the data, start of Adagrad",
        minutes=180,
        title="What late rows and late dense weights cost",
        caption="Test AUC of rows 16 updates late minus that of sync, by stream and order of the"
        " training samples. Bars are 95 % over seeds and test users. From stored runs, unless all"
        " are trained anew.",
        tables=("", "_hypotheses", "_tau", "_fresh", "_fields"),
        quick="--no-train",
        quick_minutes=0.5,
    ),
    Study(
        name="treatments",
        says="what is done about late rows, and what others run: gaps",
        minutes=11,
        title="What is done about late rows, and what it gives back",
        caption="Dots are means over paired seeds, bars 95 % over seeds and test samples: test AUC"
        " minus that of the line in bold above: sync, or the same mode and bound untreated. Right"
        " of zero a treatment gives accuracy back; a bar that holds zero has shown nothing. The"
        " axis is linear within a thousandth, logarithmic beyond.",
        quick="--seeds 3",
        quick_minutes=6,
        file="treatments.toml",
    ),
    Study(
        name="convergence",
        says="AUC by samples and by simulated seconds, with rivals, 4 data sets",
        minutes=15,
        title="What each mode learns from a sample, and in a second",
        caption="Left: test AUC minus that of sync when all pushes are applied; an open dot learns"
        " in sync's own order. Right: the simulated time to sync's AUC on 8 V100s. Below: hybrid's"
        " gap to sync along the run. Bars are 95 % over paired seeds; crosses are published, of"
        " other data and one run each.",
        tables=("", "_published", "_targets"),
        quick="--seeds 5 --samples 25600 --snapshots 5 --test-rows 5000"
        " --modes sync hybrid async xdl_sync xdl_async",
        quick_minutes=1.5,
    ),
    Study(
        name="scale",
        says="simulated throughput beside published, over GPUs and over rows",
        minutes=3,
        title="Throughput against workers and rows",
        caption="Published bars and lines (open markers) beside the simulator's, in samples per"
        " second; the table says which points a constant was fitted to. One level was fitted to the"
        " five sizes from 6.25 to 100 trillion parameters, so its flatness is put in, not found.",
        tables=("_workers", "_model_size"),
        quick_minutes=0.7,
    ),
    Study(
        name="modes-timeline",
        says="stages of a few simulated steps in every mode",
        minutes=0.2,
        title="What overlaps in each mode",
        caption="The stages of four steps of one rank on a simulated cluster. Numbers are steps;"
        " bars above each other are in flight together.",
        quick_minutes=0.2,
    ),
    Study(
        name="ablation",
        says="each optimisation off in turn: simulated throughput",
        minutes=4,
        title="What each optimisation is worth",
        caption="Throughput of hybrid on simulated clusters with one thing changed at a time, as a"
        " share of that with everything on, and what then binds.",
        quick="--steps 24 --ranks 16",
        quick_minutes=0.3,
    ),
    Study(
        name="predict-published",
        says="published training, predicted: tables on GPUs, Persia; constants fitted, left out",
        minutes=1,
        title="Published GPU-sharded training, predicted",
        caption="Predicted against measured steps with the 90 % band and what one machine differs"
        " by from itself (left), and the error of each point by framework (right).",
        quick_minutes=0.2,
    ),
    Study(
        name="convergence-bound",
        says="the bound of late rows against measured gradients; the largest stable step",
        minutes=8,
        title="What is proved of late rows, and what is measured",
        caption="Logistic regression with known constants: the bound on the mean squared gradient"
        " (lines) and the measured mean with its 95 % interval (markers) against the lateness tau,"
        " for rare and for popular ids, axes logarithmic.",
        tables=("", "_steps"),
        quick="--seeds 3 --updates 64 512",
        quick_minutes=1.2,
    ),
    Study("fault-drill", "processes killed at random: what goes on, what is lost", 30),
)
"""Name -> study, in the order in which `paper` runs them; its module is in experiments/studies."""
PIECES = tuple(study for study in STUDIES.values() if study.title)
"""Studies that `paper` runs."""

BENCHES = _by_name(
    Study("bench-engines", "modes over a slow wire; transport of rows; its goal", 9),
    Study("validate", "runs of this host against their predictions, with bands", 15),
    Study("bench-peers", "whole steps against FBGEMM, TorchRec and torch", 40),
)
"""Name -> bench of speeds; its module lies in experiments/benching."""


def chosen(only: Sequence[str], pieces: Sequence[Study] = PIECES) -> list[Study]:
    """The pieces of these names, in the order of `PIECES`; all where none is named.

    Raises ValueError naming a study that is no piece.
    """
    names = [piece.name for piece in pieces]
    for name in only:
        if name not in names:
            raise ValueError(f"only must name pieces ({', '.join(names)}), got {name!r}")
    return [piece for piece in pieces if not only or piece.name in only]
