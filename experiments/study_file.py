"""A study as a file: what all runs have, lines of training's own options, and who is held against
whom.

    versus = "sync"                  # every line is held against the line of this name

    [base]                           # what every line has, where its mode reads it
    data.name = "clicks.toml"
    sync.tau = [4, 16]               # a list is crossed

    [[line]]
    name = "sync"

    [[line]]
    name = "hybrid tau {sync.tau}"   # the value that the line has
    sync.mode = "hybrid"

Of the base's group `sync` a line in mode sync takes the ranks alone: it stays the reference.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal

from experiments.option_values import flat, of, options_in, training_options, values_of
from experiments.options import REFERENCE, PairedSeeds, Seeds, hold
from experiments.points import SYNTHETIC, Line, find_data, readable, words_of
from persia_sim.base.command_line import with_changes
from persia_sim.base.files import read_document
from persia_sim.base.rules import Refused
from persia_sim.base.schema import Checked, Unread, Within, fit, nearest, parse, shown
from runtime.config import DataConfig, TrainConfig
from runtime.config.presets import PresetName, with_preset
from runtime.models.imported import refuse_code_named_in

SWEEPS = Path(__file__).with_name("sweeps")
"""The studies that come with the package."""
OF_A_LINE = ("name", "versus", "preset")
MOST_LINES = 1_000
RATES = ("rows.optimizer.lr", "model.lr")


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchTable(Checked):
    """``[search]``: rates of its own for each line, by the rule of `experiments.search`."""

    wanted: bool = True
    """Whether they are searched without ``--search``, too."""
    trials: Annotated[int, Within(5, 1_000)] = 20
    """Pairs of rates that a line may try; the grid of a reference alone has 12."""
    seeds: PairedSeeds = 3
    """Paired seeds of each pair: a gain is believed beyond two standard errors."""
    reference: Literal["searched", "given"] = "searched"
    """Whether lines that are held against none have a grid of their own, or the rates given."""
    only: bool = False
    """Whether the rates are all that is wanted: the lines are not trained at them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyFile(Checked):
    """What a study's file says."""

    line: list[dict[str, Any]]
    base: dict[str, Any] = field(default_factory=dict)
    """What every line has, where its mode reads it."""
    without_data: dict[str, Any] = field(default_factory=dict)
    """What takes the place of the base's where its data set is not on this machine."""
    versus: str | list[str] = ""
    """The line, or lines, that each line is held against, unless it says another."""
    beside: str = ""
    """An option that the base crosses: each gap is also held against that at its first value."""
    seeds: Seeds = 5
    """Paired seeds 0, 1, ...; an interval needs two."""
    search: SearchTable = field(default_factory=lambda: SearchTable(wanted=False))


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """A study with all its lines, in the order of its table."""

    name: str
    file: StudyFile
    lines: tuple[Line, ...]
    notes: tuple[str, ...]
    """What was left out, in words."""


def read_study(
    study: Path | str | Mapping[str, Any],
    config: Path | None = None,
    typed: Mapping[str, list[Any]] | None = None,
) -> Study:
    """The study of a file, of one that comes with the package, or of a mapping as a file has it.

    ``config``: options of training from a file, over those of the base; ``typed``: values by
    option, over both. Raises ValueError naming the key, the line, the value and the remedy.
    """
    typed = typed or {}
    if isinstance(study, Mapping):
        name, document = "study", study
    else:
        path = _path_of(Path(study))
        name, document = path.stem, read_document(path)
        if path.parent != SWEEPS:
            _refuse_code(path, document, typed)
    try:
        file = parse(StudyFile, document, "the study")
        lines, notes = _lines(file, config, typed)
    except Refused as error:
        raise ValueError(f"{name}: {error}") from None
    return Study(name=name, file=file, lines=tuple(lines), notes=tuple(notes))


def _path_of(path: Path) -> Path:
    packaged = SWEEPS / path.name
    if path.is_file() or not packaged.is_file():
        known = [file.name for file in sorted(SWEEPS.glob("*.toml"))]
        if not path.is_file():
            raise ValueError(f"no study {str(path)!r}; name a file, or {nearest(path.name, known)}")
        return path
    return packaged


def _refuse_code(path: Path, document: Any, typed: Mapping[str, Any]) -> None:
    """Refuse a model's code that a file names and nobody has typed."""
    tables = [document.get("base"), *_items(document.get("line"))] if document else []
    for table in filter(lambda table: isinstance(table, dict), tables):
        for name in _items(flat(table, "base", OF_A_LINE).get("model.name")):
            if isinstance(name, str) and name not in typed.get("model.name", ()):
                remedy = f"type --set model.name={name}"
                refuse_code_named_in(path, name, trust=False, remedy=remedy)


