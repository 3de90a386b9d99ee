"""What a run counts: the figures of its summary, and what they hold of all that came before."""

from __future__ import annotations

from dataclasses import dataclass, field

from persia_sim.base.schema import Count


@dataclass(slots=True, kw_only=True)
class History:
    """What the summary says of all that came before, over any number of resumes."""

    wall_s: float = 0.0
    first_warnings: list[str] | None = None
    """Warnings of the first evaluation, with its updates in words; None before it."""
    resumed_at_samples: list[Count] = field(default_factory=list)
    trace_since_samples: Count = 0
    """Where the order that is kept begins: a resume with other ranks or shards begins anew."""
    checkpoints_written: Count = 0
    checkpoints_failed: Count = 0
    best_score: float | None = None
    """The best score of the evaluations on the way, where they may end the run; of its first
    task."""
    since_best: Count = 0
    """Evaluations after that one."""
    longest_pause_s: float = 0.0
    """From the end of a leg, when nothing is in flight, to the start of the next."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What a run has counted, over any number of resumes; the summary has all of it by name."""

    samples: int
    steps: int
    """Steps of ``batch`` samples each, but for the last one of a pass."""
    updates: int
    """Dense updates: a step each, or one of each rank (``match=global``)."""
    wall_s: float
    """Seconds of training and of evaluations on the way."""
    updates_per_loss: int
    samples_per_s: float
    """Without warm-up, evaluations and pauses for checkpoints."""
    rows: int
    resident_bytes: int
    """That the rows take."""
    rows_replaced: int
    """Rows that lookahead read again, as they were written between prefetch and use."""
    rows_evicted: int
    rows_expired: int
    lookups_not_admitted: int
    row_gradients_dropped: int
    """Their row was not there any more."""
    batches_skipped: int
    """Loss or gradient was not finite."""
    pushes_lost: int
    pushes_lost_at: list[int]
    """Pushes lost at each server, with those that were left out."""
    ranks_fused: bool
    checkpoints_written: int
    checkpoints_failed: int
    longest_pause_s: float
    """Between two legs."""
    resumed_at_samples: list[int]
    trace_since_samples: int
    stopped_early: bool
    """Evaluations on the way were no better any more, and were to end the run."""
