"""The dense networks against sums written out by hand."""

from __future__ import annotations

import itertools
import math
import random

import numpy as np
import pytest
import torch

from runtime.data.batch import Field, Layout
from runtime.models.inputs import Embeddings, InputShape
from runtime.models.networks import BUILT_IN, build_model

LAYOUT = Layout(
    fields=(Field(name="a"), Field(name="b"), Field(name="s", pooling="sequence", max_length=3)),
    dense=("x", "y"),
    tasks=("click", "buy"),
)
SHAPE = InputShape(layout=LAYOUT, dims={"rows": 4})


def inputs(samples: int = 5) -> tuple[torch.Tensor, Embeddings]:
    draw = torch.Generator().manual_seed(0)
    mask = torch.tensor([[True, True, False]] * samples)
    sequence = torch.randn(samples, 3, 4, generator=draw) * mask[..., None]
    pooled = torch.randn(samples, 8, generator=draw)
    return torch.randn(samples, 2, generator=draw), Embeddings(pooled, {"s": sequence}, {"s": mask})


@pytest.mark.parametrize("name", BUILT_IN)
def test_one_logit_per_sample_and_task_and_gradients_everywhere(name):
    model = build_model(name, SHAPE, (16, 8), seed=0)
    dense, embeddings = inputs()
    embeddings.pooled.requires_grad_()
    logits = model(dense, embeddings)
    assert logits.shape == (5, 2)
    logits.sum().backward()
    assert embeddings.pooled.grad.abs().sum() > 0
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("name", BUILT_IN)
def test_a_model_is_a_function_of_its_seed_and_leaves_the_global_generator_alone(name):
    torch.manual_seed(5)
    before = torch.get_rng_state()
    one, same, other = (build_model(name, SHAPE, (8,), seed=s) for s in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    pairs = list(zip(one.parameters(), same.parameters(), other.parameters(), strict=True))
    assert all(torch.equal(a, b) for a, b, _ in pairs)
    assert any(not torch.equal(a, c) for a, _, c in pairs)


class Drawn(torch.nn.Linear):
    """As the public DLRM begins, whose weights numpy draws; and Python one of them."""

    def __init__(self, shape, hidden):
        super().__init__(shape.width, shape.tasks)
        drawn = np.random.normal(size=self.weight.shape)  # noqa: NPY002
        self.weight.data = torch.from_numpy(drawn * random.random())


def test_a_model_is_drawn_by_its_seed_whoever_draws_and_whatever_was_set_before():
    def drawn(name, seed):
        return torch.cat(
            [p.detach().flatten() for p in build_model(name, SHAPE, (8,), seed).parameters()]
        )

    for name in ("mlp", f"{__name__}:Drawn"):
        one, other = drawn(name, 2**40 + 1), drawn(name, 2**40 + 2)
        torch.set_default_dtype(torch.float64)
        try:
            assert torch.equal(one, drawn(name, 2**40 + 1))
            assert torch.get_default_dtype() is torch.float64
        finally:
            torch.set_default_dtype(torch.float32)
        assert not torch.equal(one, other)
    random.seed(3)
    before = random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002
    drawn(f"{__name__}:Drawn", 1)
    assert before == (random.getstate(), np.random.get_state()[1].tolist())  # noqa: NPY002


def in_float64(samples: int = 3) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Dense features, pooled fields, the sequence's rows and its mask; 1, 2 and 3 ids long."""
    draw = torch.Generator().manual_seed(1)
    mask = torch.arange(3) < torch.arange(1, samples + 1)[:, None]
    dense, pooled, rows = (
        torch.randn(samples, *size, generator=draw, dtype=torch.float64)
        for size in ((2,), (8,), (3, 4))
    )
    return dense, pooled, rows * mask[..., None], mask


def linear(layer: torch.nn.Linear, x: list[float]) -> list[float]:
    weights, bias = layer.weight.tolist(), layer.bias.tolist()
    return [
        sum(w * v for w, v in zip(row, x, strict=True)) + b
        for row, b in zip(weights, bias, strict=True)
    ]


def tower(layers: torch.nn.Sequential, x: list[float]) -> list[float]:
    for layer in layers:
        x = linear(layer, x) if isinstance(layer, torch.nn.Linear) else [max(v, 0.0) for v in x]
    return x


def dot(a: list[float], b: list[float]) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True))


