"""A table's options: what is accepted is meant, what is not is one sentence with name and rule."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.embedding.config import (
    Admission,
    Capacity,
    RowOptimizer,
    TableConfig,
)

UNREAD: list[tuple[Any, dict[str, Any], str]] = [
    (RowOptimizer, {"l1": 0.5}, "only used with kind ftrl; remove it"),
    (RowOptimizer, {"kind": "adam", "initial_accumulator": 0.1}, "only used with kind adag"),
]
FINITE = "must be a finite number"
WRONG: list[tuple[Any, dict[str, Any], str]] = [
    (TableConfig, {"initial_scale": -1.0}, "must be >= 0"),
    (TableConfig, {"initial_scale": 1e-60}, "must be 0 or between 1e-45 and 3e.38 in size"),
    (TableConfig, {"initial": "constant", "initial_scale": math.inf}, FINITE),
    (TableConfig, {"initial": "constant", "initial_scale": -1e39}, "must .* which float32 holds"),
    (TableConfig, {"dim": 500_000_000_000}, "must be <= 65,536"),
    (TableConfig, {"dim": 0}, "must be >= 1"),
    (TableConfig, {"dim": 2.5}, "must be a whole number"),
    (TableConfig, {"dtype": "float16"}, "must be one of float32, float64"),
    (TableConfig, {"initial": "uniforme"}, "must be uniform, normal, .*, or a file"),
    (Capacity, {"rows": 2**64}, "must fit into 64 bits"),
    (Capacity, {"expire_after_steps": 2**32}, "must be <= 4,294,967,295"),
    (Admission, {"probability": math.nan}, FINITE),
    (Admission, {"probability": 0.0}, "must be > 0"),
    (RowOptimizer, {"kind": "Adam"}, "must be one of sgd, adagrad"),
    (RowOptimizer, {"lr": math.nan}, FINITE),
    (RowOptimizer, {"lr": "0.1"}, "must be a number"),
    (RowOptimizer, {"lr": 0.0}, "must be > 0"),
    (RowOptimizer, {"kind": "ftrl", "l1": math.inf}, FINITE),
]


@pytest.mark.parametrize(("kind", "options", "rule"), UNREAD + WRONG)
def test_what_nothing_reads_or_cannot_be_is_refused_with_name_value_and_rule(kind, options, rule):
    name, value = list(options.items())[-1]
    with pytest.raises(ValueError, match=rf"^{name} .*{rule}") as told:
        kind(**options)
    assert str(value) in str(told.value)


NUMBERS = st.one_of(st.integers(), st.floats(), st.none(), st.text(max_size=3), st.booleans())


@given(field=st.sampled_from(["dim", "initial_scale"]), value=NUMBERS)
def test_any_value_is_taken_or_refused_in_one_sentence(field, value):
    try:
        table = TableConfig(**{field: value})
    except ValueError as refused:
        assert field in str(refused)
        forms = {str(value), repr(value)} | ({str(float(value))} if type(value) is int else set())
        assert any(form in str(refused) for form in forms)
        assert len(str(refused).splitlines()) == 1
    else:
        assert math.isfinite(getattr(table, field))


def test_eps_is_that_of_torch_for_each_kind():
    """torch.optim.SparseAdam and Adam add 1e-8, Adagrad 1e-10."""
    assert RowOptimizer(kind="adam").epsilon == RowOptimizer(kind="rowwise_adam").epsilon == 1e-8
    assert RowOptimizer(kind="adagrad").epsilon == RowOptimizer().epsilon == 1e-10


@pytest.mark.parametrize(
    ("kind", "name"),
    [("sgd", "lr"), ("ftrl", "lr"), ("adam", "lr"), ("rowwise_adagrad", "initial_accumulator"),
     ("ftrl", "l1"), ("ftrl", "l2")],
)  # fmt: skip
@pytest.mark.parametrize("value", [1e-50, 1e39])
def test_what_is_0_or_infinite_in_the_rows_own_numbers_is_no_rate(kind, name, value):
    """The first step gave NaN, and the advice to lower the rate."""
    most = 1e6 if name == "lr" else math.inf
    if value > most:
        with pytest.raises(ValueError, match=f"^{name} "):
            RowOptimizer(kind=kind, **{name: value})
        return
    optimizer = RowOptimizer(kind=kind, **{name: value})
    with pytest.raises(ValueError, match=rf"^optimizer.{name} .*which float32 holds"):
        TableConfig(optimizer=optimizer)
    assert TableConfig(optimizer=optimizer, dtype="float64").optimizer is optimizer
