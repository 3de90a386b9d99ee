"""Where the time goes: the critical path of a run, second by second.

From the last push backwards, of rows or of dense weights: each instant is explained by the latest
of those that it had to wait for. The pieces add up to the makespan, by stage or by resource.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from persia_sim.bounds.transfers import Transfers
from persia_sim.cluster.scenario import DenseHome, Discipline, Queues
from persia_sim.cluster.stamps import Leg, Mark
from persia_sim.cluster.validity import ALL_REDUCE, GPU, LOADERS, SERVERS, WORKERS
from persia_sim.engine.simulate import Run

COPIES = "copies to and from the GPU"
LATENCY = "latency"
AVERAGING = "averaging"

Piece = tuple[str, float]


class Resources:
    """Cuts the time between two marks at the legs of the batch.

    A resource is blamed with the queue before it. A message crosses two NICs; the one that carries
    more for its rate is blamed for it.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._latency_s = run.scenario.cluster.link.latency_s
        self._load = self._loads()

    def between(self, step: Step) -> Iterator[Piece]:
        """The pieces of a step of the path."""
        (mark, r, s) = step.node
        since_s = step.since_s
        end_s = step.until_s
        run = self._run
        need = self._run.need
        legs = run.legs[:, r, s].tolist()
        took_s = end_s - since_s

        # By the stage that this step of the path has passed: loading, ...
        if mark is Mark.LOADED:
            alone = Transfers(run.scenario, need)
            dense_s = alone.input_s()  # what it waits is the worker NICs'
            alone_s = took_s - alone.load_s() - dense_s
            loading_s = max(0.0, alone_s) if step.is_first else min(took_s, need.load_s)
            dense_s = min(dense_s, took_s - loading_s)
            yield LOADERS, loading_s
            yield "worker NICs", took_s - loading_s - dense_s
            yield "GPU hosts' NICs", dense_s

        # ... the lookup, once or twice, ...
        elif mark is Mark.READ:
            yield from self._to_servers(since_s, legs[Leg.ASKED : Leg.READ], end_s)
        elif mark is Mark.ROWS:
            yield from self._to_rank(since_s, legs[Leg.ANSWERED : Leg.ROWS], end_s)
        elif mark is Mark.REFRESHED and run.scenario.brings_up_to_date:
            if need.forward is None:
                yield from self._second_look(since_s, legs, end_s)
            else:
                yield from self._forwarded(since_s, legs, end_s)

        # ... copies of dense weights, gradients handed on, ...
        elif mark is Mark.START and run.scenario.home is not None:
            yield from self._dense(since_s, legs[Leg.DENSE_SERVED], end_s)
        elif mark is Leg.DENSE_APPLIED:
            home, nic = self._home("in")
            yield LATENCY, self._latency_s
            yield nic, legs[Leg.DENSE_SENT] - since_s - self._latency_s
            yield home, end_s - legs[Leg.DENSE_SENT]
        elif mark is Leg.FORWARDED:
            yield from self._to_workers(since_s, end_s)
        elif mark is Leg.FRESH_APPLIED:
            fresh = legs[Leg.FRESH_AT_WORKER : Leg.FRESH_AT_SERVERS + 1]
            copied_s = need.pushes[0].copy_out_s
            yield COPIES, copied_s
            yield from self._push(since_s + copied_s, fresh, end_s)

        # ... computing and the all-reduce, ...
        elif mark is Mark.BACKWARD_END:
            computed_s = min(took_s, float(run.computed_s[r, s]))
            yield GPU, computed_s
            yield AVERAGING, took_s - computed_s
        elif mark is Mark.UPDATED:
            yield ALL_REDUCE, took_s

        # ... and the push with what follows it.
        elif mark is Mark.APPLIED:
            yield from self._push(since_s, legs[Leg.AT_WORKER : Leg.AT_SERVERS + 1], end_s)
        elif mark in (Mark.ON_GPU, Mark.COPIED_OUT):
            yield COPIES, took_s
        elif mark is Mark.RETURNED:
            yield LATENCY, took_s
        else:
            yield "queues", took_s

    def _to_servers(self, since_s: float, legs: list[float], end_s: float) -> Iterator[Piece]:
        asked_s, arrived_s, admitted_s = legs
        if admitted_s > arrived_s:  # the request was there: what it waited for was the cause
            yield SERVERS, end_s - since_s
            return
        yield LATENCY, 2 * self._latency_s
        yield WORKERS, asked_s - since_s - 2 * self._latency_s
        yield self._nic("worker host", "server host", "in"), arrived_s - asked_s
        yield SERVERS, end_s - arrived_s

    def _to_rank(self, since_s: float, legs: list[float], end_s: float) -> Iterator[Piece]:
        answered_s, pooled_s = legs
        yield LATENCY, 2 * self._latency_s
        nic = self._nic("worker host", "server host", "out")
        yield nic, answered_s - since_s - self._latency_s
        yield WORKERS, pooled_s - answered_s - self._latency_s
        yield self._nic("worker host", "GPU host", "in"), end_s - pooled_s

    def _forwarded(self, since_s: float, legs: list[float], end_s: float) -> Iterator[Piece]:
        """The pieces from the push of the last gradient, or from the batch itself, to rows brought
        up to date at the worker and copied."""
        begun_s = legs[Leg.ASKED_AGAIN]
        pooled_s = legs[Leg.POOLED_AGAIN]
        if begun_s > since_s:
            yield from self._to_workers(since_s, begun_s)
        yield LATENCY, self._latency_s
        yield WORKERS, pooled_s - begun_s - self._latency_s
        nic = self._nic("worker host", "GPU host", "in")
        yield nic, legs[Leg.ROWS_AGAIN] - pooled_s
        yield COPIES, end_s - legs[Leg.ROWS_AGAIN]

    def _to_workers(self, since_s: float, end_s: float) -> Iterator[Piece]:
        """Gradients by way of a worker to the one that holds their rows."""
        yield LATENCY, 2 * self._latency_s
        scatter_s = min(self._run.need.push.worker_scatter_s, end_s - since_s)
        yield WORKERS, scatter_s
        yield "worker NICs", end_s - since_s - scatter_s - 2 * self._latency_s

    def _second_look(self, since_s: float, legs: list[float], end_s: float) -> Iterator[Piece]:
        first = Leg.ASKED_AGAIN
        read = legs[Leg.READ_AGAIN]
        rows = legs[Leg.ROWS_AGAIN]
        yield from self._to_servers(since_s, legs[first : first + 3], read)
        yield from self._to_rank(read, legs[first + 4 : first + 6], rows)
        yield COPIES, end_s - rows

    def _dense(self, since_s: float, served_s: float, end_s: float) -> Iterator[Piece]:
        home, nic = self._home("out")
        yield LATENCY, 2 * self._latency_s
        yield home, served_s - since_s - self._latency_s
        yield nic, end_s - served_s - self._latency_s

    def _home(self, way: str) -> tuple[str, str]:
        """What serves the dense weights, and the NIC on the way between it and a rank."""
        if self._run.scenario.home is DenseHome.SERVERS:
            return SERVERS, self._nic("GPU host", "server host", way)
        return "dense server", "dense server's network"

    def _push(self, since_s: float, legs: list[float], end_s: float) -> Iterator[Piece]:
        at_worker_s, scattered_s, arrived_s = legs
        yield LATENCY, 2 * self._latency_s
        nic = self._nic("worker host", "GPU host", "out")
        yield nic, at_worker_s - since_s - self._latency_s
        yield WORKERS, scattered_s - at_worker_s - self._latency_s
        nic = self._nic("worker host", "server host", "in")
        yield nic, arrived_s - scattered_s
        yield SERVERS, end_s - arrived_s

    def _loads(self) -> dict[tuple[str, str], float]:
        """How busy the busiest NIC of a role is in a direction; alone, how slow it is."""
        run = self._run
        alone = run.scenario.discipline is Discipline.UNSHARED
        loads: dict[tuple[str, str], float] = {}
        for name, sent in run.link_bytes.items():
            role = next(role for role in _NICS if name.startswith(role))
            load = (1.0 if alone else sent) / run.link_capacity[name]
            key = (role, name.rsplit(" ", 1)[1])
            loads[key] = max(loads.get(key, 0.0), load)
        return loads

    def _nic(self, one: str, other: str, way: str) -> str:
        """The name of the busier of two roles' NICs, of which the second uses this direction."""
        back = "out" if way == "in" else "in"
        met = [(one, back), (other, way)]
        return _NICS[max(met, key=lambda nic: self._load.get(nic, 0.0))[0]]


