"""Whether which-mode decides rightly: its decisions about drawn logs, held against the truth.

Each log is drawn from a law, many times: the decision knows one draw, the truth is the mean over
others, which have users of their own.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import numpy as np

from experiments.choosing.batch import Cell
from experiments.choosing.decision import LOOKS, TIE, Decision
from experiments.choosing.speeds import Simulated, candidates, on_front, simulate_all
from experiments.options import PairedSeeds, Planned
from experiments.result_cache import ResultCache
from experiments.statistics import Interval, t_interval
from experiments.studies.which_mode import Options as Question
from experiments.tables import Column, table, write_csv
from persia_sim.base.files import atomic_write
from persia_sim.base.schema import Within
from persia_sim.bounds.closed_form import answer
from persia_sim.presets.catalogue import rows_of
from persia_sim.report import sweep

USERS = 500
"""Users of a log; each is in its training part and in its test part."""
ROWS_OF_A_USER = 100
TEST_ROWS_OF_A_USER = 25
ITEMS = 100
BATCH = 128
"""Of the log and of every cluster: lateness counts the same updates in both."""
BURST_UPDATES = 3
"""Updates within which a user's training rows come, where users come in bursts."""
FIRST_TRUE_DRAW = 1_000
"""Draws from this one on are of the truth alone."""
TRUE_DRAWS_AT_A_TIME = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(Planned):
    """Draw logs, let which-mode decide on three clusters, and count right, undecided and wrong."""

    draws: Annotated[int, Within(1, 500)] = 10
    """Times that each of the three logs is drawn for a decision."""
    truth: PairedSeeds = 30
    """Further draws over which the true gaps of each log are taken, one seed each."""


# The logs.


@dataclass(frozen=True, slots=True, kw_only=True)
class Law:
    """What a log is drawn from, and how it is trained."""

    set: tuple[str, ...]
    has_bursts: bool = False
    """Whether a user's rows come at once, and all depends on who the user is."""
    is_dense: bool = False
    """Whether all depends on numbers, by a function that is not linear."""


_ROWS = ("rows.dim=4", f"batch={BATCH}")
LAWS: Mapping[str, Law] = {
    "bursts": Law(
        has_bursts=True, set=("model.hidden=16", "model.lr=1e-3", "rows.optimizer.lr=0.2", *_ROWS)
    ),
    "dense": Law(
        is_dense=True,
        set=(
            *("model.hidden=32", "model.optimizer=sgd", "model.lr=1.5", "rows.optimizer.lr=0.05"),
            *_ROWS,
        ),
    ),
    "nothing": Law(set=("model.hidden=16", "model.lr=1e-3", "rows.optimizer.lr=0.02", *_ROWS)),
}
"""Logs on which late rows cost much, on which late dense weights do, and on which nothing does."""


def drawn_log(name: str, draw: int, folder: Path) -> Path:
    """Draw a log with users of its own, and write it with its schema, whose path is returned."""
    law = LAWS[name]
    random = np.random.default_rng([list(LAWS).index(name), draw])
    train, test = (USERS * each for each in (ROWS_OF_A_USER, TEST_ROWS_OF_A_USER))
    rows = train + test

    # Who clicks, when: in bursts, or at any time; all users are tested at the end.
    users = random.integers(0, USERS, rows)
    if law.has_bursts:
        users[:train] = np.repeat(np.arange(USERS), ROWS_OF_A_USER)
        begin = users[:train] * ROWS_OF_A_USER
        at = begin + random.random(train) * BURST_UPDATES * BATCH
        users[:train] = users[:train][np.argsort(at, kind="stable")]
        users[train:] = np.repeat(np.arange(USERS), TEST_ROWS_OF_A_USER)

    # On what: few items have most rows. What decides is the law's.
    items = (ITEMS * random.random(rows) ** 2).astype(int)
    numbers = random.normal(size=(rows, 4)).round(3)
    if law.is_dense:
        logit = 1.5 * numbers[:, 0] + 1.5 * numbers[:, 1] * numbers[:, 2] + 0.8 * numbers[:, 3]
    else:
        logit = random.normal(0, 1, ITEMS)[items] + 0.5 * numbers[:, 0]
    if law.has_bursts:
        logit += random.normal(0, 3, USERS)[users]
    clicks = random.random(rows) < 1 / (1 + np.exp(-logit))

    # As a user has it: a table, and what its columns mean.
    import pandas as pd  # late: half a second

    columns = {"time": range(rows), "user": users, "item": items}
    columns |= {f"x{k}": numbers[:, k] for k in range(4)}
    folder.mkdir(parents=True, exist_ok=True)
    pd.DataFrame(columns | {"click": clicks.astype(int)}).to_csv(folder / "log.csv", index=False)
    named = ['"item"', *(f'{{ name = "x{k}", kind = "numeric" }}' for k in range(4))]
    named = ['"user"', *named] if law.has_bursts else named
    path = folder / "log.toml"
    path.write_text(
        f'name = "{name}"\nfile = "log.csv"\nlabels = ["click"]\ngroup = "user"\n'
        f'split = {{ column = "time", test_from = {train} }}\ncolumns = [{", ".join(named)}]\n'
    )
    return path


