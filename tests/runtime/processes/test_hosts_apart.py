"""Two hosts that can be cut from each other: network namespaces of this machine, joined by a cable.

They need root and `ip`, and are deleted when their test ends.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.netns,
    pytest.mark.skipif(
        os.geteuid() != 0 or shutil.which("ip") is None, reason="namespaces need root and `ip`"
    ),
]
FAR = "10.77.0.2"


class Hosts:
    """``near`` has the ranks, ``far`` the servers."""

    def __init__(self) -> None:
        self.names = [f"persia{os.getpid()}{side}" for side in "ab"]
        self.cables = [f"pv{os.getpid()}{side}" for side in "ab"]

    def set_up(self) -> None:
        for name in self.names:
            ip("netns", "add", name)
        one, other = self.cables
        ip("link", "add", one, "netns", self.names[0], "type", "veth",
           "peer", "name", other, "netns", self.names[1])  # fmt: skip
        for k, (name, cable) in enumerate(zip(self.names, self.cables, strict=True)):
            ip("-n", name, "addr", "add", f"10.77.0.{k + 1}/24", "dev", cable)
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "link", "set", cable, "up")

    def cable(self, state: str) -> None:
        ip("-n", self.names[0], "link", "set", self.cables[0], state)

    def start(self, host: int, *words: str) -> subprocess.Popen[str]:
        inside = ["ip", "netns", "exec", self.names[host], sys.executable]
        return subprocess.Popen(
            [*inside, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    found = Hosts()
    try:
        found.set_up()
    except subprocess.CalledProcessError as error:
        pytest.skip(f"this machine makes no namespaces: {error.stderr!r}")
    else:
        yield found
    finally:
        for name in found.names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


RUN = """
import hashlib, sys
from pathlib import Path
from persia_sim.words.vocabulary import Mode
from runtime.rank.progress import Meter
from tests.runtime.worlds import ArraySource, config, run
far = dict(servers=2, servers_at=(sys.argv[1],), servers_secret=Path(sys.argv[2])) \\
    if len(sys.argv) > 2 else dict(shards=2)
start = Meter.start
Meter.start = lambda self: start(self, on_samples=lambda samples: print("trains", flush=True))
world = run(config(mode=Mode.SYNC, ranks=2, executor="concurrent", latency_s=0.01, **far),
            ArraySource(24 * 300))
digest = hashlib.sha256()
for name, array in sorted(world.state().items()):
    digest.update(name.encode() + array.tobytes())
print(digest.hexdigest(), len(world.trace.events), flush=True)
world.store.close()
"""


def test_a_cable_that_is_out_for_five_seconds_changes_no_byte(hosts, tmp_path):
    secret = tmp_path / "secret"
    secret.touch(0o600)
    secret.write_text("a secret for tests alone")
    alone = subprocess.run(
        [sys.executable, "-c", RUN], capture_output=True, text=True, cwd=Path.cwd(), check=True
    )
    far = hosts.start(
        1, "-m", "runtime", "serve", "--secret", str(secret), "--listen", f"{FAR}:7800"
    )
    near = None
    try:
        assert far.stdout.readline().startswith("ready for embedding servers")
        near = hosts.start(0, "-c", RUN, f"{FAR}:7800", str(secret))
        for _ in range(20):
            assert near.stdout.readline() == "trains\n", near.stderr.read()
        hosts.cable("down")
        time.sleep(5.0)
        hosts.cable("up")
        told, failed = near.communicate(timeout=300)
        assert near.returncode == 0, failed
        assert told.splitlines()[-1] == alone.stdout.splitlines()[-1]
    finally:
        for process in (near, far):
            if process is not None:
                process.kill()
                process.wait()
