"""`train --cluster`: a run whose ranks and embedding servers Ray places, watches and starts again.

This process, the driver, is the supervisor. It is to the ranks what torchrun's agent is: it holds
the store in which they meet, and when one ends badly it starts all anew, from the last checkpoint.
An actor of a rank runs `train` in a process of its own, with torchrun's variables; an actor of a
server is `serve`. So what trains knows nothing of Ray: rows, gradients, batches and dense weights
go by the sockets that they take without it, and no step waits for a call of Ray.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import ray
import torch.distributed as dist
from ray.cluster_utils import Cluster
from ray.util import placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from persia_sim.words.rules import counted
from runtime.checkpoint.whole import complete_checkpoints
from runtime.config import TrainConfig
from runtime.engines.servers.hosts import Host
from runtime.engines.servers.launch import path_of_modules
from runtime.engines.transport.messages import SECRET_BYTES
from runtime.guarded import NOT_KEPT
from runtime.stop import NotKept, PeerError
from runtime.torchrun import MOST_RESTARTS, Launch
from runtime.train_options import Train, read_train, told_of_options

RANK, SERVER = "rank", "embedding server"
_CONNECT_S = 10.0
_OBJECT_STORE_BYTES = 80_000_000  # Ray's least is 75 MiB; a run puts nothing into it
ALL_END_WITHIN_S = 60.0
"""When one rank has failed, the others say within that time why they cannot go on."""


class Ended(NamedTuple):
    """How the process of a rank has ended."""

    code: int
    """0, or that of `guarded`, or the negative number of a signal."""
    sentence: str = ""
    follows: bool = True
    """Whether it only lost another process; else it names a mistake, which would come again."""

    def __str__(self) -> str:
        if self.code < 0:
            return f"was killed by {signal.Signals(-self.code).name}"
        return f"ended with exit code {self.code} ({self.sentence or 'it said nothing'})"

    def as_error(self) -> Exception:
        """What ends this command with the same exit code, in the same sentence."""
        kind = NotKept if self.code == NOT_KEPT else ValueError
        return kind(self.sentence.removeprefix("error: "))


class RankActor:
    """A rank in a process of its own; Ray starts this on the host that it has chosen."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def train(self, words: list[str], place: Mapping[str, str], secret: str, folder: str) -> Ended:
        """Train as torchrun's rank at ``place``, in the working ``folder`` of the driver."""
        if not Path(folder).is_dir():
            told = f"host {socket.gethostname()} has no folder {folder}, where train was started"
            return Ended(2, f"{told}: share it among all hosts", follows=False)
        note = os.memfd_create("secret")  # gone with the processes, and on no command line
        os.fchmod(note, 0o600)
        os.write(note, secret.encode())
        with tempfile.NamedTemporaryFile() as error:
            more = {"TORCHELASTIC_ERROR_FILE": error.name, "PYTHONPATH": path_of_modules()}
            line = [sys.executable, "-u", "-m", "runtime", "train", *words]
            # It ends with the thread that started it, so this one waits for it.
            self._process = subprocess.Popen(
                [*line, "--servers-secret", f"/proc/self/fd/{note}"],
                env=os.environ | place | more,
                cwd=folder,
                pass_fds=(note,),
            )
            os.close(note)
            code = self._process.wait()
            told = Path(error.name).read_text()
        if not told:
            return Ended(code)
        said = json.loads(told)["message"]
        return Ended(code, said["message"], said["extraInfo"]["follows"] == "True")

    def send(self, number: int) -> None:
        """A signal to the rank."""
        if self._process is not None:
            self._process.send_signal(number)


class ServerActor:
    """`serve` for one embedding server, on the host that Ray has chosen; there again after a death,
    or on another host, at another address."""

    def __init__(self, secret: str, tls: bool) -> None:
        self._host = Host(f"{ray.util.get_node_ip_address()}:0", secret, tls=tls)
        threading.Thread(target=self._host.serve, daemon=True).start()

    def name(self) -> str:
        """HOST:PORT, as --servers-at takes it."""
        return self._host.name


def train_on_cluster(where: str, ranks: int, arguments: list[str]) -> None:
    """The run that was typed, on the cluster ``where``: ``local:N``, ``auto`` or HOST:PORT.

    Raises ValueError for what cannot be, PeerError where the run has ended and would end again.
    """
    launch = Launch(  # each rank is alone on its host
        rank=0, local_rank=0, ranks=ranks, ranks_here=1, host="", port=1, agent_has_store=True
    )
    unknown = ["--servers-at", "placed.by.ray:1", "--servers-secret", "placed by ray"]
    words = list(arguments)
    if not {"--out", "--resume"} & {word.partition("=")[0] for word in words}:
        words += ["--out", f"runs/train/{time.strftime('%Y%m%d-%H%M%S')}-cluster"]
    command = read_train([*words, *unknown], launch)
    plan = Plan.of(command.run)
    with connected(where, plan), reserved(plan, command.cluster_wait_s) as groups:
        print(placed(groups), flush=True)
        if command.dry_run:
            print(told_of_options([*words, *unknown], launch))
            return
        with Supervised(command, words, plan, groups) as run:
            run.supervise()


