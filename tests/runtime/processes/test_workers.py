"""Embedding workers as processes: what their ranks are told when something is wrong with them. The
laws hold there as everywhere: in `test_ranks`, `test_several_hosts` and the tests of laws."""

from __future__ import annotations

import os
import re
import signal
from contextlib import contextmanager, suppress
from dataclasses import replace

import numpy as np
import pytest

from persia_sim.words.rules import Refused
from persia_sim.words.vocabulary import Mode
from runtime.config import TrainConfig
from runtime.data.batch import Layout
from runtime.embedding.verbs import TableArrays
from runtime.engines.clients import open as opening
from runtime.engines.open import assemble_for
from runtime.engines.servers.launch import Address
from runtime.engines.threads import ConcurrentRun
from runtime.engines.transport.peers import come_in
from runtime.rank.parts import Parts
from runtime.stop import PeerError
from tests.runtime.processes.test_faults import in_thread, lives, suspend, until
from tests.runtime.worlds import ArraySource, TwoTables, config

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

    def __init__(self, parts: Parts, processes: opening.RowProcesses) -> None:
        self.parts = parts
        self.servers, self.workers = (one.pids for one in processes.every)
        self.addresses = processes.addresses
        samples: list[int] = []
        parts.meter.start(on_samples=samples.append)
        self._thread, self._errors = in_thread(ConcurrentRun(parts).run)
        until(lambda: len(samples) > 3)

    def error(self) -> BaseException:
        self._thread.join(90)
        assert not self._thread.is_alive(), "the run hangs"
        return self._errors[0]


@contextmanager
def training(monkeypatch, **changes):
    found = []

    class Noted(opening.RowProcesses):
        def __init__(self, *given):
            super().__init__(*given)
            found.append(self)

    monkeypatch.setattr(opening, "RowProcesses", Noted)
    parts = assemble_for(config(ranks=3, latency_s=0.02, **APART, **changes), LONG)
    try:
        yield Started(parts, found[0])
    finally:
        for one in found[0].every:
            for pid in one.pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)
        parts.store.close()


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


def test_a_worker_that_is_stopped_is_told_to_its_ranks_by_the_servers(monkeypatch):
    """They hear its signs of life, as those of any client."""
    patient = opening.ServerConfig
    monkeypatch.setattr(opening, "ServerConfig", lambda **said: patient(patience_s=4.0, **said))
    with training(monkeypatch, mode=Mode.HYBRID) as found:
        pid = found.workers[0]
        suspend(pid)
        told = str(found.error())
        assert f"embedding worker 0 (pid {pid}) has given no sign of life for" in told
        assert "it is stopped or stuck" in told


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
            channel = come_in(name, "embedding worker 0", secret, said, rank)
            answer, _ = channel.receive(lambda: None)
            assert answer.kind.name == "FAILED"
            channel.close()
        trained = found.parts.meter.samples
        until(lambda: found.parts.meter.samples > trained)
        os.kill(found.workers[0], signal.SIGKILL)
        found.error()
    told = capfd.readouterr().err
    assert "the first message does not know the secret of this run" in told
    assert "lookups of rank 1 belong elsewhere" in told


def test_gradients_of_a_row_that_overflow_at_a_worker_end_the_run_with_its_sentence(monkeypatch):
    """Each is finite; their sum over a row's occurrences is not."""
    give_back = opening.WorkerApart.give_back

    def huge(worker, ticket, gradients):
        for array in (gradients.vectors.pooled, *gradients.vectors.sequences.values()):
            array[...] = np.finfo(np.float32).max
        give_back(worker, ticket, gradients)

    monkeypatch.setattr(opening.WorkerApart, "give_back", huge)
    chosen = config(mode=Mode.HYBRID, ranks=3, **APART)
    parts = assemble_for(chosen, ArraySource(24 * 40))
    try:
        with pytest.raises(ValueError, match="summed over its occurrences at rank"):
            ConcurrentRun(parts).run()
    finally:
        parts.store.close()


@pytest.mark.parametrize("mode", [Mode.SYNC, Mode.LOOKAHEAD, Mode.HYBRID])
@pytest.mark.law12
def test_a_second_run_over_the_same_rows_with_more_workers_than_ranks(mode):
    """In one process: it begins anew at workers and servers alike, and has the bytes of threads."""
    exact = {"mode": mode, "ranks": 2, "executor": "concurrent"}
    exact |= {"tau": 0} if mode.reads_late_rows else {}
    apart = rows_of_two_runs(config(**exact, servers=2, workers=9))
    for name, arrays in rows_of_two_runs(config(**exact, shards=2)).items():
        for one, other in zip(arrays, apart[name], strict=True):
            assert one.tobytes() == other.tobytes()


def rows_of_two_runs(chosen: TrainConfig) -> TableArrays:
    source = Sequences(24 * 10)
    parts = assemble_for(chosen, source)
    try:
        for _ in range(2):
            parts.meter.start()
            ConcurrentRun(parts).run()
            assert parts.meter.samples == 240
            parts = parts.again(source)
        return parts.store.export()
    finally:
        parts.store.close()


def test_workers_without_servers_and_with_rows_on_lease_are_refused():
    with pytest.raises(Refused, match="workers stand between ranks and servers; add --servers"):
        config(executor="concurrent", workers=1)
    with pytest.raises(Refused, match="hold no rows on lease"):
        config(mode=Mode.LOOKAHEAD, lookahead="forwarded", **APART)
