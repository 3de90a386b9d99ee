"""Ready schemas of public data sets, and where on this machine their files lie; no rows come here.

Each is a TOML file of `catalogue/`, as users write them; the facts at its head are from the
publisher's documentation. What is left out: columns known only after the event, times that the
split is made of, and survey weights.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from runtime.data.errors import DataError
from runtime.data.joined import is_pattern
from runtime.data.publishers import PUBLICATIONS
from runtime.data.schema import Schema, read_schema
from runtime.data.split import Split

DATA_DIR_VARIABLE = "PERSIA_DATA_DIR"
CACHE = "XDG_CACHE_HOME"


def downloads() -> Path:
    """Where ``data get`` puts what it fetches (the XDG rules for a user's cache)."""
    cache = os.environ.get(CACHE)
    return (Path(cache) if cache else Path.home() / ".cache") / "persia-testbed"


def find_folder(schema: Schema, data_dir: str | Path | None = None) -> Path:
    """The folder with the schema's main file; an error that names every place.

    Places, in order: ``data_dir``, else PERSIA_DATA_DIR; then the downloads. A place holds the data
    set as PLACE/NAME/FILE or as PLACE/FILE; the downloads only as the first.
    """
    subfolder = schema.folder or schema.name
    variable = os.environ.get(DATA_DIR_VARIABLE)
    named = data_dir or variable
    candidates = [Path(named) / subfolder, Path(named)] if named else []
    for folder in [*candidates, downloads() / subfolder]:
        if _has(folder, schema.file):
            return folder
    raise DataError(
        f"no data of {schema.name}: there is no {subfolder}/{schema.file}\n"
        f"  in the data directory ({data_dir or 'not given'}), which goes before\n"
        f"  {DATA_DIR_VARIABLE} ({variable or 'not set'}), nor in\n"
        f"  the downloads ({downloads()})\n"
        f"  name its folder (--data.dir, or {DATA_DIR_VARIABLE}), or {_instead(schema.name)}\n"
        "  or train on what needs no file: --data.name synthetic"
    )


def _instead(name: str) -> str:
    """The way to data that can be fetched: this, or else another set that is named instead."""
    offered = [publication.name for publication in PUBLICATIONS]
    fetched = name if name in offered else offered[0]
    get = f"fetch it: python -m runtime data get {fetched}"
    if name == fetched:
        return get
    return (
        f"(data get cannot make {name}) fetch another set and\n"
        f"  name it: python -m runtime data get {fetched}, then --data.name {fetched}"
    )


def _has(folder: Path, name: str) -> bool:
    return any(folder.glob(name)) if is_pattern(name) else (folder / name).is_file()


FOLDER = Path(__file__).parent / "catalogue"


@dataclass(frozen=True, slots=True)
class Ready:
    """A ready schema: that of a file, or a variant of it under its own name."""

    name: str
    file: str
    changes: dict[str, Any] = field(default_factory=dict)
    words: str = ""

    def __call__(self) -> Schema:
        """The schema; reads its file."""
        return replace(read_schema(self.path)[0], name=self.name, **self.changes)

    @property
    def path(self) -> Path:
        """The file."""
        return FOLDER / f"{self.file}.toml"

    @property
    def about(self) -> str:
        """One line: what it is; that at the head of the file where it has no words of its own."""
        return self.words or self.path.read_text().partition("\n")[0].removeprefix("# ")


def _ready(name: str, file: str = "", words: str = "", **changes: Any) -> Ready:
    return Ready(name, file or name, changes, words)


_READY = (
    _ready("kuairand-pure-14d"),
    _ready(
        "kuairand-pure",
        "kuairand-pure-14d",
        "The whole KuaiRand-Pure standard-policy log, 8 April to 8 May 2022; split as the 14 days.",
    ),
    _ready(
        "kuairand-1k",
        "kuairand-pure-14d",
        "KuaiRand-1K: all that 1,000 users saw, 11.7 million impressions over 4.4 million videos.",
    ),
    _ready("adult"),
    _ready("adult-uci", "adult", "Adult as fetched from its publisher."),
    _ready("census-income-kdd"),
    _ready("nycflights13"),
    _ready(
        "nycflights13-time",
        "nycflights13",
        "The same flights, the last fifth of the year as test: a study of drift.",
        folder="nycflights13",
        split=Split(test_fraction=0.2),
    ),
    _ready("tennis"),
    _ready(
        "tennis-random",
        "tennis",
        "The same matches, a random tenth as test: no drift between the parts.",
        folder="tennis",
        split=Split(test_fraction=0.1, random_seed=1),
    ),
    _ready("criteo-kaggle"),
    _ready("avazu"),
    _ready("taobao-ad"),
    _ready("criteo_x1"),
    _ready("avazu_x1"),
    _ready("criteo_x4"),
)
CATALOGUE: dict[str, Ready] = {ready.name: ready for ready in _READY}
"""Every ready schema by name."""
