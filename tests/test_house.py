"""What one must know to change one thing does not grow: the counts of `python -m tests.house`."""

from __future__ import annotations

import sys

import pytest

from tests import house

LINES = sum(len(source.lines) for source in house.all_sources())


def at_most(most, found):
    """So many places or fewer; a failure names some of them."""
    assert len(found) <= most, f"{len(found)} places, {most} before: {list(found)[-20:]}"


def test_words_of_ours_do_not_spread_as_names():
    words = house.private_words()
    assert sum(words.values()) <= 1_390, words


def test_long_bodies_without_a_waypoint_do_not_become_more():
    at_most(270, house.long_bodies_without_waypoint())


def test_docstrings_that_begin_by_pointing_do_not_become_more():
    at_most(76, house.pointing_docstrings())


def test_tuples_are_not_assigned_to_tuples_to_save_a_line():
    at_most(round(4e-3 * LINES), house.tuple_assignments())


def test_the_formatter_is_not_skipped_more_often():
    at_most(36, house.format_skips())


def test_a_class_name_stands_once_in_a_package():
    """But for the options of a study, which each of them calls so: `module.Options`."""
    assert house.classes_named_twice().keys() <= {"experiments: Options"}


@pytest.mark.multiproc
@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="comprehensions are calls before 3.12")
def test_the_way_of_a_batch_does_not_grow():
    way = house.way_of_a_batch("constant_lag")
    assert way.files <= 23 and way.functions <= 122 and way.changes <= 105, way


def test_no_file_is_longer_than_one_finds_a_way_in():
    files = [path for package in (*house.PACKAGES, "tests") for path in house.files_in(package)]
    at_most(0, [path for path in files if len(path.read_text().splitlines()) > 500])
