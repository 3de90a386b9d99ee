"""The pieces of the report: each a study, with the options of its quick and of its full run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Size = Literal["quick", "full"]

PUBLISHED = "points read off published figures, with the error of reading; no data set"
SECTIONS = ("Accuracy", "Throughput", "Theory", "Faults", "The simulator itself")
"""Of the report, in its order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """One study as a part of the report."""

    study: str
    """Name of the command."""
    title: str
    caption: str
    """What is read from the figure, in one or two sentences; no outcome."""
    section: str
    csv: tuple[str, ...]
    """Tables that it writes into its folder."""
    png: str = ""
    """Its figure; "": the first table is shown instead."""
    quick: tuple[str, ...] | None = ()
    """Arguments of the quick run; None: in the full report only."""
    full: tuple[str, ...] = ()
    """Arguments of the full run; a study's defaults are the full ones."""
    quick_minutes: float = 1.0
    """On 2 cores, for the plan and the bar."""
    full_minutes: float = 1.0
    fills_cores: bool = False
    """Runs as many processes as there are cores; else two pieces may run side by side."""
    source: str = "simulated; no data set"
    """Whose the numbers are, where the tables name no data set."""
    measurements: bool = False
    """Reads CSVs of measurements that the user must name."""

    def arguments(self, size: Size, measurements: Path | None = None) -> tuple[str, ...] | None:
        """Its arguments but for `--out`; None where it has no part in this report."""
        own = self.quick if size == "quick" else self.full
        if own is None or not self.measurements:
            return own
        return None if measurements is None else (*own, *measured(measurements))

    def minutes(self, size: Size) -> float:
        """As written down above."""
        return self.quick_minutes if size == "quick" else self.full_minutes


