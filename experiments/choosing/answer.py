"""Which mode for a log on a cluster: what each gains there and loses here, and what follows.

Speeds are simulated, losses are trained: with a constant lag at the mean of the simulated lateness,
rounded up. A budget decides how much of the log is trained, and with how many seeds.
"""

from __future__ import annotations

import hashlib
import json
import math
import sys
import time
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from experiments.choosing.batch import (
    EXACT,
    UPDATES_PER_LATE,
    Cell,
    Plan,
    planned,
    samples_for,
)
from experiments.choosing.decision import LOOKS, TIE, Decision
from experiments.choosing.further import (
    SIMULATED_S,
    fields_one_by_one,
    replayed,
    runs_of_fields,
    runs_of_tune,
    tune,
)
from experiments.choosing.speeds import (
    MOST_STEPS,
    Candidate,
    Simulated,
    candidates,
    on_front,
    simulate_all,
)
from experiments.choosing.table import (
    TARGET,
    columns_of,
    gap_in_words,
    rows_of_table,
    said_of_hosts,
    waiting,
    why_empty,
)
from experiments.choosing.training import MOST_CELLS, UNTRAINED, Budget, Log, Training, log_of
from experiments.deriving import derive_workload
from experiments.line_search import write_config
from experiments.option_values import typed_values
from experiments.options import REFERENCE
from experiments.points import Line
from experiments.result_cache import ResultCache
from experiments.statistics import Interval
from experiments.sweeping import PRELOADED
from experiments.tables import leave, table
from persia_sim.base.files import atomic_write, toml_value
from persia_sim.base.rules import counted
from persia_sim.presets.catalogue import rows_of
from persia_sim.presets.from_file import workload_text
from persia_sim.report import sweep
from persia_sim.report.ranges import MODEL
from runtime.config.training_file import PREDICTED
from runtime.process import fork_server


def answered(options: Any) -> list[dict[str, Any]]:
    """Print the answer and leave it as files; the rows of its table, none of a dry run.

    ``options``: those of `which-mode`. Raises ValueError for a log, a model or a cluster that
    cannot be asked about, naming the remedy.
    """
    sink = sys.stderr if options.json else sys.stdout
    with redirect_stdout(sink):
        rows, advice = _answer(options)
    if options.json and rows:
        plain = [
            {k: None if isinstance(v, float) and math.isnan(v) else v for k, v in row.items()}
            for row in rows
        ]
        print(json.dumps({"advice": advice, "modes": plain}, indent=1))
    return rows


def _answer(options: Any) -> tuple[list[dict[str, Any]], str]:
    budget = Budget(60 * options.minutes, time.monotonic(), options.jobs)

    # The log and the model, counted; the modes that are worth asking about.
    log = log_of(options)
    workload = _workload_of(options, log)
    chosen = candidates(
        (options.cluster or ("gcp-100t",))[0], workload, rows_of(workload), options.hosts == "given"
    )
    _say_plan(options, budget, log, chosen)
    if options.dry_run:
        return [], ""

    # What each gains. All processes are forks of one server, so it imports what training needs.
    fork_server(PRELOADED)
    every = simulate_all(options, chosen)
    kept = on_front(every)
    front = [one for one, keep in zip(every, kept, strict=True) if keep]
    dropped = [one.candidate.label for one, keep in zip(every, kept, strict=True) if not keep]

    # What each loses: a plan that a second call finds again, and its runs.
    plan = plan_of(options, budget, log, front)
    trained = Training(options=options, log=log, plan=plan, budget=budget)
    if options.tune:
        tune(trained)
    decision = trained.until_decided(front)
    best = next(one for one in front if one.candidate.label == decision.best)
    second = trained.at_second_batch(best)
    replay = "" if best.cell.is_exact else f" {replayed(best, trained)}"
    if options.shuffled:
        trained.train(trained.plan.cells, LOOKS[0], shuffled=True)

    # All of it as a table, a sentence and files.
    rows = rows_of_table(front, trained, options)
    print(f"\n{heading(trained, front)}\n")
    print(table(rows, columns_of(plan, options)))
    for line in notes(trained, front, dropped):
        print(line)
    advice = advised(front, decision, trained, second, options) + replay
    print(f"\n{advice}")
    leave(options, {"": rows}, drawn_first=1, as_a="which_mode_of_log")
    late = [cell for cell in (best.cell, *trained.plan.cells[::-1]) if cell.rows_late]
    if options.fields and late:
        fields_one_by_one(late[0], trained)
    _leave_config(options, best, trained)
    return rows, advice


# The log, the workload, and the plan.


