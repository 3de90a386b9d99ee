"""Batches on their way to the device of the dense network, and gradients on their way back.

With a GPU the rows stay in host memory. A batch goes through pinned memory on a stream of its own
while the device still computes earlier ones, and gradients come back on a third stream.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from runtime.data.batch import Batch
from runtime.embedding.batch_rows import FieldVectors
from runtime.models.inputs import Embeddings


class Staged(NamedTuple):
    """One batch at the device, or on its way there."""

    dense: Tensor
    """[B, D]"""
    labels: Tensor
    """[B, T]"""
    embeddings: Embeddings
    """Leaves, whose gradients go back to the rows."""
    sent: Any = None
    """The event after which it is there; None: it is."""


class Coming(NamedTuple):
    """Gradients on their way to the host."""

    vectors: FieldVectors
    """Not to be read before `wait` has returned, nor behind `release`."""
    wait: Callable[[], None]
    is_here: Callable[[], bool]
    release: Callable[[], None]
    facts: np.ndarray | None
    """The scalars beside them, as float64; of a buffer of their own."""
    release_facts: Callable[[], None]


StreamName = Literal["compute", "upload", "download"]


class HostStaging:
    """Host and device are one memory: nothing moves."""

    allocate = None

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self._device = device
        self._dtype = dtype

    def send(self, batch: Batch, vectors: FieldVectors) -> Staged:
        """Start a batch on its way: views, converted only where the dtype differs."""
        sequences = {n: self._to(a).requires_grad_() for n, a in vectors.sequences.items()}
        masks = {n: torch.from_numpy(m).to(self._device) for n, m in vectors.masks.items()}
        pooled = self._to(vectors.pooled).requires_grad_()
        # A copy, whoever's model works in place: the samples are those of evaluations to come, too.
        dense = self._to(batch.dense.copy())
        return Staged(dense, self._to(batch.labels), Embeddings(pooled, sequences, masks))

    def arrive(self, staged: Staged) -> None:
        """Before the batch is computed with: it is there."""

    @contextmanager
    def receive(self, embeddings: Embeddings) -> Iterator[FieldVectors]:
        """After the backward pass: the leaves' gradients, where they are."""
        sequences = {n: _gradient(t).cpu().numpy() for n, t in embeddings.sequences.items()}
        yield FieldVectors(_gradient(embeddings.pooled).cpu().numpy(), sequences, {})

    def _to(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self._device, self._dtype)


