"""Each optimiser against its closed form in float64, over random gradients and touched rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from runtime.embedding.config import RowOptimizer

IDS, STEPS, DIM = np.arange(12), 25, 5


def run(one_table: Any, rule: RowOptimizer, **config: Any) -> tuple[np.ndarray, list[Any]]:
    """Final rows, and per step (touched ids, gradients)."""
    rng = np.random.default_rng(3)
    table = one_table(dim=DIM, dtype="float64", optimizer=rule, initial_scale=0.3, **config)
    history = []
    for step in range(STEPS):
        touched = np.sort(rng.choice(IDS, 6, replace=False))
        gradients = rng.standard_normal((6, DIM))
        table.push(table.look_up(touched, step), gradients)
        history.append((touched, gradients))
    return table.values(IDS), history


def initial(one_table: Any) -> np.ndarray:
    values: np.ndarray = one_table(dim=DIM, dtype="float64", initial_scale=0.3).values(IDS)
    return values


@pytest.mark.parametrize("kind", ["adam", "rowwise_adam"])
@pytest.mark.law4
def test_adam_that_counts_the_steps_of_the_run(one_table, kind):
    rule = RowOptimizer(kind=kind, lr=0.1)
    found, history = run(one_table, rule)
    w, m, v = initial(one_table), np.zeros((len(IDS), DIM)), np.zeros((len(IDS), DIM))
    for count, (t, g) in enumerate(history, 1):
        m[t] = 0.9 * m[t] + 0.1 * g
        square = g**2 if kind == "adam" else (g**2).mean(axis=1, keepdims=True)
        v[t] = 0.999 * v[t] + 0.001 * square
        factor = 0.1 * np.sqrt(1 - 0.999**count) / (1 - 0.9**count)
        w[t] -= factor * m[t] / (np.sqrt(v[t]) + 1e-8)
    np.testing.assert_allclose(found, w, rtol=1e-9)


@pytest.mark.law4
def test_row_wise_adagrad(one_table):
    rule = RowOptimizer(kind="rowwise_adagrad", lr=0.1, initial_accumulator=0.2)
    found, history = run(one_table, rule)
    w, total = initial(one_table), np.full((len(IDS), 1), 0.2)
    for t, g in history:
        total[t] += (g**2).mean(axis=1, keepdims=True)
        w[t] -= 0.1 * g / (np.sqrt(total[t]) + 1e-10)
    np.testing.assert_allclose(found, w, rtol=1e-12)


@pytest.mark.law4
def test_ftrl_proximal(one_table):
    rule = RowOptimizer(kind="ftrl", lr=0.1, l1=0.3, l2=0.05)
    found, history = run(one_table, rule)
    w = initial(one_table)
    z, n = -1.0 / 0.1 * w, np.zeros((len(IDS), DIM))  # the minimum is there before any gradient
    for t, g in history:
        sigma = (np.sqrt(n[t] + g**2) - np.sqrt(n[t])) / 0.1
        z[t] += g - sigma * w[t]
        n[t] += g**2
        shrunk = np.sign(z[t]) * np.maximum(np.abs(z[t]) - 0.3, 0)
        w[t] = -shrunk / ((1.0 + np.sqrt(n[t])) / 0.1 + 0.05)
    np.testing.assert_allclose(found, w, rtol=1e-10, atol=1e-12)
    assert (found == 0).any()
