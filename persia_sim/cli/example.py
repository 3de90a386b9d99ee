"""`persia-sim init`: commented examples of every file that describes something.

Comments are what the dataclasses say of their fields, so they cannot fall behind.
"""

from __future__ import annotations

import dataclasses
import json
import re
import textwrap
from contextlib import suppress
from enum import Enum
from math import isinf
from pathlib import Path
from typing import Any

from persia_sim.base.command_line import texts_of
from persia_sim.base.files import atomic_write
from persia_sim.cluster.cluster import Cluster
from persia_sim.cluster.machine import Host
from persia_sim.presets.catalogue import CLUSTERS, MACHINES, workloads
from persia_sim.presets.costs import CATALOGUE
from persia_sim.presets.from_file import record_of
from persia_sim.sharded.presets import rankers

_WIDTH = 96
_YOURS = "an example: write where your figures come from"
_MACHINES_FIRST = """\
# A cluster of embedding servers: `--cluster cluster.toml`. Write which machines you have, and how
# many: `persia-sim machines list` has their names. One that is not among them is a table of its
# own, [nn.host] in place of host, with the keys of system.toml; or it is like one of them
# (base = "p5.48xlarge") but for what the table gives, as nic_bytes_per_s = 3.125e9 for 25 Gbit/s.
# What stands behind a # follows from these, or has that value unless you give it another. Stages
# cost what costs.toml says, unless a table [costs] here says otherwise. With base = "gcp-100t" the
# whole file starts from a preset, and gives only what differs.

"""


def write_examples(folder: Path) -> list[Path]:
    """Write cluster.toml and those beside it; none that is there is touched.

    Raises ValueError for what is no folder, and naming the first file that is there; OSError where
    the folder cannot be written: then nothing is left there.
    """
    # The presets that become examples.
    workload = dataclasses.replace(
        workloads()["criteo-syn1"],
        name="my-workload",
        rows=1e10,
        batch_per_rank=1024,
        source=_YOURS,
    )
    model = rankers()["dlrm"]
    few = dataclasses.replace(model, name="my-model", tables=model.tables[:3])

    # What each file says.
    texts = {
        "cluster.toml": _MACHINES_FIRST + machines_first(CLUSTERS["h100-host"]()),
        "workload.toml": "# Data and network: `--workload workload.toml`.\n" + table(workload),
        "model.toml": "# A model with tables on the GPUs: `sharded --model model.toml`.\n"
        + table(few),
        "system.toml": "# A machine with GPUs: `sharded --system system.toml`.\n"
        + table(dataclasses.replace(MACHINES["dgx-h100"], name="my-machine")),
        "costs.toml": "# What each stage costs, measured or fitted on others' machines. Write\n"
        "# into cluster.toml what is otherwise on yours, or measure it: `persia-runtime profile`.\n"
        + table(CATALOGUE, "costs"),
    }

    # Refuse what is no folder, and files that are there.
    at = next(path for path in (folder, *folder.parents) if path.exists())
    if folder.suffix == ".toml" or not at.is_dir():
        what = f"{at} is a file" if at.is_file() else f"{folder} is a file's name"
        raise ValueError(f"init writes {len(texts)} files into a folder, and {what}; name a folder")
    paths = [folder / name for name in texts]
    for path in paths:
        if path.exists():
            raise ValueError(f"{path} is there already; move it or name another folder")

    # All files or none.
    made = [place for place in (folder, *folder.parents) if not place.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path, text in zip(paths, texts.values(), strict=True):
            with atomic_write(path) as file:
                file.write(text.encode())
    except BaseException:  # all of them or none: the next one would refuse what it finds
        for path in paths:
            path.unlink(missing_ok=True)
        for place in made:
            with suppress(OSError):
                place.rmdir()
        raise
    return paths


_ROLES = ("nn", "embedding_workers", "servers")


def machines_first(cluster: Cluster) -> str:
    """A file of the machines in each role of a cluster and of how many there are, with all that
    follows from these behind a `#`."""
    roles = {name: getattr(cluster, name) for name in _ROLES}
    given = {name: {"host": one.host.name, "hosts": one.hosts} for name, one in roles.items()}
    whole = table(record_of(Cluster, {"name": "cluster"} | given, ""))
    return re.sub(rf"^(?!#|hosts? =|\[({'|'.join(_ROLES)})\])(?=.)", "#", whole, flags=re.M)


def table(record: Any, name: str = "", said: set[str] | None = None) -> str:
    """A dataclass as TOML, with what each value means, unless that is ``said`` above; a machine of
    the catalogue is its name."""
    said = set() if said is None else said
    lines = [f"[{name}]"] if name else []
    kind: Any = type(record)
    says = texts_of(kind)
    values = {field.name: getattr(record, field.name) for field in dataclasses.fields(record)}
    for key, value in values.items():
        if isinstance(value, Host) and value == MACHINES.get(value.name):
            values[key] = value.name

    # Values first; tables of parts follow, as TOML wants it.
    for key in sorted(values, key=lambda key: _is_part(values[key])):
        value = values[key]
        place = f"{name}.{key}".lstrip(".")
        meaning = says.get(key, "") if says.get(key) not in said else ""
        said.add(meaning)
        comment = textwrap.wrap(meaning, _WIDTH, initial_indent="# ", subsequent_indent="# ")
        if not _is_part(value):
            lines += [*comment, _line(key, value)]
        elif isinstance(value, tuple):
            lines += ["", *comment, *(f"[[{place}]]\n{table(one, said=said)}" for one in value)]
        else:
            lines += ["", *comment, table(value, place, said).rstrip()]
    return "\n".join(lines).rstrip() + "\n"


def _is_part(value: Any) -> bool:
    return dataclasses.is_dataclass(value[0] if value and isinstance(value, tuple) else value)


def _line(name: str, value: Any) -> str:
    if value is None or value == ():
        return f"#{name} =   (not given)"
    return f"{name} = {_literal(value)}"


def _literal(value: Any) -> str:
    if isinstance(value, Enum):
        return json.dumps(value.value)
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, tuple):
        return f"[{', '.join(_literal(entry) for entry in value)}]"
    if isinstance(value, float) and isinf(value):
        return "inf"
    return repr(value)
