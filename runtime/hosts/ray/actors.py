"""What Ray starts on the hosts that it has chosen: a rank is `train` in a process of its own, with
torchrun's variables; an embedding server, worker or loader is `serve`. Nothing here loads torch,
which a host then has once for each rank only."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from runtime.guarded import NOT_STORED
from runtime.hosts.launch.hosts import ProcessHost
from runtime.hosts.launch.processes import path_of_modules
from runtime.hosts.ray.room import Placement
from runtime.hosts.wire.peers import at_port
from runtime.run.reports import PIPE
from runtime.stop import BY_HAND, UNFINISHED, NotStored


class RankExit(NamedTuple):
    """How the process of a rank has ended."""

    code: int
    """0, an exit code of `guarded`, or the negative number of a signal."""
    sentence: str = ""
    follows: bool = True
    """Whether it only lost another process; else it names a mistake, which would come again."""

    @property
    def is_interrupted(self) -> bool:
        """Whether it was asked to end, and has written itself down."""
        return self.code in (UNFINISHED, BY_HAND)

    @property
    def is_lost(self) -> bool:
        """Whether it has ended badly."""
        return bool(self.code) and not self.is_interrupted

    def __str__(self) -> str:
        if self.code < 0:
            return f"was killed by {signal.Signals(-self.code).name}"
        return f"ended with exit code {self.code} ({self.sentence or 'it said nothing'})"

    def as_error(self) -> Exception:
        """What ends this command with the same exit code, in the same sentence."""
        kind = NotStored if self.code == NOT_STORED else ValueError
        return kind(self.sentence.removeprefix("error: "))


class RankActor:
    """A rank in a process of its own; Ray starts this on the host that it has chosen."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._progress: dict[str, Any] = {}

    def progress(self) -> dict[str, Any]:
        """What the rank has reported last; nothing before it trains."""
        return self._progress

    def train(
        self, words: list[str], place: Mapping[str, str], secret: str, folder: str
    ) -> RankExit:
        """Train as torchrun's rank at ``place``, in the working ``folder`` of the driver."""
        if not Path(folder).is_dir():
            missing = f"host {socket.gethostname()} has no folder {folder}, where train was started"
            return RankExit(2, f"{missing}: share it among all hosts", follows=False)

        # The secret: gone with the processes, and on no command line.
        secret_file = os.memfd_create("secret")
        os.fchmod(secret_file, 0o600)
        os.write(secret_file, secret.encode())

        # The rank reports its progress through a pipe, and its error in a file.
        reading, writing = os.pipe()
        with tempfile.NamedTemporaryFile() as error, open(reading) as lines:
            more = {"TORCHELASTIC_ERROR_FILE": error.name, "PYTHONPATH": path_of_modules()}
            more[PIPE] = str(writing)
            line = [sys.executable, "-u", "-m", "runtime", "train", *words]
            # It ends with the thread that started it, so this one waits for it.
            self._process = subprocess.Popen(
                [*line, "--servers-secret", f"/proc/self/fd/{secret_file}"],
                env=os.environ | place | more,
                cwd=folder,
                pass_fds=(secret_file, writing),
            )
            os.close(secret_file)
            os.close(writing)
            for text in lines:
                with suppress(ValueError):  # of half a line: it was killed meanwhile
                    self._progress = json.loads(text)
            code = self._process.wait()
            report = Path(error.name).read_text()

        # How it has ended, in its own sentence if it wrote one.
        if not report:
            return RankExit(code)
        message = json.loads(report)["message"]
        return RankExit(code, message["message"], message["extraInfo"]["follows"] == "True")

    def send(self, number: int) -> None:
        """A signal to the rank."""
        if self._process is not None:
            self._process.send_signal(number)


class ServerActor:
    """`serve` for one embedding server, worker or loader, on the host that Ray has chosen; there
    again after a death, or on another host, at another address."""

    def __init__(self, secret: str, tls: bool) -> None:
        self._host = ProcessHost(at_port(ray.util.get_node_ip_address(), 0), secret, tls=tls)
        threading.Thread(target=self._host.serve, daemon=True).start()

    def name(self) -> str:
        """HOST:PORT, as --servers-at takes it."""
        return self._host.name


def actor_at(kind: type, place: Placement, **options: Any) -> Any:
    """An actor of that kind, where room was made for it."""
    group, number = place
    bundle = dict(group.bundle_specs[number])
    return ray.remote(kind).options(
        num_cpus=bundle.pop("CPU"),
        num_gpus=bundle.pop("GPU", 0),
        scheduling_strategy=PlacementGroupSchedulingStrategy(group, number),
        **options,
    )
