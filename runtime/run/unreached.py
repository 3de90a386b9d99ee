"""Options that the length of a run has voided, a sentence each: what was asked for never came."""

from __future__ import annotations

from persia_sim.words.vocabulary import Mode
from runtime.config import TrainConfig


def unreached(config: TrainConfig, updates: int, samples: int, *, whole: bool = True) -> list[str]:
    """What a run of so many dense updates and samples never came to.

    ``whole``: nothing was skipped or lost, so that the updates are all that the data gave. A replay
    has the order and the length of its trace: nothing is said of it.
    """
    sync = config.sync
    if config.engine.executor == "replay":
        return []
    steps = -(-updates // config.dense_updates_per_step)
    of_a_rank = updates if sync.mode.has_barrier else -(-updates // sync.ranks)
    told = []
    if config.steps is not None and steps < config.steps and whole:
        told.append(
            f"--steps {config.steps:,} asked for, the data gave {steps:,};"
            " more come with --data.passes, or a smaller --batch"
        )
    if samples < config.batch and steps == 1:
        told.append(
            f"--batch {config.batch:,} is more than all {samples:,} samples: the run was one step;"
            " give a smaller one"
        )
    starts = sync.sync_steps if sync.mode.may_merge else 0
    if starts >= of_a_rank:
        told.append(f"--sync-steps {starts:,} outlasted the run of {steps:,} steps: all were sync")
    elif sync.mode.reads_late_rows and sync.window is not None and sync.window >= of_a_rank:
        whose = "the run" if sync.mode.has_barrier else "each rank"
        told.append(f"tau {sync.window:,} was never reached: {whose} has {of_a_rank:,} updates")
    if sync.mode.has_barrier and sync.dense_lag >= updates:
        told.append(f"--dense-lag {sync.dense_lag:,} was never reached: {updates:,} dense updates")
    averages = sync.mode is Mode.ASYNC_AVERAGING and config.engine.executor == "lag"
    if averages and sync.average_every_steps > of_a_rank:
        told.append(
            f"--average-every-steps {sync.average_every_steps:,} was never reached:"
            f" each rank has {of_a_rank:,} updates"
        )
    every = config.evaluation.evaluate_every_steps
    if every is not None and every > steps:
        told.append(
            f"--evaluate-every-steps {every:,} was never reached: the run has {steps:,} steps, and"
            " was evaluated at its end alone"
        )
    return told