def _items(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


@dataclass(slots=True)
class _Made:
    """A line on its way."""

    number: int
    """Place of its table in the file."""
    stem: str
    """Its name as the file has it, filled in."""
    config: TrainConfig
    own: Mapping[str, Any]
    crossed: dict[str, Any]
    """What it reads of options that are crossed, by the base or itself."""
    read: set[str]
    versus: list[str]
    is_preset: bool
    name: str = ""
    group: tuple[tuple[str, Any], ...] = ()


def _lines(
    file: StudyFile, config: Path | None, typed: Mapping[str, list[Any]]
) -> tuple[list[Line], list[str]]:
    base, notes = _base(file, config, typed)
    crossed = {path for path, values in base.items() if len(values) > 1}
    if file.beside and file.beside not in crossed:
        rule = f"is {file.beside!r}, which no list of base crosses; give it a list, or remove it"
        raise Refused("beside", rule)
    hold("the number of combinations of base", math.prod(map(len, base.values())), _CROSSED)

    # Every line, with each of its values, in each combination of the base's.
    made: list[_Made] = []
    unread: dict[str, Refused] = {}
    for number, table in enumerate(file.line):
        where = f"line {table.get('name', number + 1)!r}"
        own = {p: values_of(p, v, where) for p, v in flat(table, where, OF_A_LINE).items()}
        hold(f"{where}: its combinations", math.prod(map(len, own.values())), _CROSSED)
        for of_base, of_line in product(_combinations(base), _combinations(own)):
            one = _line_at(file, number, table, of_base, of_line, unread)
            varied = crossed | {path for path, values in own.items() if len(values) > 1}
            one.crossed = {p: of(one.config, p) for p in base | own if p in varied & one.read}
            made.append(one)
    _require_read(base, made, unread)
    return _named(file, _distinct(made), crossed), notes


_CROSSED = Within(1, MOST_LINES)


def _base(
    file: StudyFile, config: Path | None, typed: Mapping[str, list[Any]]
) -> tuple[dict[str, list[Any]], list[str]]:
    """The values of every option that the base has, and what was left out of them."""
    base = {p: values_of(p, v, "base") for p, v in flat(file.base, "base").items()}
    of_config, left = options_in(config, typed)
    notes = [f"{config}: {', '.join(left)} not read; the study has its own"] if left else []

    # What stands for a data set that is not on this machine, where nobody named another.
    given = {path: [value] for path, value in of_config.items()} | dict(typed)
    if file.without_data and "data.name" not in given:
        (name, *_), (folder, *_) = base["data.name"], (base | given).get("data.dir", [None])
        if find_data(folder, name).name == SYNTHETIC:
            instead = flat(file.without_data, "without_data").items()
            base |= {path: values_of(path, value, "without_data") for path, value in instead}
    base |= given

    # Of several data sets, those that are here.
    if len(names := base.get("data.name", ())) > 1:
        (folder, *_), (rows, *_) = base.get("data.dir", [None]), base.get("data.rows", [None])
        found, missing = readable(DataConfig(name=name, dir=folder, rows=rows) for name in names)
        if not found:
            raise Refused("base", f"has data.name = {shown(names)}, and none of them is here")
        base["data.name"] = list(found)
        notes += missing
    return base, notes


def _combinations(choices: Mapping[str, Sequence[Any]]) -> Iterator[dict[str, Any]]:
    for values in product(*choices.values()):
        yield dict(zip(choices, values, strict=True))


def _line_at(
    file: StudyFile,
    number: int,
    table: Mapping[str, Any],
    of_base: Mapping[str, Any],
    own: Mapping[str, Any],
    unread: dict[str, Refused],
) -> _Made:
    """A line at one value of each option, without those of the base that its mode does not read."""
    where = f"line {table.get('name', number + 1)!r}"
    left = {path: value for path, value in of_base.items() if path not in own}
    preset = table.get("preset")
    if preset is not None:
        preset = fit(preset, PresetName, f"{where}: preset")

    # Sync is what others are held against: it stays as it is, and a preset says all of `sync`.
    mode = own.get("sync.mode", of_base.get("sync.mode", REFERENCE))
    for path in [path for path in left if path.startswith("sync.") and path not in _OF_SYNC]:
        if preset is not None or mode is REFERENCE:
            del left[path]
            rule = "does not vary in sync, the reference, nor in a preset; say it in a line"
            unread.setdefault(path, Refused(path, rule))

    # The config names one value at a time that it does not read: leave that out and try again.
    while True:
        try:
            config = with_changes(TrainConfig(), left if preset else left | dict(own))
            if preset is not None:
                config = with_changes(with_preset(config, preset, "constant_lag"), own)
            break
        except Refused as error:
            if not isinstance(error, Unread) or error.field not in left:
                raise Refused(where, f"cannot be: {error}") from None
            unread[error.field] = error
            del left[error.field]
    versus = fit(table.get("versus", file.versus), str | list[str], f"{where}: versus")
    held = [versus] if isinstance(versus, str) else versus
    name = table.get("name", preset or " ".join(f"{p}={words_of(v)}" for p, v in own.items()))
    return _Made(
        number=number,
        stem=_filled(fit(name, str, f"{where}: name"), config, where),
        config=config,
        own=own,
        crossed={},
        read={*left, *own} - config.unread().keys(),
        versus=[_filled(name, config, where) for name in held],
        is_preset=preset is not None,
    )


_OF_SYNC = ("sync.mode", "sync.ranks")
"""What a line in mode sync takes of a base's group `sync`."""
_PLACE = re.compile(r"\{([^{}]*)\}")


def _filled(text: str, config: TrainConfig, where: str) -> str:
    """The text with the line's values in place of the options in braces."""

    def value(place: re.Match[str]) -> str:
        if place[1] not in training_options():
            hint = nearest(place[1], training_options())
            raise Refused(where, f"has {place[0]} in {text!r}, no option of train; {hint}")
        return words_of(of(config, place[1]))

    return _PLACE.sub(value, text)


def _require_read(
    base: Mapping[str, Any], made: Sequence[_Made], unread: Mapping[str, Refused]
) -> None:
    """Refuse an option of the base that no line has: it would change nothing."""
    for path in base.keys() - {path for one in made for path in one.read - one.own.keys()}:
        why = unread.get(path) or f"{path} is said by every line itself; change it there"
        raise Refused("base", f"has {path} = {shown(base[path])}, and no line takes it: {why}")


def _distinct(made: Sequence[_Made]) -> list[_Made]:
    """Without the repetitions of a line in combinations that differ in what it does not read."""
    seen = {(one.number, repr(one.config), one.stem): one for one in reversed(made)}
    return [one for one in made if seen[one.number, repr(one.config), one.stem] is one]


def _named(file: StudyFile, made: list[_Made], crossed_by_base: set[str]) -> list[Line]:
    """The lines with their names, their groups, and whom they are held against."""
    # What every line varies in makes groups; what else is crossed stands in the name.
    shared = [p for p in made[0].crossed if all(p in m.crossed for m in made)] if made else []
    shared = [path for path in shared if path in crossed_by_base]
    for one in made:
        one.group = tuple((path, one.crossed[path]) for path in shared)
        template = file.line[one.number].get("name", "")
        more = [p for p in one.crossed if p not in shared and f"{{{p}}}" not in template]
        one.name = ", ".join([one.stem, *(f"{p} {words_of(one.crossed[p])}" for p in more)])
    groups = list(dict.fromkeys(one.group for one in made))
    made = sorted(made, key=lambda one: (groups.index(one.group), one.number))

    # Each is one of its name, and no two are the same run.
    names: dict[tuple[Any, ...], _Made] = {}
    configs: dict[tuple[Any, ...], _Made] = {}
    for one in made:
        if (one.group, one.name) in names:
            rule = "is the name of two lines; give each its own, or put what differs in {braces}"
            raise Refused(f"line {one.name!r}", rule)
        twin = configs.setdefault((one.group, repr(one.config)), one)
        if twin is not one and not (one.is_preset or twin.is_preset):
            rule = f"is the same point as line {twin.name!r}; remove one, or change an option"
            raise Refused(f"line {one.name!r}", rule)
        names[one.group, one.name] = one
    return [
        Line(
            name=one.name,
            config=one.config,
            group=one.group,
            versus=tuple(
                _reference(one, name, made) for name in one.versus if name not in ("", one.stem)
            ),
            keeps_rates=any(path in one.own for path in RATES),
        )
        for one in made
    ]


def _reference(line: _Made, versus: str, made: Sequence[_Made]) -> str:
    """The name of the line that this one is held against: of its group, and where several have the
    name, the one that has the same of what is crossed."""
    of_group = [one for one in made if one.group == line.group]
    alike = [
        one
        for one in of_group
        if one.stem == versus
        and all(line.crossed.get(path, value) == value for path, value in one.crossed.items())
    ]
    where = f"line {line.name!r}"
    if not alike:
        hint = nearest(versus, [one.stem for one in of_group])
        raise Refused(where, f"has versus = {versus!r}, the name of no line; {hint}")
    if len(alike) > 1:
        every = ", ".join(repr(one.name) for one in alike)
        rule = f"has versus = {versus!r}, which {every} have; put what differs in {{braces}}"
        raise Refused(where, rule)
    if line.stem in alike[0].versus:
        raise Refused(where, f"and {alike[0].name!r} are held against each other; remove a versus")
    return alike[0].name
