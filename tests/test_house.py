"""What one must know to change one thing does not grow: the counts of `python -m tests.house`."""

from __future__ import annotations

import sys

import pytest

from tests import house


def at_most(most, found):
    """So many places or fewer; a failure names some of them."""
    assert len(found) <= most, f"{len(found)} places, {most} before: {list(found)[-20:]}"


@pytest.mark.long
def test_no_count_of_the_source_grows():
    counts = house.counts_of_the_source()
    assert [count for count in counts if count.today > count.most] == []


def test_a_long_body_has_a_waypoint():
    at_most(0, house.long_bodies_without_waypoint())


def test_a_docstring_stands_alone():
    at_most(0, house.pointing_docstrings())


def test_a_class_name_stands_once_in_a_package():
    """But for the options of a study, which each of them calls so: `module.Options`."""
    assert house.classes_named_twice().keys() <= {"experiments: Options"}


@pytest.mark.long
@pytest.mark.multiproc
@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="comprehensions are calls before 3.12")
@pytest.mark.parametrize("executor", house.MOST)
def test_the_way_of_a_batch_does_not_grow(executor):
    way, most = house.way_of_a_batch(executor), house.MOST[executor]
    assert all(today <= before for today, before in zip(way, most, strict=True)), way


def test_no_file_is_longer_than_one_finds_a_way_in():
    files = [path for package in (*house.PACKAGES, "tests") for path in house.files_in(package)]
    at_most(0, [path for path in files if len(path.read_text().splitlines()) > 500])
