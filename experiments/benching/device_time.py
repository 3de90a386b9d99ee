"""Where the time of a window goes: how busy the device was, and how long the host waited for it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple


def profiled(
    measure: Callable[[], float], steps: int, device: str, trace: Path | None
) -> dict[str, float]:
    """Shares of one window, the host's clock around it; on a CPU its operations are the device."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    # One window under the profiler, all threads.
    on_gpu = device != "cpu"
    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    everyone = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    with profile(activities=kinds, experimental_config=everyone) as profiler:
        began = time.perf_counter()
        measure()
        if on_gpu:
            torch.cuda.synchronize(device)
        wall_s = time.perf_counter() - began
    if trace is not None:
        trace.parent.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(trace))

    # When the device worked, and how long the host waited for it.
    of_device = "DeviceType.CUDA" if on_gpu else "DeviceType.CPU"
    events = [
        Event(
            e.name, str(e.device_type) == of_device, e.thread, e.time_range.start, e.time_range.end
        )
        for e in profiler.events()
    ]
    return shares_of(events, wall_s, steps)


class Event(NamedTuple):
    """An operation of the device, or of a thread of the host, in a profile; in microseconds."""

    name: str
    of_device: bool
    thread: int
    start: float
    end: float


def shares_of(events: Sequence[Event], wall_s: float, steps: int) -> dict[str, float]:
    """How busy the device was, and how long the thread that trains waited for it.

    Copies are no work of it: while nothing else runs, it is idle. A wait of another thread, as that
    of a push for its gradients, stalls nobody.
    """
    work = [(e.start, e.end) for e in events if e.of_device and not e.name.startswith("Mem")]
    busy_s = covered(work) / 1e6
    trains = {e.thread for e in events if e.name in ("aten::linear", "aten::addmm")}
    waits = [e for e in events if e.name.endswith("Synchronize")]
    of_training = [e.end - e.start for e in waits if e.thread in trains]
    return {
        "wall_s": wall_s,
        "busy_share": busy_s / wall_s,
        "idle_ms_per_step": (wall_s - busy_s) * 1e3 / steps,
        "wait_ms_per_step": sum(of_training) / 1e3 / steps,
        "waits_per_step": len(of_training) / steps,
        "others_wait_ms_per_step": (
            sum(e.end - e.start for e in waits if e.thread not in trains) / 1e3 / steps
        ),
    }


def covered(spans: list[tuple[float, float]]) -> float:
    """The length that spans cover together.

    >>> covered([(0, 2), (1, 3), (5, 6)])
    4.0
    """
    total = 0.0
    end = float("-inf")
    for start, stop in sorted(spans):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total
