"""The optimisers of the dense weights against torch's classes, and what importing them costs."""

from __future__ import annotations

import subprocess
import sys
from typing import get_args

import pytest
import torch

from runtime.config import DenseOptimizer, ModelConfig
from runtime.dense.optimizer import FunctionalOptimizer

TORCHS = {
    "adam": lambda parameters, decay: torch.optim.Adam(
        parameters, lr=0.03, weight_decay=decay, fused=True
    ),
    "adamw": lambda parameters, decay: torch.optim.AdamW(
        parameters, lr=0.03, weight_decay=decay, fused=True
    ),
    "adagrad": lambda parameters, decay: torch.optim.Adagrad(
        parameters, lr=0.03, weight_decay=decay
    ),
    "sgd": lambda parameters, decay: torch.optim.SGD(parameters, lr=0.03, weight_decay=decay),
}


def made(
    kind: DenseOptimizer, parameters: list[torch.nn.Parameter], decay: float = 0.0
) -> FunctionalOptimizer:
    return FunctionalOptimizer(ModelConfig(optimizer=kind, lr=0.03, weight_decay=decay), parameters)


def weights(dtype: torch.dtype) -> list[torch.nn.Parameter]:
    draw = torch.Generator().manual_seed(7)
    shapes = (5, 3), (7,), (2, 2)
    return [torch.nn.Parameter(torch.randn(s, generator=draw, dtype=dtype)) for s in shapes]


def drawn(step: int, parameters: list[torch.nn.Parameter]) -> list[torch.Tensor | None]:
    """The second parameter has no gradient in the first two steps and in every fifth."""
    draw = torch.Generator().manual_seed(step)
    found = [torch.randn(p.shape, generator=draw, dtype=p.dtype) for p in parameters]
    absent = step < 2 or step % 5 == 0
    return [found[0], None if absent else found[1], found[2]]


def test_every_kind_stands_beside_torchs_class_and_no_other_is_trained_as_one_of_them():
    assert set(TORCHS) == set(get_args(DenseOptimizer))
    parameters = weights(torch.float32)
    optimizer = made("adam", parameters)
    optimizer._kind = "lamb"
    optimizer._begin = lambda parameter, state: state.update(step=torch.zeros(()))
    with pytest.raises(AssertionError):
        optimizer.step(drawn(0, parameters))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("decay", [0.0, 0.01])
@pytest.mark.parametrize("kind", sorted(TORCHS))
def test_every_step_has_the_bytes_of_torchs_own_class(kind, decay, dtype):
    mine, theirs = weights(dtype), weights(dtype)
    ours, torchs = made(kind, mine, decay), TORCHS[kind](theirs, decay)
    for step in range(20):
        gradients = drawn(step, mine)
        ours.step(gradients)
        for parameter, gradient in zip(theirs, gradients, strict=True):
            parameter.grad = gradient
        torchs.step()
        for one, other in zip(mine, theirs, strict=True):
            assert one.detach().numpy().tobytes() == other.detach().numpy().tobytes()
    saved, expected = ours.state_dict()["state"], torchs.state_dict()["state"]
    for number, tensors in saved.items():
        for name, tensor in tensors.items():
            assert torch.equal(tensor, expected[number][name]), (number, name)
    assert (len(saved) == 3) == (kind != "sgd")


@pytest.mark.parametrize("kind", sorted(TORCHS))
def test_a_loaded_optimizer_goes_on_with_the_same_bytes(kind):
    whole, first, second = (weights(torch.float32) for _ in range(3))
    undisturbed, stopped = (made(kind, p) for p in (whole, first))
    for step in range(4):
        undisturbed.step(drawn(step, whole))
        stopped.step(drawn(step, first))
    resumed = made(kind, second)
    resumed.load_state_dict(stopped.state_dict())
    stopped.step(drawn(9, first))  # what was loaded is a copy
    with torch.no_grad():
        for mine, saved in zip(second, whole, strict=True):
            mine.copy_(saved)
    for step in range(4, 9):
        undisturbed.step(drawn(step, whole))
        resumed.step(drawn(step, second))
    for one, other in zip(whole, second, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("kind", "why"),
    [("adagrad", "adagrad cannot go on from exp_avg"), ("sgd", "sgd cannot go on from")],
)
def test_the_state_of_another_kind_is_refused(kind, why):
    saved = made("adam", weights(torch.float32))
    saved.step(drawn(3, weights(torch.float32)))
    with pytest.raises(ValueError, match=why):
        made(kind, weights(torch.float32)).load_state_dict(saved.state_dict())


def test_the_state_of_other_parameters_is_refused():
    parameters = weights(torch.float32)
    saved = made("adam", parameters)
    saved.step(drawn(3, parameters))
    turned = [parameters[1], parameters[0], parameters[2]]
    with pytest.raises(ValueError, match=r"of parameter 0 is \(5, 3\), the parameter \(7,\)"):
        made("adam", turned).load_state_dict(saved.state_dict())


@pytest.mark.long
def test_a_run_imports_neither_torchs_compiler_nor_sklearn_nor_the_simulators_engine():
    program = (
        "import sys\n"
        "from runtime.config import DataConfig, EvaluationConfig, TrainConfig\n"
        "from runtime.run.session import train\n"
        "data = DataConfig(name='synthetic', rows=256)\n"
        "found = train(TrainConfig(data=data, evaluation=EvaluationConfig(test_rows=512)))\n"
        "assert found.figures.updates == 2\n"
        "import runtime.engines.threads, runtime.run.record\n"
        "late = {'torch._dynamo', 'sympy', 'sklearn', 'pandas', 'simpy'}\n"
        "print(sorted(late & set(sys.modules)))\n"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert found.stdout == "[]\n", found.stdout + found.stderr
