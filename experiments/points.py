"""Points of a sweep: a config and the folder of its result; paired seeds; data sets here."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from experiments.options import hold
from persia_sim.base.command_line import option_values
from persia_sim.base.files import atomic_write, toml_value
from persia_sim.base.schema import Within
from persia_sim.base.trace import Trace
from runtime.config import DataConfig, EngineConfig, EvaluationConfig, SyncConfig, TrainConfig
from runtime.data.batch import Layout
from runtime.data.source import Provenance
from runtime.files import digest_of
from runtime.models.imported import code_sha256, files_of_model
from runtime.run.folder import plain, read_summary

Setting = tuple[str, int | None]
"""Mode and bound tau."""
SYNTHETIC = "synthetic"
_FIRST_DRAW = (SYNTHETIC, "default", "1", "1")  # kind, preset, scale, draw
_ROWS_OF_AN_ORDINARY_SET = 165_000  # KuaiRand's training part; only the progress bar asks
MOST_POINTS = 100_000
_DECIDES_NO_RESULT = ("data.dir",)
"""Where the data lie."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One run of a sweep."""

    label: str
    """What a person calls it: mode, bound, seed."""
    config: TrainConfig
    data_sha256: str = ""
    """Checksum of the data, their schema and split: a point whose data changed runs anew."""

    def folder(self, root: Path) -> Path:
        """The run folder: the label, and a hash so that a changed config or model runs anew."""
        # Only options that differ from their defaults count, so that a new option with a default
        # leaves the folders of old points as they are.
        defaults = dict(option_values(TrainConfig()))
        config = {
            name: plain(value)
            for name, value in option_values(self.config)
            if value != defaults[name] and name not in _DECIDES_NO_RESULT
        }
        decides: dict[str, Any] = {"config": config, "data": self.data_sha256}

        # The code of a user's own model and the states that a run starts from decide, too.
        if code := code_sha256(self.config.model.name):
            decides["model"] = code
        if start := self.config.warm_start:  # one of its checkpoints, or itself one
            states = [*start.glob("state.json"), *start.glob("checkpoints/*/state.json")]
            decides["warm_start"] = [digest_of(state) for state in sorted(states)]

        # Eight digits of the hash suffice to tell the points of one study apart.
        content = json.dumps(decides, sort_keys=True).encode()
        return root / f"{self.label}-{hashlib.sha256(content).hexdigest()[:8]}"

    def is_done(self, root: Path) -> bool:
        """Whether its summary is there; it is written last, and whole."""
        return read_summary(self.folder(root)) is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One line of a study: a run over seeds, and what it is held against."""

    name: str
    """What its table calls it; one of its kind within its group."""
    config: TrainConfig
    group: tuple[tuple[str, Any], ...] = ()
    """Options that all lines of the study vary in, and their values here."""
    versus: tuple[str, ...] = ()
    """The names of the lines of its group that it is held against."""
    keeps_rates: bool = False
    """Whether its learning rates are its own, which no search changes."""

    @property
    def group_name(self) -> str:
        """The values of its group in words: ``model.name=dcn``; empty where nothing varies."""
        return " ".join(f"{path}={words_of(value)}" for path, value in self.group)

    @property
    def slug(self) -> str:
        """The start of its points' folders."""
        values = (words_of(value) for _, value in self.group)
        return re.sub(r"[^A-Za-z0-9.=+-]+", "-", "-".join([*values, self.name])).strip("-.")


def words_of(value: Any) -> str:
    """A value of an option as names of lines have it.

    >>> words_of((256, 128)), words_of(2.5e-4), words_of(True)
    ('256 128', '0.00025', 'true')
    """
    if isinstance(value, list | tuple):
        return " ".join(map(words_of, value))
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)


def data_sha256(config: TrainConfig) -> str:
    """Checksum of bytes, schema and split of a config's data. ValueError where they have no AUC."""
    from runtime.data.open import open_source  # late: a second to import

    data = config.data
    source = open_source(data.name, data_dir=data.dir, skip_bad_rows=data.skip_bad_rows, keep=True)
    require_auc(source.layout, data.name)
    return source.provenance().digest


def require_auc(layout: Layout, name: str) -> None:
    """Raise ValueError where the first task of a data set, whose AUC studies compare, has none."""
    first = layout.tasks[0]
    if first in layout.regression:
        raise ValueError(
            f"studies compare AUC, and {first}, the first task of {name}, is a regression without"
            " one; put a label of 0 and 1 before it in the schema's labels, such as pandas makes by"
            f" log['liked'] = 1 * (log[{first!r}] >= 4)"
        )


