"""Train, and keep everything in a run folder: the step between a config and a result on disk."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from persia_sim.words.chrome import chrome_events, write_chrome_trace
from persia_sim.words.files import atomic_write
from runtime.config import TrainConfig, read_config
from runtime.data.same_data import refuse_other_data
from runtime.data.source import Source
from runtime.engines.data import opened
from runtime.run.ending import Ending, Interrupted
from runtime.run.evaluate import Evaluation, best_reachable_auc
from runtime.run.folder import (
    INTERRUPTED,
    SUMMARY,
    environment,
    keep_command,
    plain,
    write_json,
)
from runtime.run.resume import cut_metrics, forget_the_end, going_on
from runtime.run.session import CurvePoint, Outcome, Saving, train
from runtime.run.tensorboard import TensorBoard
from runtime.run.unreached import unreached

if TYPE_CHECKING:
    from runtime.engines.processes.ranks import ProcessRank


METRICS = "metrics.jsonl"
MANY_SHARDS = 64
"""As many as there may be processes of them."""


def run_into(
    folder: Path,
    config: TrainConfig,
    on_samples: Callable[[int], None] | None = None,
    on_warning: Callable[[str], None] = lambda text: None,
    on_start: Callable[[str], None] = lambda text: None,
    *,
    resume: bool = False,
    ending: Ending | None = None,
    typed: Sequence[str] = (),
    rank: ProcessRank | None = None,
) -> dict[str, Any]:
    """Run ``config``, fill ``folder``, and return the summary.

    ``on_start`` is told the data, its split and its rows before anything is trained. ``resume``
    goes on from the folder's newest checkpoint; ``ending`` may ask the run to end: then it raises
    `Interrupted` after a checkpoint. ``typed`` is what the user wrote, kept beside the config.
    ``rank``: this process is rank 0 of several.

    The folder holds config.json, command.json, env.json, metrics.jsonl (a line per snapshot),
    trace.npz, predictions.npz, timeline.json if asked for, checkpoints/ if any were written and,
    written last, summary.json: a folder without it is an unfinished run.
    """
    folder.mkdir(parents=True, exist_ok=True)
    start, asked = None, config
    if resume:
        written = read_config(folder / "config.json")
        start = going_on(folder, config, written, on_warning)
    told = Told(on_samples or (lambda samples: None), on_warning, on_start)
    ending = Ending() if ending is None else ending  # one that nobody has asked counts as False
    saving = Saving(folder, start, ending, on_warning)
    with opened(config, rank) as source:
        if start is not None:  # before anything of the folder is changed
            refuse_other_data(start.state.facts, source.provenance())
        write_json(folder / "config.json", config)
        write_json(folder / "env.json", environment())
        if typed:
            keep_command(folder, typed, resume=resume)
        if rank is not None:
            from runtime.run.ranks import agree, lead  # loads torch.distributed

            agree(rank, asked, source)
            lead(rank, config, start)
        return _fill(folder, config, source, saving, told, rank)


class Told(NamedTuple):
    """Who is told of what, as in `run_into`."""

    on_samples: Callable[[int], None]
    on_warning: Callable[[str], None]
    on_start: Callable[[str], None]


def _fill(
    folder: Path,
    config: TrainConfig,
    source: Source,
    saving: Saving,
    told: Told,
    rank: ProcessRank | None,
) -> dict[str, Any]:
    metrics, start = folder / METRICS, saving.start
    on_samples, on_warning, on_start = told
    on_start(f"data: {source.provenance()}")
    if config.engine.shards > MANY_SHARDS:
        on_warning(
            f"--shards {config.engine.shards:,}: each lookup and each push visits all of them in"
            f" turn, which takes longer the more there are; up to {MANY_SHARDS} hardly show"
        )
    board = None
    if config.engine.tensorboard:
        board = TensorBoard(folder, config, None if start is None else start.state.samples)
    forget_the_end(folder)
    if start is None:
        metrics.write_text("")
    else:
        at = f"{start.state.samples:,} samples, {start.state.updates:,} updates"
        on_start(f"goes on from {start.folder}: {at}")
        cut_metrics(metrics, start.state.updates)
        on_samples(start.state.samples)

    def on_snapshot(point: CurvePoint) -> None:
        if metrics.stat().st_size == 0:  # the first evaluation: say at once what looks wrong
            for warning in point.evaluation.warnings:
                on_warning(warning)
        _append(metrics, point.updates, point.samples, point.evaluation, drained=False)
        if board is not None:
            board.scores(point.samples, _scores(point.evaluation), drained=False)

    try:
        outcome = train(
            config,
            source,
            on_samples=on_samples,
            on_snapshot=on_snapshot,
            saving=None if config.engine.executor == "replay" else saving,
            rank=rank,
        )
    except Interrupted as interrupted:
        write_json(folder / INTERRUPTED, {"by": saving.ending.why, "told": str(interrupted)})
        raise
    try:
        return _write_down(folder, config, source, outcome, board)
    finally:
        if rank is None:  # else all ranks part together
            outcome.store.close()


def _write_down(
    folder: Path, config: TrainConfig, source: Source, outcome: Outcome, board: TensorBoard | None
) -> dict[str, Any]:
    """What a run has come to, in its folder; returns the summary, which is written last."""
    metrics = folder / METRICS
    updates, samples = outcome.figures["updates"], outcome.figures["samples"]
    _append(metrics, updates, samples, outcome.final, drained=True)
    if len(outcome.trace):
        outcome.trace.save(folder / "trace.npz")
    if config.engine.timeline:
        write_chrome_trace(folder / "timeline.json", chrome_events(outcome.spans))
    final = outcome.final
    arrays: dict[str, Any] = {
        "predictions": final.predictions.astype(np.float32),
        "labels": final.labels.astype(np.int8),
    }
    if final.groups is not None:
        arrays["groups"] = final.groups
    with atomic_write(folder / "predictions.npz") as file:
        np.savez_compressed(file, **arrays)
    summary = summarize_run(config, outcome, source.provenance(), metrics)
    judged = config.evaluation
    summary["best_reachable_auc"] = best_reachable_auc(source, judged.test_rows, judged.part)
    if board is not None:
        board.scores(samples, _scores(outcome.final), drained=True)
        board.end(summary)
    write_json(folder / SUMMARY, summary)
    return summary


def _append(
    metrics: Path, updates: int, samples: int, evaluation: Evaluation, *, drained: bool
) -> None:
    """Add a line; what a killed run had evaluated stays."""
    line = {"updates": updates, "samples": samples, "drained": drained}
    with metrics.open("a") as lines:
        lines.write(json.dumps(plain({**line, "tasks": _scores(evaluation)})) + "\n")


def summarize_run(
    config: TrainConfig, outcome: Outcome, provenance: Any, metrics: Path
) -> dict[str, Any]:
    """The figures of one run, with what they are figures of; ``metrics`` has its evaluations."""
    figures = outcome.figures
    whole = not (figures["batches_skipped"] or figures["pushes_lost"])
    return {
        "mode": str(config.sync.mode),
        "tau": outcome.trace.meta["tau"],
        "implied_tau": config.implied_tau,
        "ranks": config.sync.ranks,
        "seed": config.seed,
        "executor": config.engine.executor,
        "evaluated_on": f"{config.evaluation.part} part, after the last update, all pushes applied",
        "tasks": _scores(outcome.final),
        "best_auc_on_the_way": _best_auc(metrics),
        "staleness": outcome.staleness,
        "row_staleness_histogram": outcome.store.row_staleness.tolist(),
        "warnings": outcome.warnings,
        "notes": unreached(config, figures["updates"], figures["samples"], whole=whole),
        "data": provenance,
        **figures,
    }


def _best_auc(metrics: Path) -> dict[str, float]:
    """Per task, of all evaluations, also those before a resume."""
    lines = [json.loads(line)["tasks"] for line in metrics.read_text().splitlines()]
    best = {}
    for task in lines[0]:
        found = [line[task]["auc"] for line in lines if line[task]["auc"] is not None]
        best[task] = max(found, default=math.nan)
    return best


def _scores(evaluation: Evaluation) -> dict[str, dict[str, Any]]:
    return {name: score.figures() for name, score in evaluation.tasks.items()}
