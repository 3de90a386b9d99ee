"""Law 15 with the delay on the wire, in every engine whose rows lie behind one.

What is asserted is how many lookups are on their way at once: a step of a round trip each is ten
times what the law allows. Where the machine is busy the wire is made slower until that shows.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from experiments.validating.slow_wire import Wire, slow_wire
from persia_sim.base.staleness import staleness_in_steps
from persia_sim.base.vocabulary import Mode
from runtime.config import TrainConfig
from runtime.hosts import row_processes
from runtime.hosts.row_processes import RowProcesses
from runtime.hosts.rows.remote_store import RemoteStore
from runtime.rank.stages import RankStages
from tests.runtime.hosts.test_rank_process import on_one_host, train_one
from tests.runtime.spawned import Processes
from tests.runtime.worlds import ArraySource, TwoTables, config, host_of_servers, run


def behind(place: str) -> dict[str, Any]:
    """Options of an engine, by what its wire lies before."""
    at, secret = host_of_servers()
    found = {"executor": "concurrent", "servers": 2, "servers_at": at, "servers_secret": secret}
    return found | ({} if place == "servers" else {"workers": 1})


@contextmanager
def wired(place: str, delay_s: float, **more: Any) -> Iterator[Wire]:
    """A wire between ranks and servers, ranks and workers, or workers and servers."""
    worker_configs = row_processes._worker_configs
    with slow_wire(delay_s, **more) as wire, pytest.MonkeyPatch.context() as patch:

        def addresses(processes: RowProcesses):
            servers, *workers = (each.address for each in processes.every)
            if place == "servers":
                servers = wire.to(servers)
            if place == "workers":  # which stand beside the servers
                return [servers, *map(wire.to, workers)]
            return [servers, *workers]

        def configs(*given: Any) -> Any:
            *before, servers = given
            return worker_configs(*before, wire.to(servers))

        patch.setattr(RowProcesses, "addresses", property(addresses))
        if place == "servers of workers":
            patch.setattr(row_processes, "_worker_configs", configs)
        yield wire


def step_s(chosen: TrainConfig, steps: int, source: type[ArraySource] = ArraySource) -> float:
    """Seconds from the end of one step of rank 0 to that of the next, behind the first third."""
    ends: list[float] = []
    compute = RankStages.forward_backward

    def noted(stages: RankStages, fetched: Any) -> Any:
        computed = compute(stages, fetched)
        if computed.handle.rank == 0:
            ends.append(time.monotonic())
        return computed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RankStages, "forward_backward", noted)
        world = run(chosen, source(24 * steps))
    world.store.close()
    assert len(ends) == steps
    first = steps // 3
    return (ends[-1] - ends[first]) / (steps - 1 - first)


@functools.cache
def without_a_wire_s(place: str) -> float:
    """What a step takes in sync: computing, and what a busy machine makes of a message."""
    return min(step_s(config(mode=Mode.SYNC, **behind(place)), 20) for _ in range(3))


def assert_law_15(
    place: str,
    round_trip_s: float,
    most: int,
    window: int = 1,
    source: type[ArraySource] = ArraySource,
    **chosen: Any,
) -> None:
    """The steps of threads behind a wire, of which as many as tell."""
    settings = config(**chosen, **behind(place))
    steps = 24 if most == 1 else int(9 * most) + 3 * window

    def behind_s(wire_s: float) -> float:
        with wired(place, wire_s / 2):
            return step_s(settings, steps, source)

    assert_hidden(round_trip_s, most, behind_s, lambda: without_a_wire_s(place))


def assert_hidden(
    round_trip_s: float,
    most: float,
    behind_s: Callable[[float], float],
    without_s: Callable[[], float],
) -> None:
    """The step takes max(C, (round trip + C) / most), where ``most`` batches can be on their way.

    A push is not waited for, so a round trip is all that a batch waits. On a busy machine C is what
    it likes; where the wire is slower it matters less. ``behind_s`` says what a step takes behind a
    wire of this round trip, ``without_s`` what it takes in sync without one.
    """
    for slower in (1, 1, 4, 4, 16, 16):
        wire_s = slower * round_trip_s
        took_s = behind_s(wire_s)
        alone_s = without_s()
        law_s = max(alone_s, (wire_s + alone_s) / most)
        if 0.75 * wire_s / most <= took_s <= 1.25 * law_s:
            return
    assert 0.75 * wire_s / most <= took_s <= 1.25 * law_s, (wire_s, took_s, law_s, alone_s)


CASES = [(4, 10), (16, 10), (0, 10), (1, 10), (16, 4), (16, 1), (1, 4), (4, 1), (4, 4)]
"""tau and lookups in flight, the one to try first first."""


@pytest.mark.first_case
@pytest.mark.parametrize("round_trip_s", [0.03, 0.01])
@pytest.mark.parametrize(("tau", "lookups"), CASES)
@pytest.mark.parametrize("far", ["servers", "workers", "servers of workers"])
@pytest.mark.law15
def test_a_window_hides_a_wire(far, tau, lookups, round_trip_s):
    """Servers are on the far side, or workers with them, or the servers of a worker that is beside
    the rank."""
    chosen = {"mode": Mode.HYBRID, "tau": tau, "lookups_in_flight": lookups}
    assert_law_15(far, round_trip_s, min(tau + 1, lookups), tau, **chosen)


LATE = [
    {"mode": Mode.RAW_HYBRID, "tau": 4},
    {"mode": Mode.ASYNC, "tau": 4},
    {"mode": Mode.ASYNC_AVERAGING, "tau": 4},
    {"mode": Mode.HYBRID, "tau": None, "permits": 5},
]


@pytest.mark.long
@pytest.mark.parametrize("place", ["servers", "workers", "servers of workers"])
@pytest.mark.parametrize("chosen", LATE)
@pytest.mark.law15
def test_every_late_mode_hides_a_wire(chosen, place):
    """A permit is back when its holder has heard of the push: that is another round trip."""
    round_trips = 2 if "permits" in chosen else 1
    assert_law_15(place, 0.03, 5 / round_trips, 4, **chosen)


@pytest.mark.long
@pytest.mark.parametrize("place", ["servers", "workers", "servers of workers"])
@pytest.mark.parametrize(("fresh", "tau"), [("all", 4), ("item", 4), ("item", 1)])
@pytest.mark.law15
@pytest.mark.law19
def test_fresh_tables_wait_for_one_round_trip_and_for_no_late_rows(fresh, tau, place):
    """Whether others are late or none is. The push that they wait for travels before the
    question."""
    chosen = {"mode": Mode.HYBRID, "tau": tau, "fresh": (fresh,)}
    assert_law_15(place, 0.03, 1, source=TwoTables, **chosen)


@pytest.mark.long
@pytest.mark.parametrize(("ahead", "lookups"), [(4, 10), (16, 10), (16, 4)])
@pytest.mark.law15
def test_rows_on_lease_hide_a_wire(ahead, lookups):
    """What is written back is not waited for."""
    chosen = {"mode": Mode.LOOKAHEAD, "lookahead": "forwarded", "ahead": ahead}
    most = min(ahead + 1, lookups)
    assert_law_15("servers", 0.03, most, ahead, lookups_in_flight=lookups, **chosen)


@pytest.mark.first_case
@pytest.mark.parametrize("place", ["servers", "workers", "servers of workers"])
@pytest.mark.parametrize("tau", [4, 16])
@pytest.mark.parametrize("mode", [Mode.HYBRID, Mode.ASYNC, Mode.ASYNC_AVERAGING])
@pytest.mark.law5
@pytest.mark.law15
def test_over_a_wire_rows_are_as_late_as_the_window_says(mode, tau, place):
    """Whatever a step takes, and never more; on a busy machine a slower wire shows it."""
    for round_trip_s in (0.03, 0.3, 1.0):
        with wired(place, round_trip_s / 2):
            world = run(config(mode=mode, tau=tau, **behind(place)), ArraySource(24 * 80))
            world.store.close()
        late = staleness_in_steps(world.trace)
        assert late.oldest_missing_steps.max() <= tau
        mean = late.missing_steps[late.step > tau].mean()
        if mean > tau / 2:
            return
    assert mean > tau / 2


@pytest.mark.parametrize("lookups", [3])
def test_no_more_lookups_are_on_their_way_than_is_said(lookups, monkeypatch):
    """Asked for and not answered, of each rank and server."""
    most = 0
    answered = RemoteStore._has_answered

    def noted(store: RemoteStore, *about: Any) -> bool:
        nonlocal most
        with store._changed:
            most = max(most, *map(len, store._unanswered.values()))
        return answered(store, *about)

    monkeypatch.setattr(RemoteStore, "_has_answered", noted)
    chosen = {"mode": Mode.HYBRID, "tau": 16, "ranks": 2, "lookups_in_flight": lookups}
    with wired("servers", 0.01):
        run(config(**chosen, **behind("servers")), ArraySource(24 * 30)).store.close()
    assert most == lookups


def _train_behind_a_wire(rank: int, ranks: int, store: dist.Store, folder: Path) -> None:
    for round_trip_s in (0.03, 0.3, 1.0):
        here = on_one_host(rank, ranks, dist.PrefixStore(str(round_trip_s), store))
        chosen = {"mode": Mode.HYBRID, "tau": 4, "ranks": ranks}
        with wired("servers", round_trip_s / 2):
            settings = config(**chosen, **behind("servers"))
            world = train_one(settings, here, set())
            late = ""
            if world is not None:
                stale = staleness_in_steps(world.trace)
                assert stale.oldest_missing_steps.max() <= 4
                late = str(stale.missing_steps[stale.step > 4].mean())
            is_late = float(here.group.gather("late", late)[0]) > 2
            here.close()
        if is_late:
            break
    assert is_late


@pytest.mark.long
@pytest.mark.law5
@pytest.mark.law12
@pytest.mark.law15
def test_ranks_that_are_processes_hide_a_wire_too(tmp_path):
    """As torchrun starts them; their dense step is not behind the wire."""
    Processes(2, _train_behind_a_wire, tmp_path).join_well()
