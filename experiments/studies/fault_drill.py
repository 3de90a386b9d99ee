"""A run's processes are killed at random: does it go on, and is every push accounted for?"""

from __future__ import annotations

import random
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Annotated, Any

from experiments.drilling.trial import (
    IDS,
    RATE,
    Account,
    Ending,
    Trial,
    run_trial,
    run_undisturbed,
    write_world,
)
from experiments.options import Count, OneOf, Planned, Some, Tau
from experiments.result_cache import ResultCache
from experiments.tables import Column, leave, table
from persia_sim.base.rules import Refused
from persia_sim.base.schema import Within
from persia_sim.base.vocabulary import Mode
from runtime.run.folder import read_summary

ON_A_HOST = {
    "server": "an embedding server",
    "worker": "an embedding worker",
    "rank": "a rank (torchrun starts all of them again)",
    "launcher": "the process that was started first",
    "loader": "reads ahead for the ranks",
}
ROLES = ON_A_HOST | {
    "host": "a `serve`, with the servers that it has started",
    "connection": "a TCP connection of a rank or server, which is cut",
}
OF_CABLES = {
    "cable": "the cable between two hosts, out for 5 s: ranks and a server on each",
    "one-way": "the same, but packets of one host are dropped, those of the other come",
    "long-cut": "the cable, out for a minute: one process with all ranks, a server at each end",
}
RESIZE = "resize"
EVERY_ROLE = ROLES | OF_CABLES
EVERY_ROLE |= {
    RESIZE: "a process, while the number of servers changes (a server only where rows are exact)",
}
"""What a trial strikes."""
UNNOTICED = ("cable", "one-way")
"""Nobody may notice: no byte is lost, nothing is started again."""
EVALUATIONS = 4
"""Evaluations of a run on its way; one more comes at its end."""
MODES = tuple(map(str, Mode))
Line = dict[str, Any]
"""A trial as the CSV has it: who was killed, its `Ending`, its `Account` (None of a world that does
not count, and where the run was never finished), AUC less that of the undisturbed run where the
world is one of clicks, and what law is broken; empty when none is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(Planned):
    """Kill processes of small runs, or cut their connections or cables, at random instants, and
    count what every row went through.

    In the world of the drill a row's value is the number of pushes that it has had, so an update
    that is lost without a word, or applied twice, shows.
    """

    engine: Annotated[str, OneOf(("host", "cluster", "hosts"))] = "host"
    """A run of this host alone; or as of several (`cluster`): its ranks by torchrun, and each
    server by a `serve` of its own, over TCP; or of two network namespaces (`hosts`), which need
    root, joined by a cable that is cut."""
    kills: Count = 100
    """Trials; each kills one process with SIGKILL, or cuts one connection or cable."""
    in_checkpoint: Tau = 20
    """So many of them while a checkpoint is being written."""
    in_evaluation: Tau = 20
    """So many others between two batches of an evaluation, on the way and after the last step."""
    learning: Tau = 20
    """So many of them in runs that learn planted clicks, to compare their AUC; the others count."""
    modes: Some[Annotated[str, OneOf(MODES)]] = MODES
    """Modes to draw from."""
    roles: Some[Annotated[str, OneOf(EVERY_ROLE)]] = tuple(ON_A_HOST)
    """What to kill; on a cluster also a `host`, which is a `serve` with its servers, or, to be cut,
    a `connection`; of two hosts `cable`, `one-way` (packets are dropped), `long-cut` alone; on one
    host also `resize`: some process, while the run changes the number of its servers."""
    steps: Count = 400
    """Dense updates of a run."""
    ranks: Annotated[int, Within(1, 8)] = 2
    """Ranks."""
    servers: Annotated[int, Within(1, 8)] = 2
    """Embedding servers."""
    latency_s: Annotated[float, Within(0.0, 10.0)] = 0.004
    """Seconds of each message, so that a run lasts long enough to be killed."""
    patience_s: Annotated[float, Within(1.0, 86_400.0)] = 120.0
    """Seconds after a kill from which on a run counts as hanging."""
    seed: Annotated[int, Within(0, 2**63 - 1)] = 0
    """Seed of the draw of modes, roles and instants."""

    @property
    def hosts(self) -> int:
        """Hosts that serve rows apart from the ranks."""
        return self.servers if self.engine != "host" else 0

    def _check(self) -> None:
        # Each engine has what can be struck there.
        others = [role for role in self.roles if role not in ON_A_HOST]
        cables = [role for role in others if role in OF_CABLES]
        if cables and self.engine != "hosts":
            raise Refused("roles", f"has {' and '.join(cables)}, which need --engine hosts")
        if len(cables) < len(self.roles) and self.engine == "hosts":
            raise Refused("roles", f"must be of {', '.join(OF_CABLES)} with --engine hosts")
        if RESIZE in others and self.engine != "host":
            raise Refused("roles", f"has {RESIZE}, which needs --engine host")
        others = [role for role in others if role != RESIZE]
        if others and self.engine == "host":
            raise Refused("roles", f"has {' and '.join(others)}, which need --engine cluster")
        if self.engine == "hosts" and self.ranks % 2:
            raise Refused(
                "ranks",
                f"must be even with --engine hosts, of which each has half; got {self.ranks}",
            )


def run(options: Options) -> None:
    """Undisturbed runs first, then the trials; prints the table of what came out."""
    # The plan, as far as it is known before any run was timed.
    drafted = plan(options, None)
    inside = sum(trial.in_checkpoint for trial in drafted)
    evaluated = sum(trial.in_evaluation is not None for trial in drafted)
    print(
        f"{options.kills} runs of {options.steps} steps, {options.ranks} ranks and"
        f" {options.servers} servers; each is struck once, {inside} of them inside a checkpoint,"
        f" {evaluated} inside an evaluation; results in {options.out}"
    )
    if options.dry_run:
        print(f"  {options.duration('kills', 'steps')}")
        return

    # Each kind of run once without a kill: how long it takes, and what it learns.
    schema = write_world(options.out / "world", options.steps * options.ranks)
    results = ResultCache(options.out / "trials.jsonl")
    decides = _decides(options)
    kinds = sorted({(t.mode, t.engine, t.world) for t in drafted})
    undisturbed = {
        f"undisturbed {', '.join(kind)} of {decides}": partial(_undisturbed, options, kind, schema)
        for kind in kinds
    }
    calm = dict(zip(kinds, results.fill(undisturbed, "undisturbed"), strict=True))

    # The trials, which strike at instants inside those times.
    trials = plan(options, {kind: seconds for kind, (seconds, _) in calm.items()})
    killing = {
        f"kill {t.number} of {decides}": partial(
            _one, options, t, schema, *calm[t.mode, t.engine, t.world]
        )
        for t in trials
    }
    lines: list[Line] = results.fill(killing, "kills")

    print(_table(lines))
    print(verdict(lines))
    leave(options, {"": lines})


def plan(options: Options, seconds: dict[tuple[str, str, str], float] | None) -> list[Trial]:
    """The trials, drawn with the options' seed.

    ``seconds``: the time of an undisturbed run of each mode, engine and world; None before they are
    timed.
    """
    draw = random.Random(options.seed)
    pairs = [(m, r) for m in options.modes for r in options.roles]
    trials = []
    for number in range(options.kills):
        # Every pair of mode and role once, then at random.
        mode, role = pairs[number] if number < len(pairs) else draw.choice(pairs)

        # The first trials are inside a checkpoint, the last learn, some between are evaluated.
        inside = number < options.in_checkpoint
        world = "clicks" if options.kills - number <= options.learning else "counting"
        share = draw.uniform(0.0, 0.5 if inside else 0.9)

        # Ranks are processes where one of theirs is killed, else threads of one.
        engine = "processes" if role == "rank" or (role == RESIZE and number % 2) else "threads"
        if options.engine == "cluster":
            engine = "cluster"
        elif options.engine == "hosts":
            engine = "processes apart" if role in UNNOTICED else "threads apart"

        # When it strikes: after a share of the run's time, or between batches of an evaluation, of
        # which the last is the final one.
        after_s = share * seconds[mode, engine, world] if seconds else share
        evaluation = None
        if world == "counting" and 0 <= number - options.in_checkpoint < options.in_evaluation:
            evaluation = draw.randrange(EVALUATIONS + 1)
            after_s = 0.0
        trials.append(Trial(number, mode, role, engine, world, after_s, inside, evaluation))
    return trials


def _decides(options: Options) -> str:
    """The text of all options that decide the trials."""
    return repr(replace(options, out=Path(), dry_run=False))


def command(options: Options, trial: Trial, schema: Path, folder: Path) -> list[str]:
    """The words behind ``python`` that start a trial's run."""
    # Checkpoints, evaluations and a delay of each message: so that there is something to strike.
    ranks = options.ranks
    words = (
        f"--mode {trial.mode} --executor concurrent --servers {options.servers}"
        f" --latency-s {options.latency_s} --ranks {ranks} --batch {IDS * ranks}"
        f" --steps {options.steps} --checkpoint-every {max(1, options.steps // 8)}"
        f" --keep-checkpoints 2 --evaluate-every-steps {max(1, options.steps // EVALUATIONS)}"
    )
    if Mode(trial.mode).may_merge:
        words += " --no-merge-pushes"

    # A loader or worker can only be killed where there is one.
    if trial.role in ("loader", "worker"):
        words += f" --{trial.role}s 1"
    if trial.role == RESIZE:
        words += " --loaders 1"

    # In the world that counts a push adds exactly one to each row, in the other there are clicks.
    if trial.world == "counting":
        data = str(schema)
        network = "experiments.drilling.counting:Counting"
        words += f" --model.name {network} --rows.dim 4 --rows.initial-scale 0"
        words += f" --rows.optimizer.kind sgd --rows.optimizer.lr {RATE}"
    else:
        data = "synthetic"
        words += " --model.hidden 32"
    launcher = _launcher(trial.engine, ranks)
    return [*launcher, "train", "--out", str(folder), "--data.name", data, *words.split()]


