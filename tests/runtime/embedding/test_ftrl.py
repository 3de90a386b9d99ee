"""FTRL-proximal under rates that change, held against what it minimises (McMahan et al. 2013).

The oracle shares no formula with the kernel: after each step a weight must be the minimum of

    sum of g_s w  +  1/2 sum of sigma_s (w - w_s)^2  +  l1 |w|  +  l2 / 2 w^2

over all steps s so far. The first of the terms in the middle has weight 1 / rate_1 and lies
around the initial value; together they weigh (1 + sqrt(g_1^2 + ... + g_s^2)) / rate_s. The
derivative is monotone, so the minimum is where it changes sign; scipy looks for that place. Without
l1 and l2 FTRL is Adagrad with eps = 1, of which torch has another implementation.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import brentq

from runtime.embedding.config import RowOptimizer
from runtime.embedding.native.extension import native
from tests.runtime.embedding.conftest import OneTable

RATES = st.one_of(st.just(0.0), st.floats(1e-3, 8.0))
"""What a rate is multiplied by, as `lr_by_staleness` does."""
GRADIENTS = st.one_of(st.just(0.0), st.floats(-3, 3).map(lambda g: round(g, 3)))
HISTORIES = st.lists(st.tuples(RATES, GRADIENTS), min_size=1, max_size=12)


def step(table: OneTable, number: int, gradient: Any, rate: float = 1.0) -> None:
    """One push to row 7, with the rate multiplied by a factor."""
    handle = table.look_up([7], number)
    values = handle.values["rows"]
    gradients = np.broadcast_to(np.asarray(gradient, values.dtype), values.shape).copy()
    rows = table.store.servers[0].rows
    rows.update([(handle, {"rows": gradients})], number + 1, rate)


def element(table: OneTable) -> float:
    return float(table.values([7])[0, 0])


class Minimised:
    """One weight as the minimum of its objective, by a search for the sign of the derivative."""

    def __init__(self, start: float, lr: float, l1: float, l2: float) -> None:
        self.w, self.lr, self.l1, self.l2 = start, lr, l1, l2
        self._gradients: list[float] = []
        self._terms: list[tuple[float, float]] = []
        """sigma_s and w_s."""

    def step(self, gradient: float, factor: float) -> None:
        rate = self.lr * factor
        if rate == 0 or gradient == 0:  # no step is made, or there is nothing to learn
            return
        if not self._gradients:
            self._terms.append((1 / rate, self.w))
        self._gradients.append(gradient)
        weight = (1 + float(np.sqrt(np.sum(np.square(self._gradients))))) / rate
        self._terms.append((weight - sum(sigma for sigma, _ in self._terms), self.w))
        self.w = brentq(self._slope, -1e3, 1e3, xtol=1e-15, rtol=1e-14, maxiter=500)

    def _slope(self, w: float) -> float:
        near = sum(sigma * (w - centre) for sigma, centre in self._terms)
        return sum(self._gradients) + near + self.l1 * float(np.sign(w)) + self.l2 * w


@pytest.mark.law4
@pytest.mark.parametrize("kernels", ["scalar", "avx2", "avx512"])
@given(
    history=HISTORIES,
    start=st.sampled_from([0.0, 0.5, -0.2]),
    l1=st.sampled_from([0.0, 0.4]),
    l2=st.sampled_from([0.0, 0.3]),
)
def test_a_weight_is_the_minimum_of_its_objective_whatever_the_rates(
    kernels, history, start, l1, l2
):
    widest = native.kernel_set()
    try:
        native.choose_kernel_set(kernels)
    except ValueError:
        pytest.skip(f"no {kernels} here")
    try:
        rule = RowOptimizer(kind="ftrl", lr=0.25, l1=l1, l2=l2)
        table = OneTable(
            dim=9, dtype="float64", optimizer=rule, initial="constant", initial_scale=start
        )
        expected = Minimised(start, 0.25, l1, l2)
        for number, (factor, gradient) in enumerate(history):
            step(table, number, gradient, factor)
            expected.step(gradient, factor)
            assert element(table) == pytest.approx(expected.w, rel=1e-9, abs=1e-9)
    finally:
        native.choose_kernel_set(widest)


@pytest.mark.law4
@given(history=HISTORIES)
def test_without_regularisation_it_is_adagrad_of_torch_with_1_for_eps(history):
    rule = RowOptimizer(kind="ftrl", lr=0.25)
    table = OneTable(dim=4, dtype="float64", optimizer=rule, initial_scale=0.3)
    weights = torch.tensor(table.values([7])[0], requires_grad=True)
    adagrad = torch.optim.Adagrad([weights], lr=0.25, eps=1.0)
    for number, (factor, gradient) in enumerate(history):
        slopes = gradient * np.array([1.0, -2.0, 0.5, 0.0])
        step(table, number, slopes, factor)
        if factor:  # torch's accumulator grows at rate 0; here such a step is none
            adagrad.param_groups[0]["lr"] = 0.25 * factor
            weights.grad = torch.tensor(slopes)
            adagrad.step()
        np.testing.assert_allclose(
            table.values([7])[0], weights.detach().numpy(), rtol=1e-11, atol=1e-13
        )


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("factor", [0.0, 1e-60, 1e-43])
def test_a_rate_of_zero_or_almost_none_leaves_the_row_alone(one_table, dtype, factor):
    """Also one that float32 rounds to 0, or to a number of few bits."""
    rule = RowOptimizer(kind="ftrl", lr=0.1, l1=0.1, l2=0.1)
    table = one_table(dim=8, dtype=dtype, optimizer=rule, initial_scale=0.5)
    for number in range(3):
        step(table, number, 0.7)
    before = table.values([7])
    step(table, 3, -2.0, factor)
    np.testing.assert_allclose(table.values([7]), before, rtol=0, atol=1e-7)
    step(table, 4, -2.0)
    assert np.isfinite(table.values([7])).all() and (table.values([7]) > before).all()


def test_a_late_push_is_made_smaller_and_not_the_row(one_table):
    """`lr_by_staleness` hands the store a factor of this update's rate: 1/8 of the way is gone."""
    rule = RowOptimizer(kind="ftrl", lr=0.1)
    moved = {}
    for factor in (1.0, 0.125):
        table = one_table(dim=8, dtype="float64", optimizer=rule, initial_scale=0.3)
        for number in range(20):
            step(table, number, 1.0)
        before = element(table)
        step(table, 20, 1.0, factor)
        moved[factor] = element(table) - before
    assert moved[0.125] == pytest.approx(moved[1.0] / 8, rel=1e-9)


