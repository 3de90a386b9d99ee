"""An embedding server as a process: the same bytes, the same windows, and nothing applied twice."""

from __future__ import annotations

import resource
import socket
import subprocess
import sys
import threading
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from persia_sim.base.trace import Kind
from persia_sim.base.vocabulary import Mode
from runtime import stop
from runtime.__main__ import main
from runtime.checkpoint.rows import ensure_seen, load
from runtime.checkpoint.shard import see_folder, write_rows
from runtime.data.batch import Field, Layout
from runtime.embedding.batch_rows import FieldVectors, VectorGradients
from runtime.embedding.config import Capacity, RowOptimizer, TableConfig
from runtime.embedding.native.store import NativeStore
from runtime.embedding.server_rules import ServerRules
from runtime.embedding.worker import EmbeddingWorker
from runtime.files import BrokenFileError
from runtime.hosts.launch import processes
from runtime.hosts.launch.process_config import ServerConfig
from runtime.hosts.launch.processes import ServerProcesses
from runtime.hosts.rows import remote_control, remote_store
from runtime.hosts.rows.client import ServerClient
from runtime.hosts.rows.remote_store import RemoteStore
from runtime.hosts.rows.server_calls import ServerCalls
from runtime.hosts.wire.channel import Channel
from runtime.hosts.wire.messages import Message, MessageKind
from runtime.run.session import train
from tests.runtime.embedding.conftest import save
from tests.runtime.hosts.served import LAYOUT, SGD, batch_of, one_step, ones, served
from tests.runtime.worlds import ArraySource, config, on_engine

TWO_TABLES = Layout(
    fields=(Field(name="user"), Field(name="item", table="items"), Field(name="tags")),
    dense=("age", "price"),
    tasks=("click", "buy"),
)


@pytest.mark.parametrize("dtype", ["float32"])
@pytest.mark.law12
def test_two_servers_end_with_the_bytes_of_a_store_in_the_process(dtype):
    tables = [
        TableConfig(name="rows", dim=5, optimizer=RowOptimizer(kind="adagrad"), dtype=dtype),
        TableConfig(
            name="items", dim=3, optimizer=RowOptimizer(kind="adam"), dtype=dtype,
            capacity=Capacity(rows=20),
        ),
    ]  # fmt: skip
    draw, source = np.random.default_rng(0), ArraySource(200)
    steps = [source._all.rows(start, start + 40) for start in range(0, 200, 40)]
    here = NativeStore(TWO_TABLES, tables, shards=2, rules=ServerRules(tau=0))
    with served(ServerRules(tau=0), tables, servers=2, layout=TWO_TABLES) as found:
        there = found.store
        for step, batch in enumerate(steps):
            handles = [store.begin(0, step, batch) for store in (here, there)]
            for server in here.servers:
                server.look_up(handles[0])
            there.look_up(handles[1])
            assert handles[0].version == handles[1].version
            rows = {}
            for name, values in handles[0].values.items():
                assert values.tobytes() == handles[1].values[name].tobytes()
                rows[name] = draw.normal(size=values.shape).astype(dtype)
            for server in here.servers:
                server.give((handles[0], rows))
            there.give((handles[1], rows))
        there.drain()
        for name, arrays in here.export().items():
            for mine, theirs in zip(arrays, there.export()[name], strict=True):
                assert mine.tobytes() == theirs.tobytes()
        assert there.counters == here.counters
        assert there.counters["evicted"] > 0
        assert len(there) == len(here)
        assert there.row_staleness.tolist() == here.row_staleness.tolist()
        peeked = [store.peek(source._all).values["items"].tobytes() for store in (here, there)]
        assert peeked[0] == peeked[1]


