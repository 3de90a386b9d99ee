"""What a server process must be told before it listens."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from persia_sim.words.schema import parse
from runtime.embedding.config import TableConfig
from runtime.embedding.server_rules import ServerRules
from runtime.engines.transport.peers import STUCK_S


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """One shard of a store; the same rows as that shard inside a process would have."""

    shard: int
    shards: int
    seed: int
    tables: tuple[TableConfig, ...]
    rules: ServerRules = field(default_factory=ServerRules)
    threads: int = 1
    """Of one call of the kernels."""
    records: bool = True
    """Whether it writes down when its reads and writes took effect."""
    patience_s: float = STUCK_S
    """A client without a sign of life for so long is stuck; all waiting for so long is a
    deadlock."""
    awaits_rows: bool = False
    """Ranks are let in when the rows of a checkpoint are here."""
    life: int = 0
    """Its incarnation: how many servers of this shard were started before it in this run."""
    tls: bool = False
    """Whether clients come by encrypted connections."""
    secret: str = ""
    """What a client must know, hexadecimal."""
    dies_with_parent: bool = True
    """Killed by the kernel when the thread that started it ends; needs one that lives as long."""

    def to_json(self) -> str:
        """A document that `from_json` reads."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> ServerConfig:
        """Raises ValueError for what no server can be."""
        document = json.loads(text)
        tables = tuple(parse(TableConfig, table, "table") for table in document.pop("tables"))
        rules = rules_from(document.pop("rules"))
        return cls(tables=tables, rules=rules, **document)


def rules_from(document: Mapping[str, Any]) -> ServerRules:
    """Rules from JSON. Raises ValueError."""
    return parse(ServerRules, document, "rules")
