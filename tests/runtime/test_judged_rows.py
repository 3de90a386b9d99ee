"""Which rows have trained decides what may judge: also of a run that did not come to its end."""

from __future__ import annotations

import pytest

from runtime.__main__ import main
from tests.runtime.clicks_of_a_user import edited, write_clicks


@pytest.mark.parametrize("shuffle", [False, True])
def test_the_rows_of_a_run_that_ended_early_are_the_first_ones_unless_it_was_shuffled(
    shuffle, tmp_path, capsys
):
    """80 rows a day of which 128 train: days 0 and 1 in their order, and else any of eight."""
    schema = write_clicks(tmp_path / "data")
    words = ["train", "--batch", "64", "--model.hidden", "8", "--data.name", str(schema)]
    origin, new = str(tmp_path / "origin"), str(tmp_path / "new")
    more = ["--steps", "2", *["--data.shuffle"] * shuffle, "--checkpoint-every", "end"]
    assert main([*words, "--out", origin, *more]) == 0
    later = ('{ column = "day", test_from = 8 }', '{ column = "day", test_from = 5 }')
    schema.write_text(edited(schema.read_text(), later))
    assert main([*words, "--out", new, "--warm-start", origin]) == (2 if shuffle else 0)
    assert ("samples of the test part were trained on" in capsys.readouterr().err) == shuffle