def test_a_lookup_waits_for_all_ranks_pushes_and_rare_requests_go_on_meanwhile():
    with served(ServerRules(ranks=2, tau=0, merges=True), servers=2) as found:
        store = found.store
        first = [store.begin(rank, 0, batch_of(7, 8)) for rank in (0, 1)]
        for handle in first:
            store.look_up(handle)
        late = store.begin(0, 1, batch_of(7))
        waiting = threading.Thread(target=lambda: store.look_up(late), daemon=True)
        waiting.start()
        store.give((first[0], ones(first[0])))
        waiting.join(0.1)
        assert waiting.is_alive()
        with store.frozen():
            assert store.peek(batch_of(7)).values["rows"].tolist() == [[0.0, 0.0]]
        store.give((first[1], ones(first[1])))
        waiting.join(60)
        assert late.values["rows"].tolist() == [[-2.0, -2.0]]


@pytest.mark.law15
def test_the_next_lookup_sets_out_behind_a_push_that_nobody_waits_for(monkeypatch):
    """In sync: so a step over a wire takes one round trip and its computation (law 15)."""
    order: list[str] = []
    is_read = threading.Event()
    send, receive_closing = ServerClient.send, ServerClient._receive_closing

    def sending(client, role, shard, message, *more, **named):
        order.append(message.kind.name)
        return send(client, role, shard, message, *more, **named)

    def receiving(client, server, channel):
        assert is_read.wait(60)
        receive_closing(client, server, channel)
        order.append("CLOSED")

    monkeypatch.setattr(ServerClient, "send", sending)
    monkeypatch.setattr(ServerClient, "_receive_closing", receiving)
    with served(ServerRules(tau=0)) as found:
        for step in range(3):
            one_step(found.store, 0, step, 1)
        is_read.set()
        found.store.drain()
    asked = [kind for kind in order if kind != "SEGMENT"]
    assert asked == ["LOOK_UP", "PUSH"] * 3 + ["CLOSED"] * 3


@pytest.mark.law13
def test_a_push_that_comes_again_is_acknowledged_and_counted_and_not_applied():
    """With value 0, rate 1 and gradients of one, a row's value counts the pushes it took."""
    with served(ServerRules(ranks=2, tau=3, merges=True)) as found:
        store = found.store
        handles = [store.begin(rank, 0, batch_of(7)) for rank in (0, 1)]
        for handle in handles:
            store.look_up(handle)
        heard = []
        store.on_closed(lambda rank, step: heard.append((rank, step)))
        again = Message(MessageKind.PUSH, 0, 0)
        store.give((handles[0], ones(handles[0])))
        for repeated in (1, 2):
            found.client.send("pushes", 0, again)
            while sum(status["repeated_pushes"] for status in store.statuses()) < repeated:
                threading.Event().wait(0.01)
            if repeated == 1:  # it has waited for rank 1; the second finds its step closed
                store.give((handles[1], ones(handles[1])))
                store.drain()
        assert sorted(heard) == [(0, 0), (1, 0)]
        assert store.export()["rows"][1].tolist() == [[-2.0, -2.0]]


def test_a_new_run_starts_at_step_0_on_the_rows_as_they_are():
    with served(ServerRules(tau=0)) as found:
        store = found.store
        for rules in (ServerRules(tau=0), ServerRules(tau=2)):
            store.begin_run(rules, stop.Stop())
            one_step(store, 0, 0, 7)
            store.drain()
        assert store.export()["rows"][1].tolist() == [[-2.0, -2.0]]


def test_batches_in_flight_are_bounded_by_the_segments(monkeypatch):
    monkeypatch.setattr(stop, "PATIENCE_S", 0.3)
    with served(ServerRules(tau=None), segments=2) as found:
        for step in range(2):
            found.store.begin(0, step, batch_of(7))
        with pytest.raises(RuntimeError, match="waits for one of its 2 segments"):
            found.store.begin(0, 2, batch_of(7))


def test_no_thread_is_left_after_close(monkeypatch):
    """Not even where sockets are closed before anything can be heard of their end."""
    before, send = set(threading.enumerate()), Channel.send

    def silent(channel, message, *args, **kwargs):
        if message.kind is not MessageKind.DISCONNECT:
            send(channel, message, *args, **kwargs)

    with served(servers=2) as found:
        handle = found.store.begin(0, 0, batch_of(7))
        found.store.look_up(handle)
        mine = [t for t in threading.enumerate() if t not in before]
        assert sorted(t.name for t in mine) == ["closings", "heartbeat", "heartbeat"]
        monkeypatch.setattr(Channel, "send", silent)
        monkeypatch.setattr(Channel, "close", lambda channel: channel.connection.socket.close())
    for thread in mine:
        thread.join(20)
    assert not [thread.name for thread in mine if thread.is_alive()]


