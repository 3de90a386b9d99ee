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

from persia_sim.base.progress import Progress
from runtime.checkpoint.places import complete_checkpoints, fetched
from runtime.hosts.ray.actors import RankActor, RankExit, ServerActor, actor_at
from runtime.hosts.ray.room import Placement, ResourcePlan, Room, connected, reserved
from runtime.hosts.resize import WISH, Pause, taken
from runtime.hosts.torchrun import Launch
from runtime.hosts.wire.messages import SECRET_BYTES
from runtime.object_store import store_behind, working_folder
from runtime.run.folder import fresh_folder, read_ending
from runtime.run.saver import is_finished
from runtime.stop import (
    MOST_RESTARTS,
    Interrupted,
    PeerError,
    Terminated,
    Unfinished,
    pause_before,
)
from runtime.train_options import OnCluster, Train, options_report, read_train

ALL_END_WITHIN_S = 60.0
"""When one rank has failed, the others say within that time why they cannot go on."""
ROOM_WITHIN_S = 5.0
"""Room for more servers, if a cluster has any, is there by then; nothing is watched meanwhile."""
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
        ranks=request.ranks.most,
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
    most = ["--ranks", str(request.ranks.most), "--servers", str(request.servers.most)]
    whole = [*words, *most, *placeholders]
    command = read_train(whole, launch)

    # What is asked of the cluster, and training once there is room.
    plan = ResourcePlan.of(command.run, request.ranks.least, request.servers.least)
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
        self._change = ""
        """Why all ranks were asked to end, to go on with others: more ranks, other servers."""
        self._most_servers = len(plan.servers)
        """What somebody wants it to have, or what was typed."""
        self._stopped_s = 0.0
        """When the last attempt was asked to end, or was last seen to train (`time.monotonic`)."""
        self._pause = Pause()
        """The one that ends when this attempt has trained its first step."""

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

        # Actors of the servers stay where they are; those of ranks are started for each attempt.
        self._serving = dict[Placement, Any]()
        self._servers = 0
        """Embedding servers of this attempt, without its workers and loaders."""
        self._ranks: list[Any] = []
        self._restarts = 0

        # What the user sees.
        mode = str(command.run.sync.mode)
        self._bar = Progress(unit=" samples", unit_scale=True, desc=mode)

    def __enter__(self) -> Supervised:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            signal.signal(number, lambda number, frame: self._signals.append(number))
        (self._working_folder / WISH).unlink(missing_ok=True)  # an old one counts no more
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.close()
        for actor in (*self._ranks, *self._serving.values()):
            ray.kill(actor)

    def supervise(self) -> None:
        """Train to the end, from the last checkpoint as often as ranks are lost, or more find room
        when one has been written."""
        while True:
            # One attempt of all ranks, and who has failed in it.
            ended = self._train_once()
            lost = [f"rank {r} {one}" for r, one in enumerate(ended) if one.is_lost]
            asked = any(one.is_interrupted for one in ended)
            if is_finished(self._folder(), self._command.run):  # one may be lost as all part
                return

            # It may have ended because it should.
            if not lost and self._signals:
                by = signal.Signals(self._signals[0]).name
                raise Interrupted(self._interruption(), by)
            if not lost and not asked:
                return

            # A user's mistake would come again; a lost rank goes back to the last checkpoint, and
            # so do all where somebody has asked a rank to end, and not this command.
            mistakes = [one for one in ended if one.is_lost and not one.follows]
            self._restarts += not self._change
            again = not mistakes and not self._signals and self._restarts <= MOST_RESTARTS
            why = self._change or "; ".join(lost) or "a rank was asked to end"
            if not again or not complete_checkpoints(self._folder()):
                raise mistakes[0].as_error() if mistakes else Unfinished(why)

            # Say why, and give a host the time to come back.
            pause_s = 0.0 if self._change else pause_before(self._restarts)
            warning = f"warning: {why}; all ranks go back to the last checkpoint in {pause_s:.0f} s"
            print(warning, file=sys.stderr, flush=True)
            if self._may_have_fewer:
                self._room.ask_for_servers(self._most_servers)
            self._wait(pause_s)

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

    @property
    def _may_have_fewer(self) -> bool:
        """Whether the number of servers may change: then each has room of its own."""
        return self._plan.least_servers < len(self._plan.servers)

    def _wait(self, seconds: float) -> None:
        """Unless somebody asks the run to end: then `_start_ranks` says so."""
        ends_s = time.monotonic() + seconds
        while not self._signals and time.monotonic() < ends_s:
            time.sleep(0.2)

    def _interruption(self) -> str:
        """How to go on, as rank 0 has written it down."""
        ended = read_ending(self._folder())
        return ended.told if ended else f"interrupted by {signal.Signals(self._signals[0]).name}"

    def _train_once(self) -> list[RankExit]:
        """Start as many ranks as there is room for, and wait until all have ended."""
        # Servers and ranks have a place; with other servers than before, a pause is under way.
        servers_before = self._servers
        names = self._start_ranks()
        if servers_before not in (0, self._servers):
            self._pause = Pause(self._stopped_s, servers_before, self._servers)

        # What each rank is told: the numbers of this attempt, and its place as torchrun says it.
        count = ["--ranks", str(len(self._ranks)), "--servers", str(self._servers)]
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
            places = self._room.places()
            if places is None:
                time.sleep(1.0)
                continue

            # An actor for each place; places change while actors start, and then all begin anew.
            for rank in self._ranks:
                ray.kill(rank)
            self._ranks = [actor_at(RankActor, p, max_concurrency=2).remote() for p in places.ranks]
            serving = self._serve_at([*places.servers, *places.others])
            ready = [one.__ray_ready__.remote() for one in self._ranks]
            ready += [one.name.remote() for one in serving]
            missing = ready
            while missing and time.monotonic() < ends_s and places == self._room.places():
                _, missing = ray.wait(ready, num_returns=len(ready), timeout=1.0)
            if not missing:
                self._servers = len(places.servers)
                with suppress(ray.exceptions.RayActorError):  # gone again, with its host
                    return list(ray.get(ready)[len(self._ranks) :])
        raise PeerError(self._plan.shortage(self._command.cluster_wait_s))

    def _serve_at(self, places: Sequence[Placement]) -> list[Any]:
        """The actors of servers, workers and loaders in these places, and in no others."""
        for place in self._serving.keys() - set(places):
            ray.kill(self._serving.pop(place))
        for place in places:
            if place not in self._serving:
                actor = actor_at(ServerActor, place, max_restarts=16, max_task_retries=-1)
                tls = self._command.run.engine.tls
                self._serving[place] = actor.remote(self._secret, tls)
        return [self._serving[place] for place in places]

    def _wait_for(self, waiting: dict[Any, int]) -> list[RankExit]:
        """How each rank has ended. Signals are passed on to all; when one rank is lost, the others
        have a while to end by themselves. Where more find room, or somebody wants another number of
        servers, all are asked to end."""
        ended = dict[int, RankExit]()
        passed_on = 0
        ends_s = float("inf")
        before = complete_checkpoints(self._folder())[-1:]
        self._change = ""
        trains = False
        while waiting:
            # Ranks that have ended; the first that fails sets the others a limit.
            done, _ = ray.wait(list(waiting), timeout=0.5)
            for result in done:
                rank = waiting.pop(result)
                try:
                    ended[rank] = ray.get(result)
                except ray.exceptions.RayActorError:
                    ended[rank] = RankExit(-signal.SIGKILL)  # with its actor
                if ended[rank].is_lost:
                    ends_s = min(ends_s, time.monotonic() + ALL_END_WITHIN_S)

            # Signals: those that came here, the limit, and the wish for other numbers.
            is_late = time.monotonic() > ends_s
            numbers = [*self._signals[passed_on:], *([signal.SIGKILL] if is_late else [])]
            passed_on = len(self._signals)
            if not (ended or passed_on or self._change):
                self._change = self._resized(trains) or self._grown(before)
                numbers += [signal.SIGUSR1] if self._change else []
                self._stopped_s = time.monotonic()
            for number in numbers:
                for rank in waiting.values():
                    self._ranks[rank].send.remote(number)
            if self._signals.count(signal.SIGINT) > 1:
                raise KeyboardInterrupt("interrupted at once")

            # What the ranks report goes to the progress bar.
            asked = [actor.progress.remote() for actor in self._ranks]
            reports = []
            for ready in ray.wait(asked, num_returns=len(asked), timeout=1.0)[0]:
                with suppress(ray.exceptions.RayActorError):  # it has gone, perhaps with its host
                    reports.append(ray.get(ready))
            for report in reports:
                self._take(report, before)
            trains = len(reports) == len(asked) and all(reports)
        return [ended[rank] for rank in sorted(ended)]

    def _take(self, progress: Mapping[str, Any], before: Sequence[Path]) -> None:
        """Show what a rank reports of the run; behind a restart samples are fewer."""
        samples = progress.get("samples")
        if samples is None:
            return
        self._bar.total = progress["total"]
        self._bar.update(samples - self._bar.n)
        if samples > (int(before[-1].name) if before else 0):
            self._pause.over()

    def _resized(self, trains: bool) -> str:
        """Why all ranks are to end where somebody wants another number of servers; empty where
        nobody does, or it cannot be. ``trains``: all ranks do, and hear a signal."""
        # The wish may be for what cannot be: then whoever asked is told why.
        least = self._plan.least_servers
        most = len(self._plan.servers)

        def why_not(servers: int) -> str:
            if servers == self._servers:
                return f"it has {servers} already"
            if not least <= servers <= most:
                remedy = "begin it with --servers LEAST:MOST to have others"
                return f"it was started with --servers {least}:{most}; {remedy}"
            if not trains:
                return "it is not training at this moment; try again"
            return "" if self._finds_room_for(servers) else f"Ray has no room for {servers} now"

        # It is taken once, and from then on the run has no more servers than that.
        wanted = None
        with suppress(OSError, ValueError):
            wanted = taken(self._working_folder, why_not)
        if wanted is None:
            return ""
        self._most_servers = wanted
        return f"resize to {wanted} servers"

    def _finds_room_for(self, servers: int) -> bool:
        """Whether so many servers have room; if not, no other room is asked for than before."""
        # Those that run go on meanwhile, so room is not given back here.
        if servers < self._servers:
            return True
        self._room.ask_for_servers(servers)
        ends_s = time.monotonic() + ROOM_WITHIN_S
        while len(self._room.servers()) < servers and time.monotonic() < ends_s:
            time.sleep(0.2)
        if len(self._room.servers()) < servers:
            self._room.ask_for_servers(self._most_servers)
            return False
        return True

    def _grown(self, checkpoints: Sequence[Path]) -> str:
        """Why all ranks are to end where more ranks or servers would find room, and a checkpoint
        has followed these ``checkpoints``: then all ranks train, and hear a signal."""
        if len(self._ranks) == len(self._plan.ranks) and self._servers >= self._most_servers:
            return ""
        newest = complete_checkpoints(self._folder(every_s=LOOK_EVERY_S))[-1:]
        if newest == checkpoints:
            return ""
        if len(self._room.ranks()) > len(self._ranks):
            return "there is room for more ranks"
        more = len(self._room.servers()) > self._servers
        return "there is room for more servers" if more else ""
