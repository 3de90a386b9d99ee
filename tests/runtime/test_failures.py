"""A failure anywhere ends the run at once, with its own words, in every mode."""

from __future__ import annotations

import time

import pytest

from persia_sim.base.vocabulary import Mode
from runtime.dense.optimizer import FunctionalOptimizer
from runtime.executors.threads import CARRIES, ConcurrentRun
from runtime.rank.components import assemble
from tests.runtime.hosts.test_faults import in_thread
from tests.runtime.worlds import ArraySource, config

SOURCE = ArraySource(300)


def bounded(work, seconds: float = 120.0):
    """The error of ``work``, which must end by itself."""
    thread, found = in_thread(work)
    thread.join(seconds)
    assert not thread.is_alive(), "the run hangs"
    return found[0] if found else None


@pytest.mark.parametrize("mode", [mode for mode in Mode if mode.rules in CARRIES])
@pytest.mark.parametrize("ranks", [1, 3])
def test_an_error_while_a_snapshot_is_evaluated_ends_the_run(mode, ranks):
    """Evaluation runs inside the dense update, where all other ranks wait."""
    components = assemble(config(mode=mode, ranks=ranks, executor="concurrent"), SOURCE)

    def full_disk(updates, samples, model):
        raise OSError("no space left under metrics.jsonl")

    components.meter.start(every=3, evaluate=full_disk)
    error = bounded(ConcurrentRun(components).run)
    assert isinstance(error, OSError)
    assert "no space left" in str(error)


@pytest.mark.parametrize("mode", [m for m in Mode if m.has_barrier])
@pytest.mark.parametrize("ranks", [1, 3])
def test_an_error_of_the_dense_optimiser_ends_the_run(mode, ranks, monkeypatch):
    def out_of_memory(optimizer, gradients):
        raise MemoryError("dense step")

    monkeypatch.setattr(FunctionalOptimizer, "step", out_of_memory)
    components = assemble(config(mode=mode, ranks=ranks, executor="concurrent"), SOURCE)
    assert isinstance(bounded(ConcurrentRun(components).run), MemoryError)


@pytest.mark.parametrize("verb", ["read", "refresh", "update"])
@pytest.mark.parametrize("mode", [Mode.SYNC, Mode.LOOKAHEAD, Mode.HYBRID, Mode.ASYNC])
def test_an_error_under_a_servers_lock_ends_the_run(mode, verb):
    if verb == "refresh" and not mode.prefetches_rows:
        pytest.skip("only lookahead refreshes")
    components = assemble(config(mode=mode, ranks=3, shards=2, executor="concurrent"), SOURCE)
    rows = components.store.servers[1].rows
    plain, calls = getattr(rows, verb), []

    def fails_later(*arguments):
        calls.append(1)
        if len(calls) > 7:
            raise MemoryError(f"no memory for {verb}")
        return plain(*arguments)

    setattr(rows, verb, fails_later)
    error = bounded(ConcurrentRun(components).run)
    assert isinstance(error, MemoryError)


def test_a_second_run_in_the_same_process_starts_afresh_after_a_failure():
    components = assemble(config(mode=Mode.HYBRID, ranks=2, executor="concurrent"), SOURCE)
    components.meter.start(every=1, evaluate=lambda u, s, m: 1 / 0)
    assert isinstance(bounded(ConcurrentRun(components).run), ZeroDivisionError)
    again = assemble(config(mode=Mode.HYBRID, ranks=2, executor="concurrent"), SOURCE)
    again.meter.start()
    assert bounded(ConcurrentRun(again).run) is None
    assert again.meter.samples == 300


@pytest.mark.parametrize("mode", [Mode.SYNC, Mode.LOOKAHEAD, Mode.HYBRID])
def test_a_stop_is_heard_while_messages_travel(mode):
    """A minute of injected latency; the run ends within a moment of being stopped."""
    components = assemble(config(mode=mode, ranks=2, executor="concurrent", latency_s=60.0), SOURCE)
    components.meter.start()
    thread, errors = in_thread(ConcurrentRun(components).run)
    time.sleep(0.3)
    components.stop.set(None)
    thread.join(50)  # less than the latency
    assert not thread.is_alive() and not errors