def test_a_server_that_cannot_start_says_why():
    table = replace(SGD, capacity=Capacity(rows=10**15))
    wanted = "capacity.rows .* this process may use"
    with pytest.raises(ValueError, match=wanted):
        ServerProcesses([ServerConfig(shard=0, shards=1, seed=0, tables=(table,))])


def test_a_server_loads_neither_torch_nor_pandas():
    """It starts in the time that numpy takes."""
    probe = (
        "import sys; import runtime.hosts.rows.server_process;"
        " print(sorted({'torch', 'pandas', 'simpy', 'scipy'} & set(sys.modules)))"
    )
    found = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True)
    assert found.stdout.strip() == "[]", found.stderr


def test_each_event_of_a_server_travels_once_and_in_bounded_messages(monkeypatch):
    monkeypatch.setattr(remote_control, "_MOST_EVENTS", 4)
    with served(ServerRules(tau=0)) as found:
        call_all, sizes = found.client.call_all, []

        def noted(*given):
            (told,) = call_all(*given)
            sizes.extend([len(told["events"])] if "events" in told else [])
            return [told]

        monkeypatch.setattr(found.client, "call_all", noted)
        for step in range(4):
            one_step(found.store, 0, step, 1)
            found.store.drain()
            if step != 1:
                (events,) = found.store.recorded()
                assert events[:, 0].tolist() == [Kind.LOOKUP, Kind.PUSH] * (step + 1)
                assert events[:, 2].tolist() == np.repeat(np.arange(step + 1), 2).tolist()
        assert sizes == [2, 4, 0, 2]


@pytest.mark.parametrize("into", ["processes", "another number of shards here"])
@pytest.mark.law12
def test_rows_saved_from_servers_come_back_in_any_engine(into, tmp_path):
    table = replace(SGD, optimizer=RowOptimizer(kind="adagrad"), initial_scale=0.1)
    with served(ServerRules(tau=0), [table], servers=2, run_folder=tmp_path) as found:
        store = found.store
        for step in range(2):
            one_step(store, 0, step, *range(40 * step, 40 * step + 60))
            store.drain()
        save(store, tmp_path)
        expected = store.export()["rows"]
    with served(ServerRules(tau=0), [table], servers=2) as found:
        again = found.store
        if into != "processes":
            again = NativeStore(LAYOUT, [table], shards=3)
        load(again, tmp_path)
        for one, other in zip(expected, again.export()["rows"], strict=True):
            assert one.tobytes() == other.tobytes()


@pytest.mark.law12
def test_servers_write_the_bytes_that_threads_write(tmp_path, monkeypatch):
    same = SimpleNamespace(uuid4=lambda: SimpleNamespace(hex="0" * 32))
    monkeypatch.setattr("runtime.checkpoint.rows.uuid", same)
    table = replace(SGD, optimizer=RowOptimizer(kind="adagrad"), initial_scale=0.1)
    with served(ServerRules(tau=0), [table], servers=2, run_folder=tmp_path) as found:
        here = NativeStore(LAYOUT, [table], shards=2, rules=ServerRules(tau=0))
        for store, name in ((found.store, "servers"), (here, "threads")):
            for step in range(3):
                one_step(store, 0, step, *range(10 * step, 10 * step + 40))
            store.drain()
            save(store, tmp_path / name)
    one, other = (
        {file.name: file.read_bytes() for file in (tmp_path / name).iterdir()}
        for name in ("servers", "threads")
    )
    assert one == other and len(one) == 3


