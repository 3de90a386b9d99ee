"""A small CSV with a schema, as a user has them, and the edits that a user makes to the schema."""

from __future__ import annotations

from pathlib import Path

import numpy as np

SCHEMA = """name = "mine"
file = "clicks.csv"
labels = ["label"]
split = { column = "day", test_from = 8 }

[[columns]]
name = "user"

[[columns]]
name = "item"
modulo = 50

[[columns]]
name = "tags"
kind = "multi"
separator = "|"

[[columns]]
name = "price"
kind = "numeric"
"""
EDITS = {
    "column gone": ('[[columns]]\nname = "item"\nmodulo = 50\n', ""),
    "column new": ("[[columns]]\n", '[[columns]]\nname = "place"\n\n[[columns]]\n'),
    "log": ('kind = "numeric"', 'kind = "numeric"\nlog = false'),
    "separator": ('separator = "|"', 'separator = "1"'),
    "pooling": ('separator = "|"', 'separator = "|"\npooling = "mean"'),
    "modulo": ("modulo = 50", "modulo = 5"),
    "missing": ("labels =", 'missing = ["", "u3"]\nlabels ='),
    "task": ("split =", 'tasks = ["click"]\nsplit ='),
    "order": ('name = "user"\n\n[[columns]]\nname = "item"\nmodulo = 50',
              'name = "item"\nmodulo = 50\n\n[[columns]]\nname = "user"'),
    "kind": ('kind = "numeric"', 'kind = "bucket"'),
    "split": ("test_from = 8", "test_from = 5"),
}  # fmt: skip
"""What a user changes: what stood there, and what stands there then."""
NO_EDITS = {
    "comment": ("labels =", "# of the app\nlabels ="),
    "blanks": ('name = "user"', '  name   =  "user"   # who'),
    "order of keys": ('kind = "multi"\nseparator = "|"', 'separator = "|"\nkind = "multi"'),
    "order of tables": (
        'labels = ["label"]\nsplit = { column = "day", test_from = 8 }',
        'split = { test_from = 8, column = "day" }\nlabels = ["label"]',
    ),
    "defaults": ('kind = "numeric"', 'kind = "numeric"\nlog = true'),
}
"""What is no change."""


def write_clicks(folder: Path, rows: int = 800) -> Path:
    """The schema's file; ten days in order of time, the last two of which test."""
    draw = np.random.default_rng(0)
    lines = ["user,item,tags,price,place,day,label"]
    for number in range(rows):
        user, item, place, tag, more = draw.integers(0, 60, 5)
        day, label = 10 * number // rows, int(draw.random() < 0.4)
        lines.append(f"u{user},{item},{tag}|{more},{draw.random():.4f},p{place},{day},{label}")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "clicks.csv").write_text("\n".join(lines) + "\n")
    (folder / "clicks.toml").write_text(SCHEMA)
    return folder / "clicks.toml"


def edited(text: str, edit: tuple[str, str]) -> str:
    """The schema behind an edit."""
    assert edit[0] in text
    return text.replace(*edit, 1)