def _launcher(engine: str, ranks: int) -> list[str]:
    if engine.startswith("threads"):
        return ["-m", "runtime"]
    if engine == "processes apart":  # on each of two hosts
        launch = ["--nproc-per-node", str(ranks // 2), "--max-restarts", "0"]
        return ["-m", "experiments.drilling.cable", *launch, "-m", "runtime"]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return [*torchrun, "--max-restarts", "3", "-m", "runtime"]


def _undisturbed(options: Options, kind: tuple[str, str, str], schema: Path) -> tuple[float, float]:
    """Seconds of training of a run that nothing strikes, and its AUC."""
    mode, engine, world = kind
    folder = options.out / "undisturbed" / "-".join(kind)
    trial = Trial(-1, mode, "server", engine, world, 0.0, False)
    start = command(options, trial, schema, folder)
    shutil.rmtree(folder, ignore_errors=True)
    run_undisturbed(
        start, folder, options.patience_s, options.hosts, apart=engine.endswith("apart")
    )
    summary = read_summary(folder)
    if summary is None:
        raise ValueError(f"the undisturbed run in {folder} did not finish; see the .log beside it")
    return summary["wall_s"], next(iter(summary["tasks"].values()))["auc"]


def _one(options: Options, trial: Trial, schema: Path, seconds: float, auc: float) -> Line:
    """Carry out a trial, whose undisturbed twin took so many seconds and has this AUC."""
    # Run, strike, and resume until the run has ended or hangs.
    folder = options.out / f"trial-{trial.number:03d}"
    shutil.rmtree(folder, ignore_errors=True)
    log = folder.with_suffix(".log")
    again = [*_launcher(trial.engine, options.ranks), "train", "--resume", str(folder)]
    ending = run_trial(
        trial,
        command(options, trial, schema, folder),
        again,
        folder,
        log,
        undisturbed_s=seconds,
        patience_s=options.patience_s,
        hosts=options.hosts,
        apart=trial.engine.endswith("apart"),
    )
    line = _judged(options, trial, ending, folder, auc)

    # The folder of a trial that broke a law stays, for whoever looks into it.
    if not line["broken"]:
        shutil.rmtree(folder, ignore_errors=True)
        for suffix in (".log", ".evaluated"):
            folder.with_suffix(suffix).unlink(missing_ok=True)
    return line


def _judged(options: Options, trial: Trial, ending: Ending, folder: Path, auc: float) -> Line:
    """The line of a trial that has ended so, and left this folder."""
    # What came of it: no end, every push accounted for or not, or another AUC.
    account: dict[str, Any] = dict.fromkeys(field.name for field in fields(Account))
    gap = None
    broken = ""
    summary = read_summary(folder)
    if summary is None:
        broken = "hangs" if ending.hung else f"not finished: {ending.last_line}"
    elif trial.world == "counting":
        try:
            from experiments.drilling.counting import settle  # late: loads torch

            settled = settle(folder, mode=trial.mode, ranks=options.ranks)
        except ValueError as error:
            broken = str(error)
        else:
            account = asdict(settled)
            broken = f"{settled.silent} silent losses" if settled.silent else ""
    else:
        gap = next(iter(summary["tasks"].values()))["auc"] - auc
    if trial.role in UNNOTICED and ending.resumes and not broken:
        broken = f"a cut of seconds has ended the run: {ending.last_line}"
    if ending.left_behind and not broken:
        broken = f"{ending.left_behind} processes left behind"

    about = {"number": trial.number, "mode": trial.mode, "role": trial.role, "world": trial.world}
    return about | asdict(ending) | account | {"auc_gap": gap, "broken": broken}


def _table(lines: Sequence[Line]) -> str:
    """A row for each role and mode: what was killed, what came of it."""
    killed = [line for line in lines if line["killed"]]
    groups = [
        [line for line in killed if (line["role"], line["mode"]) == pair]
        for pair in product(EVERY_ROLE, MODES)
    ]
    return table([group for group in groups if group], COLUMNS)


def _sum(group: Sequence[Line], name: str) -> int:
    return sum(line[name] or 0 for line in group)


COLUMNS: dict[str, Column] = {
    "role": lambda group: group[0]["role"],
    "mode": lambda group: group[0]["mode"],
    "killed": lambda group: str(len(group)),
    "in a checkpoint": lambda group: str(_sum(group, "in_checkpoint")),
    "in an evaluation": lambda group: str(_sum(group, "in_evaluation")),
    "by itself": lambda group: str(sum(not x["resumes"] and not x["broken"] for x in group)),
    "resumed": lambda group: str(sum(x["resumes"] > 0 and not x["broken"] for x in group)),
    "hung": lambda group: str(_sum(group, "hung")),
    "lost (counted)": lambda group: str(_sum(group, "lost")),
    "silent": lambda group: str(_sum(group, "silent")),
    "seconds more": lambda group: f"{sorted(x['extra_s'] for x in group)[len(group) // 2]:.1f}",
    "AUC gap [1e-3]": lambda group: (
        " ".join(f"{1e3 * x['auc_gap']:+.1f}" for x in group if x["auc_gap"] is not None) or "-"
    ),
}
"""Columns of a group: the killed runs of one role in one mode."""


def verdict(lines: Sequence[Line]) -> str:
    """The goals and what came of them: no run hangs, nothing is lost silently."""
    killed = [line for line in lines if line["killed"]]
    broken = [
        f"  trial {x['number']} ({x['role']}, {x['mode']}): {x['broken']}"
        for x in killed
        if x["broken"]
    ]
    head = (
        f"{len(killed)} of {len(lines)} runs were killed before they ended,"
        f" {_sum(killed, 'in_checkpoint')} inside a checkpoint, {_sum(killed, 'in_evaluation')}"
        f" inside an evaluation: {_sum(killed, 'hung')} hang, {_sum(killed, 'silent')} silent"
        f" losses, {len(broken)} trials break a law"
    )
    return "\n".join([head, *broken])
