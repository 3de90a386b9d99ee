"""The data and the components of a run, on the engine that its config asks for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, cast

import numpy as np

from persia_sim.base.trace import Trace
from runtime.config import TrainConfig
from runtime.data.open import open_source
from runtime.data.source import LoadedElsewhere, SharedSource, Source
from runtime.embedding.config import TableConfig
from runtime.rank.components import Components, OpenRows, assemble, rows_here

if TYPE_CHECKING:
    from runtime.rank.doors import JoinedRank


def source_of(config: TrainConfig) -> Source:
    """The data that the config names, read here."""
    data = config.data
    return open_source(
        data.name,
        data.dir,
        data.rows,
        data.skip_bad_rows,
        keep=not config.engine.loaders,  # what is kept needs nobody to parse it
        validation_fraction=data.validation_fraction,
    )


@contextmanager
def opened(config: TrainConfig, rank: JoinedRank | None = None) -> Iterator[Source]:
    """The data that the config names, its training part read here or by loaders.

    ``rank``: the rank that this process is; rank 0 starts the loaders of all. They end with the
    context.
    """
    # Without loaders the ranks parse.
    source = source_of(config)
    if not config.engine.loaders:
        yield source
        return
    from runtime.hosts.loading.loaded_source import LoadedSource
    from runtime.hosts.row_processes import start_loaders

    # Rank 0 starts the loaders; where it cannot, the others must not wait for them.
    processes = None
    who = "the run" if rank is None else f"rank {rank.ranks[0]}"
    with ExitStack() as ends:
        try:
            if rank is None or rank.leads:
                processes = start_loaders(config, 1 if rank is None else config.sync.ranks)
                ends.callback(processes.close)
        except BaseException:
            if rank is not None:
                rank.has_not_started("loaders")
            raise

        # Every rank learns where they are, and connects.
        started = None if processes is None else processes.address
        address = started if rank is None else rank.shared("loaders", started, config)
        assert address is not None  # as one of the two has it
        loaded = LoadedSource(cast(SharedSource, source), address, processes, who)
        ends.callback(loaded.close)
        yield loaded


def rows_of(config: TrainConfig) -> OpenRows:
    """What opens the rows of a run: in this process, or in servers of their own."""
    if not config.engine.servers:
        return rows_here
    from runtime.hosts.row_processes import rows_in_servers

    return rows_in_servers


def merged_trace(leaders: Trace, of_servers: Sequence[np.ndarray]) -> Trace:
    """The order of a run: what this process has written down, merged with what its servers have."""
    if not of_servers:
        return leaders
    from runtime.hosts.merge_recordings import merged_with_servers

    return merged_with_servers(leaders, of_servers)


def assemble_for(
    config: TrainConfig,
    source: Source,
    tables: Mapping[str, TableConfig] | None = None,
    *,
    samples: int = 0,
    rank: JoinedRank | None = None,
) -> Components:
    """Assemble the components of a run, with the rows in this process or in servers of their own.

    ``rank``: the rank that this process is; None: all are threads of this process.
    """
    # Who opens the rows: this process, the rank that it is, or servers that it starts.
    open_rows = rows_of(config)
    if rank is not None:
        open_rows = rank.open_rows
        config = replace(config, engine=replace(config.engine, device=rank.device))
    tables = config.tables_apart() | dict(tables or {})
    components = assemble(
        config, source, tables, samples=samples, open_rows=open_rows, process=rank
    )

    # Loaders are waited for as long as the run goes on.
    if isinstance(source, LoadedElsewhere):
        source.stop = components.stop
    return components
