"""`python -m runtime data`: list the data sets and where they lie; fetch one."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from runtime.data.catalogue import CATALOGUE
from runtime.data.download import get
from runtime.data.errors import DataError
from runtime.data.places import downloads, find_folder
from runtime.data.presets import PRESETS, recipe
from runtime.data.publishers import PUBLICATIONS, publication


def run(arguments: Sequence[str]) -> None:
    """Carry out ``list`` or ``get NAME``."""
    parser = argparse.ArgumentParser(prog="python -m runtime data")
    verbs = parser.add_subparsers(dest="verb", required=True)
    listing = verbs.add_parser("list", help="the data sets, and where each was found")
    listing.add_argument("--data-dir", type=Path, help="look here first")
    fetching = verbs.add_parser("get", help="download a data set from its publisher")
    fetching.add_argument("name", help=", ".join(p.name for p in PUBLICATIONS))
    fetching.add_argument("--to", type=Path, default=None, help=f"folder; else {downloads()}")
    options = parser.parse_args(arguments)
    if options.verb == "list":
        print(listed(options.data_dir))
    else:
        _fetch(options.name, options.to)


def listed(data_dir: Path | None) -> str:
    """One line a data set: its name, where it lies, what it is."""
    offered = {p.name for p in PUBLICATIONS}
    rows = []
    for name, ready in CATALOGUE.items():
        try:
            place = str(find_folder(ready(), data_dir))
        except DataError:
            place = "data get" if name in offered else "-"
        rows.append((name, place, ready.about))
    for name in PRESETS:
        ids = f"{recipe(name).distinct_ids:,} distinct ids"
        rows.append((f"synthetic:{name}", "made on the fly", ids))
    widths = [max(len(row[n]) for row in rows) for n in range(2)]
    lines = [f"{name:<{widths[0]}}  {place:<{widths[1]}}  {what}" for name, place, what in rows]
    lines.append("A schema file of your own (.toml) is named by its path.")
    return "\n".join(lines)


def _fetch(name: str, folder: Path | None) -> None:
    from tqdm import tqdm  # only a terminal needs it

    wanted = publication(name)
    print(f"{wanted.url}\n{wanted.terms}")
    with tqdm(unit="B", unit_scale=True, desc=name, delay=0.3) as bar:

        def report(received: int, announced: int | None) -> None:
            bar.total = announced
            bar.update(received - bar.n)

        path = get(wanted, folder, report)
    print(f"{name} lies in {path}")
