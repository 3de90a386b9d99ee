"""The optimisers of the dense weights against torch's classes, and what importing them costs."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from persia_sim.base.rules import Refused
from persia_sim.base.vocabulary import Mode
from runtime.config import DENSE_OPTIMIZERS, OF_TORCH, ModelConfig, SyncConfig, TrainConfig
from runtime.dense.optimizer import FunctionalOptimizer, TorchOptimizer
from tests.runtime.worlds import ArraySource, assert_same_bytes, config, run

TORCHS = {
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.03, fused=True),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.03, fused=True),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.03),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.03),
}
NAMED = {
    f"torch.optim:{name}": lambda parameters, name=name: getattr(torch.optim, name)(
        parameters, lr=0.03
    )
    for name in ("NAdam", "RAdam", "RMSprop", "Adadelta")
}
EACH = TORCHS | NAMED


def made(kind: str, parameters: list[torch.nn.Parameter]) -> FunctionalOptimizer:
    make = TorchOptimizer if kind.startswith(OF_TORCH) else FunctionalOptimizer
    return make(ModelConfig(optimizer=kind, lr=0.03), parameters)


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
    assert set(TORCHS) == set(DENSE_OPTIMIZERS)
    parameters = weights(torch.float32)
    optimizer = made("adam", parameters)
    optimizer._kind = "lamb"
    optimizer._begin = lambda parameter, state: state.update(step=torch.zeros(()))
    with pytest.raises(AssertionError):
        optimizer.step(drawn(0, parameters))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", sorted(EACH))
def test_every_step_has_the_bytes_of_torchs_own_class(kind, dtype):
    mine, theirs = weights(dtype), weights(dtype)
    ours, torchs = made(kind, mine), EACH[kind](theirs)
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


@pytest.mark.parametrize("kind", sorted(EACH))
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
    [
        ("adagrad", "adagrad cannot go on from exp_avg"),
        ("sgd", "sgd cannot go on from"),
        ("torch.optim:NAdam", "torch.optim:NAdam cannot go on from another optimiser's state"),
    ],
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


@pytest.mark.parametrize("name", ["torch.optim:NAdam", "torch.optim:RMSprop"])
def test_a_class_of_torch_trains_the_same_in_every_mode_whose_rows_are_exact(name):
    def world(mode: Mode):
        model = ModelConfig(hidden=(8,), optimizer=name, lr=0.02)
        return run(config(mode=mode, ranks=2, model=model), ArraySource(24 * 8))

    first = world(Mode.SYNC)
    assert_same_bytes(first, world(Mode.LOOKAHEAD))
    adam = run(config(mode=Mode.SYNC, ranks=2), ArraySource(24 * 8))
    assert any(
        (first.state()[key] != adam.state()[key]).any()
        for key in first.state()
        if ".ids" not in key
    )


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("torch.optim:Nadam", "torch.optim has no optimiser of that name"),
        ("torch.optim:lr_scheduler", "torch.optim has no optimiser of that name"),
        ("torch.optim:LBFGS", "computes the loss several times"),
        ("torch.optim:SparseAdam", "does not support dense gradients"),
        ("torch.optim:Muon", "cannot be made from parameters, lr: Muon only supports 2D"),
    ],
)
def test_what_is_no_optimiser_of_a_step_is_refused(name, why):
    with pytest.raises(ValueError, match=why):
        made(name, weights(torch.float32))


def test_async_keeps_the_dense_weights_on_servers_and_has_the_four_optimisers_there():
    nadam = ModelConfig(optimizer="torch.optim:NAdam")
    with pytest.raises(Refused, match="is of modes whose ranks keep the dense weights"):
        TrainConfig(model=nadam, sync=SyncConfig(mode=Mode.ASYNC))
    with pytest.raises(Refused, match=r"adagrad, or torch\.optim:"):
        ModelConfig(optimizer="lamb")


@pytest.mark.long
def test_a_run_imports_neither_torchs_compiler_nor_sklearn_nor_the_simulators_engine():
    program = (
        "import sys\n"
        "from runtime.config import DataConfig, EvaluationConfig, TrainConfig\n"
        "from runtime.run.session import train\n"
        "data = DataConfig(name='synthetic', rows=256)\n"
        "found = train(TrainConfig(data=data, evaluation=EvaluationConfig(test_rows=512)))\n"
        "assert found.figures.updates == 2\n"
        "import runtime.executors.threads, runtime.run.record\n"
        "late = {'torch._dynamo', 'sympy', 'sklearn', 'pandas', 'simpy'}\n"
        "print(sorted(late & set(sys.modules)))\n"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert found.stdout == "[]\n", found.stdout + found.stderr
