"""A point of a sweep: a training config and the folder that its result will have."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from pathlib import Path

from runtime.config import TrainConfig
from runtime.run.folder import plain, read_summary


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One run of a sweep."""

    label: str
    """What a person calls it: mode, bound, seed."""
    config: TrainConfig
    data_sha256: str = ""
    """Of the data and its split: a point whose data changed runs anew."""
    exclusive: bool = False
    """Runs alone on the machine, because its speed is a result."""

    def folder(self, root: Path) -> Path:
        """Its run folder: the label, and a hash of the config so that a changed one runs anew."""
        decides = {"config": plain(_what_decides(self.config)), "data": self.data_sha256}
        content = json.dumps(decides, sort_keys=True).encode()
        return root / f"{self.label}-{hashlib.sha256(content).hexdigest()[:8]}"

    def is_done(self, root: Path) -> bool:
        """Whether its summary is there; it is written last, and whole."""
        return read_summary(self.folder(root)) is not None


def data_sha256(config: TrainConfig) -> str:
    """What stands for the data of a config: its checksum and its split in words."""
    from runtime.data.open import open_source  # late: a second to import

    data = config.data
    found = open_source(data.name, data_dir=data.dir).provenance()
    return f"{found.sha256} {found.split}"


def _what_decides(config: TrainConfig) -> TrainConfig:
    """The config without what changes no result: where the data lies."""
    return replace(config, data=replace(config.data, dir=None))
