"""The parts of a run on the engine that its config asks for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from runtime.config import TrainConfig
from runtime.data.source import Source
from runtime.embedding.config import TableConfig
from runtime.rank.parts import Parts, assemble

if TYPE_CHECKING:
    from runtime.engines.processes.ranks import ProcessRank  # loads torch.distributed


def assemble_for(
    config: TrainConfig,
    source: Source,
    tables: Mapping[str, TableConfig] | None = None,
    *,
    samples: int = 0,
    rank: ProcessRank | None = None,
) -> Parts:
    """As `assemble`, with the rows in this process or in servers of their own.

    ``rank``: the rank that this process is; None: all are threads of this process.
    """
    if rank is not None:
        rows = rank.open_rows
        return assemble(config, source, tables, samples=samples, open_rows=rows, place=rank)
    if not config.engine.servers:
        return assemble(config, source, tables, samples=samples)
    from runtime.engines.processes.open import rows_in_servers  # loads the compiled kernels

    return assemble(config, source, tables, samples=samples, open_rows=rows_in_servers)
