"""Ids get a row by a seeded draw or by the number of sightings; refused ids read as initial."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from runtime.embedding.features import Admission


def test_probability_admits_its_share_and_the_same_ids_again(one_table: Any) -> None:
    admission = Admission(kind="probability", probability=0.3)
    tables = [one_table(dim=2, admission=admission, shards=n) for n in (1, 4)]
    for table in tables:
        table.look_up(np.arange(20_000), step=5)
    assert tables[0].resident() == tables[1].resident()
    assert len(tables[0].store) == pytest.approx(6000, abs=5 * (20_000 * 0.3 * 0.7) ** 0.5)


def test_probability_lets_frequent_ids_in(one_table: Any) -> None:
    table = one_table(dim=2, admission=Admission(kind="probability", probability=0.3))
    for step in range(5):
        table.look_up(np.arange(5000), step)
    share = 1 - 0.7**5
    assert len(table.store) == pytest.approx(5000 * share, abs=5 * (5000 * share * 0.7**5) ** 0.5)


def test_frequency_admits_at_the_given_sighting(one_table: Any) -> None:
    table = one_table(dim=2, admission=Admission(kind="frequency", sightings=3))
    for step, resident in enumerate([0, 0, 100, 100]):
        table.look_up(np.arange(100), step)
        assert len(table.store) == resident


def test_evaluation_and_reading_ahead_are_no_sightings(one_table: Any) -> None:
    table = one_table(dim=2, admission=Admission(kind="frequency", sightings=2))
    table.look_up([5])
    table.values([5])
    ahead = table.look_up([5], step=1, create=False)
    assert len(table.store) == 0
    table.store.refresh(ahead, 0)
    assert table.resident() == {5}


def test_refused_id_reads_as_its_initial_value(one_table: Any) -> None:
    table = one_table(dim=4, admission=Admission(kind="frequency", sightings=9))
    read = table.look_up([1, 2, 3]).values["rows"]
    np.testing.assert_array_equal(read, one_table(dim=4).look_up([1, 2, 3]).values["rows"])
    assert table.store.counters["not_admitted"] == 3


def test_wrong_options_name_field_value_and_rule() -> None:
    with pytest.raises(ValueError, match="probability must be > 0, got 0"):
        Admission(kind="probability", probability=0)
    with pytest.raises(ValueError, match="sightings must be <= 255, got 256"):
        Admission(kind="frequency", sightings=256)
