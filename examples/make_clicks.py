"""Writes clicks.csv: 20,000 made-up clicks of a shop, in time order (CC0: free for any use).

A click is likelier on items that all like, from users who click much, where the hidden tastes of
both agree, where the item is cheap and where it resembles what the user bought before.
`python examples/make_clicks.py` writes the same bytes every time; `... make_clicks.py 100000 DIR`
draws as many clicks into another folder, with a copy of the schema.
"""

from __future__ import annotations

import sys
from pathlib import Path
from shutil import copyfile

import numpy as np

ROWS, USERS, ITEMS, DAYS = 20_000, 2_000, 500, 10
TAGS = ("books", "cheap", "garden", "küche", "new", "toys")
FILE = Path(__file__).with_name("clicks.csv")


def lines(seed: int = 0, rows: int = ROWS) -> list[str]:
    """The header and a line a click."""
    draw = np.random.default_rng(seed)
    taste, trait = draw.normal(size=(USERS, 2)), draw.normal(size=(ITEMS, 2))
    clicks_much, liked = draw.normal(size=USERS), draw.normal(size=ITEMS)
    tags = [draw.choice(len(TAGS), draw.integers(0, 3), replace=False) for _ in range(ITEMS)]
    price = np.exp(draw.normal(2.0, 0.7, ITEMS))
    bought: list[list[int]] = [[] for _ in range(USERS)]
    users = (USERS * draw.random(rows) ** 2).astype(int)  # few users and items make most rows
    items = (ITEMS * draw.random(rows) ** 2).astype(int)
    chance = draw.random(rows)
    written = ["day,user,item,tags,history,price,clicked"]
    for row, (user, item) in enumerate(zip(users, items, strict=True)):
        alike = np.mean([trait[item] @ trait[old] for old in bought[user][-5:]] or [0.0])
        logit = 0.7 * taste[user] @ trait[item] + 0.5 * alike - 0.4 * np.log(price[item])
        logit += clicks_much[user] + 1.2 * liked[item] - 0.4
        clicked = chance[row] < 1 / (1 + np.exp(-logit))
        day = f"2026-03-{1 + row * DAYS // rows:02d}"
        history = " ".join(f"i{old}" for old in bought[user][-5:])
        words = "|".join(TAGS[tag] for tag in tags[item])
        cost = "" if row % 97 == 0 else f"{price[item]:.2f}"
        written.append(f"{day},u{user},i{item},{words},{history},{cost},{int(clicked)}")
        if clicked:
            bought[user].append(int(item))
    return written


if __name__ == "__main__":
    if len(sys.argv) == 3:
        rows, folder = int(sys.argv[1]), Path(sys.argv[2])
        folder.mkdir(parents=True, exist_ok=True)
        copyfile(FILE.with_suffix(".toml"), folder / "clicks.toml")
        text = "\n".join(lines(rows=rows)) + "\n"
        (folder / "clicks.csv").write_text(text, encoding="utf-8")
    else:
        FILE.write_text("\n".join(lines()) + "\n", encoding="utf-8")
