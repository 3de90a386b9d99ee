"""Embedding workers as processes: what their ranks are told when something is wrong with them. The
laws hold there as everywhere: in `test_ranks`, `test_several_hosts` and the tests of laws."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from persia_sim.base.rules import Refused
from persia_sim.base.trace import ALL, Kind
from persia_sim.base.vocabulary import Mode
from runtime.config import TrainConfig
from runtime.data.batch import Layout
from runtime.embedding.store import SavedServer, TableArrays
from runtime.executors.open import assemble_for
from runtime.executors.threads import ConcurrentRun
from runtime.hosts import row_processes
from runtime.hosts.launch.processes import Address
from runtime.hosts.wire.peers import connect
from runtime.rank.components import Components, server_rules
from runtime.rank.stages import Computed, RankStages
from runtime.stop import PeerError
from tests.runtime.hosts.test_faults import in_thread, lives, until
from tests.runtime.worlds import ArraySource, TwoTables, config, on_engine

LONG = ArraySource(24 * 4000)


class Sequences(TwoTables):
    """The third field is read as a sequence, whose mask travels beside its vectors."""

    @property
    def layout(self) -> Layout:
        *others, tags = super().layout.fields
        sequence = replace(tags, pooling="sequence", max_length=3)
        return replace(super().layout, fields=(*others, sequence))


APART = {"servers": 2, "workers": 2, "executor": "concurrent"}


class Started:
    """A run that goes on, and the pids of its servers and workers."""

    def __init__(self, components: Components, processes: row_processes.RowProcesses) -> None:
        self.components = components
        self.servers, self.workers = (one.pids for one in processes.every)
        self.addresses = processes.addresses
        samples: list[int] = []
        components.meter.start(on_samples=samples.append)
        self._thread, self._errors = in_thread(ConcurrentRun(components).run)
        until(lambda: len(samples) > 3)

    def error(self) -> BaseException:
        self._thread.join(90)
        assert not self._thread.is_alive(), "the run hangs"
        return self._errors[0]


@contextmanager
def training(monkeypatch, **changes):
    found = []

    class Noted(row_processes.RowProcesses):
        def __init__(self, *given):
            super().__init__(*given)
            found.append(self)

    monkeypatch.setattr(row_processes, "RowProcesses", Noted)
    components = assemble_for(config(ranks=3, latency_s=0.02, **APART, **changes), LONG)
    try:
        yield Started(components, found[0])
    finally:
        for one in found[0].every:
            for pid in one.pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)
        components.store.close()


@pytest.mark.first_case
@pytest.mark.parametrize("mode", [Mode.SYNC, Mode.LOOKAHEAD, Mode.HYBRID, Mode.ASYNC])
def test_a_run_whose_worker_dies_ends_in_a_sentence_and_leaves_no_process(mode, monkeypatch):
    with training(monkeypatch, mode=mode) as found:
        pid = found.workers[1]
        os.kill(pid, signal.SIGKILL)
        error = found.error()
    assert isinstance(error, PeerError)
    assert re.match(
        rf"embedding worker 1 \(pid {pid}\) (was killed by SIGKILL|has died)", str(error)
    )
    assert not any(map(lives, [*found.servers, *found.workers]))


def test_only_its_ranks_and_nobody_without_the_secret_come_in(monkeypatch, capfd):
    """And the run goes on meanwhile."""
    with training(monkeypatch, mode=Mode.HYBRID) as found:
        _, workers = found.addresses
        stranger = Address(workers.names, ("0" * 64,) * 2)
        said = {"role": "lookups", "ranks": "rank 1", "pid": os.getpid()}
        for name, secret, rank in (
            (workers.names[0], stranger.secrets[0], 0),
            (workers.names[0], workers.secrets[0], 1),
        ):
            channel = connect(name, "embedding worker 0", secret, said, rank)
            answer, _ = channel.receive(lambda: None)
            assert answer.kind.name == "FAILED"
            channel.close()
        trained = found.components.meter.samples
        until(lambda: found.components.meter.samples > trained)
        os.kill(found.workers[0], signal.SIGKILL)
        found.error()
    told = capfd.readouterr().err
    assert "the first message does not know the secret of this run" in told
    assert "lookups of rank 1 belong elsewhere" in told


@pytest.mark.first_case
@pytest.mark.parametrize("mode", [Mode.SYNC, Mode.LOOKAHEAD, Mode.HYBRID])
@pytest.mark.law12
def test_a_second_run_over_the_same_rows_with_more_workers_than_ranks(mode):
    """In one process: it begins anew at workers and servers alike, and has the bytes of threads;
    row gradients are W times those of the mean, which a worker must be told."""
    exact = {"mode": mode, "ranks": 2, "executor": "concurrent", "row_gradients": "sum"}
    exact |= {"tau": 0} if mode.reads_late_rows else {}
    apart = rows_of_two_runs(config(**exact, servers=2, workers=9))
    for name, arrays in rows_of_two_runs(config(**exact, shards=2)).items():
        for one, other in zip(arrays, apart[name], strict=True):
            assert one.tobytes() == other.tobytes()


def rows_of_two_runs(chosen: TrainConfig) -> TableArrays:
    source = Sequences(24 * 10)
    components = assemble_for(chosen, source)
    try:
        for _ in range(2):
            components.meter.start()
            ConcurrentRun(components).run()
            assert components.meter.samples == 240
            components = components.again(source)
        return components.store.export()
    finally:
        components.store.close()


# A worker that dies where rows are late anyway.

LATE: dict[str, dict[str, Any]] = {
    "merged": {"mode": Mode.HYBRID, "merge_pushes": True},
    "on arrival": {"mode": Mode.HYBRID, "merge_pushes": False},
    "raw": {"mode": Mode.RAW_HYBRID, "permits": 3},
    "async": {"mode": Mode.ASYNC},
    "averaging": {"mode": Mode.ASYNC_AVERAGING},
    "in half": {"mode": Mode.HYBRID, "wire": "half"},
}
STEPS = 60


class Mortal:
    """A run whose worker 0 is killed as rank 0 is about to push some of its steps."""

    def __init__(self, monkeypatch, dies_at: Sequence[int], **changes: Any) -> None:
        chosen = config(ranks=3, tau=3, latency_s=0.002, workers=2, **changes)
        components = assemble_for(chosen, ArraySource(24 * STEPS))
        self.told, self.killed, self.with_it = list[str](), 0, list[int]()
        self.components, self.store, self.meter = components, components.store, components.meter
        rules = server_rules(chosen, self.store.layout, self.store.tables.values())
        saved = [SavedServer(rules, [0] * 3)]
        self.store.allow_failover(lambda shard: saved, self.told.append)
        push = RankStages.push

        def pushed(stages: RankStages, computed: Computed) -> None:
            if stages._rank == 0 and computed.handle.step in dies_at[self.killed :][:1]:
                until(lambda: len(self.told) == self.killed)
                self.killed += 1
                for pid in [self.store._workers.pids[0], *self.with_it]:
                    os.kill(pid, signal.SIGKILL)
            push(stages, computed)

        monkeypatch.setattr(RankStages, "push", pushed)

    def run(self) -> None:
        self.meter.start()
        ConcurrentRun(self.components).run()
        self.store.drain()


@contextmanager
def mortal(monkeypatch, dies_at: Sequence[int], **changes: Any) -> Iterator[Mortal]:
    found = Mortal(monkeypatch, dies_at, **changes)
    try:
        yield found
    finally:
        found.store.close()


@pytest.mark.first_case
@pytest.mark.parametrize("engine", ["processes", "network"])
@pytest.mark.parametrize("name", LATE)
@pytest.mark.law5
@pytest.mark.law9
@pytest.mark.law13
def test_a_late_run_survives_the_deaths_of_a_worker_and_counts_its_pushes(
    name, engine, monkeypatch
):
    """Killed twice; at each server each push is applied or lost, and the window holds."""
    own = not LATE[name]["mode"].has_barrier
    dies_at = (5, 12) if own else (10, 35)
    with mortal(monkeypatch, dies_at, **on_engine(engine, 2), **LATE[name]) as found:
        found.run()
        status, orders = found.store.statuses(), found.store.recorded()
    assert (found.killed, len(found.told), found.meter.samples) == (2, 2, 24 * STEPS)
    for sentence in found.told:
        assert re.fullmatch(
            r"embedding worker 0 \(pid \d+\) (was killed by SIGKILL|has died).*; it is back, and"
            r" \d+ pushes of ranks 0, 1, 2 are lost with it", sentence
        ), sentence  # fmt: skip
    for one, events in zip(status, orders, strict=True):
        assert one["lost"] == lost_in(events, own=own) > 0
        assert one["version"] + one["lost"] == STEPS * (1 if own else 3)


def test_the_death_of_a_worker_is_that_of_a_run_whose_tables_are_fresh(monkeypatch):
    """The run goes back to its last checkpoint: a rank may wait for rows that only it had."""
    fresh = {"mode": Mode.HYBRID, "fresh": ("all",)}
    with mortal(monkeypatch, [10], **on_engine("processes", 2), **fresh) as found:
        with pytest.raises(PeerError, match=r"embedding worker 0 \(pid \d+\) (was|has)"):
            found.run()
        assert not found.told


@pytest.mark.long
@pytest.mark.parametrize("engine", ["processes", "network"])
@pytest.mark.law13
def test_workers_and_servers_that_die_at_once_come_back_and_each_push_is_accounted(
    engine, monkeypatch
):
    with mortal(monkeypatch, [10], **on_engine(engine, 2), **LATE["merged"]) as found:
        found.with_it = [found.store._workers.pids[1], *found.store._client.pids]
        found.run()
        status = found.store.statuses()
    assert len(found.told) >= 4 and found.meter.samples == 24 * STEPS
    assert [one["version"] + one["lost"] for one in status] == [STEPS * 3] * 2


def lost_in(events: np.ndarray, *, own: bool) -> int:
    """Pushes that one server says are lost, of a run with tau 3, each of whose pushes it has closed
    once, and no lookup of which has missed what it may not."""
    steps = STEPS // 3 if own else STEPS
    closed, lost = [set[int]() for _ in range(3)], 0
    for kind, rank, step, _, _ in events.tolist():
        if kind == Kind.LOOKUP:
            for seen in [closed[rank]] if own else closed:
                assert seen.issuperset(range(step - 3)), f"rank {rank}, step {step}"
        elif kind in (Kind.PUSH, Kind.LOST_PUSH):
            lost += kind == Kind.LOST_PUSH
            for seen in closed if rank == ALL else [closed[rank]]:
                assert step not in seen, f"rank {rank}, step {step} twice"
                seen.add(step)
    assert closed == [set(range(steps))] * 3
    return lost


def test_workers_without_servers_and_with_rows_on_lease_are_refused():
    with pytest.raises(Refused, match="workers stand between ranks and servers; add --servers"):
        config(executor="concurrent", workers=1)
    with pytest.raises(Refused, match="hold no rows on lease"):
        config(mode=Mode.LOOKAHEAD, lookahead="forwarded", **APART)
