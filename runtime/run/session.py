"""One training run from its config to its figures: the whole story in one readable function.

`train` puts a run together (`runtime.rank.components`), trains it and judges the model
(`runtime.run.evaluate`, `scores`). Training goes leg by leg, with a checkpoint between two legs
(`runtime.run.training`, `saver`); a leg is the work of an executor:
`runtime.executors.constant_lag`, where one thread does all in turn, or `runtime.executors.threads`.
The run folder around all of it is written by `runtime.run.record`, and how a run is gone on from
stands in `saver`, too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

from torch import nn

from persia_sim.base.rules import Refused
from persia_sim.base.staleness import StalenessSummary
from persia_sim.base.trace import SIMULATED_BATCH, Trace
from persia_sim.base.vocabulary import DEFAULT_TAU
from runtime.checkpoint.lineage import RunLineage
from runtime.checkpoint.places import STATE
from runtime.checkpoint.whole import Checkpoint, find_checkpoint
from runtime.config import TrainConfig
from runtime.data.batch import Layout
from runtime.data.source import Source, heads_taken_over, refuse_other_columns, refuse_other_data
from runtime.dense.buckets import gathers
from runtime.embedding.config import TableConfig
from runtime.embedding.store import EmbeddingStore
from runtime.executors.given_order import OrderedRun
from runtime.executors.open import assemble_for, merged_trace, source_of
from runtime.executors.replayable import (
    load_order,
    refuse_cut_short,
    refuse_other_run,
    trace_meta,
)
from runtime.files import digest_of
from runtime.object_store import address_of
from runtime.process import flushing_denormals
from runtime.rank.components import FUSED, Components
from runtime.rank.progress import OnFigures, SpanRecorder, bound_by
from runtime.run.evaluate import (
    Evaluation,
    HeldOut,
    evaluate,
    overlap_with,
    refuse_trained_on,
    threads_of,
)
from runtime.run.figures import Figures
from runtime.run.reports import reporting
from runtime.run.saver import Saving
from runtime.run.training import Training
from runtime.stop import Interrupted, NotStored

if TYPE_CHECKING:
    from runtime.rank.doors import JoinedRank

ORIGIN = "warm_start"
"""In a trace, the digest of the checkpoint that its run began with."""
MOST_WHOLE_SNAPSHOTS = 64
"""Snapshots of a curve that keep their predictions; of later ones the scores are kept."""


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """A snapshot on the way: rows as applied, dense weights after ``updates``, nothing drained."""

    updates: int
    """Dense updates so far."""
    samples: int
    """Training samples so far."""
    evaluation: Evaluation


@dataclass(frozen=True, slots=True)
class Outcome:
    """Everything that a run leaves behind."""

    final: Evaluation
    """After all pushes were applied."""
    curve: list[CurvePoint]
    trace: Trace
    """Empty when the run was not to keep it."""
    staleness: StalenessSummary
    """Of the tables that are not named fresh, or of all where every one is."""
    staleness_of_fresh_tables: StalenessSummary | None
    """Of those beside late ones; None where there are none, or the order was not kept."""
    store: EmbeddingStore
    model: nn.Module
    spans: SpanRecorder
    """How long each stage took; only of the concurrent executor, and only when asked for."""
    bound_by: str
    """What took most of the time, as `progress.bound_by` has it; of ranks in threads or processes
    on CPUs, else empty."""
    warnings: list[str]
    """Why the figures may mean nothing, from the first evaluation and the last."""
    losses: list[float]
    """Mean loss of each dense update, in their order; of a long run, of each
    ``figures.updates_per_loss`` updates."""
    figures: Figures
    """Samples, updates, samples/s, rows, bytes, and all that was skipped, lost or replaced."""


def train(
    config: TrainConfig,
    source: Source | None = None,
    *,
    tables: Mapping[str, TableConfig] | None = None,
    on_samples: Callable[[int], None] | None = None,
    on_figures: OnFigures | None = None,
    on_snapshot: Callable[[CurvePoint], None] | None = None,
    on_begin: Callable[[], None] = lambda: None,
    saving: Saving | None = None,
    rank: JoinedRank | None = None,
) -> Outcome:
    """Train as ``config`` says and evaluate on the test part, or the validation part if asked to.

    ``source`` replaces the data that the config names, ``tables`` the config of single tables;
    ``on_samples`` is told of every dense update's samples and ``on_figures`` of the recent loss,
    ``on_snapshot`` of every evaluation on the way, ``on_begin`` when all is made ready and the
    first batch is about to be trained.
    ``saving`` says where checkpoints go and what is gone on from. ``rank``: this process is rank 0
    of several. Servers that are processes end with ``close`` of the outcome's store.

    Raises `Interrupted` when it was asked to end, after a checkpoint; ValueError for data that
    cannot be read (`DataError`) and for options that do not fit each other or the data; and
    `NonFiniteError` where the config says that a loss which is no number ends the run.

    Eight updates of two ranks, whose rows are one step late:

    >>> from runtime.config import DataConfig, EvaluationConfig, SyncConfig, TrainConfig
    >>> config = TrainConfig(
    ...     sync=SyncConfig(mode="hybrid", tau=1, ranks=2),
    ...     data=DataConfig(name="synthetic", rows=512),
    ...     evaluation=EvaluationConfig(test_rows=100),
    ...     batch=64,
    ... )
    >>> outcome = train(config)
    >>> outcome.figures.updates, outcome.staleness.max_steps
    (8, 1)
    >>> outcome.final.predictions.shape
    (100, 1)
    """
    # Data, and what is gone on from or begun with.
    saving = saving or Saving()
    if saving.run is None and config.checkpoint.at_end:
        raise ValueError("checkpoint_every needs a run folder: pass saving, or use run_into")
    with flushing_denormals(), threads_of(config.engine):
        if source is None:
            if config.engine.loaders:
                raise ValueError("loaders need a run folder: use run_into, or pass a LoadedSource")
            source = source_of(config)
        if saving.start is not None:
            refuse_other_data(saving.start.state.facts, source.provenance())
        samples = saving.start.state.samples if saving.start else 0
        origin = None
        if config.warm_start is not None and saving.start is None:
            origin = find_checkpoint(config.warm_start, saving.on_warning)

        # Put together, trained and evaluated; what was opened is closed if anything fails.
        components = assemble_for(config, source, tables, samples=samples, rank=rank)
        try:
            with components.stop.explained():
                return _train_and_evaluate(
                    components,
                    source,
                    saving,
                    origin,
                    on_samples,
                    on_figures,
                    on_snapshot,
                    on_begin,
                )
        except BaseException:
            components.close()
            raise


def _score_to_stop_by(evaluated: Evaluation) -> float:
    """The goodness of the first task; raises `Refused` where it has none."""
    task, score = next(iter(evaluated.tasks.items()))
    if math.isnan(score.goodness):
        rule = f"goes by AUC, and the rows that are evaluated hold one class of {task}"
        raise Refused("stop_after", f"{rule}; evaluate more rows, or leave it out")
    return score.goodness


def _train_and_evaluate(
    components: Components,
    source: Source,
    saving: Saving,
    origin: Checkpoint | None,
    on_samples: Callable[[int], None] | None,
    on_figures: OnFigures | None,
    on_snapshot: Callable[[CurvePoint], None] | None,
    on_begin: Callable[[], None],
) -> Outcome:
    """Train what was assembled, evaluate it, and tell all about it."""
    # What the run is: its facts, its order if one is given, and what trained it before.
    config = components.config
    held_out = HeldOut(source, config.evaluation.test_rows, config.evaluation.eval_split)
    curve: list[CurvePoint] = []
    meta = trace_meta(config, source, components.store.tables)
    if components.fused:
        meta[FUSED] = True
    known = None if saving.start is None else saving.start.state.facts.get(ORIGIN)
    meta[ORIGIN] = known if origin is None else digest_of(origin.folder / STATE)
    recorded = _recorded_order(config, meta)
    with components.stop.working():
        line = _line_of(config, held_out, saving, origin)

    # Everything is put together, and the state of a checkpoint is taken over.
    keep_best = config.checkpoint.keep_best or ""
    _refuse_other_best(keep_best, components.learner.layout)
    training = Training(components, meta, saving, origin, line)
    history = training.history
    rule = training.executor.rule

    # Called on the way: evaluate rows as they are, note the score, add a point to the curve.
    def snapshot(updates: int, samples: int, model: nn.Module) -> None:
        evaluated = evaluate(components.learner, model, components.worker, held_out)
        if history.first_warnings is None:
            history.first_warnings = [f"after {updates} updates: {w}" for w in evaluated.warnings]
        point = CurvePoint(updates, samples, evaluated)
        stop_after = config.evaluation.stop_after
        if stop_after is not None:
            training.note_score(_score_to_stop_by(evaluated), stop_after)
        if on_snapshot:
            on_snapshot(point)
        many = len(curve) >= MOST_WHOLE_SNAPSHOTS
        curve.append(replace(point, evaluation=evaluated.without_predictions()) if many else point)

    # Called before a checkpoint where the best one is kept: the score that decides which it is.
    def judge(model: nn.Module) -> float:
        evaluated = evaluate(components.learner, model, components.worker, held_out)
        return float(getattr(next(iter(evaluated.tasks.values())), keep_best))

    # Test data that cannot be read end the run now, not behind its training.
    with components.stop.working():
        held_out.read_first()

    # Train: the order of a trace, or leg by leg until the data or somebody ends it.
    on_begin()
    training.begin(snapshot, on_samples, on_figures, judge if keep_best else None)
    if isinstance(training.executor, OrderedRun) and recorded is not None:
        training.executor.run(recorded)
    else:
        saving.ending.at_once = False  # from now on a signal ends the step that is under way
        with saving.listening(), reporting(training, total_samples(config, source)):
            if not training.train_legs():
                raise _interrupted(training, saving)
            saving.ending.is_trained = True

    # What was late is applied; the last checkpoint is on the disk.
    rule.drain()
    wall_s = training.wall_s()
    if not components.meter.samples:
        raise ValueError(
            f"data set {config.data.name} gave no training sample; is its split right?"
        )
    if recorded is not None:
        refuse_cut_short(recorded, components.meter.updates)
        meta["tau"] = recorded.meta.get("tau")
    if training.saver is not None:
        training.saver.wait()  # a server that dies while it is evaluated comes back with all of it
        history.checkpoints_failed = training.saver.failed
    return _outcome(training, line, held_out, curve, wall_s)


def total_samples(config: TrainConfig, source: Source) -> int | None:
    """Samples that a run will train; None where nobody knows how many the data has."""
    rows = source.provenance().train_rows
    limits = [] if config.steps is None else [config.steps * config.batch]
    if rows is not None:
        limits += [max(0, rows - config.data.skip_rows) * config.data.epochs]
    return min(limits, default=None)


def _line_of(
    config: TrainConfig, held_out: HeldOut, saving: Saving, origin: Checkpoint | None
) -> RunLineage:
    """The run, and what it begins with or goes on from. Raises ValueError for an origin of other
    columns or heads, and for one that was trained on rows which are to judge."""
    source = held_out.source
    line = RunLineage(held_out.source, config, _name_of(saving.run))
    if saving.start is not None:
        line.before = saving.start.started_from()
    if origin is not None:
        before = origin.state.facts.get("data_schema", {})
        refuse_other_columns(before, source.provenance())
        line.before = origin.trained_on()
        refuse_trained_on(origin, line.before, held_out, saving.on_warning)
        if changed := heads_taken_over(before, source.provenance()):
            saving.on_warning(f"begins with the head of another label: {', '.join(changed)}")
    return line


def _name_of(run: Path | None) -> str:
    return "" if run is None else address_of(run)


def _refuse_other_best(keep_best: str, layout: Layout) -> None:
    """Raise ValueError for a score by which the data's first task cannot be judged."""
    if keep_best in ("", "goodness"):
        return
    if (keep_best == "mse") != (layout.tasks[0] in layout.regression):
        is_ = "a regression, judged by mse alone" if keep_best != "mse" else "no regression"
        raise ValueError(f"keep_best {keep_best}: task {layout.tasks[0]} is {is_}; choose another")
    if keep_best in ("gauc", "recall", "ndcg") and layout.group is None:
        raise ValueError(f"keep_best {keep_best} ranks within groups; name one in the schema")


