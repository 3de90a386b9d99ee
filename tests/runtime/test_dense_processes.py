"""The dense all-reduce of ranks that are processes against that of ranks that are threads."""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import SupportsFloat

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from persia_sim.base.trace import Event, Kind, TraceRecorder
from runtime.config import EngineConfig, ModelConfig, SyncConfig, TrainConfig
from runtime.dense import averaging, buckets
from runtime.dense.averaging import AveragingRound, mean_model
from runtime.dense.optimizer import FunctionalOptimizer
from runtime.dense.rules import AsyncRule, DenseRule, SharedWeights, StepGradients
from runtime.hosts.dense.async_weights import (
    DenseServer,
    RemoteWeights,
)
from runtime.hosts.dense.distributed import DistributedWeights
from runtime.hosts.dense.group import RankGroup
from runtime.hosts.dense.replicas import DistributedReplicas
from runtime.hosts.launch.processes import Address
from runtime.hosts.wire.channel import Channel
from runtime.hosts.wire.peers import listen
from runtime.stop import PeerError, RunStopped, Stop
from tests.runtime.hosts.test_faults import in_thread
from tests.runtime.spawned import Processes

RANKS, STEPS = 3, 7
CONFIG = ModelConfig(optimizer="adam", lr=0.1)
NO_SAMPLES, NOT_FINITE, ONE_HEAD, NO_HEAD, IN_TWO, NONE_FINITE = 1, 2, 3, 4, 5, 6
"""Steps at which something happens to rank 1, or to all."""


