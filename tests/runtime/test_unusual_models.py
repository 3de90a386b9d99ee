"""Models with dropout, running statistics, frozen parameters, or the wrong number of outputs."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from persia_sim.words.vocabulary import Mode
from runtime.config import ModelConfig
from runtime.rank.learner import seeded_draws
from tests.runtime.worlds import ArraySource, assert_same_bytes, changed, config, run

SOURCE = ArraySource(300)


class Dropping(torch.nn.Module):
    """A tower with dropout."""

    def __init__(self, shape, hidden):
        super().__init__()
        linear = torch.nn.Linear(shape.width, 16)
        self.tower = torch.nn.Sequential(linear, torch.nn.Dropout(0.5), torch.nn.Linear(16, 2))

    def forward(self, dense, embeddings):
        return self.tower(torch.cat([embeddings.pooled, dense], 1))


def test_dropout_is_a_function_of_seed_rank_and_step():
    chosen = config(model=ModelConfig(name="tests.runtime.test_unusual_models:Dropping"), ranks=3)
    torch.manual_seed(1)
    one = run(chosen, SOURCE)
    torch.manual_seed(2)
    assert_same_bytes(one, run(chosen, SOURCE))
    assert_same_bytes(one, run(changed(chosen, executor="concurrent"), SOURCE))
    assert one.meter.losses != run(replace(chosen, seed=1), SOURCE).meter.losses


def test_every_seed_rank_and_step_has_draws_of_its_own():
    def draw(seed, rank, step):
        with seeded_draws(seed, rank, step):
            return tuple(torch.rand(4).tolist())

    torch.manual_seed(9)
    state = torch.random.get_rng_state()
    places = list(itertools.product(range(3), range(3), range(3)))
    draws = [draw(*place) for place in places]
    assert len(set(draws)) == len(places)
    assert draws == [draw(*place) for place in places]
    assert torch.equal(torch.random.get_rng_state(), state), "the user's own draws were disturbed"


class Normed(torch.nn.Module):
    """A tower with batch norm."""

    def __init__(self, shape, hidden):
        super().__init__()
        self.tower = torch.nn.Sequential(
            torch.nn.BatchNorm1d(shape.width), torch.nn.Linear(shape.width, 2)
        )

    def forward(self, dense, embeddings):
        return self.tower(torch.cat([embeddings.pooled, dense], 1))


def test_running_statistics_are_refused_where_ranks_would_not_share_them():
    normed = ModelConfig(name="tests.runtime.test_unusual_models:Normed")
    assert run(config(model=normed), SOURCE).meter.updates == 13
    for changes in ({"ranks": 2}, {"mode": Mode.ASYNC}):
        with pytest.raises(ValueError, match=r"running statistics \(tower.0.running_mean"):
            run(config(model=normed, **changes), SOURCE)


def test_a_frozen_parameter_stays_and_the_others_learn():
    frozen = ModelConfig(name="tests.runtime.test_unusual_models:Frozen")
    for executor in ("lag", "concurrent"):
        world = run(
            config(mode=Mode.HYBRID, tau=0, ranks=3, model=frozen, executor=executor), SOURCE
        )
        assert (world.state()["fixed.weight"] == 1).all()
        assert not (world.state()["free.weight"] == 1).all()


class Frozen(torch.nn.Module):
    """Two layers of ones, the first of which is fixed."""

    def __init__(self, shape, hidden):
        super().__init__()
        self.fixed, self.free = torch.nn.Linear(shape.width, 4), torch.nn.Linear(4, 2)
        for layer in (self.fixed, self.free):
            torch.nn.init.ones_(layer.weight)
        self.fixed.requires_grad_(False)

    def forward(self, dense, embeddings):
        return self.free(self.fixed(torch.cat([embeddings.pooled, dense], 1)))
