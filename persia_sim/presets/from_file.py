"""Clusters, workloads and models from TOML files: every field of the dataclasses, by name.

A file may start from a preset (`base = "gcp-100t"`) and give only what differs; a part that has
presets of its own (`gpu = "h100"`) may be their name. Unknown keys are errors.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from math import inf, isnan
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin

from persia_sim.base.files import read_document, toml_document
from persia_sim.base.rules import Quantity
from persia_sim.base.schema import field_types, fit, nearest, notes_of, shown
from persia_sim.cluster.cluster import Cluster
from persia_sim.cluster.costs import Costs
from persia_sim.cluster.machine import Gpu, Host
from persia_sim.cluster.memory import FORMATS, RowFormat
from persia_sim.cluster.workload import BY_TABLES, Workload
from persia_sim.presets.catalogue import CLUSTERS, GPUS, MACHINES, costs_of, workloads
from persia_sim.presets.costs import CATALOGUE

Record = TypeVar("Record")
Preset = TypeVar("Preset")


_INIT = "write an example with `persia-sim init`"
_NAMED: dict[type, Mapping[str, Any]] = {Gpu: GPUS, Host: MACHINES}
"""Presets of a part."""


def record_of(kind: type[Record], given: Any, where: str, base: Record | None = None) -> Record:
    """A dataclass from a table of a file; what is not given comes from ``base`` or the defaults.

    A dataclass with a class method ``completed`` has it say what follows from the values that are
    given without a base. Raises ValueError naming the place, the value and what it may be.
    """
    # A name stands for a preset.
    if isinstance(given, str) and kind in _NAMED:
        presets = _NAMED[kind]
        if given not in presets and kind is Host:
            # A role without GPUs is told of machines without them.
            has_gpus = where.startswith(("nn", "gpu"))
            alike = [name for name, one in MACHINES.items() if has_gpus or one.gpu is None]
            raise ValueError(
                f"{where} is {given!r}, a machine that is not in the catalogue:"
                f" {nearest(given, alike)} (`persia-sim machines list` shows all; or describe it as"
                " a table)"
            )
        if given not in presets:
            raise ValueError(f"{where} is {given!r}: {nearest(given, presets)}")
        preset: Record = presets[given]
        return preset
    if not isinstance(given, dict):
        raise ValueError(f"{where} must be a table, got {shown(given)}")
    whole: Any = kind

    # A machine may be one of the catalogue with other figures.
    owner = f"{where}." if where else ""
    if kind in _NAMED and "base" in given:
        given = dict(given)
        name = given.pop("base")
        if not isinstance(name, str):
            raise ValueError(f"{owner}base must be a name, got {shown(name)}")
        base = record_of(kind, name, f"{owner}base")

    # A table: no key that the dataclass does not have.
    types = field_types(whole)
    unknown = sorted(set(given) - set(types))
    if unknown:
        raise ValueError(f"{owner}{unknown[0]} is unknown: {nearest(unknown[0], types)}")

    # Each field: as given, as in the base, as follows from those given, or its default.
    values: dict[str, Any] = {}
    for field in dataclasses.fields(whole):
        name = field.name
        start = field.default if base is None else getattr(base, name)
        start = start if base is not None or dataclasses.is_dataclass(start) else None
        if name in given:
            values[name] = _value(types[name], given[name], owner + name, start)
        elif base is not None:
            values[name] = start
    values = getattr(kind, "completed", dict)(values)
    for field in dataclasses.fields(whole):
        has_default = not (field.default is field.default_factory is dataclasses.MISSING)
        if field.name in values or has_default:
            continue
        if field.name != "source":
            raise ValueError(f"{owner}{field.name} is missing: give it, or a base to start from")
        values["source"] = "a file"

    # Figures of machines are without limit only where a default is; the dataclass holds its rules.
    quantities = [(name, q) for name, q in notes_of(whole, Quantity).items() if name in given]
    for name, quantity in quantities:
        if given[name] == quantity.may[1] == inf != whole.__dataclass_fields__[name].default:
            quantity.refuse(f"{owner}{name}", inf)
    try:
        made = kind(**values)
    except ValueError as error:
        raise ValueError(f"{where + ': ' if where else ''}{error}") from None
    for name, quantity in quantities:
        if given[name] != inf:
            quantity.refuse(f"{owner}{name}", given[name])
    return _as_edited(made, given, base) if isinstance(made, Host) and base is not None else made


def _as_edited(host: Any, given: dict[str, Any], base: Any) -> Any:
    """Another machine than its base has another name and source, and no price but one given."""
    new = {
        "name": f"{base.name}, edited",
        "usd_per_hour": 0.0,
        "source": f"a file, from {base.name}",
    }
    unedited = {name: getattr(base, name) for name in new}
    if dataclasses.replace(host, **unedited) == base:
        return host
    return dataclasses.replace(host, **{n: value for n, value in new.items() if n not in given})


def _value(kind: Any, given: Any, place: str, base: Any) -> Any:
    # Parts that are tables themselves, and lists of them.
    if dataclasses.is_dataclass(kind):
        return record_of(kind, given, place, base)  # type: ignore[arg-type]
    arguments = get_args(kind)
    parts = [part for part in arguments if dataclasses.is_dataclass(part)]
    if parts and type(None) in arguments:  # a part that need not be given
        return record_of(parts[0], given, place, base)  # type: ignore[arg-type]
    if get_origin(kind) is tuple and arguments and dataclasses.is_dataclass(arguments[0]):
        if not isinstance(given, list) or not given:
            raise ValueError(f"{place} must be a list of tables, got {shown(given)}")
        return tuple(
            record_of(arguments[0], entry, f"{place}[{k}]")  # type: ignore[arg-type]
            for k, entry in enumerate(given)
        )

    # Anything else is one value.
    if kind is float and isinstance(given, float) and not isnan(given):
        return given  # inf is a limit that is not there
    return fit(given, kind, place)


def document_of(path: Path, what: str, remedy: str = _INIT) -> dict[str, Any]:
    """The table that a file holds; errors call it ``what``."""
    if not path.exists():
        raise ValueError(f"{what} {path} does not exist; {remedy}")
    try:
        document = read_document(path)
    except ValueError as error:
        raise ValueError(f"{what} {error}") from None
    if not isinstance(document, dict):
        raise ValueError(f"{what} {path} must hold a table")
    return document


def _base(document: dict[str, Any], presets: Mapping[str, Any], path: Path) -> Any:
    name = document.pop("base", None)
    if name is None:
        return None
    if not isinstance(name, str) or name not in presets:
        raise ValueError(f"base of {path} is {name!r}: {nearest(str(name), presets)}")
    return presets[name]


def read_record(
    kind: type[Record],
    path: Path,
    what: str,
    presets: Mapping[str, Any],
    through: Callable[[dict[str, Any], Callable[[], Record]], Record] = lambda _, make: make(),
) -> Record:
    """The record of a file, or of its ``base`` among the presets with what the file changes;
    ``through`` may take what is no field out of the document before it is made. Raises ValueError
    naming the file."""
    document = document_of(path, what)
    base: Record | None = _base(document, presets, path)
    document.setdefault("name", path.stem)
    try:
        return through(document, lambda: record_of(kind, document, "", base))
    except ValueError as error:
        raise ValueError(f"{what} {path}: {error}") from None


def read_cluster(path: Path) -> tuple[Cluster, Costs]:
    """A cluster and, from its table ``costs``, the laws that differ from its base's."""
    document = document_of(path, "cluster")
    given = document.pop("costs", {})
    base_name = document.get("base")
    base = _base(document, {name: make() for name, make in CLUSTERS.items()}, path)
    costs = costs_of(base_name) if base is not None else CATALOGUE
    document.setdefault("name", path.stem)
    try:
        return record_of(Cluster, document, "", base), record_of(Costs, given, "costs", costs)
    except ValueError as error:
        raise ValueError(f"cluster {path}: {error}") from None


