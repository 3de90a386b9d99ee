"""`data schema`: what kind of column its name and its values make it, and what it says of that."""

import json

import numpy as np
import pytest

from runtime.data.open import open_source
from tests.runtime.data.test_guess import ROWS, clicks, line_of, written

MIXED = [int(k) for k in np.random.default_rng(3).permutation(60)]


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("hours_per_week", [10 + k for k in MIXED]),
        ("update_count", MIXED),
        ("candidate_id", list(ROWS)),
        ("birth_year", [1950 + k for k in MIXED]),
        ("watch_time_s", [k / 10 for k in MIXED]),
        ("weekday", [k % 7 for k in ROWS]),
        ("time", [str(10**25 + k) for k in ROWS]),
    ],
)
def test_a_number_that_only_sounds_like_a_time_is_a_column(tmp_path, name, values):
    schema = written(tmp_path, clicks(**{name: values}))
    assert schema.split.column is None and schema.split.test_fraction == 0.2
    assert name in [column.name for column in schema.columns]


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("date", [20260301 + k % 30 for k in MIXED]),
        ("timestamp", [1_780_000_000 + 997 * k for k in MIXED]),
        ("event_time_ms", [1_780_000_000_000 + 997 * k for k in MIXED]),
        ("eventTime", [1_780_000_000_000_000 + 997 * k for k in MIXED]),
        ("hour", [26030100 + k // 3 for k in ROWS]),
        ("day", [1 + k // 5 for k in ROWS]),
    ],
)
def test_a_number_that_is_a_time_by_its_digits_or_its_order_splits(tmp_path, name, values):
    """Beside another column of times, which is told of and is none of the model's."""
    years = [2001 + k // 30 for k in ROWS]
    schema = written(tmp_path, clicks(release_year=years, **{name: values}))
    assert schema.split.column in (name, "release_year")
    assert [column.name for column in schema.columns] == ["user"]
    (other,) = {name, "release_year"} - {schema.split.column}
    text = (tmp_path / "mine.toml").read_text()
    assert f"# Left out: {other} is a time, too, and another column splits." in text
    if len(str(values[0])) > 4:  # sure by itself, where an order may be one by chance
        assert schema.split.column == name


LATE = "known only after the label? then leave it out"
SHOWN = "the place where it was shown? not known before: then leave it out"


@pytest.mark.parametrize(
    ("name", "values", "told"),
    [
        ("x", ["1:0.5,2:0.5", "3:0.1,1:0.9"] * 30, "id:weight? the weights become part of the ids"),
        ("x", ["3^4", "5^6"] * 30, 'a list? then kind = "multi", separator = "^"'),
        ("x", ["a#b", "b#c"] * 30, 'a list? then kind = "multi", separator = "#"'),
        ("x", ["['a', 'b']", "['b', 'a']", "[]"] * 20, "brackets and quotes stay in the ids"),
        # As logs of advertisers, shops and videos call what is known too late.
        ("conversion_timestamp", [1_600_000_000 + 79 * k if k % 3 else -1 for k in ROWS], LATE),
        ("time_delay_for_conversion", [k * 7919 % 9999 for k in ROWS], LATE),
        ("dwell_time", [k * 37 % 60 + 0.5 for k in ROWS], LATE),
        ("play_duration", [k * 7919 % 90_000 for k in ROWS], LATE),
        ("revenue", [k * 37 % 60 + 0.5 for k in ROWS], LATE),
        ("position", [k * 7 % 10 for k in ROWS], SHOWN),
        ("ad_rank", [k * 7 % 10 for k in ROWS], SHOWN),
    ],
)
def test_what_is_uncertain_of_a_column_is_said_behind_it(tmp_path, name, values, told):
    written(tmp_path, clicks(**{name: values}))
    assert told in line_of(name, tmp_path)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("price", [k * 37 % 60 + 0.5 for k in ROWS]),
        ("age", [18 + k * 7 % 60 for k in ROWS]),
        ("device_type", [k % 5 for k in ROWS]),
        ("device_model", [f"{k % 60:08x}" for k in ROWS]),
        ("zip_code", [10_000 + k * 7919 % 89_999 for k in ROWS]),
    ],
)
def test_a_column_that_is_known_in_time_is_not_to_be_left_out(tmp_path, name, values):
    written(tmp_path, clicks(**{name: values}))
    assert "leave it out" not in line_of(name, tmp_path)


@pytest.mark.parametrize("word", ["NULL", "NA", "\\N", "None", "<NA>"])
def test_a_word_for_none_among_texts_is_told_at_its_column(tmp_path, word):
    """It is an id: who means none by it says so; where numbers have it, too, it is said already."""
    table = clicks(x=[word if k % 4 == 0 else f"c{k % 3}" for k in ROWS])
    assert written(tmp_path, table).missing == ("", "?")
    assert f'missing = ["", "?", {json.dumps(word)}]' in line_of("x", tmp_path)
    # With the line of the comment each of them is absent.
    table["price"] = [word if k % 20 == 7 else f"{k}.5" for k in ROWS]
    assert written(tmp_path, table).missing == ("", "?", word)
    assert "missing" not in line_of("x", tmp_path)


@pytest.mark.parametrize("word", ["-", "NaN", "n/a"])
def test_a_rare_word_among_numbers_means_that_there_is_none(tmp_path, word):
    schema = written(tmp_path, clicks(x=[word if k % 20 == 7 else f"{k}.5" for k in ROWS]))
    assert schema.missing == ("", "?", word)
    assert {c.name: (c.kind, c.fill) for c in schema.columns}["x"] == ("numeric", 0.0)
    source = open_source(str(tmp_path / "mine.toml"))
    dense = [batch.dense[:, 0] for part in ("train", "test") for batch in source.chunks(part)]
    assert (np.concatenate(dense) == 0).sum() == 3


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        (["m", "f", "F "] * 20, "categorical"),
        (["Toys, games", "Books", "Home, garden"] * 20, "categorical"),
        (["Open heart", "Second day", "A long way"] * 20, "categorical"),
        (["a, b", "b, c", "c, a", "a, d", "b, d", "c, d"] * 10, "multi"),
        (["1 5 7", "9 3", "4"] * 20, "multi"),
    ],
)
def test_words_of_a_name_are_no_list(tmp_path, values, kind):
    schema = written(tmp_path, clicks(x=values))
    assert {c.name: c.kind for c in schema.columns}["x"] == kind
