"""A point of a sweep: a training config and the folder that its result will have."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runtime.command_line import option_values
from runtime.config import TrainConfig
from runtime.models.imported import code_sha256
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
        if code := code_sha256(self.config.model.name):
            decides["model"] = code
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


def _what_decides(config: TrainConfig) -> dict[str, Any]:
    """Every option that is not at its default and decides a result."""
    defaults = dict(option_values(TrainConfig()))
    return {
        name: plain(value)
        for name, value in option_values(config)
        if value != defaults[name] and name not in _DECIDES_NO_RESULT
    }
