"""Where real data lies on this machine."""

from __future__ import annotations

import os
from pathlib import Path

from runtime.data.errors import DataError
from runtime.data.joined import is_pattern
from runtime.data.publishers import PUBLICATIONS
from runtime.data.schema import Schema

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
