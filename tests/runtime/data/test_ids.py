from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.data.ids import MAX_FIELDS, hash_integers, hash_texts, tag, zipf_ranks
from tests.oracles.reference.initial import hash_text


@given(st.integers(-(2**63), 2**63 - 1))
def test_an_integer_hashes_as_its_decimal_text(value):
    expected = int(hash_integers(np.array([value]))[0])
    assert hash_text(str(value)) == expected
    assert hash_text(f"{value}.0") == expected


@pytest.mark.parametrize(
    "text",
    ["007", "+7", " 7", "7.", "7.00", "-7.0.0", "0x7", "\N{ARABIC-INDIC DIGIT SEVEN}", "7e0"],
)
def test_other_ways_of_writing_a_number_are_other_values(text):
    assert hash_text(text) not in hash_integers(np.array([7, -7])).tolist()


def test_a_number_that_no_integer_type_holds_is_a_text():
    wrapped = hash_integers(np.array([2**63, 2**63 + 7], np.uint64).view(np.int64)).tolist()
    assert hash_text(str(2**63)) not in wrapped
    assert hash_text(str(2**63 + 7)) not in wrapped


@given(st.lists(st.text(max_size=8) | st.integers().map(str), max_size=20))
def test_hashing_many_is_hashing_each(values):
    assert hash_texts(values).tolist() == [hash_text(v) for v in values]


def test_the_largest_id_is_never_an_empty_slot():
    largest = tag(MAX_FIELDS - 1, np.array([2**64 - 1], np.uint64))[0]
    assert int(largest) < 2**64 - 1
    with pytest.raises(ValueError, match="field number must be 0 to 254, got 255"):
        tag(MAX_FIELDS, np.array([1], np.uint64))


@pytest.mark.parametrize("exponent", [0.0, 0.7, 1.0, 1.2])
@pytest.mark.parametrize("values", [1, 10, 10**13])
def test_ranks_stay_in_range(exponent, values):
    ranks = zipf_ranks(np.random.default_rng(1), 10_000, values, exponent)
    assert 0 <= ranks.min() <= ranks.max() < values


@pytest.mark.parametrize("exponent", [0.0, 0.8, 1.0, 1.25])
def test_popularity_follows_the_power_law(exponent):
    n_draws, values = 400_000, 1000
    ranks = zipf_ranks(np.random.default_rng(1), n_draws, values, exponent)
    edges = np.arange(1, values + 2, dtype=float)
    mass = np.log(edges) if exponent == 1 else edges ** (1 - exponent) / (1 - exponent)
    expected = np.diff(mass) / (mass[-1] - mass[0])
    counts = np.bincount(ranks, minlength=values)
    chi2 = ((counts - n_draws * expected) ** 2 / (n_draws * expected)).sum()
    assert abs(chi2 - (values - 1)) < 5 * np.sqrt(2 * (values - 1))  # 5 standard deviations
    assert (np.diff(expected) <= 1e-12).all()