def _outcome(
    training: Training, line: RunLineage, held_out: HeldOut, curve: list[CurvePoint], wall_s: float
) -> Outcome:
    """All about a run that has trained, and its last evaluation."""
    # The last evaluation, all pushes applied, with what makes it doubtful.
    components = training.components
    model = training.executor.rule.snapshot()
    meter = components.meter
    spans = components.spans
    final = evaluate(components.learner, model, components.worker, held_out)
    warnings = [*_judged_by_trained(training, line, held_out), *_warnings(training, final)]

    # The whole order: what ranks and servers have recorded, merged.
    facts = training.facts | {"updates": meter.updates}
    if not training.is_whole:
        facts["not_replayable"] = "an embedding server has died and lost its part of the order"
    recorded_by_servers = components.store.recorded() if training.is_whole else []
    trace = merged_trace(components.recorder.finish(**facts), recorded_by_servers)
    bound = bound_by(spans.seconds, components.store.waited_s, spans.paused_s)
    return Outcome(
        final=final,
        curve=curve,
        trace=trace,
        staleness=training.staleness(trace),
        staleness_of_fresh_tables=training.staleness_of_fresh_tables(trace),
        store=components.store,
        model=model,
        spans=spans,
        # A GPU works on when its stages have been launched: the spans do not say what it does.
        bound_by=bound if components.learner.device.type == "cpu" else "",
        warnings=warnings,
        losses=meter.losses,
        figures=training.figures(wall_s),
    )