# The clusters.

CLUSTER = """\
name = "{name}"
ranks = 4
loaders = 16
source = "made up"
nn = {{ host = "a2-highgpu-8g", hosts = {gpu_hosts}, processes_per_host = {gpus}, \
cores_per_process = 10, ram_bytes_per_process = 80e9 }}
embedding_workers = {{ host = "c2-standard-30", hosts = 1, processes_per_host = 1, \
cores_per_process = {worker_cores}, ram_bytes_per_process = 20e9 }}
servers = {{ host = "m2-ultramem-416", hosts = 1, processes_per_host = 1, \
cores_per_process = {server_cores}, ram_bytes_per_process = 2.6e12 }}
link = {{ latency_s = {latency_s}, header_efficiency = 0.97, source = "made up" }}
"""
WORKLOAD = """\
name = "{name}"
fields = 8
ids_per_field = {ids}
dim = {dim}
rows = 1e7
dense_features = 4
mlp = [16, 1]
dense_flops = {flops}
dense_params = {params}
batch_per_rank = 32
source = "made up"
"""
CLUSTERS: Mapping[str, tuple[Mapping[str, Any], Mapping[str, Any]]] = {
    "servers": (
        {"gpu_hosts": 1, "gpus": 4, "worker_cores": 28, "server_cores": 2, "latency_s": 3e-3},
        {"ids": 30, "dim": 64, "flops": 3e8, "params": 100_000},
    ),
    "workers": (
        {"gpu_hosts": 4, "gpus": 1, "worker_cores": 1, "server_cores": 80, "latency_s": 2e-3},
        {"ids": 30, "dim": 64, "flops": 3e8, "params": 500_000},
    ),
    "GPUs": (
        {"gpu_hosts": 1, "gpus": 4, "worker_cores": 28, "server_cores": 80, "latency_s": 5e-5},
        {"ids": 1, "dim": 16, "flops": 3e10, "params": 1_000_000},
    ),
}
"""What binds the fastest mode: a cluster, and what it trains."""


def front_on(name: str, out: Path) -> list[Simulated]:
    """The modes that are worth asking about on a cluster, simulated."""
    files = []
    for what, form, numbers in zip(
        ("cluster", "workload"), (CLUSTER, WORKLOAD), CLUSTERS[name], strict=True
    ):
        path = out / f"{what}-{name}.toml"
        with atomic_write(path) as file:
            file.write(form.format(name=name, **numbers).encode())
        files.append(str(path))
    chosen = candidates(*files, rows_of(files[1]), keep_hosts=True)
    every = simulate_all(Question(out=out, jobs=1), chosen)
    return [one for one, keep in zip(every, on_front(every), strict=True) if keep]


def closed_form_rate(one: Simulated) -> float:
    """Samples per second of a mode by the closed form; all hosts are given, so no price differs."""
    return answer(sweep.scenario_of(one.candidate.point, 1)).samples_per_s


# Decisions and truths.