def _workload_of(options: Any, log: Log) -> str:
    """The name of the workload's file: what the user gives, or what is counted in log and model."""
    if options.workload is not None:
        return str(options.workload)
    derived = partial(
        derive_workload,
        log.config,
        batch_per_rank=options.batch_per_rank,
        dense_flops=options.dense_flops,
    )
    counted_ = derived(scale=options.scale)
    path = options.out / "workload.toml"
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as file:
        file.write((workload_text(counted_) + "\n").encode())
    print(
        f"workload: {counted_.rows:,.0f} rows, {counted_.dense_params:,.0f} dense weights,"
        f" {counted_.batch_per_rank:,} samples of a GPU in a step; {path}"
    )
    if options.scale > 1 and counted_.rows < 1.01 * derived(scale=1).rows:
        print(
            f"--scale {options.scale:g} adds no rows: the ids of the log no longer grow with its"
            " samples"
        )
    return str(path)


def _say_plan(options: Any, budget: Budget, log: Log, chosen: Sequence[Candidate]) -> None:
    """What will run, with its minutes, before any of it runs."""
    scenario = sweep.scenario_of(chosen[0].point, 1)
    ranks = scenario.cluster.ranks
    simulate_s = len(chosen) * ranks * MOST_STEPS * SIMULATED_S / options.jobs + 2
    cells = []
    for one in chosen:
        tau, others = one.point.tau or 0, 0 if one.point.mode.has_barrier else ranks - 1
        cells.append(Cell(rows_late=tau + (tau + 1) * others, dense_late=others))
    plan = planned(cells, log.samples, scenario.batch, budget.first_look_samples(log), MOST_CELLS)
    runs = 2 * (1 + len(plan.cells))
    train_s = budget.wall_s(runs, log, plan.samples)
    of_tune, of_fields = runs_of_tune(len(plan.cells)), runs_of_fields(log)
    for name, more in {"tune": of_tune, "shuffled": runs, "fields": of_fields}.items():
        if getattr(options, name):
            least = " or more" if name == "tune" else ""
            wall = waiting(budget.wall_s(more, log, plan.samples))
            print(f"--{name} trains {more} runs{least} beside the budget, about {wall}")
    print(
        f"plan: {len(chosen)} simulations, about {waiting(simulate_s)}; {runs} runs of"
        f" {plan.samples:,} samples, about {waiting(train_s)}; further seeds and a second batch in"
        f" what is left of {options.minutes:g} minutes; results in {options.out}"
    )
    if plan.too_late and not (plan.cells or plan.no_time):
        print(f"  if rows are as late as they may be, {_too_short(log, plan)}")


def plan_of(options: Any, budget: Budget, log: Log, front: Sequence[Simulated]) -> Plan:
    """What the budget holds; a second call goes on with the points of the first."""
    cells = [one.cell for one in front]
    batch = int(front[0].row["batch"])
    typed = typed_values(options.set)
    told = ResultCache(options.out / "plan.jsonl")
    asked = [log.facts.digest, repr(log.config), batch, [cell.name for cell in cells]]
    label = hashlib.sha256(json.dumps(asked).encode()).hexdigest()
    minutes, most, window = 0.0, 0.0, math.inf
    if label in told:
        minutes, most, window = told[label]

    def at_most(longest: float) -> Plan:
        plan = planned(cells, log.samples, batch, most, MOST_CELLS, longest)
        return replace(plan, batch=typed["batch"][0]) if "batch" in typed else plan

    # More minutes complete what is there before they take a longer window.
    more = options.minutes > minutes
    most = max(most, budget.first_look_samples(log)) if more else most
    plan = at_most(window)
    if more:
        trained = Training(options=options, log=log, plan=plan, budget=budget)
        is_whole = options.tune or not trained.missing(trained.points(plan.cells, LOOKS[0]))
        plan = at_most(math.inf) if is_whole else plan
        told.add(label, [options.minutes, most, plan.samples])
    if plan.too_late and not (plan.cells or plan.no_time):
        raise ValueError(_too_short(log, plan))
    return plan


def _too_short(log: Log, plan: Plan) -> str:
    """How long the log must be for the least late mode."""
    least = plan.too_late[0]
    return (
        f"the log has {log.samples:,} training samples, and the least late mode misses"
        f" {counted(least.late, 'update')}: with {samples_for(least):,} samples or more it would"
        f" have {UPDATES_PER_LATE} updates for each; give a longer log"
    )


# What is said beside the table.


def heading(trained: Training, front: Sequence[Simulated]) -> str:
    """What the table is of, and how far sync came there."""
    log, plan, row = trained.log, trained.plan, front[0].row
    window = f"the last {plan.samples:,} of {log.samples:,} training samples"
    if plan.samples == log.samples:
        window = f"{log.samples:,} training samples"
    return (
        f"{row['ranks']} GPUs, {row['batch']:,} samples an update there; trained here on {window}"
        f" at {plan.batch:,} an update: {plan.samples // plan.batch:,} updates, after which sync"
        f" has a test AUC of {trained.score_of_sync('auc'):.4f}"
    )


