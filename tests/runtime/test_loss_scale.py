"""Short precisions: the loss scale of float16, which all ranks of a step share."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from persia_sim.base.vocabulary import Mode
from runtime.dense import loss_scale
from runtime.dense.loss_scale import LossScale
from runtime.rank import learner
from runtime.rank.learner import round_products
from runtime.serving.trained import on_device
from tests.runtime.worlds import ArraySource, assert_same_bytes, config, run

SOURCE = ArraySource(300)


def test_a_loss_scale_that_is_a_power_of_two_changes_no_byte(monkeypatch):
    class Scaled(LossScale):
        def of(self, step):
            return 1024.0

    plain = run(config(), SOURCE)
    monkeypatch.setattr(learner, "LossScale", Scaled)
    assert_same_bytes(plain, run(config(), SOURCE))


def test_tf32_is_of_a_gpu_and_read_as_float32_on_a_cpu():
    with pytest.raises(ValueError, match="tf32 is arithmetic of a GPU, got device cpu"):
        config(precision="tf32")
    there = config(precision="tf32", device="cuda").engine
    assert on_device(there, "cpu").precision == "float32"
    assert on_device(there, "cuda:1").precision == "tf32"


def test_products_of_the_cpu_are_those_of_float32_whatever_a_gpu_rounds():
    before = torch.get_float32_matmul_precision()
    round_products("tf32")
    assert torch.backends.cuda.matmul.allow_tf32
    left = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    rounded = left @ left
    round_products("float32")
    assert not torch.backends.cuda.matmul.allow_tf32
    assert torch.equal(rounded, left @ left) and torch.get_float32_matmul_precision() == before


def test_short_precision_trains_and_stays_near_float32():
    full = run(config(), SOURCE)
    short = run(config(precision="bfloat16"), SOURCE)
    assert short.meter.losses[-1] == pytest.approx(full.meter.losses[-1], abs=0.05)


def test_float16_halves_its_scale_on_overflow_and_goes_on(monkeypatch):
    monkeypatch.setattr(loss_scale, "FIRST_SCALE", 2.0**27)
    world = run(config(precision="float16"), SOURCE)
    assert world.meter.batches_skipped > 0
    assert world.learner.scale.value < 2.0**27
    assert all(np.isfinite(array).all() for array in world.state().values())
    assert world.meter.losses[-1] == pytest.approx(run(config(), SOURCE).meter.losses[-1], abs=0.1)


def scales_by_step(monkeypatch, **changes) -> tuple[dict[int, set[float]], object]:
    """The loss scale that each batch of a float16 run was given, by step."""
    given: dict[int, set[float]] = {}

    class Watched(LossScale):
        def of(self, step):
            found = super().of(step)
            given.setdefault(step, set()).add(found)
            return found

    monkeypatch.setattr(learner, "LossScale", Watched)
    monkeypatch.setattr(loss_scale, "FIRST_SCALE", 2.0**27)
    world = run(config(precision="float16", **changes), SOURCE)
    return given, world


@pytest.mark.parametrize("executor", ["constant_lag", "concurrent"])
@pytest.mark.parametrize("mode", [Mode.SYNC, Mode.HYBRID])
def test_all_ranks_of_a_step_share_one_loss_scale_and_halve_it_once(monkeypatch, mode, executor):
    given, world = scales_by_step(monkeypatch, ranks=8, mode=mode, executor=executor)
    assert all(len(scales) == 1 for scales in given.values())
    in_turn = [given[step].pop() for step in sorted(given)]
    in_turn.append(world.learner.scale.value)
    falls = [before / after for before, after in itertools.pairwise(in_turn)]
    assert set(falls) == {1.0, 2.0}
    lone, _ = scales_by_step(monkeypatch, ranks=1, mode=mode, executor=executor)
    # An eighth of the sum overflows a little earlier or later than all of it: a halving, not six.
    assert in_turn[-1] / min(lone[max(lone)]) in (0.5, 1.0, 2.0)
    assert world.meter.batches_skipped > falls.count(2.0)


def test_in_async_every_batch_is_an_update_of_the_loss_scale(monkeypatch):
    monkeypatch.setattr(loss_scale, "FIRST_SCALE", 2.0**27)
    world = run(config(precision="float16", mode=Mode.ASYNC, ranks=4), SOURCE)
    assert world.meter.batches_skipped > 0
    assert world.learner.scale.value == 2.0 ** (27 - world.meter.batches_skipped)


def test_a_calm_loss_scale_is_doubled_up_to_where_it_began(monkeypatch):
    monkeypatch.setattr(loss_scale, "_GROWTH_UPDATES", 3)
    monkeypatch.setattr(loss_scale, "FIRST_SCALE", 64.0)
    scale = LossScale(config(precision="float16", ranks=2))
    seen = []
    for step in range(12):
        seen.append(scale.of(step))
        for rank in range(2):
            if step in (1, 2) or (step == 5 and rank == 1):
                assert scale.note_overflow(step)
            else:
                scale.note_finite(step)
    #                 0   1   2   3   4   5   6  7  8  9 10  11: doubled after three calm steps
    assert seen == [64, 64, 32, 16, 16, 16, 8, 8, 8, 16, 16, 16]
    assert scale.value == 32


def test_in_async_a_loss_scale_is_doubled_after_so_many_batches_of_whichever_rank(monkeypatch):
    monkeypatch.setattr(loss_scale, "_GROWTH_UPDATES", 3)
    monkeypatch.setattr(loss_scale, "FIRST_SCALE", 64.0)
    scale = LossScale(config(precision="float16", mode=Mode.ASYNC, ranks=2))
    seen = []
    for batch in range(10):
        seen.append(scale.of(batch // 2))
        if batch in (1, 2):
            assert scale.note_overflow(batch // 2)
        else:
            scale.note_finite(batch // 2)
    assert seen == [64, 64, 32, 16, 16, 16, 32, 32, 32, 64]


def test_a_loss_scale_of_one_is_not_to_blame_for_an_overflow(monkeypatch):
    monkeypatch.setattr(loss_scale, "FIRST_SCALE", 1.0)
    assert not LossScale(config(precision="float16")).note_overflow(0)
    assert not LossScale(config()).note_overflow(0)
