"""Two hosts, as network namespaces of this machine, and the cable between them, which is cut.

A connection that is cut is noticed at both ends at once. Of a cable that is out nobody hears: what
was sent does not come, or comes one way only, until somebody's patience is over.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from itertools import count

from persia_sim.base.rules import Refused

ADDRESSES = "10.77.0.1", "10.77.0.2"
HOSTS = "PERSIA_DRILL_HOSTS"
"""Environment variable with the names of both, for `main`."""
MISSING = "" if os.geteuid() == 0 and shutil.which("ip") else "root and the command ip"
_NOBODY = "02:00:00:00:00:01"
"""A hardware address that no host of the cable has: what is sent there is dropped."""
_RENDEZVOUS = 29400
_NUMBERS = count()


def ip(*words: str) -> None:
    """The command of iproute2. Raises CalledProcessError."""
    subprocess.run(["ip", *words], check=True, capture_output=True)


class Cable:
    """The hosts are gone when it is closed."""

    def __init__(self) -> None:
        """Raises `Refused` where this process may not make them."""
        # Two hosts are two network namespaces of this machine, which needs rights.
        if MISSING:
            raise Refused("engine", f"of hosts needs {MISSING}: a host is a network namespace")
        name = f"persia-{os.getpid()}-{next(_NUMBERS)}"
        self.names = f"{name}a", f"{name}b"

        # Joined by a pair of virtual devices; whatever was made goes again when one step fails.
        try:
            for name in self.names:
                ip("netns", "add", name)
                ip("-n", name, "link", "set", "lo", "up")
            ends = [["name", f"v{k}", "netns", name] for k, name in enumerate(self.names)]
            ip("link", "add", *ends[0], "type", "veth", "peer", *ends[1])
            for k, name in enumerate(self.names):
                ip("-n", name, "address", "add", f"{ADDRESSES[k]}/24", "dev", f"v{k}")
                ip("-n", name, "link", "set", f"v{k}", "up")
        except BaseException:
            self.close()
            raise

    def on(self, host: int) -> list[str]:
        """Words before a command that is to run on the first host, or the second."""
        return ["ip", "netns", "exec", self.names[host]]

    def cut(self, *, one_way: bool, host: int = 0) -> None:
        """From now on nothing passes; or ``one_way``, nothing that this host sends."""
        if one_way:
            far = [ADDRESSES[1 - host], "lladdr", _NOBODY, "dev", f"v{host}", "nud", "permanent"]
            ip("-n", self.names[host], "neighbour", "replace", *far)
        else:
            ip("-n", self.names[host], "link", "set", f"v{host}", "down")

    def mend(self) -> None:
        """All passes again."""
        for k, name in enumerate(self.names):
            far = [ADDRESSES[1 - k], "dev", f"v{k}"]
            subprocess.run(["ip", "-n", name, "neighbour", "delete", *far], capture_output=True)
            ip("-n", name, "link", "set", f"v{k}", "up")

    def close(self) -> None:
        """The namespaces end with what runs there."""
        for name in self.names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)


def main() -> None:
    """torchrun on both hosts, with the words that this process was given; ends as they do."""
    started = []
    for k, name in enumerate(os.environ[HOSTS].split()):
        words = ["-m", "torch.distributed.run", "--nnodes", "2", "--rdzv-backend", "c10d"]
        words += ["--rdzv-endpoint", f"{ADDRESSES[0]}:{_RENDEZVOUS}"]
        words += ["--rdzv-conf", f"is_host={int(not k)}", "--local-addr", ADDRESSES[k]]
        line = ["ip", "netns", "exec", name, sys.executable, *words, *sys.argv[1:]]
        started.append(subprocess.Popen(line))
    signal.signal(signal.SIGTERM, lambda *_: [one.terminate() for one in started])
    sys.exit(max(abs(one.wait()) for one in started))


if __name__ == "__main__":
    main()
