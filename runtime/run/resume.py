"""Going on with a run that was interrupted or killed: what may change, and from where."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from persia_sim.words.command_line import option_values
from persia_sim.words.schema import field_types, parse
from runtime.checkpoint.state import NAME as STATE
from runtime.checkpoint.whole import Checkpoint, newest
from runtime.config import CheckpointConfig, EngineConfig, EvaluationConfig, TrainConfig
from runtime.models.imported import code_sha256, refuse_code_in
from runtime.run.folder import SUMMARY, read_summary

_FIXED_OF_ENGINE = {"precision", "loss_scale", "trace", "trace_order"}
_MAY_CHANGE = {"ranks", "permits", "ahead", "lookahead", "steps", "data.dir", "data.keep"} | {
    name.replace("_", "-")
    for group in (EngineConfig, CheckpointConfig, EvaluationConfig)
    for name in field_types(group)
    if name not in _FIXED_OF_ENGINE
}
"""Who trains, how fast, how far, and what is told of it; all else decides what is trained."""


def going_on(
    run: Path, config: TrainConfig, written: TrainConfig, on_warning: Callable[[str], None]
) -> Checkpoint:
    """The newest checkpoint of a run's folder that can be trusted, to go on from with ``config``.

    ``written`` is what stands in its config.json, which anyone may have edited: the config that is
    sealed in the checkpoint counts. Raises ValueError naming an option that would make it another
    run, and for a run that is finished.
    """
    if config.engine.executor == "replay":
        raise ValueError(f"the run in {run} is a replay, which is done from its start only")
    start = newest(run, on_warning)
    before = parse(TrainConfig, start.state.config, f"{start.folder / STATE}: config")
    _refuse_other_options(run, config, written, before)
    refuse_code_in(run, config.model.name, on_warning)
    code = code_sha256(config.model.name)
    if start.state.facts.get("model_code", code) != code:
        on_warning(f"the code of model {config.model.name} was edited since: its new code goes on")
    if (run / SUMMARY).exists():
        _refuse_finished(run, config, written)
    done = -(-start.state.updates // before.dense_updates_per_step)
    if config.steps is not None and config.steps < done:
        raise ValueError(
            f"--steps is {config.steps:,}, but {done:,} are done: give more to go on, or leave it"
            " out"
        )
    engine, facts = config.engine, start.state.facts
    same = (facts["ranks"], facts["shards"]) == (config.sync.ranks, engine.server_count)
    if engine.trace_order and not same:
        on_warning("a trace is of one number of ranks and shards: trace.npz begins where this does")
    return start


def _refuse_other_options(
    run: Path, config: TrainConfig, written: TrainConfig, before: TrainConfig
) -> None:
    old, there = dict(option_values(before)), dict(option_values(written))
    for name, value in option_values(config):
        if value == old[name] or name in _MAY_CHANGE:
            continue
        if value == there[name]:
            raise ValueError(
                f"{run / 'config.json'} was edited: {name} is {value}, but the run was begun with"
                f" {old[name]}, which decides what is trained: put it back, or start a new run"
            )
        raise ValueError(
            f"--{name} is {value}, but the run in {run} was begun with {old[name]}, which decides"
            " what is trained: leave it out, or start a new run"
        )


def _refuse_finished(run: Path, config: TrainConfig, written: TrainConfig) -> None:
    """Only a run that its steps have ended can go further: others have used up their data."""
    trained = (read_summary(run) or {}).get("samples")
    steps = written.steps
    if steps is None or (isinstance(trained, int) and trained < steps * written.batch):
        raise ValueError(
            f"the run in {run} is finished: it has trained on all of its data, and a resume adds"
            f" none; start a new run, such as with --data.passes {written.data.passes + 1}"
        )
    if config.steps is not None and config.steps <= steps:
        raise ValueError(
            f"the run in {run} is finished; add --steps, more than {steps:,}, to go on"
        )
