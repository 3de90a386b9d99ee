"""TorchRec's semi-synchronous pipeline computes what this project calls hybrid with tau 1."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits

pytest.importorskip("torchrec", reason="needs the extra `bench`")
pytest.importorskip("fbgemm_gpu", reason="needs the extra `bench`")

from experiments.benching.peers import EPS, LR, SemiSync, batches_of
from runtime.models.inputs import Embeddings

FIELDS, ROWS, DIM, BATCH, STEPS = 3, 7, 4, 16, 12


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2 + FIELDS * DIM, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, dense: torch.Tensor, embeddings: Embeddings) -> torch.Tensor:
        return self.layers(torch.cat([dense, embeddings.pooled], dim=1))


def network() -> Plain:
    torch.manual_seed(3)
    return Plain()


@pytest.fixture(scope="module")
def world():
    draw = np.random.default_rng(5)
    numbers = [draw.integers(0, ROWS, (BATCH, FIELDS, 1)) for _ in range(STEPS)]
    dense = [torch.from_numpy(draw.normal(size=(BATCH, 2)).astype(np.float32)) for _ in numbers]
    labels = [torch.from_numpy(draw.integers(0, 2, (BATCH, 1)).astype(np.float32)) for _ in dense]
    initial = torch.from_numpy(draw.normal(size=(FIELDS * ROWS, DIM)).astype(np.float32))
    return numbers, dense, labels, initial


def late_losses(world, tau: int) -> list[float]:
    """A plain loop whose lookups miss the row updates of the last ``tau`` steps."""
    numbers, dense, labels, initial = world
    rows, squares = initial.clone(), torch.zeros_like(initial)
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    waiting, losses = [], []
    for step in range(STEPS):
        at = torch.from_numpy(numbers[step][:, :, 0] + ROWS * np.arange(FIELDS))
        read = rows[at].clone().requires_grad_()
        pooled = Embeddings(read.reshape(BATCH, -1), {}, {})
        loss = binary_cross_entropy_with_logits(model(dense[step], pooled), labels[step])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        summed = torch.zeros_like(rows).index_add_(0, at.reshape(-1), read.grad.reshape(-1, DIM))
        waiting.append((summed, torch.unique(at)))
        if len(waiting) > tau:
            gradient, touched = waiting.pop(0)
            squares[touched] += gradient[touched] ** 2
            rows[touched] -= LR * gradient[touched] / (squares[touched].sqrt() + EPS)
    return losses


def test_semi_sync_is_a_loop_whose_rows_are_one_step_late(world):
    numbers, dense, labels, initial = world
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    pipeline = SemiSync(model, optimizer, [ROWS] * FIELDS, DIM, initial)
    try:
        found = pipeline.steps(iter(batches_of(numbers, dense, labels)), STEPS)
    finally:
        pipeline.close()
    assert len(found) == STEPS
    np.testing.assert_allclose(found, late_losses(world, 1), rtol=2e-5)
    for other in (0, 2):  # the test can tell
        assert np.abs(np.subtract(found, late_losses(world, other))).max() > 1e-3