def decided(law: str, draw: int, front: Sequence[Simulated], out: Path) -> dict[str, Any]:
    """What which-mode decides about a draw, as its own parts decide; its runs stay in a folder that
    the clusters share."""
    from experiments.choosing.answer import plan_of
    from experiments.choosing.training import Budget, Log, Training, lines_of
    from experiments.sweeping import Speed
    from runtime.executors.open import source_of
    from runtime.run.record import run_into

    class InThisProcess(Training):
        """Trains without a process for each run, which would take longer than it."""

        def train(self, *asked: Any, **more: Any) -> None:
            for point in self.points(*asked, **more):
                if not point.is_done(self.options.out):
                    run_into(point.folder(self.options.out), point.config)

    folder = out / f"{law}-{draw}"
    schema = folder / "log.toml"
    if not schema.is_file():
        drawn_log(law, draw, folder)
    asked = Question(data=str(schema), set=LAWS[law].set, out=folder, jobs=1, minutes=1e4)
    (line,) = lines_of(asked, [], {}).values()

    # Its plan does not depend on how busy this machine is: the budget holds every look.
    facts = source_of(line.config).provenance()
    speed = Speed(4e4, 0, facts.train_rows)
    log = Log(config=line.config, facts=facts, speed=speed, unseen={})
    budget = Budget(60 * asked.minutes, time.monotonic(), jobs=1)
    plan = plan_of(asked, budget, log, front)
    trained = InThisProcess(options=asked, log=log, plan=plan, budget=budget)
    decision = trained.until_decided(front)
    late = {one.candidate.label: one.cell for one in front}
    looked = max(trained.seeds_of(cell) for cell in late.values())
    gap = trained.gap(late[decision.best]) or Interval(0.0, 0.0, 0)
    return asdict(decision) | {"trained_seeds": looked, "gap": gap.mean}


def true_gaps(law: str, draw: int, cells: Sequence[Cell]) -> list[float]:
    """AUC of each late cell minus sync's, of one seed on a draw that no decision has seen."""
    from experiments.choosing.training import lines_of
    from runtime.run.record import run_into

    with TemporaryDirectory() as place:
        folder = Path(place)
        question = Question(
            data=str(drawn_log(law, draw, folder)), set=LAWS[law].set, out=folder, jobs=1
        )
        lines = lines_of(question, cells, {})
        aucs = []
        for line in lines.values():
            summary = run_into(folder / line.slug, replace(line.config, seed=draw))
            aucs.append(summary["tasks"]["click"]["auc"])
    return [auc - aucs[0] for auc in aucs[1:]]


RIGHT, UNDECIDED, WRONG = "right", "undecided", "wrong"


def verdict(
    decision: Decision, rates: Mapping[str, float], gaps: Mapping[str, Interval], tolerance: float
) -> str:
    """What a decision is, by the truth.

    ``rates``: samples per second of each mode by the closed form, whose prices are the same;
    ``gaps``: the true ones with their intervals. It is wrong where the mode that it takes, until
    then or for good, surely loses more than the tolerance; and where it says that it is decided,
    and a mode that surely loses no more is more than `TIE` faster.
    """
    best = decision.best
    if gaps[best].mean + gaps[best].half_width < -tolerance:
        return WRONG
    if decision.binds:
        return UNDECIDED
    safe = [name for name, gap in gaps.items() if gap.mean - gap.half_width > -tolerance]
    fastest = max(rates[name] for name in safe)
    return RIGHT if rates[best] * (1 + TIE) >= fastest else WRONG


def run(options: Options) -> None:
    """Decide draw by draw, and print and store the table of what is there at the end."""
    count = options.draws * len(LAWS) * len(CLUSTERS)
    print(
        f"{options.draws} draws of {len(LAWS)} logs on {len(CLUSTERS)} clusters:"
        f" {count} decisions of {LOOKS[0]} to {LOOKS[-1]} seeds;"
        f" truths of {options.truth} draws; results in {options.out}"
    )
    if options.dry_run:
        print(f"  {options.duration('draws')}")
        return
    fronts = {name: front_on(name, options.out) for name in CLUSTERS}
    every = {one.cell for front in fronts.values() for one in front if not one.cell.is_exact}
    cells = sorted(every, key=lambda cell: (cell.late, cell.rows_late))
    decisions = ResultCache(options.out / "decisions.jsonl")
    truths = ResultCache(options.out / "truths.jsonl")
    try:
        _fill(fronts, cells, decisions, truths, options)
    finally:  # whoever interrupts it gets the table of what is there
        rows = list(_rows(fronts, cells, decisions, truths, options))
        if rows:
            path = write_csv(options.out / "which_mode_oracle.csv", rows)
            print(f"{table(list(counted(rows)), COLUMNS)}\n\ntable: {path}")


