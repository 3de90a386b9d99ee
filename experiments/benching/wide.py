"""Workload `wide`: the fixed speed test of the embedding path, 26 Zipf fields of one sample.

And what benches do with it: full stores, and the loops that they time.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from runtime.data.batch import Batch, Field, Layout
from runtime.data.ids import hash_integers, tag
from runtime.data.source import Part, Provenance
from runtime.embedding.config import TableConfig

FIELDS = 26
DENSE = 13
ZIPF_EXPONENT = 1.05
LABEL_RATE = 0.25
FILL = 1 << 18
"""Rows created by one lookup."""


@dataclass(frozen=True, slots=True)
class WideWorkload:
    """Ready-made batches that repeat, so that a measurement contains no generation of ids.

    Labels are drawn anew in every step: a network that learns random ones by heart computes with
    ever smaller numbers, and is slower or faster for it. Each window goes on with the batches where
    the one before has stopped.
    """

    batches: tuple[Batch, ...]
    _steps: Iterator[int] = field(default_factory=itertools.count, repr=False)

    def step(self) -> tuple[int, np.ndarray]:
        """Of the next step the number of its batch, and float32 [B, 1], its labels."""
        step = next(self._steps)
        number = step % len(self.batches)
        draw = np.random.default_rng([1, step])
        labels = draw.random((self.batches[number].size, 1), np.float32) < LABEL_RATE
        return number, labels.astype(np.float32)

    @property
    def layout(self) -> Layout:
        """26 id fields of equal vocabularies, 13 dense features, one task."""
        fields = tuple(Field(name=f"c{k}") for k in range(FIELDS))
        return Layout(fields=fields, dense=tuple(f"i{k}" for k in range(DENSE)), tasks=("click",))

    def chunks(self, part: Part) -> Iterator[Batch]:
        """The batches in turn, without end; the test part is the first of them."""
        if part == "test":
            yield self.batches[0]
            return
        while True:
            number, labels = self.step()
            yield replace(self.batches[number], labels=labels)

    def provenance(self) -> Provenance:
        """Random labels: for speed only."""
        return Provenance(name="workload-wide", sha256="generated", split="none: speed only")


def wide_workload(batch: int, rows: int, batches: int = 24, ids_per_field: int = 1) -> WideWorkload:
    """``rows`` distinct ids over all fields, a bounded Zipf law of exponent 1.05 in each."""
    draw = np.random.default_rng(0)
    values = rows // FIELDS
    weights = np.arange(1, values + 1, dtype=np.float64) ** -ZIPF_EXPONENT
    cumulated = np.cumsum(weights) / weights.sum()
    made = []
    for _ in range(batches):
        ranks = np.searchsorted(cumulated, draw.random((batch, FIELDS, ids_per_field)))
        ids = np.stack([tag(f, hash_integers(ranks[:, f].ravel())) for f in range(FIELDS)], axis=1)
        ids = ids.reshape(batch, ids_per_field, FIELDS).transpose(0, 2, 1).ravel()
        offsets = None if ids_per_field == 1 else np.arange(0, len(ids) + 1, ids_per_field)
        dense = draw.normal(size=(batch, DENSE)).astype(np.float32)
        labels = (draw.random((batch, 1)) < LABEL_RATE).astype(np.float32)
        made.append(Batch(ids, offsets, dense, labels))
    return WideWorkload(tuple(made))


def wide_ids(rows: int) -> Iterator[np.ndarray]:
    """All ids of the workload with so many rows, field by field."""
    for number in range(FIELDS):
        yield tag(number, hash_integers(np.arange(rows // FIELDS)))


def full_store(
    layout: Layout, config: TableConfig, columns: Iterable[np.ndarray], shards: int = 1
) -> Any:
    """A store that holds all these ids, created in random order."""
    from runtime.embedding.native.store import NativeStore

    store = NativeStore(layout, [config], shards=shards)
    empty = np.zeros((1, 0), np.float32)
    for column in columns:
        ids = np.random.default_rng(2).permutation(column)
        for start in range(0, len(ids), FILL):
            part = ids[start : start + FILL]
            bounds = np.linspace(0, len(part), len(layout.fields) + 1).astype(np.int64)
            handle = store.begin(0, 0, Batch(part, bounds, empty, empty))
            for server in store.servers:
                server.read(handle)
    return store


def concurrent_samples_per_s(components: Any, source: Any, skip: int) -> float:
    """One window of the concurrent executor over rows that may be there already."""
    from runtime.executors.threads import ConcurrentRun

    again = components.again(source)
    again.meter.start()
    ConcurrentRun(again).run()
    return float(again.meter.samples_per_s(skip=skip))


def plain_loop(
    components: Any,
    source: WideWorkload,
    look: Callable[[int], Any],
    skip: int,
    step_rows: Callable[[], None] = lambda: None,
) -> Callable[[], float]:
    """Samples/s of the plain loop around the network, loss and optimiser of ``components``.

    ``look``: from the number of a batch to its pooled vectors [B, fields * dim]; so many first
    steps of a window, at least one, are not timed.
    """
    import torch
    from torch.nn.functional import binary_cross_entropy_with_logits

    from runtime.dense.optimizer import make_optimizer
    from runtime.models.inputs import Embeddings
    from runtime.rank.learner import autocast

    # Network and optimiser of ours; the embedding layer is the caller's.
    config = components.config
    model = components.learner.model
    optimizer = make_optimizer(config, model)
    device = config.engine.device
    precision = config.engine.precision
    dense = [torch.from_numpy(b.dense).to(device) for b in source.batches]

    # The first steps warm caches and allocators up.
    def measure() -> float:
        began = 0.0
        loss = torch.zeros((), device=device)

        # The batches go round; the first steps of a window are not timed.
        for number in range(config.steps):
            if number == skip:
                loss.item()  # on a GPU: the steps before are not only asked for, but done
                began = time.perf_counter()
            at, labels = source.step()
            pooled = look(at)
            if not pooled.requires_grad:
                pooled.requires_grad_()
            with autocast(device, precision):
                logits = model(dense[at], Embeddings(pooled, {}, {}))
            target = torch.from_numpy(labels).to(device)
            loss = binary_cross_entropy_with_logits(logits.float(), target)
            model.zero_grad()
            loss.backward()
            optimizer.step([p.grad for p in model.parameters()])
            step_rows()
        loss.item()  # on a GPU: wait for the last step
        return float((config.steps - skip) * config.batch / (time.perf_counter() - began))

    return measure
