"""Whether the rows of a checkpoint mean the same in a store: the same tables, shapes and draws."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from runtime.checkpoint.manifest import Manifest
from runtime.embedding.config import TableConfig

_SHAPE = ("dim", "dtype", "storage", "share_rows", "hash_stack")
_INITIAL = ("initial", "initial_scale", "initial_mean", "initial_shape")


def check_same_rows(
    manifest: Manifest, tables: Mapping[str, TableConfig], seed: int, path: Path
) -> None:
    """Raise ValueError with what is in the checkpoint and what is in the store.

    Capacity, admission, rates and the like may change from one to the other.
    """
    if manifest.seed != seed:
        raise ValueError(
            f"{path} was saved with seed {manifest.seed}, the store has {seed}: initial values of"
            " new rows would differ; open the store with the saved seed"
        )
    if set(manifest.tables) != set(tables):
        raise ValueError(
            f"{path} holds the tables {', '.join(sorted(manifest.tables))}, the store has"
            f" {', '.join(sorted(tables))}; open the store with the saved tables"
        )
    for table, config in tables.items():
        saved, now = manifest.tables[table], asdict(config)
        for key in _SHAPE + _INITIAL:
            _same(path, table, key, saved.get(key), now[key])
        rule, state = saved.get("optimizer"), now["optimizer"]
        saved_rule: dict[str, Any] = rule if isinstance(rule, dict) else {}
        for key in ("kind", "initial_accumulator"):
            _same(path, table, f"optimizer.{key}", saved_rule.get(key), state[key])
        has, needs = bool(saved_rule.get("momentum")), bool(state["momentum"])
        _same(path, table, "optimizer.momentum > 0", has, needs)


def _same(path: Path, table: str, key: str, saved: object, now: object) -> None:
    if saved != now:
        raise ValueError(
            f"{path}: table {table} was saved with {key}={saved}, the store has {key}={now};"
            " configure it as saved"
        )