class Supervised:
    """A run's actors, and the store of its ranks; all end with the context."""

    def __init__(
        self, command: Train, words: Sequence[str], plan: Plan, groups: Mapping[str, Any]
    ) -> None:
        self._command, self._words, self._plan, self._groups = command, words, plan, groups
        self._secret, self._asked = secrets.token_hex(SECRET_BYTES), list[int]()
        self._wait_s = command.cluster_wait_s
        self._host = ray.util.get_node_ip_address()
        listener = socket.create_server((self._host, 0))  # of this address alone
        self._store = dist.TCPStore(  # type: ignore[attr-defined]
            self._host, listener.getsockname()[1], is_master=True, wait_for_workers=False,
            timeout=timedelta(seconds=60), master_listen_fd=listener.detach(),
        )  # fmt: skip
        self._servers = [
            self._actor(ServerActor, SERVER, shard, max_restarts=16, max_task_retries=-1).remote(
                self._secret, command.run.engine.tls
            )
            for shard in range(len(plan.servers))
        ]
        self._ranks: list[Any] = []

    def __enter__(self) -> Supervised:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            signal.signal(number, lambda number, frame: self._asked.append(number))
        return self

    def __exit__(self, *error: object) -> None:
        for actor in (*self._ranks, *self._servers):
            ray.kill(actor)

    def supervise(self) -> None:
        """Train to the end, from the last checkpoint as often as ranks are lost."""
        folder = self._command.resume or self._command.out
        assert folder is not None
        for restarts in range(MOST_RESTARTS + 1):
            ended = self._train_once()
            lost = [f"rank {r} {one}" for r, one in enumerate(ended) if one.code]
            if not lost:
                return
            mistakes = [one for one in ended if one.code and not one.follows]
            again = not mistakes and not self._asked and restarts < MOST_RESTARTS
            if not again or not complete_checkpoints(folder):
                raise mistakes[0].as_error() if mistakes else PeerError(lost[0])
            told = f"warning: {'; '.join(lost)}; all ranks go back to the last checkpoint"
            print(told, file=sys.stderr, flush=True)

    def _train_once(self) -> list[Ended]:
        """Start all ranks, and wait until all have ended."""
        for rank in self._ranks:
            ray.kill(rank)
        ranks = range(len(self._plan.ranks))
        self._ranks = [self._actor(RankActor, RANK, k, max_concurrency=2).remote() for k in ranks]
        try:
            names = ray.get([one.name.remote() for one in self._servers], timeout=self._wait_s)
            ray.get([one.__ray_ready__.remote() for one in self._ranks], timeout=self._wait_s)
        except ray.exceptions.GetTimeoutError:
            raise PeerError(self._plan.shortage(self._wait_s)) from None
        words = [*self._words, "--servers-at", *names]
        common = {"WORLD_SIZE": len(self._ranks), "LOCAL_WORLD_SIZE": 1, "LOCAL_RANK": 0}
        common |= {"MASTER_ADDR": self._host, "MASTER_PORT": self._store.port}
        common |= {"TORCHELASTIC_USE_AGENT_STORE": True}
        waiting = {}
        for rank, actor in enumerate(self._ranks):
            place = {"RANK": rank, "GROUP_RANK": rank, **common}  # alone on its host
            told = {name: str(value) for name, value in place.items()}
            waiting[actor.train.remote(words, told, self._secret, os.getcwd())] = rank
        return self._wait_for(waiting)

    def _wait_for(self, waiting: dict[Any, int]) -> list[Ended]:
        """How each rank has ended. Signals are passed on to all; when one rank is lost, the others
        have a while to end by themselves."""
        ended, sent, ends_s = dict[int, Ended](), 0, float("inf")
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
            asked = [] if time.monotonic() < ends_s else [signal.SIGKILL]
            for number in [*self._asked[sent:], *asked]:
                for rank in waiting.values():
                    self._ranks[rank].send.remote(number)
            sent = len(self._asked)
            if self._asked.count(signal.SIGINT) > 1:
                raise KeyboardInterrupt("interrupted at once")
        return [ended[rank] for rank in sorted(ended)]

    def _actor(self, kind: type, role: str, number: int, **options: Any) -> Any:
        """Of that kind, where room was made for it."""
        group = self._groups[role]
        bundle = dict(group.bundle_specs[number])
        return ray.remote(kind).options(
            num_cpus=bundle.pop("CPU"),
            num_gpus=bundle.pop("GPU", 0),
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, number),
            **options,
        )


# Room on the cluster: what a run asks for, where it gets it, what the cluster is short of.