class TwoHeads(nn.Module):
    """A model whose second head is not always used."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.first, self.second = nn.Linear(5, 7), nn.Linear(7, 1), nn.Linear(7, 1)

    def forward(self, x: Tensor, *, second: bool) -> Tensor:
        found = torch.tanh(self.body(x))
        return self.first(found) + (self.second(found) if second else 0.0)


def fresh_model() -> TwoHeads:
    torch.manual_seed(3)
    return TwoHeads()


def train(rule: DenseRule, rank: int) -> None:
    """Seven steps of one rank: no samples, not finite, one head at this rank, then at all ranks;
    gradients that grow when all are there (as behind reentrant checkpoints); none finite at any."""
    model = rule.model(rank)
    for step in range(STEPS):
        draw = torch.Generator().manual_seed(100 * step + rank)
        x = torch.randn(8, 5, generator=draw)
        if rank == 1 and step == NO_SAMPLES:
            rule.end_step(StepGradients(rank, step, [None] * len(list(model.parameters())), 0.0, 0))
            continue
        broken = step == NONE_FINITE or (rank == 1 and step == NOT_FINITE)
        if broken:
            x[0, 0] = math.nan
        lonely = step == NO_HEAD or (rank == 1 and step == ONE_HEAD)
        loss = model(x, second=not lonely).square().mean() / RANKS
        if rank == 1 and step == IN_TWO:
            loss = loss / 2
            loss.backward(retain_graph=True)
        loss.backward()
        gradients = [p.grad for p in model.parameters()]
        for parameter in model.parameters():
            parameter.grad = None
        rule.end_step(StepGradients(rank, step, None if broken else gradients, loss.item(), 8))


def weights_of(model: nn.Module) -> dict[str, np.ndarray]:
    return {name: tensor.numpy() for name, tensor in model.state_dict().items()}


Told = list[tuple[float, int]]


def settings(dense_lag: int) -> TrainConfig:
    engine = EngineConfig(executor="concurrent")
    return TrainConfig(
        sync=SyncConfig(ranks=RANKS, dense_lag=dense_lag), model=CONFIG, engine=engine
    )


def over_threads(dense_lag: int) -> tuple[dict[str, np.ndarray], Told]:
    model, told, stop = fresh_model(), Told(), Stop()
    rule = SharedWeights(
        settings(dense_lag), model, TraceRecorder(), lambda *news: told.append(news),
        overlapped=True, stop=stop,
    )  # fmt: skip
    ranks = [threading.Thread(target=train, args=(rule, rank)) for rank in range(RANKS)]
    for thread in ranks:
        thread.start()
    for thread in ranks:
        thread.join()
    rule.drain()
    return weights_of(model), told


WAYS = {
    "ring-overlapped": (True, False, 0),
    "ring-exposed": (False, False, 0),
    "gather-overlapped": (True, True, 0),
    "gather-exposed": (False, True, 0),
    "ring-late": (True, False, 2),
    "gather-late": (True, True, 2),
}
"""Overlapped, gathered, and steps by which the update is late."""


def over_processes(rank: int, ranks: int, store: dist.Store, folder: Path) -> None:
    group = RankGroup(rank, ranks, store, torch.device("cpu"))
    for name, (overlapped, gathers, dense_lag) in WAYS.items():
        told, recorder = Told(), TraceRecorder()
        model = fresh_model()
        if rank:  # rank 0's initial weights are everybody's
            for parameter in model.parameters():
                parameter.data.zero_()
        buckets.RING_FROM_BYTES = 2**40 if gathers else -1
        rule = DistributedWeights(
            settings(dense_lag), model, recorder,
            lambda *news: told.append(news),  # noqa: B023
            group=group, overlapped=overlapped, stop=Stop(),
        )  # fmt: skip
        train(rule, rank)
        rule.drain()
        np.savez(folder / f"{name}-{rank}.npz", told=np.array(told), **weights_of(model))
        assert len(recorder.finish()) == (STEPS if rank == 0 else 0)
    group.agree("facts", {"tau": 4, "data": "abc"})
    try:
        group.agree("other facts", {"tau": 4 + (rank == 2)})
    except ValueError as error:
        assert "tau is 5 at rank 2 and 4 at rank 0" in str(error)
    else:
        raise AssertionError("facts that differ were agreed upon")
    assert group.gather("end", str(rank)) == ["0", "1", "2"]
    group.close()


def one_has_ended(rank: int, ranks: int, store: dist.Store, folder: Path) -> None:
    group = RankGroup(rank, ranks, store, torch.device("cpu"), beat_s=0.2, silence_s=6)
    if rank == 0:
        group.status, group.legs_ended = "it has ended after 7 steps", 1
        store.set("pid", str(os.getpid()))
        group.gather("wait until the others have said it", "")
        os.kill(os.getpid(), signal.SIGSTOP)
    stopped = Path("/proc", store.get("pid").decode(), "stat")
    told = []
    for _ in range(2):
        try:
            group.wait(group.all_gather(torch.zeros(1))[0], "gradients of step 7")
        except PeerError as error:
            told.append(str(error))
        else:
            raise AssertionError("rank 0 has sent nothing")
        group.gather("wait until the others have said it", "")
        while stopped.read_text().rpartition(")")[2].split()[0] != "T":
            time.sleep(0.01)  # until then its next beat says again that it has ended
        store.set("beat/0", "0 0 trains step 7")  # stopped, not ended
    (folder / f"told-{rank}.part").write_text("\n".join(told))
    (folder / f"told-{rank}.part").rename(folder / f"told-{rank}")


def is_cut_off_behind_a_leg(rank: int, ranks: int, store: dist.Store, folder: Path) -> None:
    """Rank 1 says that it has ended the first leg, and trains the second; its next signs of life
    are late, as those of a host whose cable is out."""
    group = RankGroup(rank, ranks, store, torch.device("cpu"), beat_s=0.2, silence_s=60)
    group.status, group.legs_ended = "it has ended its leg after 20 updates", 1
    group.gather("both have ended the first leg", "")
    if rank == 1:
        while store.get("beat/1").decode().partition("it has ended")[1] == "":
            time.sleep(0.01)
        group._closed.set()
    group.gather("the second one begins", "")
    if rank == 1:
        time.sleep(3.0)  # the other one looks around after two beats, and once a second
    group.wait(group.all_reduce(torch.ones(1)), "gradients of step 31")
    (folder / f"summed-{rank}").touch()


@pytest.mark.law12
def test_a_rank_whose_last_sign_of_life_is_of_the_leg_before_is_waited_for(tmp_path):
    """At every checkpoint a rank says that it has ended a leg: behind a cut of some seconds that is
    all the others know, and it trains on."""
    Processes(2, is_cut_off_behind_a_leg, tmp_path).join_well()
    assert (tmp_path / "summed-0").exists() and (tmp_path / "summed-1").exists()


ASYNC_STEPS = 4


def gradients_for(model: nn.Module, rank: int, step: int) -> list[Tensor]:
    """Made up; the last parameter has none at odd steps."""
    draw = torch.Generator().manual_seed(1000 * step + rank)
    found: list = [torch.randn(p.shape, generator=draw) for p in model.parameters()]
    return found if step % 2 == 0 else [*found[:-1], None]


def in_turn(group: RankGroup, name: str, act) -> None:
    """One rank after the other: what is concurrent has one outcome then."""
    for turn in range(group.ranks):
        if turn == group.rank:
            act()
        group.gather(f"{name} {turn}", "")


def async_over_processes(rank: int, ranks: int, store: dist.Store, folder: Path) -> None:
    group = RankGroup(rank, ranks, store, torch.device("cpu"))
    model, told, stop, recorder = fresh_model(), Told(), Stop(), TraceRecorder()
    config = TrainConfig(sync=SyncConfig(mode="async", ranks=ranks), model=CONFIG)
    host, rule = None, None
    if rank == 0:
        rule = AsyncRule(config, model, recorder, lambda *news: told.append(news))
        host = DenseServer(rule, stop)
    kept: list = []
    place = group.gather("host", host.address.publish(kept) if host else "")[0]
    if rule is None:
        for parameter in model.parameters():
            parameter.data.zero_()  # pulled weights are rank 0's
        rule = RemoteWeights(Address.read_from(place), rank, model, stop)
    for step in range(ASYNC_STEPS):
        in_turn(group, f"pull {step}", lambda: rule.begin_step(rank, step))  # noqa: B023
        pulled = weights_of(rule.model(rank))
        np.savez(folder / f"pulled-{step}-{rank}.npz", **pulled)

        def push() -> None:
            given = None if (rank, step) == (1, 1) else gradients_for(model, rank, step)  # noqa: B023
            rule.end_step(StepGradients(rank, step, given, float(step), 10 + rank))  # noqa: B023
            rule.end_leg()  # else the next rank's may arrive before it

        in_turn(group, f"push {step}", push)
    if host is not None:
        found = weights_of(rule.snapshot())
        np.savez(folder / "async.npz", told=np.array(told), **found)
        np.save(folder / "async-events.npy", recorder.finish().events)
    if host is None:
        rule.close()
    group.gather("the others have closed", "")
    if host is not None:
        host.close()
    group.close()


def averaging_over_processes(rank: int, ranks: int, store: dist.Store, folder: Path) -> None:
    group = RankGroup(rank, ranks, store, torch.device("cpu"))
    model, told, stop, recorder = fresh_model(), Told(), Stop(), TraceRecorder()
    averaging.PERIOD_S = 0.01
    sync = SyncConfig(mode="async_averaging", ranks=ranks)
    engine = EngineConfig(executor="concurrent")
    settings = TrainConfig(sync=sync, model=CONFIG, engine=engine)
    rule = DistributedReplicas(
        settings, model, recorder, lambda *news: told.append(news), group=group, stop=stop
    )
    steps, rounds = 0, 0
    while rounds < 2:  # how many steps that takes depends on the machine
        for step in range(steps, steps + 20):
            rule.begin_step(rank, step)
            time.sleep(0.002)  # the mean comes while the rank computes
            rule.end_step(
                StepGradients(rank, step, gradients_for(model, rank, step), 1.0, 10 + rank)
            )
        steps += 20
        rounds = int(group.gather(f"rounds after {steps}", str(rule.rounds))[0])
    rule.end_leg()
    np.savez(folder / f"replica-{rank}.npz", **weights_of(rule.model(rank)))
    group.gather("settled", "")
    if rank == 0:
        np.savez(folder / "mean.npz", told=np.array(told), **weights_of(rule.snapshot()))
        np.save(folder / "averaging-events.npy", recorder.finish().events)
    group.gather("evaluated", "")
    rule.close()
    assert stop.error is None
    group.close()


def body(rank: int, ranks: int, store: dist.Store, folder: Path) -> None:
    over_processes(rank, ranks, dist.PrefixStore("ways", store), folder)
    async_over_processes(rank, ranks, dist.PrefixStore("async", store), folder)
    averaging_over_processes(rank, ranks, dist.PrefixStore("averaging", store), folder)
    one_has_ended(rank, ranks, dist.PrefixStore("ended", store), folder)


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What the processes left behind; the first of them was stopped in the end."""
    folder = tmp_path_factory.mktemp("ways")
    ranks = Processes(RANKS, body, folder)
    until = time.monotonic() + 200
    while len(list(folder.glob("told-?"))) < 2 and time.monotonic() < until:
        time.sleep(0.05)
        if list(folder.glob("*.traceback")):
            break
    if ranks.members[0].pid is not None:
        os.kill(ranks.members[0].pid, signal.SIGKILL)
    codes, told = ranks.join(), [f.read_text() for f in folder.glob("*.traceback")]
    assert codes == [-signal.SIGKILL, 0, 0], "\n".join(["", *told])
    return folder


