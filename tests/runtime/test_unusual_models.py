"""Models with dropout, running statistics, frozen parameters, or the wrong number of outputs."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from persia_sim.base.vocabulary import Mode
from runtime.config import DataConfig, ModelConfig
from runtime.rank.learner import seeded_draws
from runtime.run.record import run_into
from runtime.run.session import train
from runtime.serving.trained import evaluate_run
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


class FakeGpus:
    """Generators of two GPUs, in place of those of torch.cuda."""

    def __init__(self, monkeypatch) -> None:
        self.seeds, self.current = {0: 10, 1: 11}, 0
        for name in ("get_rng_state", "set_rng_state", "manual_seed", "device", "device_count"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))

    def get_rng_state(self, device):
        return torch.tensor([self.seeds[torch.device(device).index]])

    def set_rng_state(self, state, device):
        self.seeds[torch.device(device).index] = int(state[0])

    def manual_seed(self, seed):
        self.seeds[self.current] = seed

    def device_count(self):
        return len(self.seeds)

    @contextmanager
    def device(self, device):
        before, self.current = self.current, device.index
        yield
        self.current = before


def test_draws_on_a_gpu_are_seeded_and_leave_every_generator_where_it_stood(monkeypatch):
    gpus, found = FakeGpus(monkeypatch), []
    for place in ((0, 1, 2), (0, 1, 3)):
        with pytest.raises(KeyError), seeded_draws(*place, torch.device("cuda:1")):
            found.append(gpus.seeds[1])
            assert gpus.seeds[0] == 10, "a GPU that trains something else"
            raise KeyError
        assert gpus.seeds == {0: 10, 1: 11}
    assert len({*found, 10, 11}) == 4


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


class Linear(torch.nn.Module):
    """One layer over all inputs."""

    def __init__(self, shape, hidden):
        super().__init__()
        self.layer = torch.nn.Linear(shape.width, shape.tasks)

    def forward(self, dense, embeddings):
        return self.layer(torch.cat([embeddings.pooled, dense], 1))


class Constant(Linear):
    """A table of numbers that nobody changes, as a positional encoding."""

    def __init__(self, shape, hidden):
        super().__init__(shape, hidden)
        self.register_buffer("table", torch.ones(shape.width))

    def forward(self, dense, embeddings):
        return self.layer(torch.cat([embeddings.pooled, dense], 1) * self.table)


class Counting(Linear):
    """A network that cools down with its own count of batches."""

    def __init__(self, shape, hidden):
        super().__init__(shape, hidden)
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def forward(self, dense, embeddings):
        self.count += self.training
        return super().forward(dense, embeddings) / (1 + self.count)


def named(network: type) -> ModelConfig:
    return ModelConfig(name=f"{__name__}:{network.__name__}", lr=0.01)


def test_a_buffer_that_stays_as_it_is_may_be_in_any_mode_and_one_that_changes_may_not():
    for changes in ({"ranks": 2}, {"mode": Mode.ASYNC}):
        changes |= {"executor": "concurrent"}
        run(config(model=named(Constant), **changes), SOURCE)
        with pytest.raises(ValueError, match=r"running statistics \(count\)"):
            run(config(model=named(Counting), **changes), SOURCE)
    assert run(config(model=named(Counting)), SOURCE).state()["count"] == 13


class Again(Linear):
    """A layer used twice, each time behind a checkpoint that has a backward pass of its own."""

    def __init__(self, shape, hidden):
        super().__init__(shape, hidden)
        self.twice = torch.nn.Linear(shape.width, shape.width)

    def forward(self, dense, embeddings):
        found = torch.cat([embeddings.pooled, dense], 1)
        for _ in range(2):
            found = checkpoint(lambda x: self.twice(x).relu(), found, use_reentrant=True)
        return self.layer(found)


@pytest.mark.law1
def test_a_gradient_that_comes_in_two_parts_is_summed_whole():
    again = config(model=named(Again), ranks=3, executor="concurrent")
    assert_same_bytes(run(again, SOURCE), run(changed(again, mode=Mode.HYBRID, tau=0), SOURCE))


class Noisy(Linear):
    """Draws in evaluation, too, as a Bayesian layer does."""

    draws_random_numbers = True

    def forward(self, dense, embeddings):
        return super().forward(dense + torch.randn_like(dense), embeddings)


def test_what_a_model_draws_in_evaluation_is_a_function_of_the_seed():
    torch.manual_seed(1)
    state = torch.random.get_rng_state()
    one = train(config(model=named(Noisy), evaluate_every_steps=5), SOURCE)
    assert torch.equal(torch.random.get_rng_state(), state)
    torch.manual_seed(2)
    other = train(config(model=named(Noisy)), SOURCE)
    # By repr: a score may hold NaN, which in a dataclass equals itself only before Python 3.13.
    assert repr(one.final.tasks) == repr(other.final.tasks)


class Summed(torch.nn.Module):
    """Rows alone, and no dense weight."""

    def __init__(self, shape, hidden):
        super().__init__()

    def forward(self, dense, embeddings):
        return embeddings.pooled.sum(1, keepdim=True)


def test_a_model_without_dense_weights_is_opened_as_any_other(tmp_path):
    summed = ModelConfig(name="tests.runtime.test_unusual_models:Summed")
    data = DataConfig(name="synthetic", rows=200)
    chosen = config(model=summed, checkpoint_every="end", test_rows=200, data=data)
    tasks = run_into(tmp_path, chosen)["tasks"]
    assert evaluate_run(tmp_path)["tasks"] == tasks


class WeightNormed(Linear):
    """Its weight is computed from two others, in the way that torch no longer advises."""

    def __init__(self, shape, hidden):
        super().__init__(shape, hidden)
        norm = parametrizations.weight_norm if self.new else torch.nn.utils.weight_norm
        self.layer = norm(self.layer)

    new = False


class Parametrized(WeightNormed):
    new = True


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
@pytest.mark.parametrize("mode", [Mode.ASYNC, Mode.ASYNC_AVERAGING])
def test_a_model_that_cannot_be_copied_is_refused_with_the_remedy(mode):
    assert run(config(model=named(WeightNormed), steps=2), SOURCE).model is not None
    with pytest.raises(ValueError, match=r"cannot be copied.*parametrizations\.weight_norm"):
        run(config(model=named(WeightNormed), mode=mode, ranks=2), SOURCE)
    run(config(model=named(Parametrized), mode=mode, ranks=2, steps=2), SOURCE)