def _judged_by_trained(training: Training, line: RunLineage, held_out: HeldOut) -> list[str]:
    """Warnings where rows that judge stand in what was trained on, too (in files of a split by
    files, or twice in one), and where nobody knows."""
    feed = training.components.feed
    samples = training.components.meter.samples
    trained = line.trained(samples, feed.trained_rows(), in_part=feed.notes_a_share)
    overlap = overlap_with(trained, held_out)
    if not overlap.trained:
        return overlap.sentences()
    return [
        *overlap.sentences(),
        f"{overlap.amount} of the {overlap.rows:,} samples of the {held_out.part} part stand"
        " in the training data, too, so the model looks better here than it is; take them out of"
        " one of the parts",
    ]


def _interrupted(training: Training, saving: Saving) -> Exception:
    """Why a run that was asked to end has no outcome, once its checkpoint is on the disk."""
    # Before the first step there is nothing to save.
    saver = training.saver
    why = saving.ending.why
    written = saver is not None and saver.wait()
    if not training.components.meter.samples:
        return Interrupted(
            f"interrupted by {why} before its first step: nothing was trained yet,"
            " so there is nothing to go on from; start it anew",
            by=why,
        )

    # A store may answer another time: the checkpoint before is there still, or the run starts anew.
    if saver is not None and saver.is_store_silent:
        place = quote(_name_of(saving.run))
        anew = "the same command starts anew"
        on = f"go on with: persia-runtime train --resume {place}"
        stays = f"that at {saver.last.state.samples:,} samples stays; {on}" if saver.last else anew
        return Interrupted(
            f"interrupted by {why}; no checkpoint was written to {place}: {stays}",
            by=why,
        )

    # Without a checkpoint what was trained is lost, and that is another exit code.
    if saver is None or not written or saver.last is None:
        return NotStored(
            f"the run was asked to end by {why}, and its checkpoint could not be"
            " written: what was trained since the last one is lost"
        )
    return Interrupted(
        f"interrupted by {why} after {saver.last.state.samples:,} samples; go on"
        f" with: persia-runtime train --resume {quote(_name_of(saving.run))}",
        by=why,
    )


