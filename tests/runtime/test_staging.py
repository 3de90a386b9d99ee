"""Copies on streams: the same bytes as without, whenever the device does them.

`LateStreams` stands in for a GPU: a copy happens only when something waits for it, as late as a
device may do it, and until then its target is not a number. A wait that is missing, or a pinned
buffer that is used again too early, shows in the result. `EagerStreams` is its opposite: a download
happens as early as its waits allow, so what was computed after the event it waits for is not there.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode

from persia_sim.base.vocabulary import Mode
from runtime.data.batch import Batch, Field, Layout
from runtime.data.source import rebatch
from runtime.embedding.batch_rows import FieldVectors
from runtime.executors import threads as threads_module
from runtime.executors.threads import ConcurrentRun
from runtime.rank import learner as learner_module
from runtime.rank.components import assemble
from runtime.rank.learner import NonFiniteError
from runtime.rank.staging import HostStaging, StreamName, StreamStaging
from tests.runtime.worlds import ArraySource, assert_same_bytes, changed, config, run


class Event(NamedTuple):
    stream: StreamName
    work: int


class LateStreams:
    def __init__(self) -> None:
        self.pinned_buffers = 0
        self._mine = threading.local()  # computed: whether what "download" copies is there by then
        self._lock = threading.RLock()
        self._queues: dict[StreamName, list[Callable[[], object]]] = {
            "upload": [],
            "download": [],
            "compute": [],
        }
        self._done: dict[StreamName, int] = dict.fromkeys(self._queues, 0)

    def pinned(self, shape, dtype):
        self.pinned_buffers += 1
        return torch.zeros(shape, dtype=dtype)

    def empty(self, stream, shape, dtype):
        return poison(torch.empty(shape, dtype=dtype))

    def copy(self, stream, target, source):
        poison(target)
        if stream == "download" and not getattr(self._mine, "computed", False):
            return
        with self._lock:
            self._queues[stream].append(lambda: target.detach().copy_(source.detach()))

    def share(self, stream, tensor):
        pass

    def record(self, stream):
        if stream == "download":
            self._mine.computed = False
        with self._lock:
            return Event(stream, len(self._queues[stream]))

    def wait(self, stream, event):
        with self._lock:
            if stream == "download":
                self._mine.computed = True
            if stream == "compute":  # the host computes here, so it is at its end already
                self.synchronize(event)
            else:
                self._queues[stream].append(lambda: self.synchronize(event))

    def has_happened(self, event):
        with self._lock:
            return self._done[event.stream] >= event.work

    def synchronize(self, event):
        with self._lock:
            while self._done[event.stream] < event.work:
                work = self._queues[event.stream][self._done[event.stream]]
                self._done[event.stream] += 1
                work()


class EagerStreams(TorchFunctionMode):
    """Downloads that run the moment their waits allow; sees the calling thread's torch calls."""

    def __init__(self) -> None:
        super().__init__()
        self._computed = 0
        self._made_by: dict[int, tuple[torch.Tensor, int]] = {}
        self._waited_for = {"upload": 0, "download": 0, "compute": 0}
        self.shared: list[tuple[StreamName, torch.Tensor]] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        looks_only = getattr(func, "__name__", "") == "__get__"  # of an attribute, such as .grad
        if isinstance(found, torch.Tensor) and not looks_only:
            self._computed += 1
            self._made_by[id(found)] = found, self._computed  # kept, so that no id comes twice
        return found

    def pinned(self, shape, dtype):
        return torch.zeros(shape, dtype=dtype)

    def empty(self, stream, shape, dtype):
        return torch.zeros(shape, dtype=dtype)

    def copy(self, stream, target, source):
        made = self._made_by.get(id(source), (None, 0))[1]
        there = stream != "download" or made <= self._waited_for["download"]
        if there:
            target.detach().copy_(source.detach())
        else:
            poison(target)

    def share(self, stream, tensor):
        self.shared.append((stream, tensor))

    def record(self, stream):
        return Event(stream, self._computed)

    def wait(self, stream, event):
        if event.stream == "compute":
            self._waited_for[stream] = max(self._waited_for[stream], event.work)

    def has_happened(self, event):
        return True

    def synchronize(self, event):
        pass


