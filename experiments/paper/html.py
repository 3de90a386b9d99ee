"""Parts of a web page that needs nothing beside itself: no script, no file, no network."""

from __future__ import annotations

import base64
import html
from collections.abc import Sequence
from pathlib import Path

STYLE = Path(__file__).with_name("page.css")


def text(content: object) -> str:
    """Anything as text of a page."""
    return html.escape(str(content), quote=True)


def tag(name: str, *inside: str, **attributes: str) -> str:
    """An element; what is inside is HTML already, attributes are texts. `class_` is class."""
    names = {key.rstrip("_").replace("_", "-"): value for key, value in attributes.items()}
    given = "".join(f' {name}="{text(value)}"' for name, value in names.items())
    return f"<{name}{given}>{''.join(inside)}</{name}>"


def paragraph(content: object, **attributes: str) -> str:
    """A paragraph of plain text."""
    return tag("p", text(content), **attributes)


def picture(path: Path, alt: str) -> str:
    """A PNG inside the page, a link to itself in full size. Raises OSError if it cannot be read."""
    data = base64.b64encode(path.read_bytes()).decode()
    image = f'<img src="data:image/png;base64,{data}" alt="{text(alt)}">'
    name = f"full-size-{path.stem}"
    return tag("a", image, class_="picture", id=name, href=f"#{name}")


def bullets(items: Sequence[str]) -> str:
    """A list of HTML items."""
    return tag("ul", *(tag("li", item) for item in items))


def table(header: Sequence[str], rows: Sequence[Sequence[str]], class_: str = "plain") -> str:
    """A table in a box of its own that scrolls where it is too wide; the cells are HTML.

    Each cell knows its column's name, so that a narrow screen can show rows below each other.
    """
    head = tag("tr", *(tag("th", text(name), scope="col") for name in header))
    body = (
        tag("tr", *(cell(content, name) for name, content in zip(header, row, strict=True)))
        for row in rows
    )
    inside = tag("thead", head) + tag("tbody", *body)
    return tag("div", tag("table", inside, class_=class_), class_="scroll", tabindex="0")


def cell(content: str, name: str) -> str:
    """A cell of the column of that name."""
    return f'<td data-label="{text(name)}">{content}</td>'


def facts(pairs: Sequence[tuple[str, str]]) -> str:
    """Names and their values (HTML), as a list."""
    return tag("dl", *(tag("dt", text(name)) + tag("dd", value) for name, value in pairs))


def page(title: str, *parts: str) -> str:
    """The whole document."""
    return "\n".join(
        [
            "<!DOCTYPE html>",
            '<html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<link rel="icon" href="data:,">',
            f"<title>{text(title)}</title>",
            f"<style>\n{STYLE.read_text()}</style></head>",
            "<body><main>",
            *parts,
            "</main></body></html>\n",
        ]
    )
