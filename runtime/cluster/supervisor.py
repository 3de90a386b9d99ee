"""`train --ray`: a run whose ranks and embedding servers Ray places, watches and starts again.

This process, the driver, is the supervisor. It is to the ranks what torchrun's agent is: it holds
the store in which they meet, and when one ends badly it starts all anew, from the last checkpoint.
So what trains knows nothing of Ray: rows, gradients, batches and dense weights go by the sockets
that they take without it, and no step waits for a call of Ray.
"""

from __future__ import annotations

import math
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
from runtime.checkpoint.places import complete_checkpoints, fetched
from runtime.cluster.actors import RankActor, RankExit, ServerActor, actor_at
from runtime.cluster.room import ResourcePlan, Room, connected, reserved
from runtime.engines.wire.messages import SECRET_BYTES
from runtime.object_store import address_of, store_behind, working_folder
from runtime.run.folder import INTERRUPTED, fresh_folder
from runtime.run.live import LABELS, Totals, metrics
from runtime.run.saver import is_finished
from runtime.stop import MOST_RESTARTS, Interrupted, PeerError, Terminated, pause_before
from runtime.torchrun import Launch
from runtime.train_options import OnCluster, Train, options_report, read_train

ALL_END_WITHIN_S = 60.0
"""When one rank has failed, the others say within that time why they cannot go on."""
LOOK_EVERY_S = 10.0
"""How often a store is asked for new checkpoints, where that is done again and again."""


def train_on_cluster(request: OnCluster) -> None:
    """The run that was typed, on the cluster: ``local:N``, ``auto`` or HOST:PORT.

    Raises ValueError for what cannot be, PeerError where the run has ended and would end again.
    """
    # Read the options as rank 0 will, before anything starts: Ray has not said yet where servers
    # are.
    launch = Launch(  # each rank is alone on its host
        rank=0,
        local_rank=0,
        ranks=request.ranks,
        ranks_here=1,
        host="",
        port=1,
        agent_has_store=True,
    )
    placeholders = ["--servers-at", "placed.by.ray:1", "--servers-secret", "placed by ray"]
    words = list(request.words)
    named = bool({"--out", "--resume"} & {word.partition("=")[0] for word in words})
    fresh = Path(f"runs/train/{time.strftime('%Y%m%d-%H%M%S')}-cluster")
    placeholders += [] if named else ["--out", str(fresh)]
    whole = [*words, "--ranks", str(request.ranks), *placeholders]
    command = read_train(whole, launch)

    # What is asked of the cluster, and training once there is room.
    plan = ResourcePlan.of(command.run, request.least, command.cluster_server_bytes)
    with connected(request.where, plan), reserved(plan, command.cluster_wait_s) as room:
        print(room.describe(), flush=True)
        if command.dry_run:
            print(options_report(whole, launch))
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
        self._totals = Totals()
        self._run = {"run": run}
        self._gauges = {
            name: Gauge(f"persia_{name}", metric.help, ("run", *LABELS[metric.of]))
            for name, metric in metrics().items()
        }

    def take(self, progress: Mapping[str, Any], attempt: int = 0) -> None:
        """Export what a process of this attempt reports; again and again, as Ray forgets it in
        20 s."""
        for name, labels, value in self._totals.add(progress, attempt):
            self._gauges[name].set(value, self._run | labels)