def keys_apart(data: DataConfig) -> tuple[dict[str, Any], Path]:
    """The keys of a data set's schema, but for its name and file, in which every field has a table
    of its own, as it must have to be fresh alone; and the path of its file."""
    from runtime.data.catalogue import CATALOGUE, find_folder
    from runtime.data.open import open_source  # late: a second to import
    from runtime.data.schema import schema_keys

    # The schema's keys, and where its file lies.
    schema = CATALOGUE[data.name]() if data.name in CATALOGUE else None
    path = Path(data.name) if schema is None else CATALOGUE[data.name].path
    keys = {k: v for k, v in schema_keys(path).items() if k not in ("download", "name")}
    folder = path.parent if schema is None else find_folder(schema, data.dir)
    file = folder / keys.pop("file", "data.parquet")

    # Columns that are fields get a table of their name.
    fields = {f.name for f in open_source(data.name, data.dir).layout.fields}
    keys["columns"] = [
        column | ({"table": column["name"]} if column["name"] in fields else {})
        for column in keys["columns"]
    ]
    return keys, file.absolute()


def write_schema(path: Path, keys: Mapping[str, Any]) -> None:
    """Write a schema of these keys; files that it names beside ``file`` lie where that does."""
    beside = Path(keys["file"]).parent
    split = dict(keys.get("split", {}))
    split |= {k: str(beside / split[k]) for k in ("test_file", "validation_file") if k in split}
    joins = [each | {"file": str(beside / each["file"])} for each in keys.get("joins", ())]
    keys = dict(keys) | ({"split": split} if split else {}) | ({"joins": joins} if joins else {})
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as out:
        out.write("".join(f"{k} = {toml_value(v)}\n" for k, v in keys.items()).encode())


def files_digest(files: Sequence[Path]) -> str:
    """Checksum of files' names and bytes, in whatever order they are given; "" of none.

    Raises `BrokenFileError` for what is no file that can be read.
    """
    digests = sorted((str(file), digest_of(file)) for file in files)
    return hashlib.sha256(json.dumps(digests).encode()).hexdigest() if digests else ""


def what_decides(models: Iterable[str], also: Sequence[Path]) -> str:
    """What a change of makes a point another one, in words, where models of the user's read what
    nobody here knows of; "" where all are built in. ``also``: the files that are named beside."""
    imported = [name for name in models if files_of_model(name)]
    if not imported:
        return ""
    code = sorted({str(file) for name in imported for file in files_of_model(name).values()})
    beside = ", ".join(map(str, also)) or "none (--also-hash FILE ...)"
    return (
        "a point runs anew where its options change, the files, schema or split of its data, or the"
        f" code in {', '.join(code)}; of the files that this code reads: {beside}"
    )


def over_seeds(label: str, config: TrainConfig, seeds: int, decides: str) -> list[Point]:
    """The config with seeds 0, 1, ...; ``decides``: the checksum of its data, and of what else it
    reads."""
    return [
        Point(label=f"{label}-seed{seed}", config=with_seed(config, seed), data_sha256=decides)
        for seed in range(seeds)
    ]


def points_of(lines: Sequence[Line], seeds: int, also: str = "") -> list[list[Point]]:
    """The points of each line, a seed each; lines that are the same run share theirs."""
    hold("the number of points", len(lines) * seeds, Within(1, MOST_POINTS))
    checksums: dict[str, str] = {}
    labels: dict[str, str] = {}
    points = []
    for line in lines:
        data = line.config.data
        if repr(data) not in checksums:
            checksums[repr(data)] = data_sha256(line.config)
        decides = " ".join(filter(None, [checksums[repr(data)], also]))
        label = labels.setdefault(repr(line.config), line.slug)
        points.append(over_seeds(label, line.config, seeds, decides))
    return points


def with_seed(config: TrainConfig, seed: int) -> TrainConfig:
    """The config's run of a seed, which draws a synthetic stream's truth and all its rows anew.

    Seed 0 has the first draw, which the name has anyway; a name that says its draw keeps it.

    >>> from runtime.config import DataConfig
    >>> with_seed(TrainConfig(data=DataConfig(name="synthetic:criteo-ad")), 2).data.name
    'synthetic:criteo-ad:1:3'
    """
    config = replace(config, seed=seed)
    if seed == 0 or one_draw(config.data.name) == config.data.name:
        return config
    name, _, _ = one_draw(config.data.name).rpartition(":")
    return replace(config, data=replace(config.data, name=f"{name}:{1 + seed}"))


