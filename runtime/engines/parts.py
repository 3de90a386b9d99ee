"""The parts of a run on the engine that its config asks for."""

from __future__ import annotations

from collections.abc import Mapping

from runtime.config import TrainConfig
from runtime.data.source import Source
from runtime.embedding.config import TableConfig
from runtime.rank.parts import Parts, assemble


def assemble_for(
    config: TrainConfig,
    source: Source,
    tables: Mapping[str, TableConfig] | None = None,
    *,
    samples: int = 0,
) -> Parts:
    """As `assemble`, with the rows in this process or in servers of their own."""
    if not config.engine.servers:
        return assemble(config, source, tables, samples=samples)
    from runtime.engines.processes.open import rows_in_servers  # loads the compiled kernels

    return assemble(config, source, tables, samples=samples, open_rows=rows_in_servers)