def blend(gate: list[float], experts: list[list[float]]) -> list[float]:
    weights = [math.exp(v) for v in gate]
    columns = zip(*experts, strict=True)
    return [dot(weights, list(column)) / sum(weights) for column in columns]


def slow_logits(name: str, model, dense: list[float], fields: list[list[float]]) -> list[float]:
    """The logits of one sample from its dense features and field vectors, in Python's numbers."""
    flat = [v for field in fields for v in field] + dense
    if name == "mlp":
        return linear(model.head, tower(model.tower, flat))
    if name == "dlrm":
        low = tower(model.bottom, dense)
        vectors = [low, *fields]
        products = [dot(vectors[i], vectors[j]) for i in range(len(vectors)) for j in range(i)]
        return linear(model.head, tower(model.top, low + products))
    if name == "deepfm":
        first = sum(field[0] for field in fields)
        second = sum(dot(a[1:], b[1:]) for a, b in itertools.combinations(fields, 2))
        return linear(model.head, [*tower(model.tower, flat), first, second, *dense])
    if name == "mmoe":
        experts = [tower(expert, flat) for expert in model.experts]
        mixtures = [blend(linear(gate, flat), experts) for gate in model.gates]
        own = zip(model.heads, model.towers, mixtures, strict=True)
        return [linear(head, tower(layers, x))[0] for head, layers, x in own]
    crossed = flat
    for layer in model.cross:
        crossed = [
            x0 * y + x for x0, y, x in zip(flat, linear(layer, crossed), crossed, strict=True)
        ]
    return linear(model.head, crossed + tower(model.tower, flat))


@pytest.mark.parametrize("name", BUILT_IN)
def test_logits_are_those_of_sums_written_out_in_float64(name):
    model = build_model(name, SHAPE, (6, 5), seed=3).double()
    dense, pooled, rows, mask = in_float64()
    found = model(dense, Embeddings(pooled, {"s": rows}, {"s": mask}))
    for n in range(len(dense)):
        ids = rows[n][mask[n]].tolist()
        mean = [sum(column) / len(ids) for column in zip(*ids, strict=True)]
        fields = [pooled[n, :4].tolist(), pooled[n, 4:].tolist(), mean]
        expected = slow_logits(name, model, dense[n].tolist(), fields)
        assert found[n].tolist() == pytest.approx(expected, rel=1e-12, abs=1e-12)


@pytest.mark.first_case
@pytest.mark.parametrize("name", BUILT_IN)
def test_gradients_are_those_of_finite_differences(name):
    """Of every input and every weight, in float64."""
    model = build_model(name, SHAPE, (6, 5), seed=3).double()
    dense, pooled, rows, mask = in_float64()
    names = [n for n, _ in model.named_parameters()]

    def logits(dense, pooled, rows, *weights):
        given = Embeddings(pooled, {"s": rows}, {"s": mask})
        parameters = dict(zip(names, weights, strict=True))
        return torch.func.functional_call(model, parameters, (dense, given))

    inputs = [t.detach().clone().requires_grad_() for t in (dense, pooled, rows)]
    weights = [p.detach().clone().requires_grad_() for p in model.parameters()]
    assert torch.autograd.gradcheck(logits, (*inputs, *weights), eps=1e-6, atol=1e-7)


def test_fields_of_different_widths_are_refused_by_models_with_products():
    layout = Layout(fields=(Field(name="a"), Field(name="b", table="wide")))
    shape = InputShape(layout=layout, dims={"rows": 4, "wide": 8})
    with pytest.raises(ValueError, match=r"dlrm needs all fields of one width, got \[4, 8\]"):
        build_model("dlrm", shape, (8,), seed=0)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("fnn", "choose one of mlp, dlrm, deepfm, dcn"),
        ("torch.nn:NoSuch", "cannot be imported"),
    ],
)
def test_a_wrong_model_name_is_told(name, message):
    with pytest.raises(ValueError, match=message):
        build_model(name, SHAPE, (8,), seed=0)
