"""The data sets on which late rows are looked at: those of this machine, and synthetic ones."""

from __future__ import annotations

from pathlib import Path

SYNTHETIC = ("synthetic", "synthetic:taobao-ad", "synthetic:avazu-ad", "synthetic:criteo-ad")
LARGEST = "synthetic:kwai-video"


def found() -> list[str]:
    """Names of the ready data sets that are on this machine, one for each file."""
    from runtime.data.catalogue import CATALOGUE
    from runtime.data.errors import DataError
    from runtime.data.places import find_folder

    files: dict[Path, str] = {}
    for name, make in CATALOGUE.items():
        schema = make()
        try:
            files.setdefault(find_folder(schema) / schema.file, name)
        except DataError:
            continue
    return list(files.values())
