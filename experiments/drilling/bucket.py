"""An object store of this host: moto's server of S3 on the loopback device, which hangs for a while
and answers again."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

from persia_sim.base.rules import Refused

BUCKET = "s3://drill"
_UP_WITHIN_S = 120.0


class Bucket:
    """Empty at first; its runs keep their working folders in a cache of their own."""

    def __init__(self, cache: Path) -> None:
        """Raises `Refused` where moto or s3fs is not installed."""
        missing = [name for name in ("moto", "s3fs") if find_spec(name) is None]
        if missing:
            remedy = "pip install 'persia-testbed[stores-tests]'"
            raise Refused("roles", f"of a store needs {' and '.join(missing)}: {remedy}")

        # Where it is, in the words of its clients: this process and the runs that it starts.
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        os.environ["AWS_ENDPOINT_URL"] = f"http://127.0.0.1:{port}"
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_DEFAULT_REGION"):
            os.environ[name] = "us-east-1"
        os.environ["XDG_CACHE_HOME"] = str(cache.absolute())
        words = ["-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
        self._process = subprocess.Popen(
            [sys.executable, *words], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        self._wait_until_up(port)

        from s3fs import S3FileSystem  # late: it is in no extra of a run here

        S3FileSystem.clear_instance_cache()  # of the store of a trial before
        S3FileSystem().mkdir(BUCKET.removeprefix("s3://"))

    def hang(self) -> None:
        """From now on it takes connections and answers nothing."""
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """It answers again."""
        self._process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        """What it holds is gone."""
        self.go_on()
        self._process.kill()
        self._process.wait()

    def _wait_until_up(self, port: int) -> None:
        ends_s = time.monotonic() + _UP_WITHIN_S
        while True:
            try:
                return socket.create_connection(("127.0.0.1", port), 1.0).close()
            except OSError:
                if self._process.poll() is not None or time.monotonic() > ends_s:
                    self._process.kill()
                    raise
                time.sleep(0.2)
