"""What the all-reduce of a step sends, and when: over one rank whose device works in order."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from runtime.hosts.dense.distributed import ProcessAllReduce


class InOrder:
    """A group of one rank whose device does one work after the other, as NCCL does; counts how
    often the host waits for one that is not done."""

    rank, ranks, wire = 0, 1, torch.device("cpu")

    def __init__(self) -> None:
        self.started = self.done = self.host_waits = 0

    def all_reduce(self, buffer):
        self.started += 1
        return self.started

    def all_gather(self, buffer):
        return self.all_reduce(buffer), buffer[None].clone()

    def wait(self, work, what):
        self.host_waits += work > self.done
        self.done = max(self.done, work)


def facts_at(step: int, model: nn.Module) -> list[float]:
    return [0.0, 0.0, 0.5, 3.0, float(step), *(1.0 for _ in model.parameters())]


@pytest.mark.parametrize("gathers", [False, True])
@pytest.mark.parametrize("layers", range(1, 6))
def test_one_rank_knows_its_facts_however_many_parameters_there_are(layers, gathers):
    """A byte for each of them: the row of facts is no whole number of float64."""
    model = nn.Sequential(*(nn.Linear(3, 3, bias=k % 2 == 0) for k in range(layers)))
    reduce = ProcessAllReduce(model, InOrder(), gathers=gathers)
    gradients = [torch.full_like(p, 2.0) for p in model.parameters()]
    sums, facts = reduce.join(gradients, facts_at(0, model))
    assert facts.tolist() == [facts_at(0, model)] and all((total == 2).all() for total in sums)


@pytest.mark.parametrize("gathers", [False, True])
def test_a_small_network_and_what_the_ranks_must_know_are_one_message_a_step(gathers):
    """Between hosts each message that is waited for costs a round trip, or two in a ring."""
    model, group = nn.Sequential(*(nn.Linear(100, 100) for _ in range(8))), InOrder()
    reduce = ProcessAllReduce(model, group, gathers=gathers)
    reduce.overlap()
    for step in range(3):
        model(torch.ones(2, 100)).sum().backward()
        assert group.started == step, "it sets out when the facts are known"
        reduce.join([p.grad for p in model.parameters()], facts_at(step, model))
    assert group.started == 3 and group.host_waits == 3


def test_a_large_network_sets_out_during_the_backward_pass():
    model, group = nn.Sequential(*(nn.Linear(600, 600) for _ in range(8))), InOrder()
    reduce = ProcessAllReduce(model, group, gathers=False)
    reduce.overlap()
    model(torch.ones(2, 600)).sum().backward()
    assert group.started == len(reduce._plan) - 1 >= 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_facts_of_all_ranks_are_exact_in_a_sum(dtype):
    """Of three ranks, by hand: a ring adds zeros to what each has written in its place."""
    layers = [nn.Linear(3, 3) for _ in range(3)]
    model = nn.Sequential(*layers).to(dtype)
    count = len(list(model.parameters()))
    facts = [
        [0.0, 0.0, 0.1 + rank, 2.0**40 + 1 + rank, 7.0, *(float(k % 2) for k in range(count))]
        for rank in range(3)
    ]
    buffers = []
    for rank in range(3):
        group = InOrder()
        group.rank, group.ranks = rank, 3
        reduce = ProcessAllReduce(model, group, gathers=False)
        reduce._put_facts(facts[rank])
        buffers.append(reduce._buffers[-1].nan_to_num(0.0))
    reduce._sent = [(None, sum(buffers))]
    assert reduce._facts_of_ranks().tolist() == facts