class Supervised:
    """A run's actors, and the store of its ranks; all end with the context."""

    def __init__(
        self, command: Train, words: Sequence[str], plan: ResourcePlan, room: Room
    ) -> None:
        self._command = command
        self._words = words
        self._plan = plan
        self._room = room
        assert command.folder is not None
        self._working_folder = command.folder
        self._looked_s = -math.inf
        self._secret = secrets.token_hex(SECRET_BYTES)
        self._signals = list[int]()
        """What the user, or Ray, has sent to this process."""
        self._is_growing = False
        """Whether all ranks were asked to end because more find room."""

        # The store in which ranks meet.
        self._host = ray.util.get_node_ip_address()
        listener = socket.create_server((self._host, 0))  # of this address alone
        self._store = dist.TCPStore(  # type: ignore[attr-defined]
            self._host,
            listener.getsockname()[1],
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=60),
            master_listen_fd=listener.detach(),
        )

        # Actors of the servers; those of ranks are started for each attempt.
        self._servers = [
            actor_at(ServerActor, place, max_restarts=16, max_task_retries=-1).remote(
                self._secret, command.run.engine.tls
            )
            for place in room.servers()
        ]
        self._ranks: list[Any] = []
        self._attempt = 0
        self._restarts = 0

        # What the user sees.
        self._watch = Watch(address_of(self._working_folder))
        mode = str(command.run.sync.mode)
        self._bar = tqdm(unit=" samples", unit_scale=True, desc=mode, disable=None)

    def __enter__(self) -> Supervised:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            signal.signal(number, lambda number, frame: self._signals.append(number))
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.close()
        for actor in (*self._ranks, *self._servers):
            ray.kill(actor)

    def supervise(self) -> None:
        """Train to the end, from the last checkpoint as often as ranks are lost, or more find room
        when one has been written."""
        while True:
            # One attempt of all ranks, and who has failed in it.
            ended = self._train_once()
            lost = [f"rank {r} {one}" for r, one in enumerate(ended) if one.code]
            if is_finished(self._folder(), self._command.run):  # one may be lost as all part
                return

            # It may have ended because it should.
            if not lost and self._signals:
                raise Interrupted(self._interruption())
            if not lost and not self._is_growing:
                return

            # A user's mistake would come again; a lost rank goes back to the last checkpoint.
            mistakes = [one for one in ended if one.code and not one.follows]
            self._restarts += not self._is_growing
            again = not mistakes and not self._signals and self._restarts <= MOST_RESTARTS
            if not again or not complete_checkpoints(self._folder()):
                raise mistakes[0].as_error() if mistakes else PeerError(lost[0])

            # Say why, and give a host the time to come back.
            why = "there is room for more ranks" if self._is_growing else "; ".join(lost)
            pause_s = 0.0 if self._is_growing else pause_before(self._restarts)
            warning = f"warning: {why}; all ranks go back to the last checkpoint in {pause_s:.0f} s"
            print(warning, file=sys.stderr, flush=True)
            self._pause(pause_s)

    def _folder(self, every_s: float = 0.0) -> Path:
        """The run's folder. Where it is a URL, what the store has of it, as it was ``every_s`` ago
        at most: rank 0 writes on a host of its own."""
        behind = store_behind(self._working_folder)
        if behind is None:
            return self._working_folder
        if time.monotonic() - self._looked_s < every_s:
            return working_folder(behind.url, "watch")
        self._looked_s = time.monotonic()
        return fetched(behind.url, "watch")

    def _pause(self, seconds: float) -> None:
        """Unless somebody asks the run to end: then `_start_ranks` says so."""
        ends_s = time.monotonic() + seconds
        while not self._signals and time.monotonic() < ends_s:
            time.sleep(0.2)

    def _interruption(self) -> str:
        """How to go on, as rank 0 has written it down."""
        try:
            return str(read_document(self._folder() / INTERRUPTED)["told"])
        except (OSError, ValueError, KeyError):
            return f"interrupted by {signal.Signals(self._signals[0]).name}"

    def _train_once(self) -> list[RankExit]:
        """Start as many ranks as there is room for, and wait until all have ended."""
        names = self._start_ranks()
        self._attempt = self._attempt + 1
        count = ["--ranks", str(len(self._ranks))]
        words = [*self._words, *count, "--servers-at", *names]
        common = {"WORLD_SIZE": len(self._ranks), "LOCAL_WORLD_SIZE": 1, "LOCAL_RANK": 0}
        common |= {"MASTER_ADDR": self._host, "MASTER_PORT": self._store.port}
        common |= {"TORCHELASTIC_USE_AGENT_STORE": True}
        waiting = {}
        for rank, actor in enumerate(self._ranks):
            place = {"RANK": rank, "GROUP_RANK": rank, **common}  # alone on its host
            environment = {name: str(value) for name, value in place.items()}
            started = actor.train.remote(words, environment, self._secret, os.getcwd())
            waiting[started] = rank
        return self._wait_for(waiting)

    def _start_ranks(self) -> list[str]:
        """Have an actor in each place that there is for a rank; begin anew where a place goes
        meanwhile, or comes. Returns the addresses of the servers. Raises PeerError where there is
        no room, KeyboardInterrupt for a signal."""
        # Wait for room, and listen for signals meanwhile.
        ends_s = time.monotonic() + self._command.cluster_wait_s
        while time.monotonic() < ends_s:
            if self._signals:
                ended = KeyboardInterrupt if self._signals[0] == signal.SIGINT else Terminated
                raise ended(f"{signal.Signals(self._signals[0]).name} before ranks began")
            places = self._room.ranks()
            if len(places) < self._plan.least:
                time.sleep(1.0)
                continue

            # An actor for each place; places change while actors start, and then all begin anew.
            for rank in self._ranks:
                ray.kill(rank)
            self._ranks = [actor_at(RankActor, one, max_concurrency=2).remote() for one in places]
            ready = [one.__ray_ready__.remote() for one in self._ranks]
            ready += [one.name.remote() for one in self._servers]
            missing = ready
            while missing and time.monotonic() < ends_s and places == self._room.ranks():
                _, missing = ray.wait(ready, num_returns=len(ready), timeout=1.0)
            if not missing:
                with suppress(ray.exceptions.RayActorError):  # gone again, with its host
                    return list(ray.get(ready)[len(places) :])
        raise PeerError(self._plan.shortage(self._command.cluster_wait_s))

    def _wait_for(self, waiting: dict[Any, int]) -> list[RankExit]:
        """How each rank has ended. Signals are passed on to all; when one rank is lost, the others
        have a while to end by themselves. Where more find room, all are asked to end."""
        ended = dict[int, RankExit]()
        passed_on = 0
        ends_s = float("inf")
        before = complete_checkpoints(self._folder())[-1:]
        self._is_growing = False
        while waiting:
            # Ranks that have ended; the first that fails sets the others a limit.
            done, _ = ray.wait(list(waiting), timeout=0.5)
            for result in done:
                rank = waiting.pop(result)
                try:
                    ended[rank] = ray.get(result)
                except ray.exceptions.RayActorError:
                    ended[rank] = RankExit(-signal.SIGKILL)  # with its actor
                if ended[rank].code:
                    ends_s = min(ends_s, time.monotonic() + ALL_END_WITHIN_S)

            # Signals: those that came here, the limit, and the wish for more ranks.
            is_late = time.monotonic() > ends_s
            numbers = [*self._signals[passed_on:], *([signal.SIGKILL] if is_late else [])]
            passed_on = len(self._signals)
            if not (ended or passed_on or self._is_growing) and self._may_grow(before):
                self._is_growing = True
                numbers.append(signal.SIGUSR1)
            for number in numbers:
                for rank in waiting.values():
                    self._ranks[rank].send.remote(number)
            if self._signals.count(signal.SIGINT) > 1:
                raise KeyboardInterrupt("interrupted at once")

            # What the ranks report goes to the metrics and to the progress bar.
            self._watch.take({"run": {"restarts": self._restarts}})
            reports = [actor.progress.remote() for actor in self._ranks]
            for ready in ray.wait(reports, num_returns=len(reports), timeout=1.0)[0]:
                with suppress(ray.exceptions.RayActorError):  # it has gone, perhaps with its host
                    self._take(ray.get(ready))
        return [ended[rank] for rank in sorted(ended)]

    def _take(self, progress: Mapping[str, Any]) -> None:
        """Show what a rank reports of the run; behind a restart samples are fewer."""
        self._watch.take(progress, self._attempt)
        self._bar.total = progress.get("total", self._bar.total)
        self._bar.update(progress["run"].get("samples", self._bar.n) - self._bar.n)

    def _may_grow(self, checkpoints: Sequence[Path]) -> bool:
        """Whether more ranks would find room, and a checkpoint has followed these ``checkpoints``:
        then all ranks train, and hear a signal."""
        if len(self._ranks) == len(self._plan.ranks):
            return False
        newest = complete_checkpoints(self._folder(every_s=LOOK_EVERY_S))[-1:]
        return newest != checkpoints and len(self._room.ranks()) > len(self._ranks)