def _warnings(training: Training, final: Evaluation) -> list[str]:
    """Why the figures may mean nothing; what makes the order one that cannot be replayed is
    written into the run's facts, too."""
    components = training.components
    facts = training.facts
    config = components.config
    alone = components.process.alone
    early = training.history.first_warnings or []
    warnings = [w for w in early if w.partition(": ")[2] not in final.warnings] + final.warnings
    is_ring = config.sync.mode.has_barrier and not gathers(config, components.learner.model)
    if is_ring and not alone:
        facts.setdefault("not_replayable", _RING)
    if components.learner.drew_unseeded:
        facts["not_replayable"] = _UNSEEDED.format(config.model.name)
        warnings.append(f"this run cannot be repeated: {facts['not_replayable']}")
    if training.failover is not None:
        warnings += training.failover.notices
    return list(dict.fromkeys(warnings))


_RING = (
    "its ranks were processes that added up their dense gradients in a ring, in torch's order;"
    " record it with ranks that are threads"
)
_UNSEEDED = (
    "model {} draws from torch's generator, which no seed of the run reaches; set the attribute"
    " draws_random_numbers = True on it and its draws are a function of seed, rank and step"
)


def _recorded_order(config: TrainConfig, meta: dict[str, Any]) -> Trace | None:
    if config.engine.executor != "replay" or config.engine.trace is None:
        return None
    trace = load_order(config.engine.trace, meta)
    if SIMULATED_BATCH in trace.meta:
        meta[SIMULATED_BATCH] = trace.meta[SIMULATED_BATCH]
    refuse_other_run(trace, meta, str(config.engine.trace))
    if config.sync.tau != DEFAULT_TAU and trace.meta.get("tau") != config.sync.window:
        raise ValueError(
            f"trace {config.engine.trace} was made with tau {trace.meta.get('tau')},"
            f" not {config.sync.tau};"
            " a replay takes tau from its trace: leave the option out"
        )
    return trace
