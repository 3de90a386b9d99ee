"""Scores an export with onnxruntime and pandas alone: nothing of this project is imported.

    python score_without_us.py exported clicks.csv scores.csv

docs/export.md says why each step is as it is.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from pathlib import Path

import numpy as np
import onnxruntime
import pandas as pd

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
WHOLE = re.compile(r"0|-?[1-9][0-9]{0,18}")


def mix64(z: np.ndarray) -> np.ndarray:
    """The finaliser of splitmix64."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def hash_of(text: str) -> int:
    """64 bits of one value: of a whole number by splitmix64, of any other text by BLAKE2b."""
    text = text.removesuffix(".0") if WHOLE.fullmatch(text.removesuffix(".0")) else text
    if WHOLE.fullmatch(text) and -(2**63) <= int(text) < 2**63:
        return int(mix64(np.array([int(text)], np.int64).view(np.uint64) + GOLDEN)[0])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def ids_of(column: dict, number: int, text: str, missing: set[str]) -> list[int]:
    """The ids of one cell: the number of the field above the low 56 bits of each value's hash."""
    is_list = column["kind"] in ("multi", "sequence")
    values = [value.strip() for value in (text.split(column["separator"]) if is_list else [text])]
    values = ["" if value in missing else value for value in values]
    if column["kind"] == "bucket" and values != [""]:
        x = float(values[0])
        step = np.sign(x) * np.floor(column["buckets_per_e"] * np.log1p(abs(x)))
        values = [str(int(step))]
    if is_list and text == "":
        values = [""]  # a list without ids holds the id of "no value"
    if column["kind"] == "sequence":
        values = values[-column["max_length"] :]
    return [number << 56 | hash_of(value) & (1 << 56) - 1 for value in values]


class Rows:
    """The rows of one table, and the initial value of an id that has none."""

    def __init__(self, folder: Path, name: str, table: dict, seed: int) -> None:
        frame = pd.read_parquet(folder / "rows" / f"{name}.parquet")
        if table["initial"] != "uniform":
            raise SystemExit(f"table {name}: see docs/export.md for other rows")
        self.rows = dict(zip(frame["id"].tolist(), frame["vector"], strict=True))
        self.dim = table["dim"]
        self.scale = table["initial_scale"]
        digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
        self.key = np.uint64(int.from_bytes(digest, "little"))

    def row(self, number: int) -> np.ndarray:
        """float32 [dim]"""
        if number in self.rows:
            return np.asarray(self.rows[number], np.float32)
        base = mix64(np.array([number], np.uint64) ^ self.key)
        counters = np.arange(1, self.dim + 1, dtype=np.uint64) * GOLDEN
        bits = mix64(base + counters) >> np.uint64(11)
        return ((bits.astype(np.float64) * 2.0**-52 - 1.0) * self.scale).astype(np.float32)


def pooled(bag: list[np.ndarray], how: str) -> np.ndarray:
    """The rows of a bag one after another in float32, each times its weight."""
    weight = np.float32({"sum": 1.0, "mean": 1 / len(bag), "sqrtn": 1 / np.sqrt(len(bag))}[how])
    result = np.zeros_like(bag[0])
    for row in bag:
        result += weight * row
    return bag[0] if len(bag) == 1 else result


def score(folder: Path, frame: pd.DataFrame) -> pd.DataFrame:
    """A column a task: the probability, or the number of a regression."""
    manifest = json.loads((folder / "manifest.json").read_text())
    schema = manifest["schema"]
    missing = set(schema["missing"])
    seed = manifest["seed"]
    tables = {name: Rows(folder, name, t, seed) for name, t in manifest["tables"].items()}

    # Dense features, in the order of the schema: absent is `fill`, and `log` keeps the sign.
    texts = frame.fillna("").astype(str).map(str.strip)
    numbers = []
    for column in (c for c in schema["columns"] if c["kind"] == "numeric"):
        cells = [column["fill"] if t in missing else float(t) for t in texts[column["name"]]]
        x = np.array(cells, np.float64)
        numbers.append(np.sign(x) * np.log1p(np.abs(x)) if column["log"] else x)
    dense = np.stack(numbers, 1) if numbers else np.empty((len(frame), 0))

    # Pooled fields side by side; sequences apart, padded with zeros behind, with their masks.
    parts, given = [], {"dense": dense}
    for field in manifest["inputs"]["fields"]:
        column = next(c for c in schema["columns"] if c["name"] == field["name"])
        if {"with_column", "modulo"} & column.keys():
            raise SystemExit(f"column {field['name']}: see docs/export.md for its options")
        table, cells = tables[field["table"]], texts[field["name"]]
        bags = [ids_of(column, field["number"], cell, missing) for cell in cells]
        vectors = [[table.row(number) for number in bag] for bag in bags]
        if field["pooling"] != "sequence":
            parts.append(np.stack([pooled(bag, field["pooling"]) for bag in vectors]))
            continue
        length = field["max_length"]
        padded = np.zeros((len(bags), length, table.dim), np.float32)
        for place, bag in enumerate(vectors):
            padded[place, : len(bag)] = bag
        given[f"sequence_{field['name']}"] = padded
        lengths = np.array([[len(bag)] for bag in bags])
        given[f"mask_{field['name']}"] = np.arange(length) < lengths
    given["pooled"] = np.concatenate([np.empty((len(frame), 0)), *parts], axis=1)

    # The network gives logits; all its inputs are given, each in its type.
    network = onnxruntime.InferenceSession(folder / "dense.onnx")
    inputs = manifest["inputs"]["network"]
    (logits,) = network.run(
        ["logits"], {i["name"]: given[i["name"]].astype(i["type"]) for i in inputs}
    )
    tasks = manifest["layout"]["tasks"]
    numbers = [task in manifest["layout"]["regression"] for task in tasks]
    said = np.where(numbers, logits, 1 / (1 + np.exp(-logits.astype(np.float64))))
    return pd.DataFrame(said, columns=tasks)


if __name__ == "__main__":
    exported, table, out = map(Path, sys.argv[1:])
    read = pd.read_csv(table, dtype=str, keep_default_na=False)
    score(exported, read).to_csv(out, index=False)
