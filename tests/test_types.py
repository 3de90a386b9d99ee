"""The types of the packages are right: beside other tests, for mypy uses one core."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.tree import ROOT


@pytest.mark.long
def test_mypy_finds_nothing():
    found = subprocess.run([sys.executable, "-m", "mypy"], cwd=ROOT, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout + found.stderr
