"""Machines and models as CSVs of published measurements describe them."""

from __future__ import annotations

import csv
import re
from collections import defaultdict
from collections.abc import Callable
from enum import StrEnum
from math import inf
from pathlib import Path
from typing import TypeVar

from persia_sim.base.rules import require
from persia_sim.cluster.machine import Fabric, Gpu, Host
from persia_sim.cluster.tables import RowUpdate, Table
from persia_sim.sharded.ranker import Ranker

_TERA = 1e12
_GIGA = 1e9
_BUS = 16e9  # PCIe 3.0 x16, where a machine's bus is not told
_CORES = (16e9, 0.7), (32e9, 0.9), (inf, 1.0)
"""Bus of a machine -> speed of a core of its age, assumed. Of hosts with PCIe 4, Geekbench 5 has
EPYC 7763 at 1,249, as Xeon 8468 of PCIe 5 (1,257); EPYC 7742 is slower: 0.9 stands for both."""


DATA = Path(__file__).resolve().parent
"""Folder of what was read off published plots."""
_Made = TypeVar("_Made")
_Choice = TypeVar("_Choice", bound=StrEnum)


def published_rates(name: str, data: Path = DATA) -> list[dict[str, str]]:
    """The lines of a table of published figures."""
    return read_csv(data / name, "published figures", "run from a checkout")


def read_csv(
    path: Path, what: str, remedy: str = "name a CSV with a header line"
) -> list[dict[str, str]]:
    """The lines of a CSV by column, empty cells as empty text.

    Raises ValueError naming the file when it is missing, no text or has no line.
    """
    return [line for _, line in numbered_csv(path, what, remedy)]