_NICS = {
    "GPU host": "GPU hosts' NICs",
    "worker host": "worker NICs",
    "server host": "server NICs",
}


_PART = {
    Mark.LOADED: "load", Mark.LOOKUP: "load", Mark.READ: "lookup at servers",
    Mark.ROWS: "rows to the rank", Mark.COPY_IN: "queue for the GPU copy",
    Mark.ON_GPU: "copy to the GPU", Mark.REFRESHED: "refresh", Mark.START: "dense pull",
    Mark.BACKWARD_END: "forward and backward", Mark.UPDATED: "dense sync",
    Mark.COPY_OUT: "queue for the copy back", Mark.COPIED_OUT: "copy from the GPU",
    Mark.PUSH: "queue for a push task", Mark.APPLIED: "push", Mark.RETURNED: "push answer",
    Leg.FORWARDED: "push", Leg.FRESH_APPLIED: "push", Leg.DENSE_APPLIED: "dense push",
}  # fmt: skip

Node = tuple[Mark | Leg, int, int]
_ENDS = Mark.RETURNED, Leg.FORWARDED, Leg.DENSE_APPLIED  # what a run waits for last


class Step(NamedTuple):
    """A step of the critical path: from the cause of an instant, or the start of the run, to it."""

    node: Node
    since_s: float
    until_s: float
    is_first: bool


