"""An embedding server as a process: the same bytes, the same windows, and nothing applied twice."""

from __future__ import annotations

import subprocess
import sys
import threading
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from persia_sim.base.trace import Kind
from runtime import stop
from runtime.__main__ import main
from runtime.checkpoint.rows import ensure_seen, load
from runtime.checkpoint.shard import see_folder, write_rows
from runtime.data.batch import Field, Layout
from runtime.embedding.config import Capacity, RowOptimizer, TableConfig
from runtime.embedding.native.store import NativeStore
from runtime.embedding.server_rules import ServerRules
from runtime.hosts.rows import remote_control
from runtime.hosts.rows.client import ServerClient
from runtime.hosts.rows.server_calls import ServerCalls
from runtime.hosts.wire.messages import Message, MessageKind
from tests.runtime.embedding.conftest import save
from tests.runtime.hosts.served import LAYOUT, SGD, batch_of, one_step, ones, served
from tests.runtime.worlds import ArraySource

TWO_TABLES = Layout(
    fields=(Field(name="user"), Field(name="item", table="items"), Field(name="tags")),
    dense=("age", "price"),
    tasks=("click", "buy"),
)


@pytest.mark.law12
def test_two_servers_end_with_the_bytes_of_a_store_in_the_process():
    tables = [
        TableConfig(name="rows", dim=5, optimizer=RowOptimizer(kind="adagrad")),
        TableConfig(
            name="items", dim=3, optimizer=RowOptimizer(kind="adam"), capacity=Capacity(rows=20),
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
                rows[name] = draw.normal(size=values.shape).astype(np.float32)
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


def test_files_that_the_leader_does_not_see_whole_are_no_checkpoint(tmp_path, monkeypatch):
    """A server on another host may have another folder of the same name."""
    with served(servers=2, run_folder=tmp_path) as found:
        write = found.store.at_each_server

        def elsewhere(*verb, **said):
            told = write(*verb, **said)
            next((tmp_path / "rows").glob("*-shard-0001.rows")).unlink()
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
        for folder, save in ((tmp_path, "0"), (run / "..", "0"), (run, "../0"), ("/tmp", "0")):
            with pytest.raises(OSError, match="writes only below the folder of its run"):
                found.store.at_each_server(write_rows, folder=str(folder), save=save)


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


# A whole run over server processes: its curve and figures are those of threads.


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
