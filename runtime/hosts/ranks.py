"""Ranks that torchrun has started: they find each other, agree, and follow rank 0."""

from __future__ import annotations

import json
import platform
import secrets
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from runtime.checkpoint.places import fetched
from runtime.checkpoint.whole import Checkpoint, read_checkpoint
from runtime.config import TrainConfig
from runtime.data.source import Source
from runtime.executors.open import assemble_for, opened
from runtime.executors.replayable import trace_meta
from runtime.hosts.dense.group import JOIN_S, SILENCE_S, Heard, RankGroup, answered
from runtime.hosts.rank_process import GroupedRank
from runtime.hosts.torchrun import Launch, device_of
from runtime.object_store import address_of, store_behind
from runtime.process import die_with_parent
from runtime.rank.learner import enter_device
from runtime.run.folder import flat, plain
from runtime.run.reports import reporting
from runtime.run.saver import Saving
from runtime.run.training import Training
from runtime.stop import Ending, Interrupted, PeerError, Silence


@contextmanager
def joined(config: TrainConfig, launch: Launch) -> Iterator[GroupedRank]:
    """This process as a rank among all that torchrun started, from their meeting to their parting.

    An error in the context ends this process only; torchrun ends the others.
    """
    # The device of this rank among those of the host.
    die_with_parent(signal.SIGTERM)  # torchrun is killed, too, and then says nothing
    devices = torch.cuda.device_count() if config.engine.device == "cuda" else 0
    device = device_of(config.engine.device, launch.local_rank, devices)
    enter_device(device)

    # Which start of all ranks this is: keys of an earlier one must not be read.
    whole = _store(launch)
    heard = Heard(whole, launch.rank, SILENCE_S, lambda: None)
    attempt = _attempt(heard, launch)
    heard.close()
    store = dist.PrefixStore(f"attempt {attempt}", whole)  # type: ignore[attr-defined]

    # The group in which they sum, agree and part.
    group = RankGroup(
        launch.rank,
        launch.ranks,
        store,
        torch.device(device),
        towards=launch.host if launch.spans_hosts else "127.0.0.1",
    )
    rank = GroupedRank(group, device, ranks_here=launch.ranks_here)
    rank.attempt = attempt
    yield rank
    rank.close()


def meet_as_leader(
    rank: GroupedRank, config: TrainConfig, folder: Path, source: Source, start: Checkpoint | None
) -> None:
    """At rank 0, before anything is trained: all ranks agree on the run and on where it goes on."""
    agree(rank, config, source)
    lead(rank, config, start, folder)


def agree(rank: GroupedRank, config: TrainConfig, source: Source) -> None:
    """Raise ValueError, at every rank, when ranks were not started for the same run."""
    data = source.provenance()
    facts: dict[str, Any] = flat(plain(config))
    facts |= {"the data": data.name, "the data's sha256": data.sha256, "the split": data.split}
    facts |= {"the schema": json.dumps(data.schema)}
    facts |= {"Python": platform.python_version(), "torch": torch.__version__}
    facts |= {"numpy": metadata.version("numpy")}
    del facts["engine.servers_secret"]  # a file of its host
    rank.group.agree("what is trained", facts)


def lead(rank: GroupedRank, config: TrainConfig, start: Checkpoint | None, folder: Path) -> None:
    """Tell the ranks that follow from where the run goes on.

    Raises ValueError, at every rank, where one of them does not see the run's ``folder`` and would
    have to read a checkpoint there.
    """
    start_facts = {
        "from": None if start is None else address_of(start.folder.resolve()),
        "trace_order": config.engine.trace_order,
        "sees": None,
    }
    by_url = store_behind(folder) is not None
    if by_url or not (rank.spans_hosts and config.checkpoint.at_end):
        rank.group.gather(_START, json.dumps(start_facts))
        return
    with tempfile.NamedTemporaryFile(dir=folder, prefix="seen-by-all-ranks-") as mark:
        rank.group.gather(
            _START, json.dumps(start_facts | {"sees": str(Path(mark.name).resolve())})
        )
        _refuse_folder_of_one_host(rank, mark.name)


