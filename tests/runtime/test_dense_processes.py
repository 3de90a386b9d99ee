"""The dense all-reduce of ranks that are processes against that of ranks that are threads."""

from __future__ import annotations

import math
import os
import re
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from persia_sim.words.trace import TraceRecorder
from runtime.config import EngineConfig, ModelConfig, SyncConfig, TrainConfig
from runtime.dense.distributed import DistributedWeights
from runtime.dense.group import ENDED, PeerError, RankGroup
from runtime.dense.rule import DenseRule
from runtime.dense.rules import LossScale
from runtime.dense.threads import SharedWeights
from runtime.stop import Stop
from tests.runtime.processes import Processes

RANKS, STEPS = 3, 6
CONFIG = ModelConfig(optimizer="adam", lr=0.1)
NO_SAMPLES, NOT_FINITE, ONE_HEAD, NO_HEAD = 1, 2, 3, 4
"""Steps at which something happens to rank 1."""


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
    """Six steps of one rank: no samples, not finite, one head at this rank, then at all ranks."""
    model = rule.model(rank)
    for step in range(STEPS):
        draw = torch.Generator().manual_seed(100 * step + rank)
        x = torch.randn(8, 5, generator=draw)
        if rank == 1 and step == NO_SAMPLES:
            rule.end_step(rank, step, [None] * len(list(model.parameters())), 0.0, 0)
            continue
        broken = rank == 1 and step == NOT_FINITE
        if broken:
            x[0, 0] = math.nan
        lonely = step == NO_HEAD or (rank == 1 and step == ONE_HEAD)
        loss = model(x, second=not lonely).square().mean() / RANKS
        loss.backward()
        gradients = [p.grad for p in model.parameters()]
        for parameter in model.parameters():
            parameter.grad = None
        rule.end_step(rank, step, None if broken else gradients, loss.item(), 8)


def weights_of(model: nn.Module) -> dict[str, np.ndarray]:
    return {name: tensor.numpy() for name, tensor in model.state_dict().items()}


Told = list[tuple[float, int]]


def over_threads() -> tuple[dict[str, np.ndarray], Told]:
    model, told, stop = fresh_model(), Told(), Stop()
    rule = SharedWeights(
        CONFIG, model, RANKS, overlapped=True, recorder=TraceRecorder(),
        told=lambda loss, samples: told.append((loss, samples)), stop=stop,
    )  # fmt: skip
    ranks = [threading.Thread(target=train, args=(rule, rank)) for rank in range(RANKS)]
    for thread in ranks:
        thread.start()
    for thread in ranks:
        thread.join()
    return weights_of(model), told


WAYS = {
    "ring-overlapped": (True, False),
    "ring-exposed": (False, False),
    "gather-overlapped": (True, True),
    "gather-exposed": (False, True),
}


def over_processes(rank: int, ranks: int, store: dist.Store, folder: Path) -> None:
    group = RankGroup(rank, ranks, store, torch.device("cpu"))
    float16 = EngineConfig(precision="float16", loss_scale=8.0)
    scale = LossScale(TrainConfig(sync=SyncConfig(ranks=ranks), engine=float16))
    for name, (overlapped, gathers) in WAYS.items():
        told, recorder = Told(), TraceRecorder()
        model = fresh_model()
        if rank:  # rank 0's initial weights are everybody's
            for parameter in model.parameters():
                parameter.data.zero_()
        rule = DistributedWeights(
            CONFIG, model, group, overlapped=overlapped, gathers=gathers, scale=scale,
            recorder=recorder, told=lambda loss, samples: told.append((loss, samples)),  # noqa: B023
            stop=Stop(),
        )  # fmt: skip
        train(rule, rank)
        np.savez(folder / f"{name}-{rank}.npz", told=np.array(told), **weights_of(model))
        assert len(recorder.finish()) == (STEPS if rank == 0 else 0)
    assert scale.value == 8.0
    if rank == 2:
        scale.note_overflow(0)
    rule.end_step(rank, STEPS, [None] * len(list(model.parameters())), 0.0, 1)
    assert scale.value == 4.0, "an overflow at one rank halves the factor of all"
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
    group = RankGroup(rank, ranks, store, torch.device("cpu"), beat_s=0.2, silence_s=2)
    if rank == 0:
        group.status = f"{ENDED} after 7 steps"
        group.gather("wait until the others have said it", "")
        os.kill(os.getpid(), signal.SIGSTOP)
    told = []
    for _ in range(2):
        try:
            group.wait(group.all_gather(torch.zeros(1))[0], "gradients of step 7")
        except PeerError as error:
            told.append(str(error))
        else:
            raise AssertionError("rank 0 has sent nothing")
        store.set("beat/0", "0 trains step 7")  # stopped, not ended
        group.gather("wait until the others have said it", "")
    (folder / f"told-{rank}.part").write_text("\n".join(told))
    (folder / f"told-{rank}.part").rename(folder / f"told-{rank}")


def body(rank: int, ranks: int, store: dist.Store, folder: Path) -> None:
    over_processes(rank, ranks, dist.PrefixStore("ways", store), folder)
    one_has_ended(rank, ranks, dist.PrefixStore("ended", store), folder)


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What the processes left behind; the first of them was stopped in the end."""
    folder = tmp_path_factory.mktemp("ways")
    ranks = Processes(RANKS, body, folder)
    until = time.monotonic() + 60
    while len(list(folder.glob("told-?"))) < 2 and time.monotonic() < until:
        time.sleep(0.05)
        if list(folder.glob("*.traceback")):
            break
    if ranks.members[0].pid is not None:
        os.kill(ranks.members[0].pid, signal.SIGKILL)
    codes, told = ranks.join(), [f.read_text() for f in folder.glob("*.traceback")]
    assert codes == [-signal.SIGKILL, 0, 0], "\n".join(told)
    return folder


@pytest.mark.parametrize("name", WAYS)
def test_processes_train_as_threads_do(name, found):
    """With `gather` to the byte, with `ring` but for the order of sums; at every rank the same."""
    expected, told = over_threads()
    assert [samples for _, samples in told] == [24, 16, 24, 24, 24, 24]
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
            assert np.allclose(arrays["told"][:, 0], losses, rtol=0, atol=tolerance)


def test_a_wait_names_the_rank_that_has_ended_and_the_one_that_hangs(found):
    for rank in (1, 2):
        ended, hangs = (found / f"told-{rank}").read_text().splitlines()
        start = rf"rank {rank} has waited \d+ s for the gradients of step 7 of rank 0: "
        assert re.fullmatch(start + "it has ended after 7 steps", ended)
        silent = r"silent for 2 s; the last that it said was: trains step 7"
        assert re.fullmatch(start + silent, hangs)
