"""A point of a sweep: a training config and the folder that its result will have."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runtime.config import TrainConfig
from runtime.config.options import option_values
from runtime.models.imported import files_of_model
from runtime.run.folder import plain, read_summary

_DECIDES_NO_RESULT = ("data.dir", "data.keep")
"""Where the data lie, and whether they are kept parsed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One run of a sweep."""

    label: str
    """What a person calls it: mode, bound, seed."""
    config: TrainConfig
    data_sha256: str = ""
    """Of the data, their schema and split: a point whose data changed runs anew."""
    exclusive: bool = False
    """Runs alone on the machine, because what its threads do is a result."""

    def folder(self, root: Path) -> Path:
        """Its run folder: the label, and a hash so that a changed config or model runs anew."""
        decides = {"config": _what_decides(self.config), "data": self.data_sha256}
        if source := model_sha256(self.config.model.name):
            decides["model"] = source
        content = json.dumps(decides, sort_keys=True).encode()
        return root / f"{self.label}-{hashlib.sha256(content).hexdigest()[:8]}"

    def is_done(self, root: Path) -> bool:
        """Whether its summary is there; it is written last, and whole."""
        return read_summary(self.folder(root)) is not None


def data_sha256(config: TrainConfig) -> str:
    """What stands for the data of a config: bytes, schema and split."""
    from runtime.data.open import open_source  # late: a second to import

    data = config.data
    return open_source(data.name, data_dir=data.dir, keep=data.keep).provenance().digest


def model_sha256(name: str) -> str:
    """Checksum of the files that ``package.module:Class`` is made of; "" for a built-in model.

    A class that was edited under the same name is another model, and so is one whose helpers were:
    what its file imports counts, as far as it lies in the user's own folders and is imported by a
    name that stands there (`runtime.models.imported`). Also "" where there is no such file: the run
    itself will say so.
    """
    digest = hashlib.sha256()
    files = files_of_model(name)
    for module in sorted(files):
        digest.update(f"{module} {hashlib.sha256(files[module].read_bytes()).hexdigest()}".encode())
    return digest.hexdigest() if files else ""


def _what_decides(config: TrainConfig) -> dict[str, Any]:
    """Every option that is not at its default and decides a result."""
    defaults = dict(option_values(TrainConfig()))
    return {
        name: plain(value)
        for name, value in option_values(config)
        if value != defaults[name] and name not in _DECIDES_NO_RESULT
    }
