"""Train, and keep everything in a run folder: the step between a config and a result on disk."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from persia_sim.base.chrome import chrome_events, write_chrome_trace
from persia_sim.base.files import atomic_write
from persia_sim.base.trace import SIMULATED_BATCH
from runtime.checkpoint.places import complete_checkpoints, remove_run_file, send_run_files
from runtime.checkpoint.whole import Checkpoint, best
from runtime.config import TrainConfig, read_config
from runtime.data.source import Provenance, Source, refuse_other_data
from runtime.executors.open import opened
from runtime.object_store import address_of, named_as
from runtime.rank.progress import BlockMeans, OnFigures
from runtime.run.evaluate import best_reachable_auc
from runtime.run.folder import (
    COMMAND,
    ENDING,
    METRICS,
    OF_THE_DISK,
    PREDICTIONS,
    SUMMARY,
    TIMELINE,
    TRACE,
    Line,
    LossCurve,
    append_metrics,
    best_auc,
    command_with,
    environment,
    flat,
    plain,
    read_metrics,
    scores,
    write_ending,
    write_json,
    write_metrics,
)
from runtime.run.loggers import Logger, TensorBoard
from runtime.run.saver import Saving, going_on
from runtime.run.session import CurvePoint, Outcome, total_samples, train
from runtime.stop import UNFINISHED, Ending, Interrupted, NotStored, PeerError, StoreError

if TYPE_CHECKING:
    from runtime.rank.doors import JoinedRank


MANY_SHARDS = 64
"""Shards of which there are many: their processes may be so many at most."""


def run_into(
    folder: str | Path,
    config: TrainConfig,
    on_samples: Callable[[int], None] | None = None,
    on_warning: Callable[[str], None] = lambda text: None,
    on_start: Callable[[str], None] = lambda text: None,
    *,
    on_figures: OnFigures = lambda figures: None,
    on_total: Callable[[int], None] = lambda samples: None,
    resume: bool = False,
    ending: Ending | None = None,
    typed: Sequence[str] = (),
    rank: JoinedRank | None = None,
    meet: Callable[[Source, Checkpoint | None], None] | None = None,
    log: type[Logger] | None = None,
) -> dict[str, Any]:
    """Run ``config``, fill ``folder``, and return the summary.

    ``on_start`` is told the data, its split and its rows before anything is trained, ``on_total``
    the samples that the run will train, where they are known, and ``on_figures`` the recent loss
    and the first task's AUC of each evaluation on the way. ``resume`` goes on from the folder's
    newest checkpoint; ``ending`` may ask the run to end: then it raises `Interrupted` after a
    checkpoint. ``typed`` is what the user wrote, kept beside the config.
    ``rank``: this process is rank 0 of several; ``meet`` is called with the data and the checkpoint
    that is gone on from, and has all ranks agree on them. ``log`` is made with the folder and the
    options as the run begins, and told the scores as they come.

    The folder holds config.json, command.json, env.json, metrics.jsonl (a line per snapshot),
    trace.npz, predictions.npz, timeline.json if asked for, checkpoints/ if any were written and,
    written last, summary.json: a folder without it is an unfinished run.
    """
    # What is gone on from, and what will be written when the first batch is about to be trained.
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    start = None
    if resume:
        written = read_config(folder / "config.json")
        with named_as(address_of(folder), folder):
            start = going_on(folder, config, written, on_warning)
    begin = beginning(folder, config, start, typed)
    ending = Ending() if ending is None else ending  # one that nobody has asked counts as False
    saving = Saving(folder, start, ending, on_warning)

    # The data must be those of before; all ranks agree on them.
    with opened(config, rank) as source:
        if start is not None:
            refuse_other_data(start.state.facts, source.provenance())
        if meet is not None:
            meet(source, start)
        announce(source.provenance(), on_start, on_warning)

        # What a person reads before training.
        total = total_samples(config, source)
        if total is not None:
            on_total(total)
        if config.engine.shards > MANY_SHARDS:
            on_warning(
                f"--shards {config.engine.shards:,}: each lookup and each push visits all of them"
                " in turn, which takes longer the more there are; up to"
                f" {MANY_SHARDS} hardly show"
            )
        if start is not None:
            at = f"{start.state.samples:,} samples, {start.state.updates:,} updates"
            on_start(f"goes on from {address_of(start.folder)}: {at}")
            if on_samples is not None:
                on_samples(start.state.samples)
        elif config.warm_start is not None:
            on_start(f"is to begin with the rows and dense weights of {config.warm_start}")
        return _train_and_record(
            folder, config, source, saving, rank, begin, on_samples, on_figures, log
        )


def beginning(
    folder: Path, config: TrainConfig, start: Checkpoint | None, typed: Sequence[str]
) -> Callable[[], None]:
    """What writes into a run's folder when its first batch is about to be trained.

    Whatever stops it before that leaves the folder as it was, a finished run's result with it; so
    all that is read of the folder is read here, and refused here.
    """
    command = command_with(folder, typed, resume=start is not None)
    lines_before: list[Line] = []
    if start is not None:  # later evaluations will be made again, and the end, too
        updates = start.state.updates
        lines = read_metrics(folder)
        lines_before = [line for line in lines if line.updates <= updates and not line.drained]

    def write() -> None:
        # The first one says that the others are of a run, so that one which is killed between
        # them can begin again.
        write_json(folder / "env.json", environment())
        write_json(folder / "config.json", config)
        if command:
            write_json(folder / COMMAND, command)
        for name in (SUMMARY, ENDING):  # it is a run under way again
            remove_run_file(folder, name)
        write_metrics(folder, lines_before)

    return write


def _train_and_record(
    folder: Path,
    config: TrainConfig,
    source: Source,
    saving: Saving,
    rank: JoinedRank | None,
    begin: Callable[[], None],
    on_samples: Callable[[int], None] | None,
    on_figures: OnFigures,
    log: type[Logger] | None,
) -> dict[str, Any]:
    # Who is told the scores begins with the run, not before it is sure to begin.
    loggers: list[Logger] = []
    is_begun = False

    def on_begin() -> None:
        nonlocal is_begun
        options = flat(plain(config))
        if log is TensorBoard:
            start = saving.start
            goes_on_at = None if start is None else start.state.samples
            loggers.append(TensorBoard(folder, options, goes_on_at))
        elif log is not None:
            loggers.append(log(folder, options))
        begin()
        is_begun = True

    # Each evaluation on the way is written down at once, so that a killed run has its curve.
    def on_snapshot(point: CurvePoint) -> None:
        if not (folder / METRICS).stat().st_size:  # the first one: say at once what looks wrong
            for warning in point.evaluation.warnings:
                saving.on_warning(warning)
        counts = {"updates": point.updates, "samples": point.samples}
        append_metrics(folder, point.evaluation, drained=False, **counts)
        on_figures({"AUC": next(iter(point.evaluation.tasks.values())).auc})
        for logger in loggers:
            logger.scores(point.samples, scores(point.evaluation), drained=False)

    try:
        # Train; who ended the run is written down, for whoever goes on with it.
        outcome = train(
            config,
            source,
            on_samples=on_samples,
            on_figures=on_figures,
            on_snapshot=on_snapshot,
            on_begin=on_begin,
            saving=None if config.engine.executor == "replay" else saving,
            rank=rank,
        )
    except Interrupted as interrupted:
        write_ending(folder, interrupted.status, interrupted.by, str(interrupted))
        with suppress(StoreError):  # the checkpoint is there, or its absence is told
            send_run_files(folder)
        raise
    except PeerError as error:
        if is_begun:
            write_ending(folder, UNFINISHED, None, str(error))
        raise
    try:
        # A full disk loses the results: say what can be gone on from.
        return _write_down(folder, config, source, outcome, loggers)
    except OSError as error:
        if error.errno not in OF_THE_DISK:
            raise
        on = f"--resume {folder}" if complete_checkpoints(folder) else "as before: all is lost"
        where = f"{error.filename or folder}: {error.strerror}; the disk is full, or fails"
        raise NotStored(
            f"{where}: the results are not kept; free some space, and run train {on}"
        ) from error
    finally:
        if rank is None:  # else all ranks part together
            outcome.store.close()


def _write_down(
    folder: Path, config: TrainConfig, source: Source, outcome: Outcome, loggers: Sequence[Logger]
) -> dict[str, Any]:
    """What a run has come to, in its folder; returns the summary, which is written last."""
    # Scores, order and timeline.
    counts = {"updates": outcome.figures.updates, "samples": outcome.figures.samples}
    append_metrics(folder, outcome.final, drained=True, **counts)
    if len(outcome.trace):
        outcome.trace.save(folder / TRACE)
    if config.engine.timeline:
        events = chrome_events(outcome.spans.spans, outcome.spans.moments)
        write_chrome_trace(folder / TIMELINE, events)

    # Predictions of every row, in as little space as loses nothing that a score needs.
    final = outcome.final
    are_classes = not (source.layout.regression or source.layout.optional)
    arrays: dict[str, Any] = {
        "predictions": final.predictions.astype(np.float32),
        "labels": final.labels.astype(np.int8 if are_classes else np.float32),
    }
    of_samples = {"groups": final.groups, "weights": final.weights}
    arrays |= {name: array for name, array in of_samples.items() if array is not None}
    with atomic_write(folder / PREDICTIONS) as file:
        if source.provenance().private:
            os.fchmod(file.fileno(), 0o600)
        np.savez_compressed(file, **arrays)

    # The summary is written last: a folder with it is a finished run.
    summary = summarize_run(config, outcome, source.provenance(), folder)
    judged = config.evaluation
    summary["best_reachable_auc"] = best_reachable_auc(source, judged.test_rows, judged.eval_split)
    for logger in loggers:
        logger.scores(counts["samples"], scores(outcome.final), drained=True)
        logger.end(plain(summary))
    write_json(folder / SUMMARY, summary)
    try:
        send_run_files(folder)
    except StoreError as error:
        raise StoreError(
            f"{error}; all that the run came to lies in {folder}; start the same command again"
        ) from error
    except OSError as error:
        raise NotStored(f"{error}; all that the run came to lies in {folder}") from error
    return summary


def announce(
    data: Provenance, on_start: Callable[[str], None], on_warning: Callable[[str], None]
) -> None:
    """What is known of the data before anything is trained."""
    on_start(f"data: {data}")
    falling = sorted(data.absent, key=data.absent.__getitem__, reverse=True)
    if falling:
        shares = ", ".join(f"{name} {100 * data.absent[name]:.3g} %" for name in falling)
        on_start(f"absent values in the first rows: {shares}")
    for name in falling:
        if data.absent[name] == 1.0:
            on_warning(
                f"column {name} has no value in any of the first rows: a feature that is always the"
                " same; is its name right, or is the file?"
            )


def summarize_run(
    config: TrainConfig, outcome: Outcome, provenance: Any, folder: Path
) -> dict[str, Any]:
    """The figures of one run, with what they are figures of; its folder has the evaluations."""
    # Notes on what the figures are figures of: bounds never reached, rows left out, and the like.
    figures = outcome.figures
    whole = not (figures.batches_skipped or figures.pushes_lost)
    notes = unreached(config, figures.updates, figures.samples, figures.steps, whole=whole)
    simulated = outcome.trace.meta.get(SIMULATED_BATCH)
    if simulated is not None:
        sync = config.sync
        pushes = sync.ranks if sync.mode.has_barrier else config.dense_updates_per_step
        stands_for = simulated * pushes / config.batch  # a rank's share may be no whole number
        notes = [*notes, f"a sample stands for {stands_for:,.4g} of the simulated cluster's"]
    if figures.stopped_early:
        notes = [f"stopped early: {config.evaluation.stop_after:,} evaluations were no better"]
    notes = [*notes, *better_before(config, read_metrics(folder))]
    if config.evaluation.test_rows is not None:
        rows = len(outcome.final.labels)
        notes = [
            *notes,
            f"judged by the first {rows:,} samples of the {config.evaluation.eval_split} part",
        ]
    if config.sync.half:
        notes = [*notes, "rows and their gradients travelled as float16"]

    # A curve of bounded size, however long the run was.
    means = BlockMeans(MOST_LOSSES // 2)
    for loss in outcome.losses:
        means.append(loss)
    every = means.values_per_point * figures.updates_per_loss

    # The figures, in the words of the docs.
    fresh = outcome.staleness_of_fresh_tables
    return {
        "mode": str(config.sync.mode),
        "tau": outcome.trace.meta["tau"],
        "implied_tau": config.implied_tau,
        "ranks": config.sync.ranks,
        "seed": config.seed,
        "executor": config.engine.executor,
        "evaluated_on": (
            f"{config.evaluation.eval_split} part, after the last update, all pushes applied"
        ),
        "tasks": scores(outcome.final),
        "ids_with_row": outcome.final.ids_with_row,
        "best_auc_on_the_way": best_auc(folder),
        "best_checkpoint": best(folder, config.checkpoint.keep_best),
        "training_loss": LossCurve(updates_per_point=every, points=tuple(means.points)),
        "staleness": outcome.staleness,
        **({"staleness_of_fresh_tables": fresh} if fresh else {}),
        "bound_by": outcome.bound_by,
        "row_staleness_histogram": outcome.store.row_staleness.tolist(),
        "warnings": outcome.warnings,
        "notes": notes,
        "data": provenance,
        **asdict(figures),
    }


def better_before(config: TrainConfig, lines: Sequence[Line]) -> list[str]:
    """A note where a run that stops by its score keeps the model of its end, and an evaluation on
    the way was of a better one. Of the first task, as it is stopped by that."""
    # Only where it stops by a score and keeps one checkpoint, the last.
    judged = config.evaluation
    checkpoints = config.checkpoint
    if judged.stop_after is None or not checkpoints.at_end or checkpoints.keep_best is not None:
        return []

    # Of the first task: was any evaluation on the way better than the last?
    name = "mse" if "mse" in next(iter(lines[-1].tasks.values())) else "auc"
    scored = [(next(iter(line.tasks.values()))[name], line.updates) for line in lines]
    known = [(score, updates) for score, updates in scored[:-1] if score is not None]
    last = scored[-1][0]
    if not known or last is None:
        return []
    best, updates = (min if name == "mse" else max)(known, key=lambda pair: pair[0])
    if best == last or (best < last) != (name == "mse"):
        return []

    # Say which, and how to keep it.
    score = name.upper()
    return [
        f"the model that is kept is the last one, {score} {last:.4f}; there was {score} {best:.4f}"
        f" after {updates:,} updates: --keep-best {name} keeps the best one"
    ]


MOST_LOSSES = 128
"""Points of the curve that a summary keeps, or half of them."""


def unreached(
    config: TrainConfig, updates: int, samples: int, steps: int, *, whole: bool = True
) -> list[str]:
    """What a run of so many dense updates, samples and steps never came to.

    ``whole``: nothing was skipped or lost, so that the updates are all that the data gave. A replay
    has the order and the length of its trace: nothing is said of it.
    """
    # Steps of one rank: in async each has its own.
    sync = config.sync
    if config.engine.executor == "replay":
        return []
    alone = sync.mode.has_barrier or config.shares_steps
    of_a_rank = steps if alone else -(-updates // sync.ranks)
    notes = []

    # More steps or samples were asked for than there were.
    if config.steps is not None and steps < config.steps and whole:
        notes.append(
            f"--steps {config.steps:,} asked for, the data gave {steps:,};"
            " more come with --data.epochs, or a smaller --batch"
        )
    if samples < config.batch and steps == 1:
        note = f"--batch {config.batch:,} is more than all {samples:,} samples: "
        notes.append(f"{note}the run was one step; give a smaller one")

    # Bounds of lateness that no batch came to: the run was not what its options say.
    starts = sync.sync_steps if sync.mode.may_merge else 0
    if starts >= of_a_rank:
        notes.append(f"--sync-steps {starts:,} outlasted the run of {steps:,} steps: no row late")
    elif sync.mode.reads_late_rows and sync.window is not None and sync.window >= of_a_rank:
        whose = "the run" if sync.mode.has_barrier else "each rank"
        notes.append(f"tau {sync.window:,} was never reached: {whose} has {of_a_rank:,} updates")
    if sync.mode.has_barrier and sync.dense_lag >= updates:
        notes.append(f"--dense-lag {sync.dense_lag:,} was never reached: {updates:,} dense updates")
    averages = sync.mode.averages_replicas and config.engine.executor == "constant_lag"
    if averages and sync.average_every_steps > of_a_rank:
        notes.append(
            f"--average-every-steps {sync.average_every_steps:,} was never reached:"
            f" each rank has {of_a_rank:,} updates"
        )

    # Evaluations on the way that never came.
    every = config.evaluation.evaluate_every_steps
    if every is not None and every > steps:
        notes.append(
            f"--evaluate-every-steps {every:,} was never reached: the run has {steps:,} steps, and"
            " was evaluated at its end alone"
        )
    return notes
