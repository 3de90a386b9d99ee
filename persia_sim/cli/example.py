"""`python -m persia_sim init`: commented examples of every file that describes something.

Comments are what the dataclasses say of their fields, so they cannot fall behind.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import textwrap
from enum import Enum
from functools import cache
from math import isinf
from pathlib import Path
from typing import Any

_WIDTH = 96


def write_examples(folder: Path) -> list[Path]:
    """Write cluster.toml, workload.toml, model.toml, system.toml; none that is there is touched.

    Raises ValueError naming the first that is there, OSError where the folder cannot be written.
    """
    from persia_sim.presets.accelerators import NODES
    from persia_sim.presets.catalogue import CLUSTERS, costs_of, workloads
    from persia_sim.presets.rankers import rankers

    cluster = CLUSTERS["gcp-100t"]()
    model = rankers()["dlrm"]
    few = dataclasses.replace(model, name="my-model", tables=model.tables[:3])
    texts = {
        "cluster.toml": "# A cluster of embedding servers: `--cluster cluster.toml`.\n"
        '# base = "gcp-100t" would start from a preset: then only what differs is needed.\n'
        + table(dataclasses.replace(cluster, name="my-cluster"))
        + "\n# What each stage costs; whatever is left out is the catalogue's.\n"
        + table(costs_of("gcp-100t"), "costs"),
        "workload.toml": "# Data and network: `--workload workload.toml`.\n"
        + table(dataclasses.replace(workloads()["criteo-syn5"], name="my-workload")),
        "model.toml": "# A model with tables on the GPUs: `sharded --model model.toml`.\n"
        + table(few),
        "system.toml": "# A machine with GPUs: `sharded --system system.toml`.\n"
        + table(dataclasses.replace(NODES["dgx-h100"], name="my-machine")),
    }
    paths = [folder / name for name in texts]
    for path in paths:
        if path.exists():
            raise ValueError(f"{path} is there already; move it or name another folder")
    folder.mkdir(parents=True, exist_ok=True)
    for path, text in zip(paths, texts.values(), strict=True):
        path.write_text(text)
    return paths


def table(record: Any, name: str = "") -> str:
    """A dataclass as TOML, a comment before every value; tables of its parts follow."""
    lines = [f"[{name}]"] if name else []
    parts: list[str] = []
    kind: Any = type(record)
    says = sayings(kind)
    for field in dataclasses.fields(record):
        value, place = getattr(record, field.name), f"{name}.{field.name}".lstrip(".")
        comment = textwrap.wrap(
            says.get(field.name, ""), _WIDTH, initial_indent="# ", subsequent_indent="# "
        )
        if dataclasses.is_dataclass(value):
            parts.append("\n".join(["", *comment, table(value, place).rstrip()]))
        elif isinstance(value, tuple) and value and dataclasses.is_dataclass(value[0]):
            for number, entry in enumerate(value):
                body = table(entry).rstrip()
                if number:  # the first one's comments are enough
                    body = "\n".join(x for x in body.splitlines() if not x.startswith("# "))
                parts.append(
                    "\n".join(["", *(comment if not number else []), f"[[{place}]]", body])
                )
        else:
            lines += [*comment, _line(field.name, value)]
    return "\n".join([*lines, *parts]) + "\n"


def _line(name: str, value: Any) -> str:
    if value is None:
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


@cache
def sayings(kind: Any) -> dict[str, str]:
    """Field -> the text under it in the source of a dataclass."""
    (body,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(body, ast.ClassDef)
    found, name = {}, ""
    for node in body.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            name = node.target.id
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and name:
            found[name] = " ".join(str(node.value.value).split())
            name = ""
    return found