@pytest.mark.long
@pytest.mark.parametrize("name", WAYS)
@pytest.mark.law12
def test_processes_train_as_threads_do(name, found):
    """With `gather` to the byte, with `ring` but for the order of sums; at every rank the same."""
    expected, told = over_threads(WAYS[name][2])
    assert [samples for _, samples in told] == [24, 16, 24, 24, 24, 24, 24]
    assert [step for step, (loss, _) in enumerate(told) if math.isnan(loss)] == [NONE_FINITE]
    for rank in range(RANKS):
        with np.load(found / f"{name}-{rank}.npz") as arrays:
            for key, weights in expected.items():
                if name.startswith("gather"):
                    assert arrays[key].tobytes() == weights.tobytes(), key
                else:
                    assert np.abs(arrays[key] - weights).max() < 1e-5, key
            assert arrays["told"][:, 1].tolist() == [samples for _, samples in told]
            tolerance = 0 if name.startswith("gather") else 1e-6
            losses = [loss for loss, _ in told]
            assert np.allclose(arrays["told"][:, 0], losses, rtol=0, atol=tolerance, equal_nan=True)


@pytest.mark.law12
def test_async_over_processes_pulls_and_pushes_as_threads_do(found):
    """The same pulls and pushes at one server without processes: same bytes, events and figures."""
    model, told, recorder = fresh_model(), Told(), TraceRecorder()
    config = TrainConfig(sync=SyncConfig(mode="async", ranks=RANKS), model=CONFIG)
    server = AsyncRule(config, model, recorder, lambda *news: told.append(news))
    for step in range(ASYNC_STEPS):
        for rank in range(RANKS):
            server.begin_step(rank, step)
            with np.load(found / f"pulled-{step}-{rank}.npz") as arrays:
                for key, weights in weights_of(server.model(rank)).items():
                    assert arrays[key].tobytes() == weights.tobytes()
        for rank in range(RANKS):
            given = None if (rank, step) == (1, 1) else gradients_for(model, rank, step)
            server.end_step(StepGradients(rank, step, given, float(step), 10 + rank))
    with np.load(found / "async.npz") as arrays:
        for key, weights in weights_of(server.snapshot()).items():
            assert arrays[key].tobytes() == weights.tobytes()
        assert arrays["told"].tolist() == [list(news) for news in told]
    assert (np.load(found / "async-events.npy") == recorder.finish().events).all()


