"""The parts of a run on the engine that its config asks for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from runtime.config import TrainConfig
from runtime.data.source import Source
from runtime.embedding.config import TableConfig
from runtime.rank.parts import OpenRows, Parts, assemble, rows_here

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
    open_rows: OpenRows = rows_here
    if rank is not None:
        open_rows = rank.open_rows
        config = replace(config, engine=replace(config.engine, device=rank.device))
    elif config.engine.servers:
        from runtime.engines.processes.open import rows_in_servers  # loads the compiled kernels

        open_rows = rows_in_servers
    parts = assemble(config, source, tables, samples=samples, open_rows=open_rows, place=rank)
    if config.engine.loaders:
        from runtime.engines.processes.loaders import LoadedSource

        if isinstance(source, LoadedSource):
            source.stop = parts.stop
    return parts
