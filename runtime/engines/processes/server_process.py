"""An embedding server as a process: `persia-runtime.engines.processes.server_process`."""

from __future__ import annotations

from runtime.embedding.native.extension import native
from runtime.engines.processes.launch import launched
from runtime.engines.processes.messages import error_document, pack_json
from runtime.engines.processes.peers import Listener
from runtime.engines.processes.server_config import ServerConfig
from runtime.engines.processes.service import Service


def main() -> None:
    """Serve until the launcher has enough, or is gone."""
    sock, text, pipe = launched()
    try:
        config = ServerConfig.from_json(text)
        native.set_threads(config.threads)
        service = Service(config)
        who = f"embedding server {config.shard}"
        listener = Listener(sock, config.secret, service.serve, who, tls=config.tls)
    except Exception as error:
        pipe.sendall(pack_json(error_document(error)))
        return
    pipe.sendall(b"{}")
    listener.serve_all()


if __name__ == "__main__":
    main()
