"""Which mode to take on a cluster: what each gains there, and what it loses on a log where one is
given (`experiments.choosing`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from dataclasses import fields as fields_of
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

from experiments.choosing.speeds import TAUS, every_window, simulate_all
from experiments.choosing.table import GAINS, gains_of, said_of_hosts
from experiments.option_values import typed_values
from experiments.options import Parallel
from experiments.paper.record import STORED
from experiments.points import words_of
from experiments.tables import drawn, table, write_csv
from persia_sim.base.command_line import Unset
from persia_sim.base.rules import Refused
from persia_sim.base.schema import Within
from persia_sim.presets.catalogue import rows_of
from persia_sim.presets.from_file import find_cluster, find_workload

WITH_DATA = "only with --data"
"""The mark of options about a log."""
CLUSTERS = ("v100-paper", "h100-host")
"""The clusters that are compared where none is named: the paper's, and a host of today."""
WORKLOAD = "kwai-video"
"""What they train."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(Parallel):
    """Which mode to take for your log on your cluster: samples/s and dollars of each, and the AUC
    that it loses on the log. Without --data: samples/s and dollars of each mode and window."""

    data: str | None = None
    """Your log: its schema (.toml), as clicks.toml, or a ready data set."""
    cluster: Annotated[
        tuple[str, ...] | None, Unset(f"gcp-100t; without --data {' '.join(CLUSTERS)}")
    ] = None
    """Your cluster: cluster.toml as `persia-sim init` writes it, or a preset of the simulator.
    Without --data several."""
    workload: Annotated[
        str | None, Unset(f"counted in log and model; without --data {WORKLOAD}")
    ] = None
    """What it trains: workload.toml as `persia-sim init` writes it, or a preset."""
    config: Annotated[Path | None, WITH_DATA] = None
    """Options of training from a file, as run.toml of `train --config`."""
    set: Annotated[tuple[str, ...], WITH_DATA] = ()
    """Options of training by their names in such a file, over it: model.lr=1e-3 rows.dim=16."""
    scale: Annotated[float, Within(1, 1e9), WITH_DATA] = 1.0
    """Of how many times as many samples the log is a cut: tables have the rows of all of them."""
    batch_per_rank: Annotated[int, Within(1, 65_535), WITH_DATA] = 2_048
    """Samples of a GPU in a step, on the cluster."""
    dense_flops: Annotated[float | None, Within(1, 1e18), WITH_DATA] = None
    """Operations of a sample's forward and backward pass, of a model of your own that torch cannot
    count."""
    hosts: Annotated[Literal["free", "given"] | None, Unset("free; without --data given")] = None
    """free: as many embedding workers and servers for each mode as make it cheapest and fastest;
    given: as many as the cluster has."""
    minutes: Annotated[float, Within(0.1, 100_000), WITH_DATA] = 10.0
    """Minutes that all of it may take: a longer log is cut to its last window, and modes that no
    longer fit are left out."""
    tolerance: Annotated[float, Within(0, 1000), WITH_DATA] = 1.0
    """Thousandths of AUC that a mode may lose and still be as good."""
    tune: Annotated[bool, WITH_DATA] = False
    """Search the learning rates of sync and of each late mode first; else all have those given."""
    fields: Annotated[bool, WITH_DATA] = False
    """Train each field alone late, and alone fresh while all others are late: whose loss it is."""
    shuffled: Annotated[bool, WITH_DATA] = False
    """Train sync and every late mode on shuffled samples, too: what the order costs."""
    json: Annotated[bool, WITH_DATA] = False
    """Print the answer as one JSON document on stdout, and all sentences on stderr."""

    def _check(self) -> None:
        if self.data is not None:
            if self.cluster is not None and len(self.cluster) != 1:
                raise Refused("cluster", f"must be one with --data, got {len(self.cluster)}")
            _refuse_chosen(typed_values(self.set))
        else:
            self._refuse_options_of_a_log()

        # Before minutes go by: what the simulator is asked about.
        for name in self.cluster or ():
            find_cluster(name)
        if self.workload is not None:
            find_workload(self.workload)

    def _refuse_options_of_a_log(self) -> None:
        kinds = get_type_hints(type(self), include_extras=True)
        for one in fields_of(self):
            of_log = WITH_DATA in getattr(kinds[one.name], "__metadata__", ())
            if of_log and getattr(self, one.name) != one.default:
                raise Refused(one.name, "is about a log; add --data, as clicks.toml, or remove it")


_CHOSEN = {
    "data.name": "--data names the log",
    "data.skip_rows": "--minutes decides how much of the log is trained",
    "evaluation.evaluate_every_steps": "which-mode chooses it",
    "sync.mode": "which-mode compares the modes",
    "sync.tau": "which-mode trains each mode as late as it is on the cluster",
    "sync.dense_lag": "which-mode trains each mode as late as it is on the cluster",
}
"""Options of training that the question decides itself, and by what."""


def _refuse_chosen(typed: Mapping[str, Sequence[Any]]) -> None:
    for name, values in typed.items():
        if name in _CHOSEN:
            raise Refused("set", f"has {name}={words_of(values)}: {_CHOSEN[name]}; remove it")
        if len(values) > 1:
            raise Refused("set", f"gives {name} {len(values)} values; which-mode takes one of each")


def run(options: Options) -> None:
    """Print the answer, and leave its table and picture."""
    if options.data is not None:
        from experiments.choosing.answer import answered  # late: torch

        answered(options)
    else:
        gained(options)


def gained(options: Options) -> list[dict[str, Any]]:
    """Simulate every mode at each of its windows on each cluster, print a table a cluster, and
    leave all of it as one table with the picture; its rows, none of a dry run."""
    workload = options.workload or WORKLOAD
    clusters = options.cluster or CLUSTERS
    keep_hosts = options.hosts != "free"
    chosen = [every_window(one, workload, rows_of(workload), keep_hosts) for one in clusters]
    if options.dry_run:
        count = sum(map(len, chosen))
        share = count / (len(CLUSTERS) * sum(map(len, TAUS.values())))
        print(f"{count} simulations, {options.duration(share=share)}; results in {options.out}")
        return []

    # A table a cluster: sync's rate is that of the same one.
    rows = []
    for candidates in chosen:
        every = simulate_all(options, candidates)
        of_cluster = [gains_of(one) for one in every]
        print(f"{of_cluster[0]['cluster']}; {of_cluster[0]['workload']}\n")
        print(table(of_cluster, GAINS))
        print(f"{words}\n" if (words := said_of_hosts(every)) else "")
        rows += of_cluster
    print(NOTE)

    # Beside the gains stands what lateness cost where the study of it is stored.
    path = write_csv(options.out / "which_mode.csv", rows)
    losses = STORED / "lateness.csv"
    figure = drawn(path, *([losses] if losses.is_file() else []))
    print(f"table: {path}\nfigure: {figure}")
    return rows


NOTE = """\
Samples per second and dollars are simulated: what they may be, from and to. Dollars are list
prices; the paper's machines cost what the nearest ones for rent do. With --data the table says what
that lateness costs in AUC.
"""
