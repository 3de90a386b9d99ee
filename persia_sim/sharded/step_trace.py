"""Steps of a training program in a trace that `torch.profiler` wrote (Kineto's Chrome trace).

A trace is a stranger's file: its size, types and numbers are held before anything is made of them.
What ran has no name here: kernels and operators are told apart by what they work on. On a CPU an
operator is its own kernel, and its thread waits for it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import isfinite, log, prod
from pathlib import Path
from statistics import fmean, median, quantiles, stdev
from typing import Any, NamedTuple

from persia_sim.base.files import read_document
from persia_sim.base.rules import COUNT, require
from persia_sim.base.schema import shown

Shape = tuple[int, ...]
KINDS = ("products", "tables", "others", "copies", "exchanges", "constant")
"""What a device works on: products of matrices, tables' rows, activations and what else samples
are in, copies from and to the host, exchanges between ranks, and what no sample is in."""

_STEP = re.compile(r"ProfilerStep#(\d{1,9})")
_REMEDY = (
    "record it with torch.profiler.profile(record_shapes=True, schedule=torch.profiler.schedule("
    "wait=1, warmup=1, active=8)) and prof.step() behind each step"
)
_MOST = 1e18
"""Microseconds of an instant, and numbers of a shape, at most."""
_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_CALLS = ("cuda_runtime", "cuda_driver")
_LAUNCH = re.compile(r"Launch|Memcpy.*Async|Memset.*Async")
_WAIT = re.compile(r"Synchronize|Memcpy(?!.*Async)")
_OPTIMIZER = re.compile(r"optimi[sz]er", re.IGNORECASE)
_BAGS = "aten::embedding_bag"
_LOOKUPS = (_BAGS, "aten::embedding")
_FACTORS = {"aten::mm": 0, "aten::bmm": 0, "aten::addmm": 1, "aten::baddbmm": 1}
"""Operators that multiply matrices -> which of their inputs is the first factor."""
_NAMES = {
    "exchanges": r"nccl|gloo|c10d|param_comms|all_?reduce|all_?to_?all|all_?gather|reduce_?scatter",
    "copies": r"memcpy (?:htod|dtoh)",
    "tables": r"embedding|coalesce|sparse|index_(?:select|add|put)|gather|scatter|unique|sort"
    r"|jagged|fbgemm",
    "products": r"mm(?:_out)?$|matmul|gemm|cutlass|cublas|linear",
}
"""What is worked on -> what names of operators and kernels say so; the first that fits."""
_PATTERNS = {kind: re.compile(names, re.IGNORECASE) for kind, names in _NAMES.items()}


class Layer(NamedTuple):
    """A fully connected layer."""

    inputs: int
    outputs: int


class Lookup(NamedTuple):
    """A table that a step reads."""

    rows: int
    dim: int
    ids: int
    """Ids of a batch."""
    is_pooled: bool
    """Whether a sample gets one vector, and not one for each id."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Steps:
    """What a step does, as the mean of some; times in seconds."""

    durations_s: tuple[float, ...]
    """Each step."""
    on_gpu: bool
    """Whether kernels of a GPU were recorded; else the CPU's operators are the kernels."""
    kernels: float
    """Kernels that are launched, one by one or as graphs."""
    table_kernels: float
    """Those of tables."""
    launch_s: float
    """From one launch to the next; on a CPU an operator that does hardly anything."""
    host_s: float
    """The host but for waiting for the device."""
    busy_s: float
    """The device, whatever it works on."""
    work_s: Mapping[str, float]
    """The device, by what it works on (`KINDS`)."""
    ranks: int = 1
    """Ranks that trained together."""
    batch: int = 0
    """Samples of this rank; 0 where no shapes are recorded."""
    layers: tuple[Layer, ...] = ()
    """Fully connected layers of the forward pass, in its order."""
    lookups: tuple[Lookup, ...] = ()
    """Tables, in the order in which they are read."""
    multiplications: float = 0.0
    """In all products of matrices, forward and backward."""

    @property
    def step_s(self) -> float:
        """Mean of a step."""
        return fmean(self.durations_s)

    @property
    def spread_ln(self) -> float:
        """Standard deviation of the logarithm of a step."""
        return stdev(map(log, self.durations_s))