@pytest.mark.law12
def test_averaging_over_processes_is_its_trace_by_hand(found):
    """Own optimisers, and rounds at the recorded instants, carried out one after the other."""
    events = [Event(*row) for row in np.load(found / "averaging-events.npy").tolist()]
    replicas = [fresh_model() for _ in range(RANKS)]
    optimizers = [FunctionalOptimizer(CONFIG, replica.parameters()) for replica in replicas]
    rounds: dict[int, AveragingRound] = {}
    pushes = 0
    for event in events:
        replica = replicas[event.rank]
        if event.kind == Kind.DENSE_PUSH:
            assert event.version == pushes
            gradients = gradients_for(replica, event.rank, event.step)
            optimizers[event.rank].step(gradients)
            pushes += 1
        elif event.kind == Kind.AVERAGE_READ:
            rounds.setdefault(event.version, AveragingRound(RANKS)).read(event.rank, replica)
        elif event.kind == Kind.AVERAGE_WRITE:
            rounds[event.version].write(event.rank, replica)
    steps = pushes // RANKS
    assert pushes == steps * RANKS >= 20 * RANKS
    assert sum(r.is_over for r in rounds.values()) >= 2
    for rank, replica in enumerate(replicas):
        with np.load(found / f"replica-{rank}.npz") as arrays:
            for key, weights in weights_of(replica).items():
                assert arrays[key].tobytes() == weights.tobytes()
    given = [list(replica.parameters()) for replica in replicas]
    with np.load(found / "mean.npz") as arrays:
        for key, weights in weights_of(mean_model(replicas[0], given)).items():
            assert arrays[key].tobytes() == weights.tobytes()
        assert sorted(arrays["told"][:, 1].tolist()) == sorted(steps * [10, 11, 12])