def notes(trained: Training, front: Sequence[Simulated], dropped: Sequence[str]) -> list[str]:
    """What a reader must know beside the table."""
    log, plan = trained.log, trained.plan
    by_part: dict[str, list[str]] = {}
    for one in front:
        names = by_part.setdefault(str(one.row["binds"]), [])
        names += [one.candidate.name] * (one.candidate.name not in names)
    bound = "; ".join(f"{part} in {' and '.join(names)}" for part, names in by_part.items())
    hosts = said_of_hosts(front)
    lines = [*filter(None, [hosts]), f"the simulated rate is bound by: {bound}"]
    if math.isnan(front[0].usd_per_hour):
        lines.append("dollars are not known: a host of the cluster has no usd_per_hour")
    if dropped:
        lines.append(
            f"left out, since another is as fast, as cheap and as little late: {'; '.join(dropped)}"
        )
    if plan.cells:
        latest = plan.cells[-1]
        share = 100 * latest.late * plan.batch / plan.samples
        lines.append(
            f"gap: test AUC minus sync's, with all rows late by the mean, rounded up (at R/D: rows"
            f" and dense weights); the first {share:.1f} % of the updates are less late than"
            f" {latest.late}"
        )
    for name, share in log.unseen.items():
        if share > UNTRAINED:
            lines.append(
                f"{name}: {100 * share:.0f} % of its ids in the test part were never trained, so"
                " its rows are worth nothing here: leave it out of columns, or split otherwise"
            )
    if trained.left_out:
        modes = "; ".join(one.candidate.label for one in front if one.cell in trained.left_out)
        lines.append(
            f"{modes}: no longer fitted into {trained.options.minutes:g} minutes, at the speed of"
            " the runs; the same line again trains what is missing"
        )
    if any(trained.seeds_of(cell) == LOOKS[0] for cell in plan.cells):
        lines.append(
            f"{LOOKS[0]} seeds are a first look, no result: how far seeds lie apart is hardly known"
            " from them"
        )
    lines.append(
        f"time and $ to {TARGET:g} of sync's climb from an AUC of 0.5, an update"
        " here taking as long as one of the cluster"
    )
    if plan.samples < log.samples:
        lines.append("more --minutes train on more of the log")
    return lines


def advised(
    front: Sequence[Simulated],
    decision: Decision,
    trained: Training,
    second: tuple[int, Interval] | None,
    options: Any,
) -> str:
    """The advice as a sentence, with what it rests on; or what keeps anybody from giving one."""
    # A model that has not learned loses nothing by being late, or anything.
    entropy = trained.score_of_sync("normalized_entropy")
    if entropy >= 1:
        return (
            "Not decided: sync itself has not learned to predict here. Its log loss on the test"
            f" part is {entropy:.3f} of that of always saying how many labels are 1. Give a longer"
            " log, or other learning rates (--tune)."
        )

    by_name = {one.candidate.label: one for one in front}
    best = by_name[decision.best]
    open_question = ""
    if decision.binds:
        rival = by_name[decision.rival]
        open_question = _what_would_tell(best, rival, decision, trained, options)
        if best.gain.low <= 1:
            between = f"{best.candidate.name} and {rival.candidate.name}"
            return (
                f"Not decided between {between}: {open_question} Until then"
                f" {_with_gap(best, trained)}."
            )

    # What another batch says, where it says something else.
    gap = trained.gap(best.cell)
    if gap is not None and second is not None and _differs(gap, second[1], options.tolerance):
        needed = samples_for(best.cell, int(best.row["batch"]))
        return (
            f"Not decided: the log is {needed / trained.log.samples:,.1f} times too short for this"
            f" cluster's batch. {best.candidate.name} changes the AUC by {gap_in_words(gap)} at"
            f" batch {trained.plan.batch:,} and by {gap_in_words(second[1])} at {second[0]:,}."
        )

    # A mode that gains more, of whose loss nothing is known, is no loser.
    if not open_question and (untrained := _untrained(best, front, trained)) is not None:
        name = untrained.candidate.name
        why = why_empty(untrained.cell, trained) or "it was not trained"
        open_question = f"what {name} changes the AUC by: {why}."
        if best.candidate.point.mode is REFERENCE:
            return (
                f"Not decided between {best.candidate.name} and {name}, which is"
                f" {untrained.gain:.1f} times as {_cheap(untrained)}: open is"
                f" {open_question} Until then {best.candidate.name}."
            )

    # What it rests on.
    if best.candidate.point.mode is REFERENCE:
        return (
            f"Take {best.candidate.name}: no other mode is surely {_cheap(best)}er without a loss."
        )
    loses = "its rows are exact"
    if gap is not None:
        also = f" and by {gap_in_words(second[1])} at {second[0]:,}" if second else ""
        loses = f"changes the AUC by {gap_in_words(gap)} at batch {trained.plan.batch:,}{also}"
    further = f" Open is {open_question}" if open_question else ""
    return (
        f"Take {best.candidate.name}: with {counted(best.row['workers'], 'worker host')} and"
        f" {counted(best.row['servers'], 'server host')} it has {best.times_sync:.1f} times sync's"
        f" samples/s, and {loses}.{further}"
    )


