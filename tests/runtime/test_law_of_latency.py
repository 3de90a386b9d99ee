"""Law 15: latency is hidden by the window, exposed in sync and in lookahead that re-reads.

What is asserted holds on a busy machine, too: how many messages are on their way at once, and
lower bounds that no speed can beat. `persia-experiments bench-engines` measures the rest.
"""

from __future__ import annotations

import time

import pytest

from persia_sim.base.staleness import staleness_in_steps
from persia_sim.base.vocabulary import Mode
from runtime.executors.threads import Pipe
from runtime.stop import Stop
from tests.runtime.worlds import ArraySource, config, on_engine, run

LATENCY_S = 0.03


def seconds(steps: int, latency_s: float = LATENCY_S, **changes) -> float:
    source = ArraySource(24 * steps)
    began = time.monotonic()
    world = run(config(executor="concurrent", latency_s=latency_s, **changes), source)
    assert world.meter.updates == steps
    return time.monotonic() - began


@pytest.mark.first_case
@pytest.mark.parametrize("tau", [1, 4, 16])
@pytest.mark.parametrize(
    ("mode", "engine"),
    [
        (Mode.HYBRID, "threads"), (Mode.RAW_HYBRID, "threads"), (Mode.HYBRID, "processes"),
        (Mode.HYBRID, "workers"),
    ],
)  # fmt: skip
@pytest.mark.law15
def test_a_window_of_tau_has_tau_and_one_batches_on_their_way(mode, engine, tau):
    """A lookup starts when the window opens, tau steps late; never later, nor always earlier.

    The first wave starts with nothing to wait for, so only what comes after it is looked at.
    On a busy machine threads wake late, and a longer latency gives them more time.
    """
    for latency_s in (0.04, 0.2, 1.0, 2.0):
        chosen = config(mode=mode, tau=tau, ranks=2, latency_s=latency_s, **on_engine(engine))
        stale = staleness_in_steps(run(chosen, ArraySource(24 * (3 * tau + 6))).trace)
        latest = stale.oldest_missing_steps[stale.step > tau].max()
        assert latest <= tau
        if latest == tau:
            return
    assert latest == tau


@pytest.mark.parametrize(
    ("exposed", "hidden", "chosen"),
    [
        (2, 0, {}), (2, 1, {"mode": Mode.LOOKAHEAD, "ahead": 4}),
        (0, 2, {"mode": Mode.HYBRID, "tau": 0}), (0, 2, {"mode": Mode.RAW_HYBRID, "tau": 4}),
        (0, 2, {"mode": Mode.ASYNC, "tau": 4}),
    ],
)  # fmt: skip
@pytest.mark.law15
def test_each_message_of_a_batch_has_its_latency_once(exposed, hidden, chosen, monkeypatch):
    """What a rank waits for, and what travels while it goes on; a latency paid twice is seen."""
    told: dict[str, list[float]] = {"exposed": [], "hidden": []}
    sleep, put = Stop.sleep, Pipe.put

    def slept(stop, seconds):
        told["exposed"] += [seconds] if seconds >= 1e-3 else []  # less is a pipe's rest of a delay
        sleep(stop, seconds)

    def sent(pipe, item, delay_s=0.0):
        told["hidden"] += [delay_s] if delay_s else []
        put(pipe, item, delay_s)

    monkeypatch.setattr(Stop, "sleep", slept)
    monkeypatch.setattr(Pipe, "put", sent)
    seconds(6, latency_s=1e-3, **chosen)
    assert told == {"exposed": [1e-3] * 6 * exposed, "hidden": [1e-3] * 6 * hidden}


@pytest.mark.law15
def test_a_wide_window_hides_most_of_the_latency():
    """2 L a step in sync, 2 L / 9 with tau 8; asked for is a factor of two, not of nine.

    Nothing but latency takes long on a machine with time; on a busy one, where L is long.
    """
    hidden = (
        seconds(24, latency_s, mode=Mode.HYBRID, tau=8) < 0.5 * 24 * 2 * latency_s
        for latency_s in (LATENCY_S, 0.3, 3.0)
    )
    assert any(hidden)


def test_a_pipe_keeps_order_and_lets_delays_run_side_by_side():
    for delay_s in (0.2, 2.0, 20.0):  # the longer ones on a busy machine only
        pipe: Pipe[int] = Pipe("taker", 8, Stop())
        began = time.monotonic()
        for item in range(8):
            pipe.put(item, delay_s)
        assert [pipe.get() for _ in range(8)] == list(range(8))
        took_s = time.monotonic() - began
        assert took_s >= delay_s
        if took_s < 6 * delay_s:
            return
    assert took_s < 6 * delay_s  # 8 times one after the other
