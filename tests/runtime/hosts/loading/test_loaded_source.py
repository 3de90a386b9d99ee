"""Loaders as processes: whatever their number, every rank trains the same batches."""

from __future__ import annotations

import os
import signal
import threading
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest

from persia_sim.base.trace import Kind, Trace
from runtime.config import CheckpointConfig, DataConfig, SyncConfig, TrainConfig
from runtime.data.errors import DataError
from runtime.data.synthetic import CHUNK_ROWS
from runtime.data.table import ROWS_PER_BATCH
from runtime.hosts.loading import loaded_source
from runtime.hosts.loading.loaded_source import LoadedSource
from runtime.hosts.wire.calls import payload_of
from runtime.hosts.wire.messages import (
    MessageKind,
)
from runtime.hosts.wire.segments import Segment
from runtime.rank import feed
from runtime.run.record import run_into
from runtime.stop import PeerError
from tests.runtime import worlds
from tests.runtime.hosts.loading.loaders import (
    batches,
    chunks,
    elsewhere,
    encrypted,
    opened,
    pids_now,
    started,
    written,
)
from tests.runtime.hosts.test_faults import in_thread, lives, until
from tests.runtime.worlds import host_of_servers


def limit(case: str) -> int | None:
    if "one sample" in case:
        return 9001
    return ROWS_PER_BATCH + (-4 if "before" in case else 4000) if "limited" in case else None


@pytest.mark.first_case
@pytest.mark.parametrize(
    "case",
    [
        "file, shuffled, two passes", "file, limited", "file, limited, two passes",
        "file, limited to before the bad rows, two passes", "file, one sample in the last batch",
        "synthetic",
    ],
)  # fmt: skip
@pytest.mark.law12
def test_the_batches_of_a_rank_and_step_do_not_depend_on_the_loaders(case, tmp_path):
    if case == "synthetic":
        data = DataConfig(name="synthetic", rows=45_001)  # the last batch leaves two ranks without
    else:
        data = DataConfig(
            name=written(tmp_path, unplaced=2),
            skip_bad_rows=True,
            shuffle="shuffled" in case,
            epochs=2 if "two passes" in case else 1,
            rows=limit(case),
        )
    config = TrainConfig(
        data=data,
        batch=9000,
        sync=SyncConfig(ranks=3, mode="async" if "limited" in case else "sync"),
    )
    alone = opened(data)
    expected = batches(config, alone)
    for count in (1, 3) if case == "synthetic" else (2,):
        processes = started(data, count, consumers=1)
        source = LoadedSource(opened(data), processes.address, processes)
        assert batches(config, source) == expected
        assert source.provenance() == alone.provenance()
        source.close()
        processes.close()
    assert len(expected) > 3
    assert ("2 of no part" in alone.provenance().skipped_where) == (case != "synthetic")


def test_receive_samples_several_steps_are_asked_for_at_once():
    """Beside what is asked for where a chunk is let go, and for who waits."""
    data = DataConfig(name="synthetic", rows=3000)
    config = TrainConfig(data=data, batch=30, sync=SyncConfig(ranks=3, mode="sync"))
    processes = started(data, 1, consumers=1)
    source = LoadedSource(opened(data), processes.address, processes)
    assert len(batches(config, source)) == 300
    assert not source._connections[0].held, "a chunk that the stream has passed is let go"
    assert 300 / loaded_source.TOGETHER <= source._connections[0].requested < 100
    source.close()
    processes.close()


@pytest.mark.first_case
@pytest.mark.parametrize("case", ["in order", "shuffled", "async", "in the middle"])
@pytest.mark.law12
def test_each_process_gets_the_rows_that_its_rank_trains_and_no_others(case, tmp_path, monkeypatch):
    """So all of them together get one pass of the data; of a run that goes on, its rest."""
    data = DataConfig(name=written(tmp_path), skip_bad_rows=True, shuffle=case == "shuffled")
    mode = "async" if case == "async" else "sync"
    config = TrainConfig(data=data, batch=9000, sync=SyncConfig(ranks=3, mode=mode))
    skipped = 20_000 if case == "in the middle" else 0
    expected = batches(config, opened(data), skipped=skipped)
    got, file = [0, 0, 0], LoadedSource._store

    def counted(self, link, message, segment):
        if message.kind is MessageKind.SAMPLES:
            arrays = payload_of(message, Segment.attach(os.dup(segment.descriptor)))
            got[int(self._who)] += len(arrays["labels"])
        file(self, link, message, segment)

    monkeypatch.setattr(LoadedSource, "_store", counted)
    processes = started(data, 2, consumers=3)
    sources = [LoadedSource(opened(data), processes.address, who=str(k)) for k in range(3)]
    found: dict[tuple[int, int], list[bytes]] = {}
    threads = [
        in_thread(lambda k=k: found.update(batches(config, sources[k], [k], skipped)))
        for k in range(3)
    ]
    for thread, errors in threads:
        thread.join(90)
        assert not errors and not thread.is_alive()
    assert found == expected
    rows = 4 * ROWS_PER_BATCH + 100 - 50 - 3 - skipped
    assert sum(got) == rows and max(got) - min(got) <= 9000
    for source in sources:
        source.close()
    processes.close()


