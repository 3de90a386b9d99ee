"""The runs of a sweep by setting: what they are called, and of which config, over their seeds."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from experiments.points import SYNTHETIC, stream_of_seeds
from experiments.registry.runs import Run
from persia_sim.words.rules import counted

_MOST_SHOWN = 32
_DECIDES_NO_RESULT = ("seed", "data.dir", "data.keep")


@dataclass(slots=True)
class Setting:
    """Runs of one label and one config, but for their seeds."""

    label: str
    """Of the runs' folders, without the seed."""
    label_of_sync: str
    options: Mapping[str, str]
    """Every option that decides a result, and the data."""
    aucs: dict[int, float] = field(default_factory=dict)
    """By seed, of the first task; of two runs with one seed, the one that was started last."""
    folders: dict[int, Path] = field(default_factory=dict)
    """Of those runs."""
    name: str = ""
    """The label, and what tells it from others of the same label."""

    def sync_beside_it(self, settings: Sequence[Setting]) -> Setting | None:
        """The sync that this setting differs from in synchronisation alone, or, where labels are
        of one config each, the one that is labelled so."""
        called = [other for other in settings if other.label == self.label_of_sync]
        own = _but_for_sync(self.options)
        for other in called:
            if _but_for_sync(other.options) == own:
                return other
        alone = sum(other.label == self.label for other in settings) == 1
        return called[0] if alone and len(called) == 1 else None


def settings_of(runs: Iterable[Run]) -> tuple[list[Setting], list[str]]:
    """The settings of all runs that have ended, and what a reader must know of them."""
    found: dict[tuple[str, str], Setting] = {}
    twice: Counter[tuple[str, str]] = Counter()
    for run in sorted(runs, key=lambda run: run.started):
        if run.state != "done" or run.auc is None or not isinstance(run.seed, int):
            continue
        options = dict(_options(run))
        key = run.setting, json.dumps(options, sort_keys=True)
        own = found.setdefault(key, Setting(run.setting, run.setting_of_sync, options))
        twice[key] += run.seed in own.aucs
        own.aucs[run.seed], own.folders[run.seed] = run.auc, run.folder
    settings = sorted(found.values(), key=lambda setting: setting.label)
    notes = list(_tell_apart(settings))
    notes += [
        f"{found[key].name}: {counted(count, 'run')} left out, of a seed that ran again later"
        for key, count in twice.items()
        if count
    ]
    return settings, notes


def pairs(first: Sequence[Setting], second: Sequence[Setting]) -> Iterator[tuple[Setting, Setting]]:
    """Settings of two sweeps that answer to each other: the only ones of a label, or, where a label
    has several configs, those of one config."""
    for one in first:
        others = [other for other in second if other.label == one.label]
        if len(others) == 1 and sum(other.label == one.label for other in first) == 1:
            yield one, others[0]
        else:
            yield from ((one, other) for other in others if other.options == one.options)


def _tell_apart(settings: Sequence[Setting]) -> Iterator[str]:
    """Names for all; a sentence for each label that has several configs."""
    for label in dict.fromkeys(setting.label for setting in settings):
        same = [setting for setting in settings if setting.label == label]
        names = dict.fromkeys(name for setting in same for name in setting.options)
        unlike = [name for name in names if len({s.options.get(name) for s in same}) > 1]
        for setting in same:
            told = ", ".join(f"{name} {_short(setting.options.get(name, '-'))}" for name in unlike)
            setting.name = f"{label} ({told})" if told else label
        if len(same) > 1:
            yield (
                f"{counted(len(same), 'different config')} are called {label}: they differ in"
                f" {', '.join(unlike)}, and are told apart"
            )


def _short(value: str) -> str:
    """A value as a name shows it; a long one by its checksum."""
    if len(value) <= _MOST_SHOWN:
        return value
    return hashlib.sha256(value.encode()).hexdigest()[:8]


def _options(run: Run) -> Iterator[tuple[str, str]]:
    stream = stream_of_seeds(str(run.data), run.seed if isinstance(run.seed, int) else 0)
    for name, value in _flat(run.config):
        if name == "data.name":
            value = stream
        if name not in _DECIDES_NO_RESULT:
            yield name, value if isinstance(value, str) else json.dumps(value)
    data = run.summary.get("data")
    # A seed draws a synthetic stream anew, so bytes and split are those of the seed.
    told = ("schema",) if stream.startswith(SYNTHETIC) else ("sha256", "split", "schema")
    if isinstance(data, Mapping):
        yield from ((f"data's {n}", json.dumps(data.get(n))) for n in told)


def _flat(document: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in document.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _but_for_sync(options: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in options.items() if not name.startswith("sync.")}
