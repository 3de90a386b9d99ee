"""`train --ray`: a run whose ranks and embedding servers Ray places, watches and starts again.

This process, the driver, is the supervisor. It is to the ranks what torchrun's agent is: it holds
the store in which they meet, and when one ends badly it starts all anew, from the last checkpoint.
So what trains knows nothing of Ray: rows, gradients, batches and dense weights go by the sockets
that they take without it, and no step waits for a call of Ray.
"""

from __future__ import annotations

import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import ray
import torch.distributed as dist
from ray.util.metrics import Gauge
from tqdm import tqdm

from persia_sim.base.files import read_document
from runtime.checkpoint.whole import complete_checkpoints
from runtime.cluster.actors import Ended, RankActor, ServerActor, placed
from runtime.cluster.room import Plan, Room, connected, reserved
from runtime.engines.wire.messages import SECRET_BYTES
from runtime.run.folder import INTERRUPTED, fresh_folder
from runtime.run.live import LABELS, Totals, metrics
from runtime.run.saver import is_finished
from runtime.stop import Interrupted, PeerError, Terminated
from runtime.torchrun import MOST_RESTARTS, Launch, pause_before
from runtime.train_options import OnCluster, Train, read_train, told_of_options

ALL_END_WITHIN_S = 60.0
"""When one rank has failed, the others say within that time why they cannot go on."""


def train_on_cluster(asked: OnCluster) -> None:
    """The run that was typed, on the cluster: ``local:N``, ``auto`` or HOST:PORT.

    Raises ValueError for what cannot be, PeerError where the run has ended and would end again.
    """
    launch = Launch(  # each rank is alone on its host
        rank=0, local_rank=0, ranks=asked.ranks, ranks_here=1, host="", port=1, agent_has_store=True
    )
    unknown = ["--servers-at", "placed.by.ray:1", "--servers-secret", "placed by ray"]
    words = list(asked.words)
    named = bool({"--out", "--resume"} & {word.partition("=")[0] for word in words})
    fresh = Path(f"runs/train/{time.strftime('%Y%m%d-%H%M%S')}-cluster")
    unknown += [] if named else ["--out", str(fresh)]
    whole = [*words, "--ranks", str(asked.ranks), *unknown]
    command = read_train(whole, launch)
    plan = Plan.of(command.run, asked.least, command.cluster_server_bytes)
    with connected(asked.where, plan), reserved(plan, command.cluster_wait_s) as room:
        print(room.told(), flush=True)
        if command.dry_run:
            print(told_of_options(whole, launch))
            return
        if not named:
            command = replace(command, out=fresh_folder(fresh))
            words += ["--out", str(command.out)]
        with Supervised(command, words, plan, room) as run:
            run.supervise()


class Watch:
    """The metrics of a run, which Ray's agent on the supervisor's host exports.

    Counts are gauges, too: a counter of Ray cannot be 0, and stays with the agent when its process
    has ended, so that a run that is resumed would be counted twice.
    """

    def __init__(self, run: str) -> None:
        self._totals, self._run = Totals(), {"run": run}
        self._gauges = {
            name: Gauge(f"persia_{name}", metric.told, ("run", *LABELS[metric.of]))
            for name, metric in metrics().items()
        }

    def take(self, said: Mapping[str, Any], attempt: int = 0) -> None:
        """What a process of this attempt has said; again and again, as Ray forgets it in 20 s."""
        for name, labels, value in self._totals.add(said, attempt):
            self._gauges[name].set(value, self._run | labels)