class _Span(NamedTuple):
    kind: str
    name: str
    start_us: float
    end_us: float
    process: str
    thread: str
    args: Mapping[str, Any]


class _Operator(NamedTuple):
    span: _Span
    own_us: float
    """Without the operators that it calls."""
    shapes: list[Shape]
    """Its inputs that are tensors; empty where none was recorded."""


class _Work(NamedTuple):
    """All steps together."""

    launches: int
    of_tables: int
    launch_us: float
    waited_us: float
    busy_us: float
    by_kind_us: dict[str, float]


def read_steps(path: Path, chosen: tuple[int, int] | None = None) -> Steps:
    """The steps of a trace from the first to the last that is ``chosen``, as the profiler numbered
    them; None: all, but for the first of more than two.

    Raises ValueError naming the file and what is wrong in it, OSError where it cannot be read.
    """
    document = read_document(path)
    try:
        ranks = _ranks(document)
        return replace(_steps(list(_spans(document)), chosen), ranks=ranks)
    except ValueError as error:
        raise ValueError(f"trace {path}: {error}") from None


def _ranks(document: Any) -> int:
    """The size of the group of processes, of which the profiler writes where there is one."""
    group = document.get("distributedInfo") if isinstance(document, dict) else None
    size = group.get("world_size", 1) if isinstance(group, dict) else 1
    known = isinstance(size, int) and 1 <= size <= COUNT[1]
    require(known, "world_size", shown(size), f"must be a number in [1, {COUNT[1]:,}]")
    return int(size)


def _spans(document: Any) -> Iterator[_Span]:
    """What takes time; a trace also holds names, arrows and instants."""
    listed = document.get("traceEvents") if isinstance(document, dict) else document
    if not isinstance(listed, list):
        raise ValueError(f"it has no list traceEvents; {_REMEDY}")
    for number, event in enumerate(listed):
        place = f"traceEvents[{number}]"
        if not isinstance(event, dict):
            raise ValueError(f"{place} must be a table, got {shown(event)}")
        if event.get("ph") != "X":
            continue
        start, length = (_number(event.get(key), f"{place}.{key}") for key in ("ts", "dur"))
        require(length >= 0, f"{place}.dur", length, "must be >= 0")
        for key, kind in (("cat", str), ("name", str), ("args", dict)):
            value = event.setdefault(key, kind())
            if not isinstance(value, kind):
                what = "text" if kind is str else "a table"
                raise ValueError(f"{place}.{key} must be {what}, got {shown(value)}")
        who = str(event.get("pid")), str(event.get("tid"))
        yield _Span(event["cat"], event["name"], start, start + length, *who, event["args"])


def _number(value: Any, place: str) -> float:
    known = isinstance(value, int | float) and not isinstance(value, bool)
    if not known or not isfinite(value) or abs(value) > _MOST:
        raise ValueError(f"{place} must be a number of at most {_MOST:g}, got {shown(value)}")
    return float(value)


def _steps(spans: Sequence[_Span], chosen: tuple[int, int] | None) -> Steps:
    # The steps that count, by the marks that the program set.
    found = ((_STEP.fullmatch(s.name), s) for s in spans if s.kind == "user_annotation")
    marks = {int(match[1]): span for match, span in found if match}
    require(bool(marks), "ProfilerStep", "missing", "no step is marked in it", _REMEDY)
    first, last = chosen or (min(marks) + (len(marks) > 2), max(marks))
    steps = [marks[number] for number in sorted(marks) if first <= number <= last]
    rule = f"must name two steps at least of {min(marks)} to {max(marks)}"
    require(len(steps) >= 2, "--steps", f"{first} {last}", rule)
    durations_us = [span.end_us - span.start_us for span in steps]
    require(min(durations_us) > 0, "a step", "0 us", "must take time")

    # What ran in them, in the process that marked them, and on its GPU.
    start, end = steps[0].start_us, steps[-1].end_us
    inside = [span for span in spans if start <= span.start_us < end]
    mine = [span for span in inside if span.process == steps[0].process]
    operators = _operators([span for span in mine if span.kind == "cpu_op"])
    device = [span for span in inside if span.kind in _DEVICE]
    gpus = {str(span.args.get("device", span.process)) for span in device}
    require(len(gpus) <= 1, "GPUs in it", len(gpus), "must be one", "record one rank")

    # What it works on, and what the host does beside.
    count = len(steps)
    model = _model(operators, count)
    work = _on_gpu(mine, operators, device) if device else _on_cpu(mine, operators, model)
    step_us = sum(durations_us) / count
    return Steps(
        durations_s=tuple(each / 1e6 for each in durations_us),
        on_gpu=bool(device),
        kernels=work.launches / count,
        table_kernels=min(work.of_tables, work.launches) / count,  # a graph is one launch
        launch_s=work.launch_us / 1e6,
        host_s=max(0.0, step_us - work.waited_us / count) / 1e6,
        busy_s=work.busy_us / count / 1e6,
        work_s={kind: us / count / 1e6 for kind, us in work.by_kind_us.items()},
        **model,
    )


