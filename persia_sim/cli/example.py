"""`persia-sim init`: commented examples of every file that describes something.

Comments are what the dataclasses say of their fields, so they cannot fall behind.
"""

from __future__ import annotations

import dataclasses
import json
import textwrap
from contextlib import suppress
from enum import Enum
from math import isinf
from pathlib import Path
from typing import TYPE_CHECKING, Any

from persia_sim.base.command_line import texts_of
from persia_sim.base.files import atomic_write

if TYPE_CHECKING:
    from persia_sim.cluster.cluster import Cluster

_WIDTH = 96
_YOURS = "an example: write where your figures come from"


def write_examples(folder: Path) -> list[Path]:
    """Write cluster.toml, workload.toml, model.toml, system.toml; none that is there is touched.

    Raises ValueError for what is no folder, and naming the first file that is there; OSError where
    the folder cannot be written: then nothing is left there.
    """
    from persia_sim.presets.catalogue import CLUSTERS, MACHINES, workloads
    from persia_sim.presets.costs import CATALOGUE
    from persia_sim.sharded.presets import rankers

    # The presets that become examples, without other people's names and prices.
    cluster = yours(CLUSTERS["gcp-100t"]())
    workload = dataclasses.replace(
        workloads()["criteo-syn1"], name="my-workload", batch_per_rank=1024, source=_YOURS
    )
    model = rankers()["dlrm"]
    few = dataclasses.replace(model, name="my-model", tables=model.tables[:3])

    # What each file says.
    texts = {
        "cluster.toml": "# A cluster of embedding servers: `--cluster cluster.toml`.\n"
        '# base = "gcp-100t" would start from a preset: then only what differs is needed.\n'
        '# host = "p5.48xlarge" in a role names a machine, in place of the table [nn.host].\n'
        + table(cluster)
        + "\n# What each stage costs is the catalogue's, measured or fitted on others' machines.\n"
        "# To say what it costs on yours, remove the first `#` of a line and of its table's name;\n"
        "# or measure it: `persia-runtime profile` writes what `--profile` reads.\n"
        + off(table(CATALOGUE, "costs")),
        "workload.toml": "# Data and network: `--workload workload.toml`.\n" + table(workload),
        "model.toml": "# A model with tables on the GPUs: `sharded --model model.toml`.\n"
        + table(few),
        "system.toml": "# A machine with GPUs: `sharded --system system.toml`.\n"
        + table(dataclasses.replace(MACHINES["dgx-h100"], name="my-machine")),
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


def yours(cluster: Cluster) -> Cluster:
    """The cluster with hosts that are nobody's: no name, price or source of others."""
    roles = {"nn": "GPU host", "embedding_workers": "worker host", "servers": "server host"}
    mine: dict[str, Any] = {"name": "my-cluster", "source": _YOURS}
    for role, name in roles.items():
        hosts = getattr(cluster, role)
        host = dataclasses.replace(hosts.host, name=f"my {name}", usd_per_hour=0.0, source=_YOURS)
        mine[role] = dataclasses.replace(hosts, host=host)
    return dataclasses.replace(cluster, **mine)


def off(text: str) -> str:
    """Each line behind a `#`."""
    return "".join(f"#{line}\n" if line else "\n" for line in text.splitlines())


def table(record: Any, name: str = "") -> str:
    """A dataclass as TOML, a comment before every value; tables of its parts follow."""
    lines = [f"[{name}]"] if name else []
    parts: list[str] = []
    kind: Any = type(record)
    says = texts_of(kind)

    # Values first; tables of parts follow, as TOML wants it.
    for field in dataclasses.fields(record):
        value = getattr(record, field.name)
        place = f"{name}.{field.name}".lstrip(".")
        comment = textwrap.wrap(
            says.get(field.name, ""), _WIDTH, initial_indent="# ", subsequent_indent="# "
        )
        if dataclasses.is_dataclass(value):
            parts.append("\n".join(["", *comment, table(value, place).rstrip()]))
        elif value and isinstance(value, tuple) and dataclasses.is_dataclass(value[0]):
            for number, entry in enumerate(value):
                body = table(entry).rstrip()
                if number:  # the first one's comments are enough
                    body = "\n".join(x for x in body.splitlines() if not x.startswith("# "))
                above = [] if number else comment
                parts.append("\n".join(["", *above, f"[[{place}]]", body]))
        else:
            lines += [*comment, _line(field.name, value)]
    return "\n".join([*lines, *parts]) + "\n"


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