@dataclass(frozen=True, slots=True)
class Plan:
    """What a run asks of a cluster."""

    ranks: list[dict[str, float]]
    """The resources of each rank: cores of its dense operations and loaders, or a GPU, too."""
    servers: list[dict[str, float]]

    @classmethod
    def of(cls, config: TrainConfig) -> Plan:
        """Of a run."""
        rank = {"CPU": float(config.engine.threads + config.engine.loaders)}
        if config.engine.device != "cpu":
            rank["GPU"] = 1.0
        return cls([rank] * config.sync.ranks, [{"CPU": 1.0}] * config.engine.servers)

    def asks(self, resource: str) -> tuple[float, float]:
        """How much in all, and of one process at most."""
        found = [one.get(resource, 0.0) for one in (*self.ranks, *self.servers)]
        return sum(found), max(found)

    def shortage(self, waited_s: float) -> str:
        """Which resource is short, and what the cluster has."""
        hosts = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        free, told = ray.available_resources(), []
        for resource in ("CPU", "GPU"):
            asked, most = self.asks(resource)
            has = [host.get(resource, 0.0) for host in hosts]
            told.append(
                f"{asked:g} {resource} are asked for ({most:g} of one process), {sum(has):g} are"
                f" there ({max(has):g} on a host), {free.get(resource, 0.0):g} are free"
            )
        return (
            f"the cluster of {counted(len(hosts), 'host')} has had no room for"
            f" {counted(len(self.ranks), 'rank')} and {counted(len(self.servers), 'server')} for"
            f" {waited_s:g} s: {'; '.join(told)}; add hosts, or use fewer --ranks, --threads,"
            " --loaders or --servers"
        )


@contextmanager
def connected(where: str, plan: Plan) -> Iterator[None]:
    """This process as a driver of the cluster, which ends with the context where it is local.

    Raises ValueError where no cluster is.
    """
    with ExitStack() as ends:
        nodes = where.partition("local:")[2]
        if nodes:
            where = ends.enter_context(
                local_nodes(int(nodes), *plan.asks("CPU"), plan.asks("GPU")[0])
            )
        try:
            if ":" in where:  # Ray itself tries an address where nobody listens for minutes
                host, port = where.rsplit(":", 1)
                socket.create_connection((host.strip("[]"), int(port)), _CONNECT_S).close()
            ray.init(where, logging_level="ERROR")
        except (OSError, ValueError) as error:
            raise ValueError(
                f"--cluster {where}: no Ray cluster is there ({str(error).splitlines()[0]}); start"
                " one, or use local:2"
            ) from None
        ends.callback(ray.shutdown)
        yield


@contextmanager
def local_nodes(count: int, cores: float, least: float = 1.0, gpus: float = 0.0) -> Iterator[str]:
    """Ray nodes on this machine, whose ``cores`` are claims and may be more than there are; each
    has the ``least``. Gives their address. Raises PeerError."""
    common = {
        "num_cpus": int(max(-(-cores // count) + 1, least)),
        "num_gpus": int(-(-gpus // count)),
        "object_store_memory": _OBJECT_STORE_BYTES,
    }
    cluster = _started(count, common)
    try:
        yield cluster.address
    finally:
        cluster.shutdown()


def _started(count: int, node: Mapping[str, Any]) -> Cluster:
    """Ray gives the agents of a node 15 s to load Python, which a busy machine may exceed; and it
    runs actors at nice 15, where ranks starve beside anything else."""
    os.environ.setdefault("RAY_worker_niceness", "0")
    for again in (True, True, False):
        cluster = Cluster()
        try:
            cluster.add_node(include_dashboard=False, **node)
            for _ in range(count - 1):
                cluster.add_node(**node)
            return cluster
        except Exception as error:
            cluster.shutdown()
            if not again:
                raise PeerError(
                    f"Ray could not start {counted(count, 'node')} on this machine, which may be"
                    f" too busy ({error}); start again"
                ) from error
    raise AssertionError


@contextmanager
def reserved(plan: Plan, wait_s: float) -> Iterator[Mapping[str, Any]]:
    """Room for all ranks, close together, and for all servers, apart, or for nobody.

    Raises ValueError where there is none within ``wait_s``.
    """
    groups = {
        RANK: placement_group(plan.ranks, strategy="PACK"),
        SERVER: placement_group(plan.servers, strategy="SPREAD"),
    }
    ends_s = time.monotonic() + wait_s
    try:
        for group in groups.values():
            if not group.wait(max(1.0, ends_s - time.monotonic())):
                raise ValueError(plan.shortage(wait_s))
        yield groups
    finally:
        for group in groups.values():
            remove_placement_group(group)


def placed(groups: Mapping[str, Any]) -> str:
    """A line for each process: where Ray has made room for it."""
    hosts = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    lines = []
    for role, group in groups.items():
        table = placement_group_table(group)
        for number, node in sorted(table["bundles_to_node_id"].items()):
            room = ", ".join(f"{n:g} {what}" for what, n in table["bundles"][number].items())
            lines.append(f"{role} {number}: {room} on {hosts[node]} (node {node[:8]})")
    return "\n".join(lines)
