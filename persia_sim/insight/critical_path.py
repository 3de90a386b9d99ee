"""Where the time goes: the critical path of a run, second by second.

From the last push backwards: each instant is explained by the latest of the instants that it had
to wait for. The pieces add up to the makespan, by stage of a batch's life or by resource.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import numpy as np

from persia_sim.engine.run import Run
from persia_sim.insight.resources import Resources
from persia_sim.model.stamps import Leg, Mark
from persia_sim.words.vocabulary import Mode

_PART = {
    Mark.LOADED: "load",
    Mark.LOOKUP: "load",
    Mark.READ: "lookup at servers",
    Mark.ROWS: "rows to the rank",
    Mark.COPY_IN: "queue for the GPU copy",
    Mark.ON_GPU: "copy to the GPU",
    Mark.REFRESHED: "refresh",
    Mark.START: "dense pull",
    Mark.BACKWARD_END: "forward and backward",
    Mark.UPDATED: "dense sync",
    Mark.COPY_OUT: "queue for the copy back",
    Mark.COPIED_OUT: "copy from the GPU",
    Mark.PUSH: "queue for a push task",
    Mark.APPLIED: "push",
    Mark.RETURNED: "push answer",
}

Node = tuple[Mark, int, int]


def critical_path(run: Run) -> dict[str, float]:
    """Seconds of the makespan that each part of a batch's life is to blame for."""
    blame: dict[str, float] = defaultdict(float)
    for (mark, r, s), since_s, _ in _walk(run):
        blame[_PART[mark]] += float(run.stamps[mark, r, s]) - since_s
    return {part: seconds for part, seconds in blame.items() if seconds > 0}


def blame_of_resources(run: Run) -> dict[str, float]:
    """Seconds of the makespan that each resource is to blame for, with the queues before it."""
    blame: dict[str, float] = defaultdict(float)
    resources = Resources(run)
    for node, since_s, is_first in _walk(run):
        for name, seconds in resources.between(node, since_s, is_first):
            blame[name] += seconds
    return {name: seconds for name, seconds in blame.items() if seconds > 0}


def _walk(run: Run) -> Iterator[tuple[Node, float, bool]]:
    """The path from its end: each instant, when its cause was, and whether there was none."""
    stamps, scenario = run.stamps, run.scenario
    ranks, steps = stamps.shape[1:]
    queues, window = scenario.queues, scenario.window
    barrier = scenario.mode.has_barrier
    lookahead = scenario.mode is Mode.LOOKAHEAD
    last_applied = stamps[Mark.APPLIED].max(0)
    loaders = scenario.cluster.loaders

    def before(node: Node) -> list[Node]:
        mark, r, s = node
        if mark is Mark.LOADED:
            batch = s * ranks + r - loaders
            found = [(Mark.LOADED, batch % ranks, batch // ranks)] if batch >= 0 else []
            return found + _at(Mark.LOOKUP, r, s - queues.dataset)
        if mark is Mark.LOOKUP:
            found = [(Mark.LOADED, r, s), *_at(Mark.LOOKUP, r, s - 1)]
            found += _at(Mark.COPY_IN, r, s - queues.lookup_tasks)
            found += _at(Mark.ROWS, r, s - queues.lookup_tasks)
            if scenario.permits is not None:
                earlier = stamps[Mark.RETURNED][r, :s]
                kth = s - scenario.permits
                if kth >= 0:
                    found.append((Mark.RETURNED, r, int(np.argpartition(earlier, kth)[kth])))
            if window is not None and s > window:
                who = int(stamps[Mark.APPLIED][:, : s - window].max(1).argmax()) if barrier else r
                which = int(stamps[Mark.APPLIED][who, : s - window].argmax())
                found.append((Mark.APPLIED, who, which))
            return found
        if mark is Mark.COPY_IN:
            found = [(Mark.ROWS, r, s), *_at(Mark.ON_GPU, r, s - 1)]
            return found + _at(Mark.REFRESHED, r, s - 1 - queues.on_gpu)
        if mark is Mark.REFRESHED:
            found = [(Mark.ON_GPU, r, s), *_at(Mark.UPDATED, r, s - 1)]
            found += _at(Mark.COPY_OUT, r, s - 1 - queues.backward)
            if run.need.forward is not None and s:
                there = run.legs[Leg.FORWARDED][:, :s]
                giver, last = np.unravel_index(int(np.nanargmax(there)), there.shape)
                found.append((Mark.PUSH, int(giver), int(last)))
            elif lookahead and s:
                step = int(last_applied[:s].argmax())
                found.append((Mark.APPLIED, int(stamps[Mark.APPLIED][:, step].argmax()), step))
            return found
        if mark is Mark.UPDATED and barrier:
            return [(Mark.BACKWARD_END, int(stamps[Mark.BACKWARD_END][:, s].argmax()), s)]
        if mark is Mark.COPY_OUT:
            found = [(Mark.UPDATED, r, s), *_at(Mark.COPIED_OUT, r, s - 1)]
            return found + _at(Mark.PUSH, r, s - 1 - queues.copied_back)
        if mark is Mark.PUSH:
            found = [(Mark.COPIED_OUT, r, s)]
            earlier = stamps[Mark.RETURNED][r, :s]
            kth = s - queues.push_tasks
            if kth >= 0:
                found.append((Mark.RETURNED, r, int(np.argpartition(earlier, kth)[kth])))
            return found
        return [(Mark(mark - 1), r, s)]

    r, s = np.unravel_index(int(stamps[Mark.RETURNED].argmax()), (ranks, steps))
    node: Node = (Mark.RETURNED, int(r), int(s))
    while True:
        now = float(stamps[node])
        earlier = [n for n in before(node) if stamps[n] <= now]
        cause = max(earlier, key=lambda n: float(stamps[n]), default=None)
        yield node, float(stamps[cause]) if cause else 0.0, cause is None
        if cause is None:
            return
        node = cause


def _at(mark: Mark, r: int, s: int) -> list[Node]:
    return [(mark, r, s)] if s >= 0 else []
