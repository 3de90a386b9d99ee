"""An embedding server as a process: `python -m runtime.engines.processes.server_process`.

Started by `launch` with three inherited descriptors: a listening socket, a memory file with its
config, and a pipe on which it says that it is ready and whose other end lives as long as the
launcher. It ends when asked to, when that pipe ends, and when the kernel says that the thread that
started it has ended: so never later than its launcher, however that dies.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
import threading
import time

from runtime.embedding.native.extension import native
from runtime.engines.processes.channel import Channel
from runtime.engines.processes.launch import NOT_FOR_SERVERS
from runtime.engines.processes.messages import error_document, pack_json
from runtime.engines.processes.server_config import ServerConfig
from runtime.engines.processes.service import Service

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Serve until the launcher has enough, or is gone."""
    listening, config_file, life = (int(text) for text in sys.argv[1:4])
    for number in NOT_FOR_SERVERS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, NOT_FOR_SERVERS)  # blocked since before we began
    with os.fdopen(config_file) as file:
        text = file.read()
    pipe = socket.socket(fileno=life)
    try:
        config = ServerConfig.from_json(text)
        if config.dies_with_parent:
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        native.set_threads(config.threads)
        service = Service(config, lambda: os._exit(0))
    except Exception as error:
        pipe.sendall(pack_json(error_document(error)))
        return
    threading.Thread(target=_end_with, args=(pipe,), daemon=True).start()
    pipe.sendall(b"{}")
    door = socket.socket(fileno=listening)
    while True:
        try:
            connection, _ = door.accept()
        except OSError:  # no descriptor is free: whoever is connected is served all the same
            time.sleep(0.1)
            continue
        channel = Channel(connection)
        if not channel.is_own_user():  # not even heard
            channel.close()
            continue
        threading.Thread(target=service.serve, args=(channel,), daemon=True).start()


def _end_with(pipe: socket.socket) -> None:
    """The launcher never writes: what comes is its end."""
    while pipe.recv(1):
        pass
    os._exit(0)


if __name__ == "__main__":
    main()
