"""Short precisions."""

from __future__ import annotations

import pytest
import torch

from runtime.rank.learner import round_products
from runtime.serving.trained import on_device
from tests.runtime.worlds import ArraySource, config, run

SOURCE = ArraySource(300)


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
