"""Pages of one file that need nothing beside themselves: their skeleton, tables and pictures."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from persia_sim.base.files import atomic_write

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SKELETON = Path(__file__).with_name("page.html")
_DRAWN: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "page",
    "text.parse_math": False,
    "axes.grid": True,
    "grid.color": "#d0d7de",
    "axes.axisbelow": True,
    "legend.fontsize": "small",
    "errorbar.capsize": 2,
    "lines.markersize": 4,
}
"""Words stay words (a name may hold a dollar sign), and equal pictures have equal bytes."""
_COLOURS = ("#000000", "#0072b2", "#e69f00", "#009e73", "#cc79a7")
_DASHES = ("-", "--", ":", "-.", (0, (8, 3, 2, 3)))  # lines differ in grey, too


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A section of a page; what is empty is not shown."""

    title: str
    paragraphs: Sequence[str] = ()
    """Text before all else."""
    command: str = ""
    chart: str = ""
    """SVG, as of `drawn`."""
    facts: Sequence[tuple[str, object]] = ()
    kind: str = "numbers"
    """The kind of table: cells of "plain" ones are broken, of "numbers" they never are."""
    header: Sequence[str] = ()
    rows: Sequence[Sequence[object]] = ()
    folded: str = ""
    """What stands on the fold that `more` lies behind."""
    more: Sequence[Sequence[object]] = ()
    """Rows under the same header."""
    notes: Sequence[str] = ()
    """Small print at the end."""


def write_page(path: Path, template: Path = SKELETON, **values: Any) -> Path:
    """Write a page, whole or not at all; returns where. ``values``: ``title``, ``lead`` and
    ``parts``, or whatever another template asks for. Raises OSError."""
    content = filled(template, **values)
    with atomic_write(path) as file:
        file.write(content.encode())
    return path


def filled(template: Path = SKELETON, **values: Any) -> str:
    """The page as HTML; whatever is no markup is escaped. Templates import the skeleton's macros
    from "page.html"."""
    templates = Environment(
        loader=FileSystemLoader([template.parent, SKELETON.parent]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        extensions=["jinja2.ext.do"],
    )
    templates.filters["data_url"] = _data_url
    return templates.get_template(template.name).render(values)


def _data_url(picture: bytes | str) -> str:
    """A picture as a link that holds it: a PNG's bytes or an SVG's text."""
    kind, content = ("svg+xml", picture.encode()) if isinstance(picture, str) else ("png", picture)
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"


def drawn(draw: Callable[[Figure], object], height_in: float) -> str:
    """What a function draws into a figure, as SVG that is readable on a phone, too."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure  # not pyplot, which takes seconds
    from matplotlib.rcsetup import cycler

    lines = cycler(color=_COLOURS, linestyle=_DASHES)
    with rc_context(_DRAWN | {"axes.prop_cycle": lines}):
        figure = Figure(figsize=(5.0, height_in), layout="constrained")
        file = io.StringIO()
        draw(figure)
        unsaid = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(file, format="svg", metadata=unsaid)
    return file.getvalue()