def test_a_first_touch_moves_a_row_from_its_initial_value(one_table):
    rule = RowOptimizer(kind="ftrl", lr=0.05)
    table = one_table(dim=8, optimizer=rule, initial="constant", initial_scale=0.5)
    step(table, 0, 0.0)
    assert element(table) == 0.5
    step(table, 1, 0.001)  # by 0.05 * 0.001 / (1 + 0.001)
    assert element(table) == pytest.approx(0.5 - 0.05 * 0.001 / 1.001, rel=1e-6)


def test_rows_with_little_signal_become_zero_under_l1_and_come_back_with_more(one_table):
    rule = RowOptimizer(kind="ftrl", lr=0.1, l1=0.5)
    table = one_table(dim=8, dtype="float64", optimizer=rule, initial_scale=0.01)
    for number, gradient in enumerate([0.2, -0.1, 0.2]):
        step(table, number, gradient)
        assert element(table) == 0, gradient
    for number in range(3, 6):
        step(table, number, 0.4)
    assert element(table) < 0, "0.3 and three times 0.4 are more than 0.5"


@pytest.mark.parametrize(("l1", "floats"), [(0.0, 8), (0.3, 16)])
def test_state_is_one_number_an_element_and_two_where_l1_holds_gradients_back(l1, floats):
    table = OneTable(dim=8, optimizer=RowOptimizer(kind="ftrl", l1=l1))
    step(table, 0, 1.0)
    assert table.store.export()["rows"][2].shape == (1, floats)