def _refuse_folder_of_one_host(rank: GroupedRank, mark: str) -> None:
    """Raise ValueError at every rank unless all see a file that rank 0 has just made."""
    seen = rank.group.gather("who sees the run folder", "yes" if Path(mark).exists() else "no")
    if "no" in seen:
        raise ValueError(
            f"{rank.group.places[seen.index('no')]} does not see {Path(mark).parent}, the run"
            f" folder of {rank.group.places[0]}, and could not go on from a checkpoint there: name"
            " a folder with --out that all hosts share, or leave --checkpoint-every out"
        )


def follow(config: TrainConfig, rank: GroupedRank, ending: Ending | None = None) -> None:
    """Train as a rank that does not lead: what is counted, evaluated and written is at rank 0.

    Raises `Interrupted`, without words, where the run was asked to end.
    """
    # What rank 0 has decided: the data, and what is gone on from.
    torch.set_num_threads(config.engine.threads)
    ending = Ending() if ending is None else ending  # one that nobody has asked counts as False
    with opened(config, rank) as source:
        agree(rank, config, source)
        start_facts = json.loads(rank.group.gather(_START, "")[0])
        if start_facts["sees"] is not None:
            _refuse_folder_of_one_host(rank, start_facts["sees"])
        start = (
            None if start_facts["from"] is None else read_checkpoint(fetched(start_facts["from"]))
        )
        config = replace(
            config, engine=replace(config.engine, trace_order=start_facts["trace_order"])
        )

        # The same components as at rank 0, over this rank's batches.
        samples = start.state.samples if start else 0
        components = assemble_for(config, source, samples=samples, rank=rank)
        saving = Saving(start=start, ending=ending)
        with components.stop.explained():
            training = Training(
                components, trace_meta(config, source, components.store.tables), saving
            )

            # Train leg by leg until rank 0 ends it; a run that was asked to end says so there.
            training.begin(None, None)
            ending.at_once = False
            with ending.listening(), reporting(training):
                if not training.train_legs():
                    raise Interrupted(by=ending.why)
                ending.is_trained = True


_START = "where the run goes on"


def _attempt(store: Heard, launch: Launch) -> int:
    """The number of this start of all ranks, from 1, the same at each of them.

    torchrun counts a restart on the host alone on which a rank has failed. So every process makes
    up a word, and rank 0 numbers the list of all; what it finds of a start before is replaced as
    soon as its rank is here, and that list then has another number.
    """
    # A word that no earlier start can have.
    my_word = secrets.token_hex(8)
    apart = Silence()
    listed = ""
    words = [f"start/{rank}" for rank in range(launch.ranks)]
    store.set(words[launch.rank], my_word)
    while True:
        # Rank 0 numbers the list whenever a word in it is new.
        if launch.rank == 0 and store.check(words):
            all_words = json.dumps([store.get(word).decode() for word in words])
            if all_words != listed:
                listed = all_words
                store.set("starts", json.dumps([store.add("starts so far", 1), all_words]))

        # A list with this rank's word counts once all others have seen theirs in it, too.
        if store.check(["starts"]):
            number, all_words = json.loads(store.get("starts"))
            if dict(enumerate(json.loads(all_words))).get(launch.rank) == my_word:
                store.set(f"start {number}/{launch.rank}", "")
                if store.check([f"start {number}/{rank}" for rank in range(launch.ranks)]):
                    return int(number)

        # One that never comes is named.
        if apart.look() > JOIN_S:
            missing = [f"rank {r}" for r, word in enumerate(words) if not store.check([word])]
            raise PeerError(
                f"rank {launch.rank} has waited {JOIN_S:.0f} s for all {launch.ranks} ranks to"
                f" start; {', '.join(missing) or 'one that has ended'} has not: look at its host"
            )
        time.sleep(0.05)


def _store(launch: Launch) -> Any:
    made = partial(
        dist.TCPStore,  # type: ignore[attr-defined]
        launch.host,
        launch.port,
        is_master=launch.rank == 0 and not launch.agent_has_store,
        wait_for_workers=False,
        timeout=timedelta(seconds=JOIN_S),
    )
    # Torch's limit is of the connection; of the first words over it there is none.
    try:
        return answered(made, JOIN_S + SILENCE_S)
    except TimeoutError:
        raise PeerError(
            f"rank {launch.rank} has connected to the store of all ranks at {launch.host}:"
            f"{launch.port}, which does not answer: it is stopped, or a cable is cut"
        ) from None
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise PeerError(
            f"rank {launch.rank} cannot reach the store of all ranks at {launch.host}:"
            f"{launch.port}: {reason}"
        ) from None
