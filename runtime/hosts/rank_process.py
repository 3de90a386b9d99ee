"""A rank that is a process: what it shares with the others, and how all end a leg at one batch."""

from __future__ import annotations

import json
import secrets
import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial
from itertools import zip_longest
from typing import IO

import torch
from torch import Tensor

from persia_sim.base.trace import TraceRecorder
from runtime.config import TrainConfig
from runtime.data.batch import Layout
from runtime.dense.rules import AsyncRule, DenseRule, OnUpdate
from runtime.embedding.config import TableConfig
from runtime.embedding.worker import EmbeddingWorker
from runtime.hosts.dense.async_weights import DenseServer, RemoteWeights
from runtime.hosts.dense.distributed import DistributedWeights
from runtime.hosts.dense.group import RankGroup
from runtime.hosts.dense.replicas import DistributedReplicas
from runtime.hosts.launch.hosts import read_secret
from runtime.hosts.launch.processes import Address
from runtime.hosts.row_processes import RowProcesses, worker_of
from runtime.hosts.wire.peers import at_port
from runtime.hosts.wire.tls import named
from runtime.rank.components import Components
from runtime.rank.doors import JoinedRank
from runtime.rank.feed import Feed
from runtime.rank.progress import SpanRecorder
from runtime.stop import PeerError, RunStopped, Stop

LOOK_EVERY_S = 0.1
_PLAIN_GRADIENTS = (
    "note: dense gradients travel between hosts in plain, by gloo or NCCL, whatever --tls says of"
    " rows; use a network that you trust"
)
_BARRIERS = 8
"""By which clocks are compared: the error is that of the best ones."""
Barriers = Sequence[tuple[float, float]]
"""When one process has entered and left each, by its clock."""


