"""A point of a sweep: a training config and the folder that its result will have."""

from __future__ import annotations

import hashlib
import importlib.util
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from runtime.config import TrainConfig
from runtime.run.folder import plain, read_summary

LATER_OPTIONS: tuple[tuple[str, str, Any], ...] = (
    ("data", "validation_fraction", None),
    ("engine", "tensorboard", False),
    ("evaluation", "part", "test"),
    ("sync", "sync_steps", 0),
    ("sync", "dense_lag", 0),
    ("sync", "delay_compensation", 0.0),
    ("sync", "lr_by_staleness", False),
)
"""Options that came after the first results (group, name, default): left at its default, none of
them makes another point of one that was there before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One run of a sweep."""

    label: str
    """What a person calls it: mode, bound, seed."""
    config: TrainConfig
    data_sha256: str = ""
    """Of the data and its split: a point whose data changed runs anew."""
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
    """What stands for the data of a config: its checksum and its split in words."""
    from runtime.data.open import open_source  # late: a second to import

    data = config.data
    found = open_source(data.name, data_dir=data.dir, keep=data.keep).provenance()
    return f"{found.sha256} {found.split}"


def model_sha256(name: str) -> str:
    """Checksum of the file that ``package.module:Class`` lies in; "" for a built-in model.

    A class that was edited under the same name is another model. What its file imports is not
    looked at. Also "" where there is no such file: the run itself will say so.
    """
    module, _, attribute = name.partition(":")
    if not attribute:
        return ""
    try:
        found = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        return ""
    if found is None or found.origin is None or not Path(found.origin).is_file():
        return ""
    return hashlib.sha256(Path(found.origin).read_bytes()).hexdigest()


def _what_decides(config: TrainConfig) -> dict[str, Any]:
    """The config without what changes no result: where the data lies, and whether it is kept."""
    found = plain(replace(config, data=replace(config.data, dir=None, keep=True)))
    for group, name, default in LATER_OPTIONS:
        if found[group][name] == default:
            del found[group][name]
    return dict(found)