class StreamStaging:
    """Copies through pinned memory on streams of their own."""

    def __init__(self, dtype: torch.dtype, streams: CudaStreams) -> None:
        self._dtype = dtype
        self._streams = streams
        self._pinned = _PinnedPool(streams)
        self._array_dtype = torch.empty(0, dtype=dtype).numpy().dtype
        self._filled: dict[int, Tensor] = {}  # buffers of `allocate`, by address

    def allocate(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
        """Pinned memory, which `send` copies from as it is; it must be sent."""
        if dtype != self._array_dtype or not math.prod(shape):
            return np.empty(shape, dtype)
        buffer = self._pinned.take(torch.Size(shape), self._dtype)
        self._filled[buffer.data_ptr()] = buffer
        array: np.ndarray = buffer.numpy()
        return array

    def send(self, batch: Batch, vectors: FieldVectors) -> Staged:
        """Copies that run while the device computes; returns at once."""
        buffers: list[Tensor] = []

        def upload(array: np.ndarray, dtype: torch.dtype) -> Tensor:
            source = torch.from_numpy(array)
            buffer = self._filled.pop(source.data_ptr(), None)
            if buffer is None:
                buffer = self._pinned.take(source.shape, dtype)
                buffer.copy_(source)
            buffers.append(buffer)
            target = self._streams.empty("upload", buffer.shape, dtype)
            self._streams.copy("upload", target, buffer)
            return target

        # Copies are queued on a stream of their own, so that they run beside the computation.
        dense = upload(batch.dense, self._dtype)
        labels = upload(batch.labels, self._dtype)
        pooled = upload(vectors.pooled, self._dtype)
        sequences = {n: upload(a, self._dtype) for n, a in vectors.sequences.items()}
        masks = {n: upload(m, torch.bool) for n, m in vectors.masks.items()}

        # The pinned buffers may be used again when this instant of the stream has passed.
        sent = self._streams.record("upload")
        for buffer in buffers:
            self._pinned.give(buffer, sent)

        # The vectors are leaves: their gradients are what goes back to the rows.
        for leaf in (pooled, *sequences.values()):
            leaf.requires_grad_()
        return Staged(dense, labels, Embeddings(pooled, sequences, masks), sent)

    def arrive(self, staged: Staged) -> None:
        """The compute stream waits for the copies, the host does not."""
        self._streams.wait("compute", staged.sent)
        pooled, sequences, masks = staged.embeddings
        for tensor in (staged.dense, staged.labels, pooled, *sequences.values(), *masks.values()):
            self._streams.share("compute", tensor)

    @contextmanager
    def receive(self, embeddings: Embeddings) -> Iterator[FieldVectors]:
        """The host waits for the copies of these gradients and for nothing else."""
        coming = self.begin_receiving(embeddings)
        coming.wait()
        try:
            yield coming.vectors
        finally:
            coming.release()

    def begin_receiving(self, embeddings: Embeddings, *facts: Tensor) -> Coming:
        """After the backward pass: the copies of these gradients, and of scalars beside them, set
        out; the host goes on."""
        # All of them before the event: the zeros of an input that the model ignored are written by
        # the compute stream, too, and a copy that waits for an older event may overtake it.
        of_pooled = _gradient(embeddings.pooled)
        of_sequences = {n: _gradient(t) for n, t in embeddings.sequences.items()}
        stacked = torch.stack([fact.detach().double() for fact in facts]) if facts else None
        self._streams.wait("download", self._streams.record("compute"))
        buffers: list[Tensor] = []

        def download(gradient: Tensor) -> np.ndarray:
            buffer = self._pinned.take(gradient.shape, gradient.dtype)
            buffers.append(buffer)
            self._streams.copy("download", buffer, gradient)
            self._streams.share("download", gradient)
            array: np.ndarray = buffer.numpy()
            return array

        # The copies are queued; one event behind the last of them says that all are here.
        pooled = download(of_pooled)
        sequences = {n: download(g) for n, g in of_sequences.items()}
        facts_here = None if stacked is None else download(stacked)
        received = self._streams.record("download")
        of_rows = buffers if facts_here is None else buffers[:-1]

        # Rows and facts lie in buffers of their own, as they are given back at different times.
        def release(returned: list[Tensor]) -> None:
            for buffer in returned:
                self._pinned.give(buffer, received)

        return Coming(
            FieldVectors(pooled, sequences, {}),
            wait=lambda: self._streams.synchronize(received),
            is_here=lambda: self._streams.has_happened(received),
            release=lambda: release(of_rows),
            facts=facts_here,
            release_facts=lambda: release(buffers[len(of_rows) :]),
        )


class _PinnedPool:
    """Pinned buffers to use again: to make one is a slow call that stops the device."""

    def __init__(self, streams: CudaStreams) -> None:
        self._streams = streams
        self._free: dict[tuple[torch.Size, torch.dtype], list[tuple[Tensor, Any]]] = {}
        self._lock = threading.Lock()

    def take(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """A buffer that no copy uses any more."""
        with self._lock:
            free = self._free.get((shape, dtype))
            free_one = free.pop(0) if free else None
        if free_one is None:
            return self._streams.pinned(shape, dtype)
        buffer, last_use = free_one
        self._streams.synchronize(last_use)
        return buffer

    def give(self, buffer: Tensor, last_use: Any) -> None:
        """``last_use``: the event after which the buffer may be overwritten."""
        with self._lock:
            self._free.setdefault((buffer.shape, buffer.dtype), []).append((buffer, last_use))


def _gradient(leaf: Tensor) -> Tensor:
    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad


class CudaStreams:
    """What staging needs of a device: work on one stream runs in order, streams run side by side.

    Nothing here waits for the whole device: one stream waits for an event of another, and the
    host for one event. ``compute`` is the calling thread's current stream.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._upload = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._download = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def pinned(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """Page-locked host memory: the device copies from and to it without a detour."""
        return torch.empty(shape, dtype=dtype, pin_memory=True)

    def empty(self, stream: StreamName, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """Device memory that is first used on ``stream``, of its own pool in torch's allocator."""
        with torch.cuda.stream(self._named(stream)):
            return torch.empty(shape, dtype=dtype, device=self._device)

    def copy(self, stream: StreamName, target: Tensor, source: Tensor) -> None:
        """Copy when the stream gets there; returns at once."""
        with torch.cuda.stream(self._named(stream)):
            target.copy_(source, non_blocking=True)

    def share(self, stream: StreamName, tensor: Tensor) -> None:
        """``stream`` uses the tensor, too: its memory is not reused before that is over."""
        tensor.record_stream(self._named(stream))

    def record(self, stream: StreamName) -> torch.cuda.Event:
        """An event that happens when the stream has done all its work up to now."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._named(stream))
        return event

    def wait(self, stream: StreamName, event: torch.cuda.Event) -> None:
        """Later work of the stream starts after the event; the host does not wait."""
        self._named(stream).wait_event(event)

    def has_happened(self, event: torch.cuda.Event) -> bool:
        """Whether the stream has got there; nobody waits."""
        return bool(event.query())  # type: ignore[no-untyped-call]

    def synchronize(self, event: torch.cuda.Event) -> None:
        """Block the host until the event has happened."""
        event.synchronize()

    def _named(self, stream: StreamName) -> torch.cuda.Stream:
        if stream == "upload":
            return self._upload
        if stream == "download":
            return self._download
        return torch.cuda.current_stream(self._device)


def open_staging(device: torch.device, dtype: torch.dtype) -> HostStaging | StreamStaging:
    """The staging for a device and the dense network's dtype; safe for any number of threads."""
    if device.type == "cuda":
        return StreamStaging(dtype, CudaStreams(device))
    return HostStaging(device, dtype)
