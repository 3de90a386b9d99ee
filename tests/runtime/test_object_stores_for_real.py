"""A real object store, moto's server of S3 on the loopback device, reached by s3fs over HTTP."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from urllib.request import Request, urlopen

import numpy as np
import pytest

from runtime import object_store
from runtime.checkpoint.places import complete_checkpoints, fetched
from runtime.checkpoint.whole import newest
from runtime.inference import open_model
from runtime.object_store import Store, working_folder
from runtime.run.saver import Saving
from runtime.run.session import train
from runtime.store_claim import CLAIM
from tests.runtime.spawned import SLOW, TORCHRUN
from tests.runtime.worlds import ArraySource, assert_same_bytes, config, on_engine

pytestmark = [pytest.mark.multiproc, pytest.mark.long]
SOURCE = ArraySource(300)
URL = "s3://bucket/runs/a"


@pytest.fixture
def s3(monkeypatch, tmp_path):
    """fsspec's S3, with an empty bucket."""
    server_of_moto = pytest.importorskip("moto.server", reason="needs the extra `stores-tests`")
    s3fs = pytest.importorskip("s3fs", reason="s3fs is not installed (the extra `stores`)")
    server = server_of_moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    # What is kept there is of this process: empty for each test.
    urlopen(Request(f"http://{host}:{port}/moto-api/reset", method="POST")).read()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_DEFAULT_REGION"):
        monkeypatch.setenv(name, "us-east-1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "first host"))
    opened = object_store._opened  # which a test may replace
    s3fs.S3FileSystem.clear_instance_cache()
    opened.cache_clear()
    system = s3fs.S3FileSystem()
    system.mkdir("bucket")
    yield system
    server.stop()
    s3fs.S3FileSystem.clear_instance_cache()
    opened.cache_clear()


def every(steps, **changes):
    return config(checkpoint_every=steps, keep_checkpoints=100, mode="sync", **changes)


def trained(settings, folder: Path, start=None):
    return train(settings, SOURCE, saving=Saving(folder, start))


@pytest.mark.law11
@pytest.mark.parametrize("engine", ["lag", "processes"])
def test_a_run_goes_on_from_s3_on_another_host_with_the_same_bytes(
    engine, s3, tmp_path, monkeypatch
):
    """On another number of servers; these send and fetch their rows themselves."""
    undisturbed = trained(every(4, shards=2), tmp_path / "local")
    first = every(4, **on_engine(engine, 2))
    trained(first, working_folder(URL, "runs")).store.close()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "second host"))
    last = complete_checkpoints(fetched(URL, "runs"))[-1]
    Store(URL).remove(f"checkpoints/{last.name}")
    here = fetched(URL, "runs")
    start = newest(here)
    assert 0 < start.state.samples < 300
    went_on = trained(every(4, **on_engine(engine, 3)), here, start)
    try:
        assert_same_bytes(undisturbed, went_on)
    finally:
        went_on.store.close()


class Proxy:
    """Stands before a store; once it hangs it takes connections and bytes, and answers nothing."""

    def __init__(self, port: int) -> None:
        self._port = port
        self.hangs = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self._port))
                for ends in ((client, server), (server, client)):
                    threading.Thread(target=self._pass_on, args=ends, daemon=True).start()

    def _pass_on(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while content := source.recv(1 << 16):
                if not self.hangs.is_set():
                    target.sendall(content)
            target.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self._listener.close()


@pytest.fixture
def proxy(s3, monkeypatch):
    before = Proxy(int(os.environ["AWS_ENDPOINT_URL"].rpartition(":")[2]))
    yield before
    before.close()


@pytest.mark.law12
@pytest.mark.parametrize(
    "servers", [[], ["--servers", "1", "--executor", "concurrent"]], ids=["alone", "servers"]
)
def test_a_run_whose_s3_hangs_ends_by_sigterm_with_75_and_goes_on(servers, proxy, tmp_path):
    (tmp_path / "measured_steps.py").write_text(SLOW)
    words = "train --data.name synthetic --steps 100 --batch 32 --mode sync --test-rows 200"
    words += " --model.name measured_steps:Net --model.hidden 8 --checkpoint-every 10"
    words += f" --resume auto --store-timeout 2 --out {URL}"
    line = [sys.executable, "-m", "runtime", *words.split(), *servers]
    behind = os.environ | {"AWS_ENDPOINT_URL": proxy.url}
    process = subprocess.Popen(
        line, cwd=tmp_path, env=behind, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        while not any(name.endswith("state.json") for name in Store(URL).names()):
            assert process.poll() is None, process.communicate()[0]
            time.sleep(0.1)
        proxy.hangs.set()
        time.sleep(1.0)
        process.send_signal(signal.SIGTERM)
        told, _ = process.communicate(timeout=100)
    finally:
        process.kill()
    assert process.returncode == 75, told
    assert "Traceback" not in told and URL in told
    whole = newest(fetched(URL, "read")).state.samples
    assert whole >= 10 * 32
    (tmp_path / "enough").touch()
    subprocess.run(line, cwd=tmp_path, check=True)


@pytest.mark.law12
def test_two_runs_do_not_fill_one_s3_url(s3, tmp_path, monkeypatch):
    """Of two hosts; the claim is made in one step, and goes with its run."""
    (tmp_path / "measured_steps.py").write_text(SLOW)
    words = "train --data.name synthetic --steps 600 --batch 32 --mode sync --test-rows 200"
    words += f" --model.name measured_steps:Net --model.hidden 8 --checkpoint-every end --out {URL}"
    line = [sys.executable, "-m", "runtime", *words.split()]
    first = subprocess.Popen(line, cwd=tmp_path)
    try:
        while CLAIM not in Store(URL).names():
            assert first.poll() is None
            time.sleep(0.1)
        with pytest.raises(OSError, match="ondition"):
            Store(URL).create(CLAIM, b"mine")
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "second host"))
        second = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert second.returncode == 2 and f"is filling {URL}" in second.stderr, second.stderr
        assert first.poll() is None
        (tmp_path / "enough").touch()
        assert first.wait(200) == 0
    finally:
        first.kill()
    assert CLAIM not in Store(URL).names() and "summary.json" in Store(URL).names()