@contextmanager
def weights_that_nobody_serves() -> Iterator[RemoteWeights]:
    door, name = listen(f"\0persia-testbed-test-{os.getpid()}-{time.monotonic_ns()}")
    yield RemoteWeights(Address((name,), ("",)), 1, fresh_model(), Stop())
    door.close()


@pytest.mark.parametrize("waits", ["in a pull", "at the end of a leg"])
def test_a_push_is_not_waited_for_and_a_stop_ends_what_is(waits):
    """Rank 0 is stopped, and answers nothing."""
    with weights_that_nobody_serves() as rule:
        stop = rule._stop
        gradients: list = [p.detach() for p in rule.model(1).parameters()]
        pushing, errors = in_thread(lambda: rule.end_step(StepGradients(1, 0, gradients, 0.0, 8)))
        pushing.join(60)
        assert not pushing.is_alive() and not errors
        wait = (lambda: rule.begin_step(1, 1)) if waits == "in a pull" else rule.end_leg
        waiting, errors = in_thread(wait)
        waiting.join(1)
        assert waiting.is_alive()
        stop.set(PeerError("rank 0 is stuck"))
        waiting.join(60)
        assert isinstance(errors[0], RunStopped)


@contextmanager
def served_weights(rule: AsyncRule) -> Iterator[RemoteWeights]:
    server = DenseServer(rule, Stop())
    remote = RemoteWeights(server.address, 1, fresh_model(), Stop())
    try:
        yield remote
    finally:
        remote.close()
        server.close()


def rule_of_async() -> AsyncRule:
    sync = SyncConfig(mode="async", ranks=2)
    return AsyncRule(TrainConfig(sync=sync, model=CONFIG), fresh_model(), TraceRecorder(), told_of)


def told_of(loss: SupportsFloat, samples: int) -> None:
    pass


def test_a_step_of_async_waits_for_one_round_trip(monkeypatch):
    """What is sent, and when an answer is awaited: the push of a step and the pull of the next one
    set out together, and the pull sees the push."""
    order: list[str] = []
    with served_weights(rule := rule_of_async()) as remote:

        def noting(name: str, method):
            def noted(channel, *given, **more):
                if channel is remote._channel:
                    order.append(name)
                return method(channel, *given, **more)

            return noted

        for name in ("send", "receive"):
            monkeypatch.setattr(Channel, name, noting(name, getattr(Channel, name)))
        for step in range(3):
            remote.begin_step(1, step)
            gradients = gradients_for(remote.model(1), 1, step)
            remote.end_step(StepGradients(1, step, gradients, 0.5, 8))
        remote.begin_step(1, 3)
        monkeypatch.undo()
        assert [(event.kind, event.step, event.version) for event in rule._recorder.finish()] == [
            *((kind, step, step + behind) for step in range(3)
              for kind, behind in ((Kind.DENSE_PULL, 0), (Kind.DENSE_PUSH, 0))),
            (Kind.DENSE_PULL, 3, 3),
        ]  # fmt: skip
        for ours, theirs in zip(remote.model(1).parameters(), rule.snapshot().parameters(),
                                strict=True):  # fmt: skip
            assert torch.equal(ours, theirs)
    turns = sum(pair == ("send", "receive") for pair in pairwise(order))
    assert turns == 4
