"""The streams of a CUDA device on which copies run beside the computation."""

from __future__ import annotations

from typing import Any, Literal, Protocol

import torch
from torch import Tensor

StreamName = Literal["compute", "upload", "download"]


class CopyStreams(Protocol):
    """What staging needs of a device; work on one stream runs in order, streams run side by side.

    Nothing here waits for the whole device: one stream waits for an event of another, and the
    host for one event.
    """

    def pinned(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """Host memory that the device copies from and to without a detour."""

    def empty(self, stream: StreamName, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """Device memory that is first used on ``stream``."""

    def copy(self, stream: StreamName, target: Tensor, source: Tensor) -> None:
        """Copy when the stream gets there; returns at once."""

    def share(self, stream: StreamName, tensor: Tensor) -> None:
        """``stream`` uses the tensor, too: its memory is not reused before that is over."""

    def record(self, stream: StreamName) -> Any:
        """An event that happens when the stream has done all its work up to now."""

    def wait(self, stream: StreamName, event: Any) -> None:
        """Later work of the stream starts after the event."""

    def synchronize(self, event: Any) -> None:
        """Block the host until the event has happened."""


class CudaStreams:
    """`CopyStreams` of one CUDA device; ``compute`` is the calling thread's current stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._upload = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._download = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def pinned(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """Page-locked host memory."""
        return torch.empty(shape, dtype=dtype, pin_memory=True)

    def empty(self, stream: StreamName, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """Memory of the stream's own pool in torch's allocator."""
        with torch.cuda.stream(self._named(stream)):
            return torch.empty(shape, dtype=dtype, device=self._device)

    def copy(self, stream: StreamName, target: Tensor, source: Tensor) -> None:
        """An asynchronous copy."""
        with torch.cuda.stream(self._named(stream)):
            target.copy_(source, non_blocking=True)

    def share(self, stream: StreamName, tensor: Tensor) -> None:
        """Tell torch's allocator."""
        tensor.record_stream(self._named(stream))

    def record(self, stream: StreamName) -> torch.cuda.Event:
        """A CUDA event."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._named(stream))
        return event

    def wait(self, stream: StreamName, event: torch.cuda.Event) -> None:
        """The stream waits, the host does not."""
        self._named(stream).wait_event(event)

    def synchronize(self, event: torch.cuda.Event) -> None:
        """The host waits for this event only."""
        event.synchronize()

    def _named(self, stream: StreamName) -> torch.cuda.Stream:
        if stream == "upload":
            return self._upload
        if stream == "download":
            return self._download
        return torch.cuda.current_stream(self._device)
