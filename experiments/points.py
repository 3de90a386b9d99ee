"""A point of a sweep: a training config and the folder that its result will have."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from pathlib import Path

from runtime.config import TrainConfig
from runtime.runfolder import plain, read_summary


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One run of a sweep."""

    label: str
    """What a person calls it: mode, bound, seed."""
    config: TrainConfig
    exclusive: bool = False
    """Runs alone on the machine, because its speed is a result."""

    def folder(self, root: Path) -> Path:
        """Its run folder: the label, and a hash of the config so that a changed one runs anew."""
        content = json.dumps(plain(_what_decides(self.config)), sort_keys=True).encode()
        return root / f"{self.label}-{hashlib.sha256(content).hexdigest()[:8]}"

    def is_done(self, root: Path) -> bool:
        """Whether its summary is there; it is written last, and whole."""
        return read_summary(self.folder(root)) is not None


def _what_decides(config: TrainConfig) -> TrainConfig:
    """The config without what changes no result: where the data lies."""
    return replace(config, data=replace(config.data, dir=None))