class GroupedRank(JoinedRank):
    """One rank of a run, alone in its process. Rank 0 leads: it starts the servers, evaluates, and
    writes everything down."""

    alone = False

    def __init__(
        self,
        group: RankGroup,
        device: str = "cpu",
        *,
        ranks_here: int | None = None,
    ) -> None:
        """``device``: of this rank's dense network; ``ranks_here``: on this host (None: all)."""
        self.ranks: Sequence[int] = range(group.rank, group.rank + 1)

        # Who this rank is among the others, and on which host.
        self.group = group
        self.device = device
        self.leads = group.rank == 0
        self.ranks_here = group.ranks if ranks_here is None else ranks_here
        self.spans_hosts = self.ranks_here < group.ranks
        """Whether other ranks are on other hosts, and share no memory with this one."""
        self.attempt = 1
        """Which start of all ranks this is; what ended the one before is not known here."""
        # What it counts by leg, and closes at its end.
        self._leg = 0
        self._counted = (0, 0)
        """Batches skipped and pushes lost in the legs before."""
        self._closing: list[Callable[[], None]] = []
        self._hosted: list[Callable[[], None]] = []
        """What the other ranks use goes last."""
        self._open_files: list[IO[str]] = []
        self._watch: LegWatch | None = None

    def open_rows(
        self,
        config: TrainConfig,
        layout: Layout,
        tables: list[TableConfig],
        recorder: TraceRecorder,
        stop: Stop,
    ) -> EmbeddingWorker:
        """Connect to the servers and workers, which rank 0 starts; they end with it."""
        # A worker that applies gradients itself must see those of all ranks.
        if config.sync.lookahead == "forwarded" and self.group.ranks > 1:
            raise ValueError(
                "--lookahead forwarded needs all ranks' gradients in one process; use --lookahead"
                " reread, or start it without torchrun"
            )

        # Rank 0 starts the processes; where it cannot, the others must not wait for them.
        processes = None
        addresses = list[Address]()
        names = ["embedding servers", *["embedding workers"] * bool(config.engine.workers)]
        try:
            if self.leads:
                processes = RowProcesses(config, layout, tables)
                addresses = processes.addresses
        except BaseException:
            self.has_not_started(names[0])
            raise

        # Every rank learns where they are, and connects.
        shared = [self.shared(n, a, config) for n, a in zip_longest(names, addresses)]
        worker = worker_of(config, layout, tables, stop, shared, self.ranks, processes)
        (self._hosted if processes else self._closing).append(worker.store.close)
        return worker

    def open_rule(self, components: Components, on_update: OnUpdate) -> DenseRule:
        """The rule of the dense weights that the mode asks for."""
        # async serves weights by calls; all other modes meet as a group.
        config = components.config
        learner = components.learner
        group = self.group
        group.attach(components.stop)
        if config.sync.mode.has_dense_server:
            return self._async_rule(components, on_update)
        if self.leads and self.spans_hosts:
            print(_PLAIN_GRADIENTS, file=sys.stderr, flush=True)

        # Replicas that are averaged now and then, or one set of weights that all sum into.
        if config.sync.mode.averages_replicas:
            averaged = DistributedReplicas(
                config,
                learner.model,
                components.recorder,
                on_update,
                group=group,
                stop=components.stop,
            )
            self._closing.append(averaged.close)
            return averaged
        return DistributedWeights(
            config,
            learner.model,
            components.recorder,
            on_update,
            group=group,
            overlapped=config.sync.mode.overlaps_dense_sync,
            stop=components.stop,
        )

    def begin_leg(self, prepare: Callable[[], None]) -> None:
        """Rank 0 prepares the servers; then all begin."""
        self.group.status = "begins to train"
        if self.leads:
            prepare()
        self.group.gather(f"leg {self._leg} begins", "")

    def open_leg(self, feed: Feed, end: int | None, ends_now: Callable[[], bool]) -> None:
        """Until the leg is over: as soon as ``ends_now`` at any rank, all end it at one cut."""
        feed.begin_leg(end)
        self._watch = LegWatch(self.group, self._leg, feed, ends_now)

    def ended_by(self, why: str | None) -> str | None:
        """Why any rank was asked to end the run; None: none was."""
        return next(filter(None, self.group.gather(f"leg {self._leg} by", why or "")), None)

    def end_leg(self, components: Components) -> None:
        """End the leg at all ranks: all pushes of all ranks are closed when this returns."""
        meter = components.meter
        learner = components.learner
        worker = components.worker
        group = self.group

        # What this rank adds to the account of the run since the leg before.
        skipped, lost = self._counted
        report = {
            "skipped": meter.batches_skipped - skipped,
            "lost": meter.pushes_lost - lost,
            "drew_unseeded": learner.drew_unseeded,
            "row_gradient_seen": worker.row_gradient_seen,
            "seconds": [[*key, s] for key, s in components.spans.seconds.items()],
            "waited": [[*key, s] for key, s in components.store.waited_s.items()],
        }
        if components.config.engine.timeline:
            self._gather_spans(components.spans)

        # All reports; nobody hands out batches of this leg any more.
        group.status = f"it has ended its leg after {meter.updates} updates"
        group.legs_ended += 1
        reports = group.gather(f"leg {self._leg} ends", json.dumps(report))
        if self._watch is not None:
            self._watch.over()
            self._watch = None
        self._leg += 1

        # Rank 0 has the account of all.
        if self.leads:
            for other in map(json.loads, reports[1:]):
                meter.batches_skipped += other["skipped"]
                meter.pushes_lost += other["lost"]
                learner.drew_unseeded |= other["drew_unseeded"]
                worker.row_gradient_seen |= other["row_gradient_seen"]
                components.spans.seconds |= {
                    (rank, stage): s for rank, stage, s in other["seconds"]
                }
                components.store.waited_s |= {
                    (rank, server): s for rank, server, s in other["waited"]
                }
            if components.config.sync.mode.has_barrier:  # all wait while this one evaluates
                paused_s = components.spans.paused_s
                paused_s |= dict.fromkeys(range(group.ranks), paused_s.get(group.rank, 0.0))
        self._counted = (meter.batches_skipped, meter.pushes_lost)

    def _gather_spans(self, spans: SpanRecorder) -> None:
        """Give rank 0's timeline the spans of all ranks, by its own clock."""
        # Barriers, by which clocks are compared.
        group = self.group
        barriers = list[tuple[float, float]]()
        for _ in range(_BARRIERS):
            entered_s = spans.now_s()
            group.wait(group.all_reduce(torch.zeros(1, device=group.wire)), "a barrier")
            barriers.append((entered_s, spans.now_s()))

        # How the ranks exchange what they have: tensors of one shape.
        def gathered(tensor: Tensor) -> Tensor:
            work, of_all_ranks = group.all_gather(tensor.to(group.wire))
            group.wait(work, "the timeline")
            return of_all_ranks.cpu()

        # All ranks' spans as text, padded to the longest.
        sent = [] if self.leads else spans.spans
        if not self.leads:
            spans.spans = []
        text = json.dumps([barriers, sent]).encode()
        sizes = gathered(torch.tensor([len(text)])).flatten().tolist()
        padded = torch.frombuffer(bytearray(text.ljust(max(sizes))), dtype=torch.uint8)
        texts = gathered(padded)
        for rank in range(1, group.ranks) if self.leads else ():
            entered, received = json.loads(texts[rank].numpy().tobytes())
            spans.take_in(rank, received, *behind(barriers, entered))

    def close(self) -> None:
        """All is done; every rank calls it, and waits for the others."""
        self.group.gather("all is done", "")  # until then rank 0 may ask for replicas
        for close in self._closing:
            close()
        self.group.gather("closing", "")
        for close in (*self._hosted, *(file.close for file in self._open_files)):
            close()
        self.group.close()

    def _async_rule(self, components: Components, on_update: OnUpdate) -> DenseRule:
        """The rule of async: rank 0 serves its dense weights, the others pull and push."""
        # Rank 0 has the weights, and listens for the others.
        config = components.config
        model = components.learner.model
        address = None
        if self.leads:
            rule = AsyncRule(config, model, components.recorder, on_update)
            at = named(at_port(self.group.address, 0), tls=config.engine.tls)
            exchange = partial(components.spans.exchange, pauses_s=components.meter.pauses_s)
            server = DenseServer(rule, components.stop, at if self.spans_hosts else "", exchange)
            self._hosted.append(server.close)
            address = server.address

        # All ranks learn where.
        address = self.shared("dense weights", address, config)
        if self.leads:
            return rule
        remote = RemoteWeights(address, self.group.rank, model, components.stop)
        self._closing.append(remote.close)
        return remote

    def shared(self, what: str, address: Address | None, config: TrainConfig) -> Address:
        """Where rank 0 has started ``what`` all ranks use: its ``address``. The secrets in it are
        not for the store of all ranks."""
        secret = config.engine.servers_secret
        seal = read_secret(secret) if self.spans_hosts and secret else None

        # Sealed for these ranks of this start alone: each of them draws a part of what it is about.
        about = what
        if seal:
            drawn = self.group.gather(_readers_of(what), secrets.token_hex(16))
            about = " ".join([what, *drawn])
        published = ""
        if address is not None:
            published = address.sealed(seal, about) if seal else address.publish(self._open_files)
        place = self.group.gather(what, published)[0]
        if not place:
            raise PeerError(f"rank 0 could not start the {what}, and says why")
        return Address.unsealed(place, seal, about) if seal else Address.read_from(place)

    def told(self, what: str, word: str) -> str:
        """Rank 0's word; each rank gives its own, and waits for all."""
        return self.group.gather(what, word)[0]

    def has_not_started(self, what: str) -> None:
        """At rank 0, which could not start what all use: the others, which ask for it in `shared`,
        find nothing. Waits for none of them, who may have been asked to end as well."""
        for name in (_readers_of(what), what):
            self.group.give_up(name)