def test_an_s3_that_hangs_from_the_start_is_named_and_ends_the_command(proxy, tmp_path):
    proxy.hangs.set()
    words = f"train --data.name synthetic --store-timeout 0.5 --out {URL}"
    behind = os.environ | {"AWS_ENDPOINT_URL": proxy.url}
    done = subprocess.run(
        [sys.executable, "-m", "runtime", *words.split()],
        cwd=tmp_path, env=behind, capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == 75, done.stderr
    assert URL in done.stderr and "Traceback" not in done.stderr


@pytest.mark.law11
@pytest.mark.law12
@pytest.mark.parametrize(
    ("launcher", "more"),
    [
        pytest.param(TORCHRUN, [], id="torchrun"),
        pytest.param([], ["--ray", "local:2"], id="ray", marks=pytest.mark.ray),
    ],
)
def test_a_run_of_several_processes_that_is_stopped_goes_on_from_s3_by_the_same_command(
    launcher, more, s3, tmp_path, monkeypatch
):
    if more:
        pytest.importorskip("ray", reason="Ray is not installed (the extra `cluster`)")
    (tmp_path / "measured_steps.py").write_text(SLOW)
    words = "train --data.name synthetic --steps 200 --batch 32 --mode sync --test-rows 200"
    words += " --model.name measured_steps:Net --model.hidden 8 --ranks 2 --checkpoint-every 20"
    there = [*more, "--servers", "2", "--out", URL, "--resume", "auto"]
    line = [sys.executable, *launcher, "-m", "runtime", *words.split(), *there]

    # It is stopped behind its first checkpoint, and begun again by the same words.
    process = subprocess.Popen(line, cwd=tmp_path)
    try:
        while not any(name.endswith("state.json") for name in Store(URL).names()):
            assert process.poll() is None
            time.sleep(0.1)
        process.terminate()
        assert process.wait(300) != 0
    finally:
        process.kill()
    assert Store(URL).names() and not (tmp_path / "s3:").exists()
    (tmp_path / "enough").touch()
    subprocess.run(line, cwd=tmp_path, check=True)

    # The same run in one process, in a folder.
    line = [sys.executable, "-m", "runtime", *words.split(), "--executor", "concurrent"]
    subprocess.run([*line, "--out", "local"], cwd=tmp_path, check=True)
    summary = json.loads((fetched(URL, "read") / "summary.json").read_text())
    assert summary["samples"] == 200 * 32 and len(summary["resumed_at_samples"]) == 1
    monkeypatch.syspath_prepend(tmp_path)
    local, stored = open_model(tmp_path / "local", trust=True), open_model(URL, trust=True)
    for table in local.tables:
        ids = np.arange(5000)
        assert local.lookup(table, ids).tobytes() == stored.lookup(table, ids).tobytes()
    Store(URL).get("predictions.npz", tmp_path / "stored.npz")
    judged = [dict(np.load(tmp_path / file)) for file in ("local/predictions.npz", "stored.npz")]
    assert judged[0].keys() == judged[1].keys()
    assert all(judged[0][name].tobytes() == judged[1][name].tobytes() for name in judged[0])