def poison(tensor):
    return tensor.fill_(torch.nan) if tensor.is_floating_point() else tensor.fill_(True)


def trained(monkeypatch, streams, **changes):
    def stage(device, dtype):
        return HostStaging(device, dtype) if streams is None else StreamStaging(dtype, streams)

    monkeypatch.setattr(learner_module, "open_staging", stage)
    return run(config(**changes), WithSequence(200))


@pytest.mark.parametrize("mode", [Mode.SYNC, Mode.LOOKAHEAD])
@pytest.mark.parametrize("executor", ["constant_lag", "concurrent"])
def test_training_gives_the_same_bytes_with_copies_as_late_as_may_be(monkeypatch, mode, executor):
    changes = {"mode": mode, "executor": executor, "precision": "bfloat16"}
    changes |= {"ranks": 2, "row_gradients": "sum"}
    plain = trained(monkeypatch, None, **changes)
    late = trained(monkeypatch, LateStreams(), **changes)
    assert_same_bytes(plain, late)


def test_hybrid_with_three_threads_a_rank_stays_finite_and_reuses_its_pinned_buffers(monkeypatch):
    streams = LateStreams()
    world = trained(
        monkeypatch, streams, mode=Mode.HYBRID, executor="concurrent", ranks=2, queue_batches=2
    )
    assert all(np.isfinite(array).all() for array in world.state().values())
    # 4 arrays a batch (a short last batch has its own), at most 2 + 2 + 3 batches in flight a rank.
    assert streams.pinned_buffers <= 2 * 4 * 2 * 7


class WatchedStreams(LateStreams):
    """Notes which thread had to wait for a download."""

    def __init__(self) -> None:
        super().__init__()
        self.waited: set[str] = set()

    def synchronize(self, event):
        if event.stream == "download" and not self.has_happened(event):
            self.waited.add(threading.current_thread().name)
        super().synchronize(event)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_the_training_thread_of_hybrid_never_waits_for_the_device(monkeypatch, precision):
    """Loss, finite check and gradients are waited for where rows are written."""
    streams = WatchedStreams()
    chosen = {"mode": Mode.HYBRID, "executor": "concurrent", "tau": 2, "precision": precision}
    world = trained(monkeypatch, streams, **chosen)
    assert streams.waited == {"push-0"}
    assert len(world.meter.losses) == 9 and np.isfinite(world.meter.losses).all()


class Broken(ArraySource):
    """One dense feature of the third batch is no number."""

    def chunks(self, part):
        for number, batch in enumerate(rebatch(super().chunks(part), 24)):
            if number == 2:
                batch.dense[0, 0] = np.nan
            yield batch


@pytest.mark.parametrize("mode", [Mode.SYNC, Mode.HYBRID, Mode.ASYNC, Mode.ASYNC_AVERAGING])
@pytest.mark.parametrize("executor", ["constant_lag", "concurrent"])
def test_a_loss_that_is_no_number_is_refused_though_it_is_read_late(monkeypatch, mode, executor):
    monkeypatch.setattr(
        learner_module, "open_staging", lambda device, dtype: StreamStaging(dtype, LateStreams())
    )
    with pytest.raises(NonFiniteError, match="loss nan or a gradient is not finite at rank 0, st"):
        run(config(mode=mode, executor=executor, **AVERAGE.get((mode, executor), {})), Broken(200))


AVERAGE = {
    (Mode.ASYNC_AVERAGING, "constant_lag"): {"average_every_steps": 2},
}


def test_steps_that_may_be_left_out_are_decided_upon_at_once(monkeypatch):
    """Nothing of them may reach rows or weights."""
    skipping = {"mode": Mode.SYNC, "nonfinite": "skip"}
    monkeypatch.setattr(
        learner_module, "open_staging", lambda device, dtype: StreamStaging(dtype, LateStreams())
    )
    late = run(config(**skipping), Broken(200))
    monkeypatch.undo()
    assert late.meter.batches_skipped == 1
    assert_same_bytes(run(config(**skipping), Broken(200)), late)


