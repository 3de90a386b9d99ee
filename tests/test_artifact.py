"""What an evaluator reads first: what made the stored tables, the citation, the versions."""

from __future__ import annotations

import hashlib
import re
import tomllib

import pytest
import stored_index
import yaml

from experiments.paper.record import STORED, read_rows
from tests.tree import ROOT

INDEX = STORED / "index.csv"
CITATION = yaml.safe_load((ROOT / "CITATION.cff").read_text())
LOCKED = (ROOT / "constraints.txt").read_text().splitlines()


def test_every_stored_table_is_in_the_index_with_its_checksum():
    kept = read_rows(INDEX)
    assert [row["file"] for row in kept] == sorted(row["file"] for row in kept)
    assert {(row["file"], row["sha256"]) for row in kept} == {
        (path.name, hashlib.sha256(path.read_bytes()).hexdigest())
        for path in STORED.glob("*.csv")
        if path != INDEX
    }, "run: python docs/tools/stored_index.py"
    assert all(row["command"].startswith("persia-experiments ") for row in kept)
    columns = ["file", "command", "date", "machine", "commit", "sha256"]
    assert all([*row] == columns for row in kept), "a comma within a field takes quotes"


def test_a_command_is_written_beside_the_tables_that_are_named_and_no_others(tmp_path):
    """Who stores a table says nothing of another that somebody changed meanwhile."""
    for name in ("mine.csv", "theirs.csv"):
        (tmp_path / name).write_text("a\n1\n")
    old = "theirs.csv,persia-experiments old,2026-01-01,a,b,00"
    gone = "gone.csv,persia-experiments old,2026-01-01,a,b,00"
    (tmp_path / "index.csv").write_text("\n".join([",".join(stored_index.COLUMNS), gone, old, ""]))
    assert stored_index.changed(tmp_path) == ["mine.csv", "theirs.csv"]
    mine, theirs = stored_index.index(tmp_path, "persia-experiments new", ["mine.csv"])
    assert (mine["file"], mine["command"]) == ("mine.csv", "persia-experiments new")
    assert mine["sha256"] == hashlib.sha256(b"a\n1\n").hexdigest()
    assert ",".join(theirs.values()) == old


def test_the_citation_has_what_its_format_asks_for():
    assert CITATION["cff-version"] == "1.2.0"
    assert {"message", "title", "authors"} <= set(CITATION)
    assert (CITATION["type"], CITATION["license"]) == ("software", "MIT")
    (paper,) = CITATION["references"]
    assert {"type", "title", "authors"} <= set(paper) and paper["year"] == 2022
    for person in CITATION["authors"] + paper["authors"]:
        assert {"name"} <= set(person) or {"family-names", "given-names"} <= set(person)


def test_the_citation_names_the_version_of_the_project():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert str(CITATION["version"]) == project["version"]


@pytest.mark.parametrize("line", LOCKED)
def test_a_locked_version_is_a_name_and_a_number(line):
    assert re.fullmatch(r"[A-Za-z0-9._-]+==[0-9][A-Za-z0-9.]*", line), "no path, host or build tag"


def test_every_dependency_is_locked():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = project["dependencies"] + project["optional-dependencies"]["dev"]
    names = {re.match(r"[\w.-]+", need)[0].lower().replace("_", "-") for need in asked}
    locked = {line.split("==")[0].lower().replace("_", "-") for line in LOCKED}
    assert names <= locked, names - locked