def numbered_csv(
    path: Path, what: str, remedy: str = "name a CSV with a header line"
) -> list[tuple[int, dict[str, str]]]:
    """The rows of a CSV, each with the number that an editor shows for it."""
    if not path.is_file():
        raise ValueError(f"{what} {path} is missing; {remedy}")
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file)
            lines = [(reader.line_num, line) for line in reader]
    except (UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{what} {path} is no CSV in UTF-8: {error}") from None
    require(bool(lines), f"{what} {path}", "empty", "it needs a header and a line or more")
    return [(n, {k: (v or "").strip() for k, v in line.items() if k}) for n, line in lines]


def positive(line: dict[str, str], column: str) -> float | None:
    """The number of a cell, > 0 and finite; None where the cell is empty.

    >>> positive({"step_ms": ""}, "step_ms"), positive({"step_ms": "2.5"}, "step_ms")
    (None, 2.5)
    """
    if not line.get(column):
        return None
    result = number(line, column)
    require(0 < result < inf, column, repr(line[column]), "must be > 0 and finite")
    return result


def number(line: dict[str, str], column: str, default: float | None = None) -> float:
    """The first number of a cell, which may hold words, too; commas may set off thousands.

    >>> number({"n": "25 (8 NICs)"}, "n"), number({"n": "8,192"}, "n"), number({}, "n", 0.0)
    (25.0, 8192.0, 0.0)
    """
    cell = line.get(column, "")
    digits = re.search(r"[-+]?\d+(?:,\d+)*(?:\.\d+)?(?:[eE][-+]?\d+)?(?:,\d+)?", cell)
    after = cell[digits.end() :] if digits else ""
    rule = "a letter for thousands or millions is not read"
    require(not re.match(r" ?[kKM]\b", after), column, repr(cell), rule, "write the number out")
    if digits and re.fullmatch(
        r"[-+]?(\d+|\d{1,3}(,\d{3})+)(\.\d+)?([eE][-+]?\d+)?", digits.group()
    ):
        return float(digits.group().replace(",", ""))
    rule = "a comma stands before three digits only"
    require(not digits, column, repr(cell), rule, "write 8,192 or 8192, and 2.5")
    if default is None:
        raise ValueError(f"{column} is {cell!r}: must be a number")
    return default


def hosts_of(path: Path) -> dict[str, Host]:
    """A machine for each line of a systems file."""
    return _described(path, "system", _node)


def _described(
    path: Path, what: str, make: Callable[[dict[str, str]], _Made | None], *needed: str
) -> dict[str, _Made]:
    """What each line of a file describes, by the name in its column ``what``; of None nothing."""
    lines = numbered_csv(path, f"{what}s")
    has_columns(lines[0][1], f"{what}s {path}", what, *needed)
    result: dict[str, _Made] = {}
    for place, line in lines:
        name = line[what]
        where = f"{what} of {path}, line {place}"
        rule = "it stands there twice"
        require(name not in result, where, repr(name), rule, "keep one of the lines")
        try:
            made = make(line)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
        result |= {} if made is None else {name: made}
    return result


def has_columns(line: dict[str, str], where: str, *needed: str) -> None:
    """Raise ValueError naming the columns that a file lacks; of `a|b`, one is enough."""
    missing = [n for n in needed if not set(n.split("|")) & set(line)]
    names = ", ".join(name.replace("|", " or ") for name in missing)
    require(
        not missing,
        f"header of {where}",
        repr(",".join(line)),
        f"it has no column {names}",
        "add it (`tests/experiments/examples` has files of the right form)",
    )


def _node(line: dict[str, str]) -> Host:
    name = line["system"]
    fabric = choice(line, "interconnect", Fabric, Fabric.PCIE)
    bus = number(line, "pcie_GBps_per_direction", _BUS / _GIGA) * _GIGA
    gpus = int(number(line, "gpus_per_node"))
    domain = positive(line, "nvlink_domain")

    # The GPU by its datasheet columns.
    chip = Gpu(
        name=line.get("gpu", ""),
        fp32_flops=number(line, "peak_fp32_TF") * _TERA,
        tf32_flops=number(line, "peak_tf32_TF", 0.0) * _TERA or None,
        fp16_flops=number(line, "peak_fp16_TF_dense", 0.0) * _TERA or None,
        hbm_bytes_per_s=number(line, "hbm_GBps") * _GIGA,
        hbm_bytes=number(line, "hbm_GB") * _GIGA,
        pcie_bytes_per_s=bus,
        source="systems file",
    )

    # CPUs are guessed by the generation of the bus; memory is taken to suffice.
    return Host(
        name=name,
        cores=1,
        ram_bytes=inf,  # no column tells them, and rows there are taken to have room
        core_speed=next(speed for most, speed in _CORES if bus <= most),
        gpu=chip,
        gpus=gpus,
        fabric=fabric,
        intra_bytes_per_s=number(line, "intra_GBps_per_gpu_per_direction", bus / _GIGA) * _GIGA,
        nic_bytes_per_s=number(line, "inter_GBps_per_gpu_per_direction", 0.0) * _GIGA * gpus,
        rdma=yes_or_no(line, "rdma", True),
        nvlink_domain=None if domain is None else int(domain),
        gpus_per_switch=int(number(line, "gpus_per_switch", 2)),
        peer_to_peer=yes_or_no(line, "peer_to_peer", True),
        bridge_bytes_per_s=(positive(line, "bridge_GBps") or 0.0) * _GIGA or None,
        source="systems file",
    )


def yes_or_no(line: dict[str, str], column: str, untold: bool) -> bool:
    """What a cell says that may be empty."""
    text = line.get(column, "")
    require(text in ("yes", "no", ""), column, repr(text), "must be yes or no, or be empty")
    return text == "yes" if text else untold


def choice(line: dict[str, str], column: str, words: type[_Choice], untold: _Choice) -> _Choice:
    """One of the words of a cell that may be empty.

    >>> choice({"interconnect": "mesh"}, "interconnect", Fabric, Fabric.PCIE)
    <Fabric.MESH: 'mesh'>
    """
    text = line.get(column, "")
    rule = f"must be one of {', '.join(words)}, or be empty"
    require(not text or text in [*words], column, repr(text), rule)
    return words(text) if text else untold


def rankers_of(path: Path, tables: Path | None = None) -> dict[str, Ranker]:
    """A model for each line of a workloads file, with its own tables where ``tables`` lists them.

    A line that lacks what a model needs is left out: rows that name it say so.
    """
    # Tables by workload, where they are listed one by one.
    listed: dict[str, list[Table]] = defaultdict(list)
    for line in read_csv(tables, "tables") if tables is not None else []:
        has_columns(line, f"tables {tables}", "workload", "rows", "dim", "lookups_per_sample")
        listed[line["workload"]].append(
            Table(
                rows=number(line, "rows"),
                dim=number(line, "dim"),
                ids_per_sample=tuple(float(x) for x in line["lookups_per_sample"].split(";")),
                count=int(number(line, "n_tables", 1)),
            )
        )
    macs = "dense_macs_fwd_per_sample"

    # A line without multiplications describes no network.
    def ranker(line: dict[str, str]) -> Ranker | None:
        if not line[macs]:
            return None
        return Ranker(
            name=line["workload"],
            tables=tuple(listed.get(line["workload"]) or _alike(line)),
            dense_macs=number(line, macs),
            dense_params=number(line, "dense_params"),
            dense_layers=positive(line, "dense_layers"),
            update=choice(line, "optimizer", RowUpdate, RowUpdate.SGD),
            source="workloads file",
        )

    return _described(path, "workload", ranker, macs)


def _needed(line: dict[str, str], column: str) -> float:
    result = positive(line, column)
    if result is None:
        raise ValueError(f"{column} is '': must be a number > 0")
    return result


def _alike(line: dict[str, str]) -> list[Table]:
    """Tables from the totals of a line, where they are not listed one by one."""
    # Totals say how many ids a sample has, and how many numbers they are.
    ids, elements = (
        _needed(line, name) for name in ("lookups_per_sample", "lookup_elements_per_sample")
    )

    # As many equal tables as the line says, each with the same number of features.
    count = max(1, int(number(line, "tables", 1)))
    dim = elements / ids
    features = max(1, round(number(line, "pooled_elements_per_sample") / dim / count))
    rows = number(line, "total_rows", 1e6 * count) / count
    require(rows >= 1, "total_rows", line.get("total_rows"), f"{count} tables have >= 1 row each")
    each = (ids / count / features,) * features
    return [Table(rows=rows, dim=dim, ids_per_sample=each, count=count)]