def test_a_pinned_buffer_is_not_overwritten_before_its_copy_is_done():
    staging = StreamStaging(torch.float32, LateStreams())

    def send(value: float):
        array = np.full((3, 2), value, np.float32)
        batch = Batch(np.zeros(3, np.uint64), None, array, array[:, :1].copy())
        return staging.send(batch, FieldVectors(array, {}, {}))

    sent = [send(float(k)) for k in range(5)]
    for k, staged in reversed(list(enumerate(sent))):
        staging.arrive(staged)
        assert torch.equal(staged.embeddings.pooled, torch.full((3, 2), float(k)))
        assert torch.equal(staged.dense, torch.full((3, 2), float(k)))


def test_vectors_are_pooled_into_the_pinned_memory_that_is_copied():
    streams = LateStreams()
    staging = StreamStaging(torch.float32, streams)
    pooled = staging.allocate((3, 2), np.dtype(np.float32))
    other = np.zeros((3, 1), np.float32)
    staged = staging.send(
        Batch(np.zeros(3, np.uint64), None, other, other), FieldVectors(pooled, {}, {})
    )
    assert streams.pinned_buffers == 3  # with those of dense features and labels
    pooled[...] = 7  # nothing lies between it and the device, whose copy comes late
    staging.arrive(staged)
    assert (staged.embeddings.pooled == 7).all()
    assert staging.allocate((3, 2), np.dtype(np.float32)) is not pooled
    assert streams.pinned_buffers == 3
    assert staging.allocate((0, 2), np.dtype(np.float32)).size == 0  # a batch without samples
    assert staging.allocate((3, 2), np.dtype(np.float64)).dtype == np.float64
    assert streams.pinned_buffers == 3


def test_ten_batches_in_turn_need_the_pinned_buffers_of_one():
    streams = LateStreams()
    staging = StreamStaging(torch.float32, streams)
    needed = []
    for _ in range(10):
        array = np.ones((3, 2), np.float32)
        batch = Batch(np.zeros(3, np.uint64), None, array, array[:, :1].copy())
        staged = staging.send(batch, FieldVectors(array, {}, {}))
        staging.arrive(staged)
        staged.embeddings.pooled.sum().backward()
        with staging.receive(staged.embeddings):
            pass
        needed.append(streams.pinned_buffers)
    # dense and pooled, labels, and (of the shape of pooled) the gradient on its way back
    assert needed == [needed[0]] * 10
    assert needed[0] <= 4


class WithSequence(ArraySource):
    @property
    def layout(self):
        fields = (Field(name="user"), Field(name="item"),
                  Field(name="tags", pooling="sequence", max_length=3))  # fmt: skip
        return Layout(fields=fields, dense=("age", "price"), tasks=("click", "buy"))


def test_every_thread_of_a_rank_enters_its_device(monkeypatch):
    """Else it would open a context on GPU 0."""
    entered: dict[str, str] = {}

    def enter(device):
        entered[threading.current_thread().name] = device

    monkeypatch.setattr(threads_module, "enter_device", enter)
    run(config(mode=Mode.HYBRID, executor="concurrent", ranks=2), ArraySource(100))
    assert entered == {f"{t}-{r}": "cpu" for t in ("fetch", "train", "push") for r in (0, 1)}


@pytest.mark.parametrize("mode", [Mode.SYNC, Mode.LOOKAHEAD, Mode.HYBRID, Mode.ASYNC])
def test_beside_a_gpu_the_kernels_of_the_rows_have_all_threads_in_every_mode(monkeypatch, mode):
    """One thread feeds less than a GPU trains; on a CPU the others compute the network."""
    asked = []
    monkeypatch.setattr(threads_module, "use_threads", asked.append)
    chosen = config(mode=mode, executor="concurrent", ranks=2, threads=3, steps=2)
    for device in ("cuda", "cpu"):
        components = assemble(chosen, ArraySource(100))
        ConcurrentRun(replace(components, config=changed(chosen, device=device))).run()
    assert asked == [3, 1]