def find(
    name: str, what: str, presets: Mapping[str, Preset], read: Callable[[Path], Preset]
) -> Preset:
    """What a preset or a .toml file of this name describes. Raises ValueError where there is
    neither, naming the nearest."""
    if name.endswith(".toml"):
        return read(Path(name))
    if name not in presets:
        hint = nearest(name, presets)
        raise ValueError(f"{what} is {name!r}: {hint} (or give a file that ends in .toml)")
    return presets[name]


def find_cluster(name: str) -> tuple[Cluster, Costs]:
    """A cluster and the costs that belong to it."""
    presets = {presets: (make(), costs_of(presets)) for presets, make in CLUSTERS.items()}
    return find(name, "--cluster", presets, read_cluster)


def find_workload(name: str) -> Workload:
    """Data and network."""
    return find(name, "--workload", workloads(), read_workload)


def find_rows(name: str) -> RowFormat:
    """How servers keep rows."""
    return find(
        name, "--row-format", FORMATS, partial(read_record, RowFormat, what="rows", presets=FORMATS)
    )


def read_workload(path: Path) -> Workload:
    """A workload."""
    return read_record(Workload, path, "workload", workloads(), _without_the_bases_tables)


def workload_of(document: dict[str, Any]) -> Workload:
    """A workload from what its file would say. Raises ValueError naming what is wrong."""
    return record_of(Workload, document, "")


def workload_text(workload: Workload) -> str:
    """What a workload's file says, as TOML: every value that is no default.

    >>> print(workload_text(Workload(name="a", fields=2, dim=8, rows=1e3, mlp=(4, 1),
    ...     batch_per_rank=64, source="me")))
    name = "a"
    fields = 2
    dim = 8
    rows = 1000.0
    mlp = [4, 1]
    batch_per_rank = 64
    source = "me"
    """
    return text_of(workload)


def text_of(record: Any) -> str:
    """What a record's file says, as TOML: every value that is no default."""
    return toml_document(_said(record))


def _said(record: Any) -> dict[str, Any]:
    """The fields of a dataclass that are not at their defaults; of a workload not those that its
    tables say."""
    said: dict[str, Any] = {}
    by_tables = BY_TABLES if getattr(record, "tables", ()) else {}
    for field in dataclasses.fields(record):
        value = getattr(record, field.name)
        if value == field.default or field.name in by_tables:
            continue
        if dataclasses.is_dataclass(value):
            value = _said(value)
        elif isinstance(value, tuple):
            value = [_said(v) if dataclasses.is_dataclass(v) else v for v in value]
        said[field.name] = value
    return said


def _without_the_bases_tables(document: dict[str, Any], make: Callable[[], Workload]) -> Workload:
    """A workload whose tables say what its base says without tables."""
    if "tables" in document:
        for name, unsaid in BY_TABLES.items():
            document.setdefault(name, unsaid)
    return make()


def read_host(path: Path) -> Host:
    """A machine."""
    return read_record(Host, path, "system", MACHINES)