PIECES = (
    Piece(
        study="demo",
        title="AUC lost by late rows and late dense weights",
        caption="Test AUC minus that of sync, paired by seed, with 95 % intervals over seeds and"
        " test rows, by the updates that rows / dense weights miss; open: at a dense rate of its"
        " own. Left of zero a mode has lost accuracy.",
        section="Accuracy",
        csv=("demo.csv",),
        png="demo.png",
        quick_minutes=4,
        full_minutes=4,
        fills_cores=True,
    ),
    Piece(
        study="lateness",
        title="What late rows and late dense weights cost",
        caption="Left: gap of runs whose rows alone are late, against lateness over the updates"
        " made so far. Middle: where the best dense learning rate lies when dense weights are 0, 1"
        " and 7 updates late. Right: what each lateness costs, beside a batch of twice the samples;"
        " bars are 95 % over seeds and test rows.",
        section="Accuracy",
        csv=(
            "lateness.csv",
            "lateness_rates.csv",
            "lateness_delays.csv",
            "lateness_hypotheses.csv",
        ),
        png="lateness.png",
        quick=("--streams", "synthetic:zipf-1.4", "--share", "50", "--seeds", "2"),
        quick_minutes=5,
        full_minutes=500,
        fills_cores=True,
    ),
    Piece(
        study="treatments",
        title="What is done about late rows, and what it gives back",
        caption="Dots are means over paired seeds, bars 95 % over seeds and test rows: test AUC"
        " minus that of sync (left), and minus the same mode and bound untreated (right). Right of"
        " zero a treatment gives accuracy back; a bar that holds zero has shown nothing. The axes"
        " are linear within a thousandth, logarithmic beyond.",
        section="Accuracy",
        csv=("treatments.csv",),
        png="treatments.png",
        quick=(
            *("--seeds", "3", "--taus", "64"),
            *("--presets", "torchrec-semisync", "tfra-half-sync", "persia-default"),
        ),
        quick_minutes=3,
        full_minutes=8,
        fills_cores=True,
    ),
    Piece(
        study="convergence",
        title="What each mode learns from a sample, and in a second",
        caption="Test AUC by samples, the simulated time to sync's AUC on 8 V100s, and the gap to"
        " sync along the run with 95 % bands over paired seeds; grey: published, of other data and"
        " one run each.",
        section="Accuracy",
        csv=("convergence.csv", "convergence_published.csv", "convergence_targets.csv"),
        png="convergence.png",
        quick=(
            "--seeds",
            "5",
            "--samples",
            "25600",
            "--snapshots",
            "5",
            "--test-rows",
            "5000",
            "--modes",
            "sync",
            "hybrid",
            "async",
            "xdl_sync",
            "xdl_async",
        ),
        quick_minutes=1.5,
        full_minutes=15,
        fills_cores=True,
    ),
    Piece(
        study="time-to-auc",
        title="AUC against the clock of a cluster that you do not own",
        caption="True gradients in the simulated order of reads and writes of the paper's"
        " 100 T cluster: AUC against simulated seconds (left) and samples (middle), and the wait"
        " for 90, 95 and 99 % of sync's climb with 95 % intervals over paired seeds (right).",
        section="Accuracy",
        csv=("time_to_auc_targets.csv", "time_to_auc.csv"),
        png="time_to_auc.png",
        quick=("--seeds", "3", "--steps", "160", "--test-rows", "5000"),
        quick_minutes=1,
        full_minutes=4,
        fills_cores=True,
    ),
    Piece(
        study="scale-workers",
        title="Throughput against the number of workers",
        caption="Published bars and lines (open markers) beside the simulator's lines, in samples"
        " per second; the table says which points a constant was fitted to.",
        section="Throughput",
        csv=("scale_workers.csv",),
        png="scale_workers.png",
        quick_minutes=0.3,
        source=PUBLISHED,
    ),
    Piece(
        study="scale-model-size",
        title="Throughput from 6.25 to 100 trillion parameters",
        caption="Published points and the simulator's on 64 A100; one level was fitted to the five"
        " sizes, so its flatness is put in, not found.",
        section="Throughput",
        csv=("scale_model_size.csv",),
        png="scale_model_size.png",
        quick=("--no-suspects",),
        quick_minutes=0.4,
        full_minutes=2,
        source=PUBLISHED,
    ),
    Piece(
        study="modes-timeline",
        title="What overlaps in each mode",
        caption="The stages of four steps of two ranks: a simulated cluster, this host simulated"
        " from the stages of its sync run, and this host as it ran, with a latency added to each"
        " lookup and push. Numbers are steps; bars above each other are in flight together.",
        section="Throughput",
        csv=("modes_timeline.csv",),
        png="modes_timeline.png",
        quick=("--rounds", "2"),
        quick_minutes=0.5,
        source="recorded on the machine of the run, and simulated; no data set",
    ),
    Piece(
        study="ablation",
        title="What each optimisation is worth",
        caption="Throughput of hybrid on simulated clusters with one thing changed at a time, as a"
        " share of that with everything on, and what then binds; right, the AUC of real runs minus"
        " that with everything on, with 95 % intervals over paired seeds.",
        section="Throughput",
        csv=("ablation.csv",),
        png="ablation.png",
        quick=(
            "--steps",
            "24",
            "--ranks",
            "16",
            "--seeds",
            "3",
            "--samples",
            "40000",
            "--test-rows",
            "10000",
        ),
        quick_minutes=0.5,
        full_minutes=8,
        fills_cores=True,
        source="throughput simulated; AUC: the data set that the lines of the table name",
    ),
    Piece(
        study="sharded-map",
        title="Hybrid, or tables on the GPUs",
        caption="Samples per second and dollars a sample of hybrid over synchronous training with"
        " the tables spread over GPUs, for the same workload, by model size, network and GPU:"
        " above 1 (dark) hybrid wins. A star: the other side needs more GPUs for its rows.",
        section="Throughput",
        csv=("sharded_map.csv",),
        png="sharded_map.png",
        quick=(
            "--gpus",
            "a100",
            "--software",
            "torchrec",
            "--steps",
            "16",
            "--nic-gbit-per-s",
            "10",
            "100",
            "400",
            "--parameters",
            "1e10",
            "1e12",
            "6.25e12",
            "1e14",
        ),
        quick_minutes=0.5,
        full_minutes=8,
    ),
    Piece(
        study="predict-published",
        title="Published GPU-sharded training, predicted",
        caption="Predicted against measured steps with the 90 % band and what one machine differs"
        " by from itself (left), and the error of each point by framework (right).",
        section="Throughput",
        csv=("predict_published.csv",),
        png="predict_published.png",
        measurements=True,
        quick_minutes=0.2,
        source="measurements that others published; no data set",
    ),
    Piece(
        study="fit",
        title="The constants fitted to the published points",
        caption="Signed logarithmic error of the simulator at every point of the paper's figures"
        " that its constants were fitted to or held against.",
        section="Throughput",
        csv=("persia.csv", "persia_left_out.csv"),
        quick_minutes=0.5,
        full_minutes=3,
        source=PUBLISHED,
    ),
    Piece(
        study="convergence-bound",
        title="What is proved of late rows, and what is measured",
        caption="Logistic regression with known constants: the bound on the mean squared gradient"
        " (lines) and the measured mean with its 95 % interval (markers) against the lateness tau,"
        " for rare and for popular ids, axes logarithmic. Right: how often the rows of each data"
        " set are read.",
        section="Theory",
        csv=(
            "convergence_bound.csv",
            "convergence_bound_alpha.csv",
            "convergence_bound_steps.csv",
        ),
        png="convergence_bound.png",
        quick=("--seeds", "3", "--updates", "64", "1024", "--samples", "50000"),
        quick_minutes=1.2,
        full_minutes=8,
    ),
    Piece(
        study="row-frequency",
        title="Who pays for late rows: rare ids or popular ones?",
        caption="Gap of hybrid to sync by how often a test sample's rarest id occurs in training,"
        " 95 % over paired seeds; pushes of a row that a read missed, beside the model; and the gap"
        " against the drift of the rows.",
        section="Theory",
        csv=("row_frequency.csv", "row_frequency_staleness.csv", "row_frequency_drift.csv"),
        png="row_frequency.png",
        quick=("--seeds", "3", "--samples", "20000", "--test-rows", "10000", "--probes", "4"),
        quick_minutes=1.5,
        full_minutes=10,
        fills_cores=True,
    ),
    Piece(
        study="checkpoint-interval",
        title="Throughput lost to crashes and checkpoints",
        caption="Share of the throughput of simulated runs that random crashes of ranks and"
        " checkpoints cost, against the time between checkpoints in units of Young's, by mode and"
        " rate of crashes, with 95 % intervals over seeds; Daly's closed form beside.",
        section="Faults",
        csv=("checkpoint_interval.csv",),
        png="checkpoint_interval.png",
        quick=("--seeds", "3", "--steps", "160", "--factors", "0.25", "1", "4"),
        quick_minutes=0.3,
        full_minutes=6,
    ),
    Piece(
        study="simulator-speed",
        title="Events and CPU time of the simulator",
        caption="CPU seconds of one simulated run, and events a second, against the size of the"
        " cluster; wall-clock load of the machine beside it.",
        section="The simulator itself",
        csv=("simulator_speed.csv",),
        quick=("--most-ranks", "256", "--closed-forms", "500"),
        quick_minutes=0.8,
    ),
)
"""In the order of the report; the studies' own packages stay unimported until one runs."""


def chosen(only: Sequence[str], pieces: Sequence[Piece] = PIECES) -> list[Piece]:
    """The pieces of these studies, in the report's order; all where none is named.

    Raises ValueError naming a study that is no piece.
    """
    known = [piece.study for piece in pieces]
    for name in only:
        if name not in known:
            raise ValueError(f"only must name pieces ({', '.join(known)}), got {name!r}")
    return [piece for piece in pieces if not only or piece.study in only]


def measured(folder: Path) -> tuple[str, ...]:
    """The options that name the CSVs of a folder of measurements.

    Raises ValueError where one is missing.
    """
    rows = sorted(str(path) for path in folder.glob("rows*.csv"))
    beside = [folder / "workloads.csv", folder / "systems.csv"]
    missing = [path.name for path in beside if not path.is_file()]
    if not rows or missing:
        lack = ", ".join([*([] if rows else ["rows*.csv"]), *missing])
        raise ValueError(
            f"measurements {folder} lacks {lack}; name a folder with rows*.csv, workloads.csv and"
            " systems.csv as of predict-published"
        )
    return ("--rows", *rows, "--workloads", str(beside[0]), "--systems", str(beside[1]))