def _fill(
    fronts: Mapping[str, Sequence[Simulated]],
    cells: Sequence[Cell],
    decisions: ResultCache,
    truths: ResultCache,
    options: Options,
) -> None:
    """Make the decisions and the truths that are missing, some draws of each in turn."""
    for draw in range(max(options.draws, -(-options.truth // TRUE_DRAWS_AT_A_TIME))):
        first = TRUE_DRAWS_AT_A_TIME * draw
        seeds = range(first, min(options.truth, first + TRUE_DRAWS_AT_A_TIME))
        for law in LAWS:
            if draw < options.draws:
                asked = {
                    f"{law}, draw {draw}, {name}": partial(decided, law, draw, front, options.out)
                    for name, front in fronts.items()
                }
                decisions.fill(asked, f"{law}, draw {draw}")
            trained = {
                f"{law}, draw {seed}, {cells}": partial(
                    true_gaps, law, FIRST_TRUE_DRAW + seed, cells
                )
                for seed in seeds
            }
            truths.fill(trained, f"truth of {law}")


def _rows(
    fronts: Mapping[str, Sequence[Simulated]],
    cells: Sequence[Cell],
    decisions: ResultCache,
    truths: ResultCache,
    options: Options,
) -> Iterator[dict[str, Any]]:
    """A row a decision that is made, with what is true of it by the draws that are trained."""
    tolerance = 1e-3 * Question(out=options.out).tolerance
    for law in LAWS:
        labels = [f"{law}, draw {seed}, {cells}" for seed in range(options.truth)]
        seen = [truths[label] for label in labels if label in truths]
        if len(seen) < 2:  # no interval, and so no truth
            continue
        true = {c: t_interval(gaps) for c, gaps in zip(cells, zip(*seen, strict=True), strict=True)}
        for name, front in fronts.items():
            rates = {one.candidate.label: closed_form_rate(one) for one in front}
            gaps = {o.candidate.label: true.get(o.cell, Interval(0.0, 0.0, 0)) for o in front}
            for draw in range(options.draws):
                if (label := f"{law}, draw {draw}, {name}") not in decisions:
                    continue
                found = dict(decisions[label])
                trained_seeds, gap = found.pop("trained_seeds"), found.pop("gap")
                decision = Decision(**found)
                safe = [o for o, one in gaps.items() if one.mean > -tolerance]
                yield {
                    "log": law,
                    "cluster": name,
                    "draw": draw,
                    "verdict": verdict(decision, rates, gaps, tolerance),
                    "best": decision.best,
                    "rival": decision.rival,
                    "binds": decision.binds,
                    "trained_seeds": trained_seeds,
                    "gap": gap,
                    "true_gap": gaps[decision.best].mean,
                    "true_gap_half_width_95": gaps[decision.best].half_width,
                    "true_best": max(safe, key=lambda o: rates[o]),
                    "true_draws": len(seen),
                }


def counted(rows: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """The verdicts of each log on each cluster, counted, and those of all of them."""
    places = dict.fromkeys((row["log"], row["cluster"]) for row in rows)
    for log, cluster in [*places, ("all", "all")]:
        of = [r for r in rows if log == "all" or (r["log"], r["cluster"]) == (log, cluster)]
        words = [row["verdict"] for row in of]
        best = ", ".join(dict.fromkeys(r["true_best"] for r in of)) if log != "all" else ""
        counts = {word: words.count(word) for word in (RIGHT, UNDECIDED, WRONG)}
        yield {"log": log, "cluster": cluster, "true_best": best} | counts


COLUMNS: dict[str, Column] = {
    "log": "{log}",
    "bound by": "{cluster}",
    "best": "{true_best}",
    RIGHT: "{right}",
    UNDECIDED: "{undecided}",
    WRONG: "{wrong}",
}
