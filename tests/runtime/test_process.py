"""Every process and thread of a run takes denormals as zero (docs/laws.md, law 6)."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from experiments.result_cache import computed
from runtime.embedding.config import RowOptimizer
from runtime.embedding.native.extension import native
from tests.runtime.worlds import ENGINES, ArraySource, config, on_engine, run

THREADS = """
import threading
import numpy as np
import torch

torch.set_num_threads(2)
tiny = torch.full((1 << 20,), 1e-30)

def kept():
    "Whether the first and the last element, which two threads compute, are denormals."
    bits = (tiny * 1e-10).view(torch.int32)
    small = np.full(9, 1e-30, np.float32) * np.float32(1e-10)
    return bool(bits[0]), bool(bits[-1]), bool(small.view(np.int32).any())

print(kept())  # a pool of threads is there from now on
from runtime.process import enter_process
from runtime.embedding.native.extension import native
print(native.flushes_denormals())
enter_process()
print(native.flushes_denormals(), kept())
thread = threading.Thread(target=lambda: print(native.flushes_denormals(), kept()))
thread.start()
thread.join()
"""


def test_all_threads_of_a_process_flush_also_those_of_a_pool_that_was_there():
    done = subprocess.run([sys.executable, "-c", THREADS], capture_output=True, text=True)
    assert done.stdout.splitlines() == [
        "(True, True, True)",
        "False",
        "True (False, False, False)",
        "True (False, False, False)",
    ], done.stderr


class Faint(ArraySource):
    """Samples that weigh so little that the squares of their gradients are denormals."""

    def __init__(self, samples: int) -> None:
        super().__init__(samples)
        weight = np.full((samples, 1), 1e-18, np.float32)
        self._all = replace(self._all, labels=np.hstack([self._all.labels, weight]))

    @property
    def layout(self):
        return replace(super().layout, weighted=True)


def denormals(state: dict[str, np.ndarray]) -> dict[str, int]:
    tiny = np.finfo(np.float32).tiny
    found = {}
    for name, array in state.items():
        if array.dtype == np.float32:
            bits = array.view(np.uint32) & 0x7FFFFFFF
            found[name] = int(((bits > 0) & (bits < tiny.view(np.uint32))).sum())
    return found


@pytest.mark.parametrize("engine", ["constant_lag", *ENGINES])
def test_no_engine_leaves_a_denormal_behind(engine):
    """Adagrad adds up squares: 1e-40 and the like without the flush, in whichever process."""
    chosen = config(ranks=2, optimizer=RowOptimizer(kind="adagrad", lr=0.1), **on_engine(engine, 2))
    world = run(chosen, Faint(200))
    found = denormals(world.state())
    assert sum(array.size for name, array in world.state().items() if name.endswith("state")) > 0
    assert {name: count for name, count in found.items() if count} == {}


def flushes() -> bool:
    return native.flushes_denormals()


def test_processes_of_a_sweep_flush():
    assert dict(computed({"a": flushes, "b": flushes}, jobs=2)) == {"a": True, "b": True}


def test_training_leaves_the_arithmetic_of_its_caller_alone():
    run(config(), ArraySource(30))
    assert not native.flushes_denormals()