def _operators(spans: Sequence[_Span]) -> list[_Operator]:
    """Operators in the order of their starts, each with the time that is its own."""
    ordered = sorted(spans, key=lambda span: (span.start_us, -span.end_us))
    own_us = [span.end_us - span.start_us for span in ordered]
    callers: dict[str, list[int]] = {}
    for number, span in enumerate(ordered):
        stack = callers.setdefault(span.thread, [])
        while stack and ordered[stack[-1]].end_us <= span.start_us:
            stack.pop()
        if stack:
            own_us[stack[-1]] -= min(span.end_us, ordered[stack[-1]].end_us) - span.start_us
        stack.append(number)
    return [
        _Operator(span, max(0.0, us), _shapes(span))
        for span, us in zip(ordered, own_us, strict=True)
    ]


def _shapes(span: _Span) -> list[Shape]:
    """The shapes in ``Input Dims``: a list of sizes for a tensor, a list of these for several, an
    empty one or a text for anything else."""
    found: list[Shape] = []
    pending = [span.args.get("Input Dims", span.args.get("Input dims", []))]
    while pending:
        value = pending.pop()
        if not isinstance(value, list):
            continue
        sizes = [each for each in value if isinstance(each, int) and not isinstance(each, bool)]
        wrong = [each for each in sizes if not 0 <= each <= _MOST]
        if wrong:
            rule = f"must hold sizes in [0, {_MOST:g}]"
            raise ValueError(f"Input Dims of {shown(span.name)} {rule}, got {shown(wrong[0])}")
        if sizes and len(sizes) == len(value):
            found.append(tuple(sizes))
        else:
            pending += reversed(value)
    return found


def _model(operators: Sequence[_Operator], steps: int) -> dict[str, Any]:
    """What the shapes of operators say of batch and model: fields of `Steps`."""
    # Layers of the forward pass; where none is called so, products with a bias.
    linear = [o.shapes[:2] for o in operators if o.span.name == "aten::linear"]
    seen = [(x, (w[-1], w[0])) for x, w in filter(_is_pair, linear)]
    if not seen:
        biased = [o.shapes[1:3] for o in operators if o.span.name == "aten::addmm"]
        seen = [(x, (w[0], w[-1])) for x, w in filter(_is_pair, biased)]
    batches = Counter(x[0] for x, _ in seen)
    batch = batches.most_common(1)[0][0] if batches else 0

    # Tables that are read, and every product of matrices.
    read = [(o.span.name, o.shapes[:2]) for o in operators if o.span.name in _LOOKUPS]
    lookups = [
        Lookup(*table, prod(ids), name == _BAGS)
        for name, (table, ids) in ((name, pair) for name, pair in read if _is_pair(pair, least=1))
        if len(table) == 2
    ]
    products = [(_FACTORS.get(o.span.name), o.shapes) for o in operators]
    factors = [shapes[place : place + 2] for place, shapes in products if place is not None]
    return {
        "batch": batch,
        "layers": tuple(Layer(*w) for _, w in seen[: round(len(seen) / steps)]),
        "lookups": tuple(lookups[: round(len(lookups) / steps)]),
        "multiplications": sum(prod(a) * b[-1] for a, b in filter(_is_pair, factors)) / steps,
    }