def one_draw(name: str) -> str:
    """The name of a synthetic stream with the draw that it has, which no seed changes then; any
    other name as it is.

    >>> one_draw("synthetic"), one_draw("adult")
    ('synthetic:default:1:1', 'adult')
    """
    parts = name.split(":")
    is_drawn = parts[0] == SYNTHETIC and len(parts) < len(_FIRST_DRAW)
    return ":".join([*parts, *_FIRST_DRAW[len(parts) :]]) if is_drawn else name


def stream_of_seeds(name: str, seed: int) -> str:
    """What seeds have in common in the name of their data: all but the draw that `with_seed` made.

    >>> stream_of_seeds("synthetic", 0), stream_of_seeds("synthetic:default:1:2", 1)
    ('synthetic', 'synthetic')
    >>> stream_of_seeds("synthetic:avazu-ad:0.01:3", 2), stream_of_seeds("adult", 3)
    ('synthetic:avazu-ad:0.01', 'adult')
    """
    parts = name.split(":")
    if parts[0] != SYNTHETIC:
        return name
    if len(parts) == len(_FIRST_DRAW) and parts[-1] == str(1 + seed):
        parts.pop()
    while len(parts) > 1 and parts[-1] == _FIRST_DRAW[len(parts) - 1]:
        parts.pop()
    return ":".join(parts)


def replayed(
    label: str, sync: SyncConfig, batch: int, data: DataConfig, order: Path | None, options: Any
) -> list[Point]:
    """Paired runs in the order of a trace (None: in the constant one), evaluated on the way.

    ``options``: a study's, with its steps, snapshots, seeds and test_rows.
    """
    # Snapshots at equal distances along the run.
    every = max(1, options.steps // options.snapshots)
    engine = EngineConfig()
    if order is not None:
        engine = EngineConfig(executor="replay", trace=order)
    base = TrainConfig(
        sync=sync,
        batch=batch,
        steps=options.steps,
        engine=engine,
        data=data,
        evaluation=EvaluationConfig(evaluate_every_steps=every, test_rows=options.test_rows),
    )

    # Results depend on the order of the trace, so its checksum joins that of the data.
    checksum = data_sha256(base)
    if order is not None:
        checksum += f" {Trace.load(order).sha256()}"
    return over_seeds(label, base, options.seeds, checksum)


def expected_samples(config: TrainConfig) -> int:
    """Samples of one run, for the progress bar; an estimate when only a pass would tell."""
    if config.steps is not None:
        return config.steps * config.batch
    return (config.data.rows or _ROWS_OF_AN_ORDINARY_SET) * config.data.epochs


def readable(wanted: Iterable[DataConfig]) -> tuple[dict[str, Provenance], list[str]]:
    """Facts, by name, of the data sets that can be read, and a line for each that cannot.

    Each is counted on the way, and what is parsed for it is kept for the runs.
    """
    from runtime.data.errors import DataError
    from runtime.data.open import open_source  # late: a second to import

    facts = {}
    missing = []
    for data in wanted:
        try:
            facts[data.name] = open_source(data.name, data.dir, data.rows, keep=True).provenance()
        except DataError as error:
            missing.append(f"{data.name} is left out: {str(error).splitlines()[0]}")
    return facts, missing


REAL_DATA = "kuairand-pure-14d"


def find_data(data_dir: Path | None, name: str = REAL_DATA) -> DataConfig:
    """The real clicks where they are found, else the synthetic stream, with a line that says so.

    Raises ValueError where they do not lie in a folder that the user has named.
    """
    from runtime.data.catalogue import DATA_DIR_VARIABLE
    from runtime.data.errors import DataError
    from runtime.data.open import open_source

    # A folder that the user named must hold them.
    try:
        open_source(name, data_dir=data_dir)
        return DataConfig(name=name, dir=data_dir)
    except DataError as error:
        if data_dir is not None or DATA_DIR_VARIABLE in os.environ:
            raise ValueError(str(error)) from None

    # Without one a study runs all the same.
    print(
        "no real data found: using the synthetic stream; for real clicks run"
        f" `persia-runtime data get {name}` or set PERSIA_DATA_DIR"
    )
    return DataConfig(name=SYNTHETIC)
