"""The dense networks against sums written out by hand."""

from __future__ import annotations

import itertools

import pytest
import torch

from runtime.data.batch import Field, Layout
from runtime.models.build import BUILT_IN, build_model
from runtime.models.inputs import Embeddings, InputShape, flatten
from runtime.models.towers import PAPER_TOWER

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


def test_a_sequence_enters_as_the_mean_of_its_ids():
    dense, embeddings = inputs()
    expected = embeddings.sequences["s"][:, :2].mean(1)
    assert torch.allclose(flatten(dense, embeddings)[:, 8:12], expected)


def vectors(embeddings: Embeddings) -> list[torch.Tensor]:
    mean = embeddings.sequences["s"][:, :2].mean(1)
    return [embeddings.pooled[:, :4], embeddings.pooled[:, 4:], mean]


def test_dlrm_takes_the_dot_product_of_every_pair():
    model = build_model("dlrm", SHAPE, (8,), seed=0)
    dense, embeddings = inputs()
    low = model.bottom(dense)
    fields = [low, *vectors(embeddings)]
    products = [(fields[i] * fields[j]).sum(1) for i in range(4) for j in range(i)]
    expected = model.head(model.top(torch.cat([low, torch.stack(products, 1)], 1)))
    assert torch.allclose(model(dense, embeddings), expected, atol=1e-6)


def test_deepfm_sums_the_products_of_every_pair_of_factors():
    model = build_model("deepfm", SHAPE, (8,), seed=0)
    dense, embeddings = inputs()
    fields = vectors(embeddings)
    first = sum(f[:, :1] for f in fields)
    second = sum(
        (a[:, 1:] * b[:, 1:]).sum(1, keepdim=True) for a, b in itertools.combinations(fields, 2)
    )
    deep = model.tower(flatten(dense, embeddings))
    expected = model.head(torch.cat([deep, first, second, dense], 1))
    assert torch.allclose(model(dense, embeddings), expected, atol=1e-5)


def test_dcn_crosses_with_the_input():
    model = build_model("dcn", SHAPE, (8,), seed=0)
    dense, embeddings = inputs()
    first = crossed = flatten(dense, embeddings)
    for layer in model.cross:
        crossed = first * (crossed @ layer.weight.T + layer.bias) + crossed
    expected = model.head(torch.cat([crossed, model.tower(first)], 1))
    assert torch.allclose(model(dense, embeddings), expected, atol=1e-5)


@pytest.mark.parametrize("name", ["ffnn", "deepfm"])
def test_zeros_behind_the_input_change_nothing(name, monkeypatch):
    """The tower's input is filled up for the sake of BLAS; outputs and gradients stay the same."""
    found = []
    for columns in (1, 16, 64):
        monkeypatch.setattr("runtime.models.towers.COLUMNS", columns)
        monkeypatch.setattr("runtime.models.interactions.COLUMNS", columns)
        model = build_model(name, SHAPE, (8, 4), seed=0).double()
        dense, embeddings = inputs()
        pooled = embeddings.pooled.double().requires_grad_()
        sequences = {n: t.double() for n, t in embeddings.sequences.items()}
        logits = model(dense.double(), Embeddings(pooled, sequences, embeddings.masks))
        logits.square().sum().backward()
        found.append([logits, pooled.grad, *(p.grad for p in model.parameters())])
    for other in found[1:]:
        for expected, got in zip(found[0], other, strict=True):
            assert expected.shape == got.shape
            assert torch.allclose(expected, got, atol=1e-12)


def test_the_papers_tower_on_criteos_shape_has_its_12_million_weights():
    """12,906,497 with 26 x 16 + 13 inputs: the paper prints 12 M."""
    fields = tuple(Field(name=f"c{k}") for k in range(26))
    layout = Layout(fields=fields, dense=tuple(f"i{k}" for k in range(13)))
    shape = InputShape(layout=layout, dims={"rows": 16})
    model = build_model("ffnn", shape, PAPER_TOWER, seed=0)
    assert sum(p.numel() for p in model.parameters()) == 12_906_497


def test_fields_of_different_widths_are_refused_by_models_with_products():
    layout = Layout(fields=(Field(name="a"), Field(name="b", table="wide")))
    shape = InputShape(layout=layout, dims={"rows": 4, "wide": 8})
    with pytest.raises(ValueError, match=r"dlrm needs all fields of one width, got \[4, 8\]"):
        build_model("dlrm", shape, (8,), seed=0)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("fnn", "choose one of ffnn, dlrm, deepfm, dcn"),
        ("torch.nn:NoSuch", "cannot be imported"),
    ],
)
def test_a_wrong_model_name_is_told(name, message):
    with pytest.raises(ValueError, match=message):
        build_model(name, SHAPE, (8,), seed=0)
