"""A mode looks the same in every figure, and the modes stand in one order."""

from __future__ import annotations

from itertools import combinations

import pytest

from paper_figs.style import MODES, OTHER, in_order, look_of
from persia_sim.base.vocabulary import Mode


def grey(color: str) -> float:
    """How bright a colour is on paper without colours (ITU-R BT.601), 0 to 1."""
    red, green, blue = (int(color[k : k + 2], 16) / 255 for k in (1, 3, 5))
    return 0.299 * red + 0.587 * green + 0.114 * blue


def test_every_mode_has_a_look_in_the_order_of_the_commands():
    assert list(MODES) == [str(mode) for mode in Mode]


@pytest.mark.parametrize(("one", "other"), list(combinations([*MODES.values(), OTHER], 2)))
def test_two_modes_differ_in_grey(one, other):
    """By their markers, and as bars by brightness or hatching."""
    assert one.color != other.color and one.marker != other.marker
    assert one.hatch != other.hatch or abs(grey(one.color) - grey(other.color)) > 0.2


def test_a_line_of_any_name_looks_as_its_mode_and_stands_at_its_place():
    for name in ("hybrid, tau 16", "hybrid tau 64", "Persia hybrid", "hybrid"):
        assert look_of(name) is MODES["hybrid"]
    assert look_of("xdl_async") is look_of("XDL async") is MODES["async"]
    assert look_of("PaddlePaddle heter") is OTHER
    lines = ["xdl_async", "async", "hybrid, tau 16", "hybrid, tau 4", "xdl_sync", "sync"]
    assert in_order(lines) == [
        "sync", "hybrid, tau 16", "hybrid, tau 4", "async", "xdl_sync", "xdl_async"
    ]  # fmt: skip