class Supervised:
    """A run's actors, and the store of its ranks; all end with the context."""

    def __init__(self, command: Train, words: Sequence[str], plan: Plan, room: Room) -> None:
        self._command, self._words, self._plan, self._room = command, words, plan, room
        folder = command.folder
        assert folder is not None
        self._folder, self._grows = folder, False
        self._secret, self._asked = secrets.token_hex(SECRET_BYTES), list[int]()
        self._host = ray.util.get_node_ip_address()
        listener = socket.create_server((self._host, 0))  # of this address alone
        self._store = dist.TCPStore(  # type: ignore[attr-defined]
            self._host, listener.getsockname()[1], is_master=True, wait_for_workers=False,
            timeout=timedelta(seconds=60), master_listen_fd=listener.detach(),
        )  # fmt: skip
        self._servers = [
            placed(ServerActor, place, max_restarts=16, max_task_retries=-1).remote(
                self._secret, command.run.engine.tls
            )
            for place in room.servers()
        ]
        self._ranks: list[Any] = []
        self._watch, self._attempt, self._restarts = Watch(str(folder)), 0, 0
        mode = str(command.run.sync.mode)
        self._bar = tqdm(unit=" samples", unit_scale=True, desc=mode, disable=None)

    def __enter__(self) -> Supervised:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            signal.signal(number, lambda number, frame: self._asked.append(number))
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.close()
        for actor in (*self._ranks, *self._servers):
            ray.kill(actor)

    def supervise(self) -> None:
        """Train to the end, from the last checkpoint as often as ranks are lost, or more find room
        when one has been written."""
        while True:
            ended = self._train_once()
            lost = [f"rank {r} {one}" for r, one in enumerate(ended) if one.code]
            if is_finished(self._folder, self._command.run):  # one may be lost as all part
                return
            if not lost and self._asked:
                raise Interrupted(self._told_of_interruption())
            if not lost and not self._grows:
                return
            mistakes = [one for one in ended if one.code and not one.follows]
            self._restarts += not self._grows
            again = not mistakes and not self._asked and self._restarts <= MOST_RESTARTS
            if not again or not complete_checkpoints(self._folder):
                raise mistakes[0].as_error() if mistakes else PeerError(lost[0])
            why = "there is room for more ranks" if self._grows else "; ".join(lost)
            pause_s = 0.0 if self._grows else pause_before(self._restarts)
            told = f"warning: {why}; all ranks go back to the last checkpoint in {pause_s:.0f} s"
            print(told, file=sys.stderr, flush=True)
            self._pause(pause_s)

    def _pause(self, seconds: float) -> None:
        """Unless somebody asks the run to end: then `_start_ranks` says so."""
        ends_s = time.monotonic() + seconds
        while not self._asked and time.monotonic() < ends_s:
            time.sleep(0.2)

    def _told_of_interruption(self) -> str:
        """How to go on, as rank 0 has written it down."""
        try:
            return str(read_document(self._folder / INTERRUPTED)["told"])
        except (OSError, ValueError, KeyError):
            return f"interrupted by {signal.Signals(self._asked[0]).name}"

    def _train_once(self) -> list[Ended]:
        """Start as many ranks as there is room for, and wait until all have ended."""
        names, self._attempt = self._start_ranks(), self._attempt + 1
        count = ["--ranks", str(len(self._ranks))]
        words = [*self._words, *count, "--servers-at", *names]
        common = {"WORLD_SIZE": len(self._ranks), "LOCAL_WORLD_SIZE": 1, "LOCAL_RANK": 0}
        common |= {"MASTER_ADDR": self._host, "MASTER_PORT": self._store.port}
        common |= {"TORCHELASTIC_USE_AGENT_STORE": True}
        waiting = {}
        for rank, actor in enumerate(self._ranks):
            place = {"RANK": rank, "GROUP_RANK": rank, **common}  # alone on its host
            told = {name: str(value) for name, value in place.items()}
            waiting[actor.train.remote(words, told, self._secret, os.getcwd())] = rank
        return self._wait_for(waiting)

    def _start_ranks(self) -> list[str]:
        """Have an actor in each place that there is for a rank; begin anew where a place goes
        meanwhile, or comes. Returns the addresses of the servers. Raises PeerError where there is
        no room, KeyboardInterrupt for a signal."""
        ends_s = time.monotonic() + self._command.cluster_wait_s
        while time.monotonic() < ends_s:
            if self._asked:
                ended = KeyboardInterrupt if self._asked[0] == signal.SIGINT else Terminated
                raise ended(f"{signal.Signals(self._asked[0]).name} before ranks began")
            places = self._room.ranks()
            if len(places) < self._plan.least:
                time.sleep(1.0)
                continue
            for rank in self._ranks:
                ray.kill(rank)
            self._ranks = [placed(RankActor, one, max_concurrency=2).remote() for one in places]
            ready = [one.__ray_ready__.remote() for one in self._ranks]
            ready += [one.name.remote() for one in self._servers]
            missing = ready
            while missing and time.monotonic() < ends_s and places == self._room.ranks():
                _, missing = ray.wait(ready, num_returns=len(ready), timeout=1.0)
            if not missing:
                with suppress(ray.exceptions.RayActorError):  # gone again, with its host
                    return list(ray.get(ready)[len(places) :])
        raise PeerError(self._plan.shortage(self._command.cluster_wait_s))

    def _wait_for(self, waiting: dict[Any, int]) -> list[Ended]:
        """How each rank has ended. Signals are passed on to all; when one rank is lost, the others
        have a while to end by themselves. Where more find room, all are asked to end."""
        ended, sent, ends_s = dict[int, Ended](), 0, float("inf")
        kept, self._grows = complete_checkpoints(self._folder)[-1:], False
        while waiting:
            done, _ = ray.wait(list(waiting), timeout=0.5)
            for found in done:
                rank = waiting.pop(found)
                try:
                    ended[rank] = ray.get(found)
                except ray.exceptions.RayActorError:
                    ended[rank] = Ended(-signal.SIGKILL)  # with its actor
                if ended[rank].code:
                    ends_s = min(ends_s, time.monotonic() + ALL_END_WITHIN_S)
            asked = [*self._asked[sent:], *([signal.SIGKILL] if time.monotonic() > ends_s else [])]
            sent = len(self._asked)
            if not (ended or sent or self._grows) and self._may_grow(kept):
                self._grows = True
                asked.append(signal.SIGUSR1)
            for number in asked:
                for rank in waiting.values():
                    self._ranks[rank].send.remote(number)
            if self._asked.count(signal.SIGINT) > 1:
                raise KeyboardInterrupt("interrupted at once")
            self._watch.take({"run": {"restarts": self._restarts}})
            told = [actor.told.remote() for actor in self._ranks]
            for found in ray.wait(told, num_returns=len(told), timeout=1.0)[0]:
                with suppress(ray.exceptions.RayActorError):  # it has gone, perhaps with its host
                    self._take(ray.get(found))
        return [ended[rank] for rank in sorted(ended)]

    def _take(self, said: Mapping[str, Any]) -> None:
        """What a rank has said of the run; behind a restart samples are fewer."""
        self._watch.take(said, self._attempt)
        self._bar.total = said.get("total", self._bar.total)
        self._bar.update(said["run"].get("samples", self._bar.n) - self._bar.n)

    def _may_grow(self, kept: Sequence[Path]) -> bool:
        """Whether more ranks would find room, and a checkpoint has followed the ``kept`` one: then
        all ranks train, and hear a signal."""
        if len(self._ranks) == len(self._plan.ranks):
            return False
        newest = complete_checkpoints(self._folder)[-1:]
        return newest != kept and len(self._room.ranks()) > len(self._ranks)