def _instant(run: Run, node: Node) -> float:
    return float((run.legs if isinstance(node[0], Leg) else run.stamps)[node])


def critical_path(run: Run) -> dict[str, float]:
    """Seconds of the makespan that each part of a batch's life is to blame for."""
    blame: dict[str, float] = defaultdict(float)
    for step in _walk(run):
        blame[_PART[step.node[0]]] += step.until_s - step.since_s
    return {part: seconds for part, seconds in blame.items() if seconds > 0}


def blame_of_resources(run: Run) -> dict[str, float]:
    """Seconds of the makespan that each resource is to blame for, with the queues before it."""
    blame: dict[str, float] = defaultdict(float)
    resources = Resources(run)
    for step in _walk(run):
        for name, seconds in resources.between(step):
            blame[name] += seconds
    return {name: seconds for name, seconds in blame.items() if seconds > 0}


def _summed_since(run: Run, s: int) -> tuple[int, float] | None:
    """The rank and the instant of its backward pass from which on the buckets of a step's gradient
    are summed without a pause until its update; None where the last end of a backward pass is what
    they wait for."""
    # Only where sums overlap the backward pass.
    need = run.need
    stamps = run.stamps
    if not run.scenario.mode.overlaps_dense_sync or not need.buckets:
        return None

    # When each rank's backward pass began and ended.
    share = need.backward_s / need.compute_s if need.compute_s else 0.0
    backward_s = share * run.computed_s[:, s]
    ends_s = stamps[Mark.BACKWARD_END][:, s]

    # Bucket by bucket: it is summed when the last rank has it and the bucket before is done.
    summed_s = -np.inf
    rank = 0
    since_s = 0.0
    for bucket in need.buckets:
        ready_s = ends_s - (1.0 - bucket.ready_share) * backward_s
        if float(ready_s.max()) >= summed_s:
            rank = int(ready_s.argmax())
            since_s = float(ready_s.max())
            summed_s = since_s
        summed_s += bucket.seconds
    return (rank, since_s) if summed_s > float(ends_s.max()) else None


