"""The data and the parts of a run, on the engine that its config asks for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, cast

from runtime.config import TrainConfig
from runtime.data.open import open_source
from runtime.data.source import SharedSource, Source
from runtime.embedding.config import TableConfig
from runtime.rank.parts import OpenRows, Parts, assemble, rows_here

if TYPE_CHECKING:
    from runtime.engines.clients.ranks import ProcessRank  # loads torch.distributed


def source_of(config: TrainConfig) -> Source:
    """The data that the config names, read here."""
    data = config.data
    keep = data.keep and not config.engine.loaders  # what is kept needs nobody to parse it
    return open_source(
        data.name, data.dir, data.rows, data.skip_bad_rows,
        keep=keep, validation_fraction=data.validation_fraction,
    )  # fmt: skip


@contextmanager
def opened(config: TrainConfig, rank: ProcessRank | None = None) -> Iterator[Source]:
    """The data that the config names, its training part read here or by loaders.

    ``rank``: the rank that this process is; the first one of a host starts the loaders of all
    there. They end with the context.
    """
    source, loaders = source_of(config), config.engine.loaders
    if not loaders:
        yield source
        return
    from runtime.engines.clients.loaders import LoadedSource, LoaderProcesses
    from runtime.engines.servers.launch import Address

    processes, place, who = None, "", "the run" if rank is None else f"rank {rank.group.rank}"
    if rank is None or not rank.local_rank:
        processes = LoaderProcesses(config.data, loaders, 1 if rank is None else rank.ranks_here)
        place = processes.leave_address()
    if rank is not None:
        place = rank.group.gather("loaders", place)[rank.group.rank - rank.local_rank]
    loaded = LoadedSource(cast(SharedSource, source), Address.found_at(place), processes, who)
    try:
        yield loaded
    finally:
        loaded.close()
        if processes is not None:
            processes.close()


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
        from runtime.engines.clients.open import rows_in_servers  # loads the compiled kernels

        open_rows = rows_in_servers
    tables = config.tables_apart() | dict(tables or {})
    parts = assemble(config, source, tables, samples=samples, open_rows=open_rows, process=rank)
    if config.engine.loaders:
        from runtime.engines.clients.loaders import LoadedSource

        if isinstance(source, LoadedSource):
            source.stop = parts.stop
    return parts
