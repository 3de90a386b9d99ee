"""Which data sets are on this machine: by a look at their files, or by reading them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from runtime.config import DataConfig
from runtime.data.source import Provenance

SYNTHETIC = ("synthetic", "synthetic:taobao-ad", "synthetic:avazu-ad", "synthetic:criteo-ad")
"""On every machine; the shapes are those of public logs."""
LARGEST = "synthetic:kwai-video"


def present() -> list[str]:
    """Names of the ready data sets whose file is there, one for each file; nothing is read."""
    from runtime.data.catalogue import CATALOGUE, find_folder
    from runtime.data.errors import DataError

    files: dict[Path, str] = {}
    for name, make in CATALOGUE.items():
        schema = make()
        try:
            files.setdefault(find_folder(schema) / schema.file, name)
        except DataError:
            continue
    return list(files.values())


def readable(wanted: Iterable[DataConfig]) -> tuple[dict[str, Provenance], list[str]]:
    """Facts, by name, of the data sets that can be read, and a line for each that cannot.

    Each is counted on the way, and what is parsed for it is kept for the runs.
    """
    from runtime.data.errors import DataError
    from runtime.data.open import open_source  # late: a second to import

    found, missing = {}, []
    for data in wanted:
        try:
            found[data.name] = open_source(data.name, data.dir, data.rows, keep=True).provenance()
        except DataError as error:
            missing.append(f"{data.name} is left out: {str(error).splitlines()[0]}")
    return found, missing
