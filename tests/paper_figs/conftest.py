"""Figures of a test are freed at its end."""

from __future__ import annotations

import pytest
from matplotlib import pyplot as plt


@pytest.fixture(autouse=True)
def free_figures():
    yield
    plt.close("all")