def _is_pair(shapes: Sequence[Shape], least: int = 2) -> bool:
    """Whether these are two tensors with something in them, of two dimensions at ``least``."""
    return len(shapes) == 2 and all(len(s) >= least and prod(s) > 0 for s in shapes)


def _kind(*names: str) -> str:
    for kind, pattern in _PATTERNS.items():
        if any(pattern.search(name) for name in names):
            return kind
    return "others"


def _on_cpu(
    mine: Sequence[_Span], operators: Sequence[_Operator], model: Mapping[str, Any]
) -> _Work:
    """Every operator is a kernel; its work is what it takes beyond the cheapest ones."""
    require(len(operators) >= 2, "operators in it", len(operators), "must be two", _REMEDY)
    launch_us = quantiles([each.own_us for each in operators])[0]
    updates = [s for s in mine if s.kind == "user_annotation" and _OPTIMIZER.search(s.name)]
    updated = _merged((s.start_us, s.end_us) for s in updates)
    tables = {(each.rows, each.dim) for each in model["lookups"]}
    batch = model["batch"]

    # The name says what an operator works on, its shapes whether samples are in it.
    by_kind = dict.fromkeys(KINDS, 0.0)
    of_tables = 0
    at = 0
    for span, own_us, shapes in operators:
        while at < len(updated) and updated[at][1] <= span.start_us:
            at += 1
        in_update = at < len(updated) and updated[at][0] <= span.start_us
        sampled = not (batch and shapes) or any(n and n % batch == 0 for s in shapes for n in s)
        kind = _kind(span.name)
        if kind != "exchanges" and any(shape in tables for shape in shapes):
            kind = "tables"
        elif kind in ("products", "others") and (in_update or not sampled):
            kind = "constant"
        of_tables += kind == "tables"
        by_kind[kind] += max(0.0, own_us - launch_us)
    worked = sum(by_kind.values()) - by_kind["exchanges"]  # another thread's: a rank waits for it
    return _Work(len(operators), of_tables, launch_us, worked, worked, by_kind)


def _on_gpu(
    mine: Sequence[_Span], operators: Sequence[_Operator], device: Sequence[_Span]
) -> _Work:
    """Kernels and copies, and the calls of the host that launched them or waited for them."""
    calls = [span for span in mine if span.kind in _CALLS]
    launches = [span for span in calls if _LAUNCH.search(span.name)]
    remedy = "record the activities CPU and CUDA"
    require(bool(launches), "launches in it", 0, "kernels ran, so somebody launched them", remedy)
    starts: dict[str, list[float]] = {}
    for span in sorted(launches, key=lambda span: span.start_us):
        starts.setdefault(span.thread, []).append(span.start_us)
    gaps = [b - a for of_thread in starts.values() for a, b in pairwise(of_thread)]
    waits = [(span.start_us, span.end_us) for span in calls if _WAIT.search(span.name)]

    # The operator behind a kernel says more than the kernel's own name.
    behind = {_link(each.span): each.span.name for each in operators}
    by_kind = dict.fromkeys(KINDS, 0.0)
    of_tables = 0
    for span in device:
        kind = _kind(behind.get(_link(span), ""), span.name)
        of_tables += kind == "tables"
        by_kind[kind] += span.end_us - span.start_us
    return _Work(
        launches=len(launches),
        of_tables=of_tables,
        launch_us=median(gaps or [0.0]),
        waited_us=_length(waits),
        busy_us=_length((span.start_us, span.end_us) for span in device),
        by_kind_us=by_kind,
    )


def _link(span: _Span) -> str:
    return str(span.args.get("External id", span))


def _merged(spans: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Spans that overlap as one, in order."""
    merged: list[tuple[float, float]] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            start, end = merged[-1][0], max(end, merged.pop()[1])
        merged.append((start, end))
    return merged


def _length(spans: Iterable[tuple[float, float]]) -> float:
    return sum(end - start for start, end in _merged(spans))