@pytest.mark.first_case
@pytest.mark.law9
@pytest.mark.parametrize(
    ("passes", "starting"), [(1, started), (3, started), (3, elsewhere), (2, encrypted)]
)
def test_behind_a_killed_loader_nothing_is_missing_and_nothing_comes_twice(
    passes, starting, tmp_path, capfd
):
    """Two takers at different chunks; it is killed at three instants, one of them between passes.
    Bad rows are counted once."""
    data = DataConfig(name=written(tmp_path), skip_bad_rows=True)
    alone = opened(data)
    expected = [[b.ids.tobytes() for b in alone.chunks("train")] for _ in range(passes)]
    processes = starting(data, 2, consumers=2)
    sources = [LoadedSource(opened(data), processes.address, p) for p in (processes, None)]
    found, killed, first = [[], []], [], pids_now()

    def kill(loader: int) -> None:
        killed.append((getattr(processes, "pids", None) or pids_now())[loader])
        os.kill(killed[-1], signal.SIGKILL)

    for number in range(passes):
        streams = [chunks(source) for source in sources]
        taken = [[next(streams[0]).ids.tobytes()], []]
        kill(number % 2)
        taken[0].append(next(streams[0]).ids.tobytes())
        threads = [
            in_thread(lambda own=own, s=s: own.extend(b.ids.tobytes() for b in s))
            for own, s in zip(taken, streams, strict=True)
        ]
        for thread, errors in threads:
            thread.join(90)
            assert not errors and not thread.is_alive()
        for own, chunk in zip(found, taken, strict=True):
            own.append(chunk)
    assert found == [expected] * 2
    assert sources[0].provenance() == sources[1].provenance() == alone.provenance()
    for source in sources:
        source.close()
    processes.close()
    assert capfd.readouterr().err.count("was killed by SIGKILL; another one goes on") == passes
    until(lambda: not any(map(lives, [*killed, *first])) and not pids_now())


@pytest.mark.long
@pytest.mark.parametrize(("restarts", "where"), [(0, "here"), (8, "here"), (8, "elsewhere")])
@pytest.mark.law11
@pytest.mark.law12
def test_a_run_whose_loader_dies_goes_on_and_trains_each_batch_once(
    restarts, where, tmp_path, monkeypatch
):
    """Laws 11 and 13: nothing that was given before is lost, and nothing comes twice; where the
    loader does not come back, from the last checkpoint."""
    monkeypatch.setattr(loaded_source, "MOST_RESTARTS", restarts)
    chosen = replace(
        worlds.config(mode="hybrid", tau=0, ranks=2, executor="concurrent", loaders=2, servers=1),
        data=DataConfig(name="synthetic", rows=16 * CHUNK_ROWS),
        batch=CHUNK_ROWS,
        checkpoint=CheckpointConfig(checkpoint_every="4"),
    )
    alone = worlds.changed(chosen, loaders=0, servers=0)
    if where == "elsewhere":
        at, secret = host_of_servers()
        chosen = worlds.changed(chosen, servers_at=at, servers_secret=secret)
    undisturbed = run_into(tmp_path / "undisturbed", alone)
    answer, once = LoadedSource._receive_samples, threading.Lock()

    def dies_at_chunk_5(self, loader, number, chunk):
        if chunk == 5 and once.acquire(blocking=False):
            os.kill((self._address.pids or pids_now())[loader], signal.SIGKILL)
        return answer(self, loader, number, chunk)

    monkeypatch.setattr(LoadedSource, "_receive_samples", dies_at_chunk_5)
    monkeypatch.setattr(feed, "AHEAD_STEPS", 2)  # else all is here by then
    run, missing = tmp_path / "killed", r"loader 1 .* was killed by SIGKILL; its data is missing"
    with nullcontext() if restarts else pytest.raises(PeerError, match=missing):
        summary = run_into(run, chosen)
    if not restarts:
        monkeypatch.undo()
        summary = run_into(run, chosen, resume=True)
        (at,) = summary["resumed_at_samples"]
        assert 0 < at < 16 * CHUNK_ROWS
    assert summary["samples"] == undisturbed["samples"] == 16 * CHUNK_ROWS
    pushes = Trace.load(run / "trace.npz").of_kind(Kind.PUSH)
    assert len({tuple(row) for row in pushes[:, [2, 3, 4]].tolist()}) == len(pushes) == 16
    found = [np.load(f / "predictions.npz")["predictions"] for f in (run, tmp_path / "undisturbed")]
    assert np.array_equal(*found)


def test_what_is_wrong_with_the_data_is_told_by_the_rank(tmp_path):
    data = DataConfig(name=written(tmp_path))
    processes = started(data, 2, consumers=1)
    source = LoadedSource(opened(data), processes.address)
    with pytest.raises(DataError, match=f"row {ROWS_PER_BATCH + 6}, column label: 7"):
        list(chunks(source))
    processes.close()