@pytest.mark.long
def test_a_file_that_cannot_be_written_or_read_is_named_with_its_server(tmp_path):
    with served(servers=2, run_folder=tmp_path) as found:
        one_step(found.store, 0, 0, *range(40))
        found.store.drain()
        pid, free = found.processes.pids[1], resource.RLIM_INFINITY
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (64, free))  # as a full disk
        full = rf"embedding server 1 \(pid {pid}\): .*: '{tmp_path}/rows/.*-shard-0001\.rows'"
        with pytest.raises(OSError, match=full):
            save(found.store, tmp_path / "rows")
        assert not list((tmp_path / "rows").iterdir())
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (free, free))
        save(found.store, tmp_path / "rows")
        expected = found.store.export()["rows"]
    (file,) = (tmp_path / "rows").glob("*-shard-0001.rows")
    content = file.read_bytes()
    file.write_bytes(content[:-1] + b"x")
    with served(servers=2) as found:
        damaged = r"embedding server 1 \(pid \d+\): .*-shard-0001\.rows is damaged"
        with pytest.raises(BrokenFileError, match=damaged):
            load(found.store, tmp_path / "rows")
        assert found.client.call(1, ServerCalls.status)["rows"] == 0
    file.write_bytes(content)
    with served(servers=2) as found:
        load(found.store, tmp_path / "rows")
        for one, other in zip(expected, found.store.export()["rows"], strict=True):
            assert one.tobytes() == other.tobytes()


@pytest.mark.parametrize("damage", [Path.unlink])
def test_files_that_the_leader_does_not_see_whole_are_no_checkpoint(damage, tmp_path, monkeypatch):
    """A server on another host may have another folder of the same name."""
    with served(servers=2, run_folder=tmp_path) as found:
        write = found.store.at_each_server

        def elsewhere(*verb, **said):
            told = write(*verb, **said)
            damage(next((tmp_path / "rows").glob("*-shard-0001.rows")))
            return told

        monkeypatch.setattr(found.store, "at_each_server", elsewhere)
        with pytest.raises(OSError, match=r"-shard-0001\.rows"):
            save(found.store, tmp_path / "rows")
        assert not list((tmp_path / "rows").iterdir())


def test_a_server_writes_below_the_folder_of_its_run_alone_and_says_if_it_cannot(tmp_path):
    run = tmp_path / "run"
    with served(run_folder=run) as found:
        ensure_seen(found.store, run)
        assert not list(run.iterdir())
        with pytest.raises(ValueError, match=r"server 0 \(pid \d+\) on host .*No such file"):
            found.store.at_each_server(see_folder, mark=str(run / "never"))
        for folder, part in ((tmp_path, "0"), (run / "..", "0"), (run, "../0"), ("/tmp", "0")):
            with pytest.raises(OSError, match="writes only below the folder of its run"):
                found.store.at_each_server(write_rows, folder=str(folder), part=part)


@pytest.mark.law13
def test_a_cut_waits_until_no_push_is_applied_at_one_server_only():
    with served(ServerRules(tau=None), servers=2) as found:
        store = found.store
        handle = store.begin(0, 0, batch_of(*range(20)))
        store.look_up(handle)
        push = Message(MessageKind.PUSH, 0, 0, number=1)
        found.client.send("pushes", 0, push)
        while found.client.call(0, ServerCalls.closed)["closed"] == [[0]]:
            threading.Event().wait(0.01)
        cuts = []

        def cut() -> None:
            with store.consistent_cut():
                cuts.append([found.client.call(k, ServerCalls.closed)["closed"] for k in range(2)])

        thread = threading.Thread(target=cut, daemon=True)
        thread.start()
        thread.join(0.1)
        assert not cuts
        found.client.send("pushes", 1, push)
        thread.join(60)
        assert cuts == [[[[1]], [[1]]]]


def test_gradients_are_scattered_where_the_servers_read_them():
    with served(ServerRules(tau=0)) as found:
        worker = EmbeddingWorker(found.store)
        handle = worker.store.begin(0, 0, batch_of(7, 7, 8))
        found.store.look_up(handle)
        slopes = FieldVectors(np.array([[1, 2], [3, 4], [5, 6]], np.float32), {}, {})
        rows = worker.scatter(handle, VectorGradients(slopes))["rows"]
        assert np.shares_memory(rows, handle.gradients["rows"])
        found.store.give((handle, {"rows": rows}))
        found.store.drain()
        assert found.store.export()["rows"][1].tolist() == [[-4.0, -6.0], [-5.0, -6.0]]