def _causes(run: Run) -> Callable[[Node], list[Node]]:
    """What an instant may have waited for, as a function of it: the latest of these was the
    cause."""
    stamps = run.stamps
    scenario = run.scenario
    ranks = stamps.shape[1]
    queues = scenario.queues
    barrier = scenario.mode.has_barrier
    exact = scenario.brings_up_to_date
    loaders = scenario.cluster.loaders

    def before(node: Node) -> list[Node]:
        nodes: list[Node]
        mark, r, s = node
        if isinstance(mark, Leg):
            first = {Leg.FORWARDED: Mark.PUSH, Leg.FRESH_APPLIED: Mark.COPY_OUT}
            return [(first.get(mark, Mark.UPDATED), r, s)]

        # A loader delivers after its last batch, when the rank's buffer has room.
        if mark is Mark.LOADED:
            batch = s * ranks + r - loaders
            nodes = [(Mark.LOADED, batch % ranks, batch // ranks)] if batch >= 0 else []
            return nodes + _at(Mark.LOOKUP, r, s - queues.dataset)

        # A lookup waits for its batch, a task, a permit, its turn; at the servers for the window.
        if mark is Mark.LOOKUP:
            nodes = [(Mark.LOADED, r, s), *_at(Mark.LOOKUP, r, s - 1)]
            # A task is free when its batch was handed on, behind earlier ones, to where was room.
            handed = s - queues.lookups_in_flight
            if handed >= 0:
                nodes.append((Mark.ROWS, r, int(stamps[Mark.ROWS][r, : handed + 1].argmax())))
            nodes += _at(Mark.COPY_IN, r, handed - queues.forwarded)
            if queues.reserve:
                nodes += _taken(queues, r, s - queues.on_gpu)
            if scenario.permits is not None:
                earlier = stamps[Mark.RETURNED][r, :s]
                kth = s - scenario.permits
                if kth >= 0:
                    nodes.append((Mark.RETURNED, r, int(np.argpartition(earlier, kth)[kth])))
            if scenario.asks_in_turn:
                nodes += _at(Mark.PUSH, r, s - 1)
            return nodes if scenario.waits_at_servers else nodes + _opened(run, r, s)
        if mark is Mark.READ and _waited(run, Leg.ARRIVED, r, s):
            return _opened(run, r, s)

        # A copy waits for the rows and for room on the GPU.
        if mark is Mark.COPY_IN:
            nodes = [(Mark.ROWS, r, s), *_at(Mark.ON_GPU, r, s - 1)]
            return nodes + _taken(queues, r, s - 1 - queues.on_gpu)

        # What brings rows up to date waits for pushes of these.
        if mark is Mark.REFRESHED:
            nodes = _taken(queues, r, s)
            return _up_to_date(run, nodes, s) if exact and s else nodes

        # With a barrier the slowest rank decides; then the way back, task by task.
        if mark is Mark.UPDATED and barrier:
            return [(Mark.BACKWARD_END, int(stamps[Mark.BACKWARD_END][:, s].argmax()), s)]
        if mark is Mark.COPY_OUT:
            nodes = [(Mark.UPDATED, r, s), *_at(Mark.COPIED_OUT, r, s - 1)]
            return nodes + _at(Mark.PUSH, r, s - 1 - queues.copied_back)
        if mark is Mark.PUSH:
            nodes = [(Mark.COPIED_OUT, r, s)]
            earlier = stamps[Mark.RETURNED][r, :s]
            kth = s - queues.push_tasks
            if kth >= 0:
                nodes.append((Mark.RETURNED, r, int(np.argpartition(earlier, kth)[kth])))
            return nodes
        return [(Mark(mark - 1), r, s)]

    return before


def _up_to_date(run: Run, taken: list[Node], s: int) -> list[Node]:
    """What the rows of a step wait for before they are exact, beside the batch itself: the last
    push of earlier steps, or of their fresh tables."""
    need = run.need
    stamps = run.stamps
    if need.forward is not None or need.fresh is not None:
        leg = Leg.FRESH_APPLIED if need.forward is None else Leg.FORWARDED
        there = run.legs[leg][:, :s]
        giver, last = np.unravel_index(int(np.nanargmax(there)), there.shape)
        if need.forward is None:
            return [*taken, (leg, int(giver), int(last))]
        if np.nanmax(there) > max(stamps[node] for node in taken):  # else nobody waits
            return [(Mark.PUSH, int(giver), int(last))]
        return taken
    step = int(stamps[Mark.APPLIED][:, :s].max(0).argmax())
    return [*taken, (Mark.APPLIED, int(stamps[Mark.APPLIED][:, step].argmax()), step)]


def _waited(run: Run, arrived: Leg, r: int, s: int) -> bool:
    """Whether the window kept this request waiting at the servers."""
    return bool(run.legs[arrived + 1, r, s] > run.legs[arrived, r, s])


def _opened(run: Run, r: int, s: int) -> list[Node]:
    """The push with which the window let this lookup in."""
    window = run.scenario.steps_ahead
    if window is None or s <= window:
        return []
    applied = run.stamps[Mark.APPLIED][:, : s - window]
    who = int(applied.max(1).argmax()) if run.scenario.mode.has_barrier else r
    return [(Mark.APPLIED, who, int(applied[who].argmax()))]


def _taken(queues: Queues, r: int, s: int) -> list[Node]:
    """What a rank waits for before it takes a batch: that it is on the GPU, the batch before done,
    and that there is room for gradients."""
    if s < 0:
        return []
    room = _at(Mark.COPY_OUT, r, s - 1 - queues.backward)
    return [(Mark.ON_GPU, r, s), *_at(Mark.UPDATED, r, s - 1), *room]


def _walk(run: Run) -> Iterator[Step]:
    """The path from its end."""
    stamps = run.stamps
    before = _causes(run)
    barrier = run.scenario.mode.has_barrier

    # The end: the last push of rows, or of dense weights.
    last = np.nan_to_num([(run.legs if isinstance(m, Leg) else stamps)[m] for m in _ENDS])
    end, r, s = np.unravel_index(int(last.argmax()), last.shape)
    node: Node = (_ENDS[int(end)], int(r), int(s))
    now = _instant(run, node)

    # Backwards, from each instant to the latest of its causes.
    while True:
        if node[0] is Mark.UPDATED and barrier and (overlapped := _summed_since(run, node[2])):
            # What a rank computes behind the instant at which a bucket was there hides beside it.
            rank, since_s = overlapped
            yield Step(node, since_s, now, False)
            node = (Mark.BACKWARD_END, rank, node[2])
            now = since_s
        earlier = [n for n in before(node) if _instant(run, n) <= now]
        cause = max(earlier, key=lambda n: _instant(run, n), default=None)
        yield Step(node, _instant(run, cause) if cause else 0.0, now, cause is None)
        if cause is None:
            return
        node = cause
        now = _instant(run, cause)


def _at(mark: Mark, r: int, s: int) -> list[Node]:
    return [(mark, r, s)] if s >= 0 else []
