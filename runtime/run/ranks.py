"""Ranks that torchrun has started: they find each other, agree, and follow rank 0."""

from __future__ import annotations

import json
import platform
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from runtime.checkpoint.whole import Checkpoint, read_checkpoint
from runtime.config import TrainConfig
from runtime.data.source import Source
from runtime.dense.group import JOIN_S, RankGroup
from runtime.engines.open import assemble_for, opened
from runtime.engines.processes.ranks import ProcessRank
from runtime.order.replayable import trace_meta
from runtime.rank.learner import enter_device
from runtime.run.folder import flat, plain
from runtime.run.saver import Saving
from runtime.run.training import Training
from runtime.stop import PeerError
from runtime.torchrun import Launch, device_of, die_with_parent


@contextmanager
def joined(config: TrainConfig, launch: Launch) -> Iterator[ProcessRank]:
    """This process as a rank among all that torchrun started, from their meeting to their parting.

    An error in the context ends this process only; torchrun ends the others.
    """
    die_with_parent(signal.SIGTERM)  # torchrun is killed, too, and then says nothing
    devices = torch.cuda.device_count() if config.engine.device == "cuda" else 0
    device = device_of(config.engine.device, launch.local_rank, devices)
    enter_device(device)
    store = dist.PrefixStore(f"attempt {launch.restarts}", _store(launch))  # type: ignore[attr-defined]
    group = RankGroup(
        launch.rank, launch.ranks, store, torch.device(device), ranks_here=launch.ranks
    )
    rank = ProcessRank(group, device)
    yield rank
    rank.close()


def agree(rank: ProcessRank, config: TrainConfig, source: Source) -> None:
    """Raise ValueError, at every rank, when ranks were not started for the same run."""
    found = source.provenance()
    facts: dict[str, Any] = flat(plain(config))
    facts |= {"the data": found.name, "the data's sha256": found.sha256, "the split": found.split}
    facts |= {"the schema": json.dumps(found.schema)}
    facts |= {"Python": platform.python_version(), "torch": torch.__version__}
    facts |= {"numpy": metadata.version("numpy")}
    rank.group.agree("what is trained", facts)


def lead(rank: ProcessRank, config: TrainConfig, start: Checkpoint | None) -> None:
    """Tell the ranks that follow from where the run goes on."""
    told = {
        "from": None if start is None else str(start.folder.resolve()),
        "trace_order": config.engine.trace_order,
    }
    rank.group.gather(_START, json.dumps(told))


def follow(config: TrainConfig, rank: ProcessRank) -> None:
    """Train as a rank that does not lead: what is counted, evaluated and written is at rank 0."""
    torch.set_num_threads(config.engine.threads)
    with opened(config, rank) as source:
        agree(rank, config, source)
        told = json.loads(rank.group.gather(_START, "")[0])
        start = None if told["from"] is None else read_checkpoint(Path(told["from"]))
        config = replace(config, engine=replace(config.engine, trace_order=told["trace_order"]))
        samples = start.state.samples if start else 0
        parts = assemble_for(config, source, samples=samples, rank=rank)
        saving = Saving(start=start)
        training = Training(parts, trace_meta(config, source, parts.store.tables), saving)
        training.begin(None, None)
        with saving.ending.listening():
            training.train()


_START = "where the run goes on"


def _store(launch: Launch) -> Any:
    try:
        return dist.TCPStore(  # type: ignore[attr-defined]
            launch.host,
            launch.port,
            is_master=launch.rank == 0 and not launch.agent_has_store,
            wait_for_workers=False,
            timeout=timedelta(seconds=JOIN_S),
        )
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise PeerError(
            f"rank {launch.rank} cannot reach the store of all ranks at {launch.host}:"
            f"{launch.port}: {reason}"
        ) from None
