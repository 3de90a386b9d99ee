"""Two hosts that are cut from each other for a while: ranks on one, servers on the other."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.runtime.processes.namespaces import ADDRESSES, ip, needed, start, two_hosts

pytestmark = [pytest.mark.netns, needed]


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


@pytest.fixture
def hosts():
    with two_hosts() as names:
        yield names


def test_a_cable_that_is_out_for_five_seconds_changes_no_byte(hosts, tmp_path):
    at = f"{ADDRESSES[1]}:7800"
    secret = tmp_path / "secret"
    secret.touch(0o600)
    secret.write_text("a secret for tests alone")
    alone = subprocess.run(
        [sys.executable, "-c", RUN], capture_output=True, text=True, cwd=Path.cwd(), check=True
    )
    far = start(hosts[1], "-m", "runtime", "serve", "--secret", str(secret), "--listen", at)
    near = None
    try:
        assert far.stdout.readline().startswith("ready for embedding servers")
        near = start(hosts[0], "-c", RUN, at, str(secret))
        for _ in range(20):
            assert near.stdout.readline() == "trains\n", near.stderr.read()
        ip("-n", hosts[0], "link", "set", "v0", "down")
        time.sleep(5.0)
        ip("-n", hosts[0], "link", "set", "v0", "up")
        told, failed = near.communicate(timeout=300)
        assert near.returncode == 0, failed
        assert told.splitlines()[-1] == alone.stdout.splitlines()[-1]
    finally:
        for process in (near, far):
            if process is not None:
                process.kill()
                process.wait()