def _untrained(best: Simulated, front: Sequence[Simulated], trained: Training) -> Simulated | None:
    """The mode that gains most of those that gain more than the best and have no gap; None where
    there is none."""
    least = max(1.0, best.gain.value) * (1 + TIE)
    unknown = [
        one
        for one in front
        if not one.cell.is_exact and one.gain.value > least and trained.gap(one.cell) is None
    ]
    return max(unknown, key=lambda one: one.gain.value, default=None)


def _cheap(one: Simulated) -> str:
    """What a gain is of: of dollars, or of seconds where a host has no price."""
    return "fast" if math.isnan(one.usd_per_hour) else "cheap"


def _differs(first: Interval, second: Interval, tolerance: float) -> bool:
    """Whether a second batch says another thing than the first: another sign, or twice as much, by
    more than the tolerance."""
    apart = abs(first.mean - second.mean) > 1e-3 * tolerance
    turned = first.mean * second.mean < 0
    return apart and (turned or abs(second.mean) > 2 * abs(first.mean))


def _what_would_tell(
    best: Simulated, rival: Simulated, decision: Decision, trained: Training, options: Any
) -> str:
    """What would tell whether a mode that may be better loses more than the tolerance."""
    said = _with_gap(rival, trained)
    if decision.binds == "seeds":
        needed = (
            f"{said}: seeds bind. By an estimate from {trained.seeds_of(rival.cell)}, about"
            f" {decision.seeds} would be needed"
        )
        if decision.seeds > LOOKS[-1]:
            return (
                f"{needed}, and at most {LOOKS[-1]} are trained. A longer log may tell, or a larger"
                " --tolerance."
            )
        look = next(look for look in LOOKS if look >= decision.seeds)
        late = [one.cell for one in (best, rival) if not one.cell.is_exact]
        wall_s = trained.wall_s(trained.missing(trained.points(late, look)))
        return f"{needed}; {look} take about {waiting(wall_s)} more (--minutes)."
    if decision.binds == "users":
        users = "users" if trained.log.facts.schema.get("group") else "samples"
        return (
            f"{said}: test {users} bind, and no further seed helps; at least"
            f" {decision.users_times:,.1f} times as many would tell, or a larger --tolerance than"
            f" {options.tolerance:g}."
        )
    constant = decision.constant or "its constants"
    remedy = "Measure it on the cluster's machines with `persia-runtime profile`."
    if constant.startswith(MODEL):
        remedy = "A few minutes of both modes on the cluster would tell."
    return f"the simulator binds, by {constant}. {remedy}"


def _with_gap(one: Simulated, trained: Training) -> str:
    """A mode by its name, with what is known of its loss."""
    gap = trained.gap(one.cell)
    name = one.candidate.name
    return name if gap is None else f"{name}, which changes the AUC by {gap_in_words(gap)}"


def _leave_config(options: Any, best: Simulated, trained: Training) -> None:
    """Write what trains the mode that is advised, with what was simulated of it, and print the line
    that does it."""
    point = best.candidate.point
    lines = trained.lines(trained.plan.batch)
    config = lines.get(best.cell, lines[EXACT]).config
    tau = {"tau": point.tau} if point.mode.reads_late_rows else {}
    ranks = min(int(best.row["ranks"]), config.batch)
    config = replace(
        config,
        sync=replace(lines[EXACT].config.sync, mode=point.mode, ranks=ranks, **tau),
        data=replace(config.data, skip_rows=0),
        evaluation=replace(config.evaluation, evaluate_every_steps=None),
    )
    path = write_config(Line(name="advised", config=config), options.out)
    with path.open("a") as file:
        file.write(f"\n{_prediction(best)}")
    trust = f" --model.name {config.model.name}" if ":" in config.model.name else ""
    print(f"train it: persia-runtime train --config {path}{trust}")


def _prediction(best: Simulated) -> str:
    """The table of a file of training that `runtime.config.training_file.Predicted` reads."""
    said = {
        "cluster": Path(best.candidate.point.cluster).stem,
        "ranks": int(best.row["ranks"]),
        "samples_per_s": best.rate.value,
        "samples_per_s_low": best.rate.low,
        "samples_per_s_high": best.rate.high,
        "updates_missed": best.rows_late,
    }
    return "\n".join([f"[{PREDICTED}]", *(f"{k} = {toml_value(v)}" for k, v in said.items()), ""])