def _readers_of(what: str) -> str:
    return f"who reads the {what}"


def behind(ours: Barriers, theirs: Barriers) -> tuple[float, float]:
    """Say by how many seconds their clock is behind, and how far off that may be.

    Nobody leaves a barrier before all have entered it.

    >>> behind([(10.0, 11.0), (20.0, 24.0)], [(0.5, 1.5), (13.0, 14.5)])
    (9.5, 1.0)
    """
    pairs = list(zip(ours, theirs, strict=True))
    least = max(entered - left for (entered, _), (_, left) in pairs)
    most = min(left - entered for (_, left), (entered, _) in pairs)
    return (least + most) / 2, (most - least) / 2


class LegWatch:
    """The thread beside training that ends one leg at one batch of all ranks.

    When a rank wants the leg to end, every rank stops handing out batches, says which it would hand
    out next, and goes on to the furthest of these: so a batch that any rank has begun is trained by
    all, and nobody waits for the gradients of a batch that another one never takes.
    """

    def __init__(
        self, group: RankGroup, leg: int, feed: Feed, ends_now: Callable[[], bool]
    ) -> None:
        self._group = group
        self._leg = leg
        self._feed = feed
        self._ends_now = ends_now
        self._over = Stop()
        self._thread = threading.Thread(target=self._watch, name="leg", daemon=True)
        self._thread.start()

    def over(self) -> None:
        """Every rank has ended the leg."""
        self._over.set(None)
        self._thread.join()

    def _watch(self) -> None:
        wanted = f"leg {self._leg} is to end"
        try:
            while True:
                self._over.sleep(LOOK_EVERY_S)
                if self._ends_now():
                    self._group.say(wanted)
                if self._group.is_announced(wanted):
                    self._feed.end_with(self._agreed)
                    return
        except RunStopped:
            pass
        except Exception as error:  # nobody hands out batches now: the run ends, in a sentence
            self._group.fail(error)

    def _agreed(self, promised: int, requested: int) -> tuple[int, int]:
        promise = json.dumps([promised, requested])
        promises = self._group.gather(f"leg {self._leg} has promised", promise, self._over)
        furthest, last = zip(*map(json.loads, promises), strict=True)
        return max(furthest), max(last)