# A whole run over server processes: its curve and figures are those of threads.

SOURCE = ArraySource(600)


@pytest.mark.parametrize("mode", [Mode.LOOKAHEAD])
def test_curve_and_figures_of_an_exact_mode_are_those_of_threads(mode):
    """Snapshots on the way hold the servers; the last evaluation finds every push applied."""
    here, there = (
        train(config(mode=mode, ranks=2, evaluate_every_steps=7, **on_engine(engine, 2)), SOURCE)
        for engine in ("threads", "processes")
    )
    assert len(there.curve) == len(here.curve) == 3
    for one, other in zip(here.curve, there.curve, strict=True):
        assert np.array_equal(one.evaluation.predictions, other.evaluation.predictions)
    assert np.array_equal(here.final.predictions, there.final.predictions)
    assert here.losses == there.losses
    assert here.staleness == there.staleness
    assert here.store.row_staleness.tolist() == there.store.row_staleness.tolist()
    same = ("samples", "updates", "rows", "resident_bytes", "pushes_lost")
    for name in same:
        assert getattr(here.figures, name) == getattr(there.figures, name), name
    if mode.reads_fresh_rows:  # what a prefetch finds depends on the instant
        assert sorted(here.trace.events.tolist()) == sorted(there.trace.events.tolist())


WORDS = [
    "--data.name", "synthetic", "--data.rows", "3000", "--steps", "8", "--batch", "64",
    "--test-rows", "500", "--mode", "hybrid", "--ranks", "2",
]  # fmt: skip


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--servers", "2"], "servers is not used by mode hybrid with executor constant_lag"),
        (["--servers", "513", "--executor", "concurrent"], "servers must be <= 512, got 513"),
        (
            ["--servers", "2", "--shards", "2", "--executor", "concurrent"],
            "shards 2 is not used with servers 2, which are processes of one shard each",
        ),
    ],
)
def test_options_that_do_not_fit_servers_are_refused(options, sentence, capsys, tmp_path):
    assert main(["train", *WORDS, *options, "--out", str(tmp_path / "x")]) == 2
    assert sentence in capsys.readouterr().err


class Alike(RemoteStore):
    """Servers that all answer a second after they were asked, by a clock of the test's."""

    def __init__(self, servers: int) -> None:
        self.shards, self.waited_s, self._changed = servers, {}, threading.Condition()
        self._unanswered = defaultdict(dict)
        self.now_s = self.ready_s = 0.0

    def _ask(self, *_: object) -> None:
        self.ready_s = self.now_s + 1.0

    def _has_answered(self, *_: object) -> bool:
        self.now_s = max(self.now_s, self.ready_s)
        return True


def test_servers_that_are_as_slow_as_each_other_share_the_waiting(monkeypatch):
    """So that no run is told that it was bound by the first."""
    store = Alike(2)
    monkeypatch.setattr(remote_store, "time", SimpleNamespace(perf_counter=lambda: store.now_s))
    for step in range(10):
        store._read(MessageKind.LOOK_UP, SimpleNamespace(rank=0, step=step), None, "lookups")
    assert store.waited_s == {(0, 0): 5.0, (0, 1): 5.0}


def test_a_process_whose_launcher_goes_while_it_starts_says_nothing_of_that(monkeypatch):
    """As after Ctrl-C: it is about to end, and a traceback would be the last that a user sees."""
    pipe, launchers = socket.socketpair()
    launchers.close()
    monkeypatch.setattr(processes, "inherited", lambda: (None, "{}", pipe))
    served: list[str] = []
    processes.serve(lambda sock, text: SimpleNamespace(serve_all=lambda: served.append(text)))
    assert served == ["{}"]
    pipe.close()
