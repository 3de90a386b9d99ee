"""From a table's configuration to the native table that one shard owns."""

from __future__ import annotations

import hashlib
import math

from persia_sim.words.rules import require
from runtime.embedding.config import TableConfig
from runtime.embedding.native.extension import native
from runtime.embedding.native.memory import allowed_bytes

_STORAGE = {
    ("dtype", "float32"): native.Storage.f32,
    ("dtype", "float64"): native.Storage.f64,
    ("float16", "float32"): native.Storage.f16,
    ("bfloat16", "float32"): native.Storage.bf16,
}
_INDEX_BYTES_PER_ROW = 8 / 0.75  # a bucket has 8 bytes, three of four are full (native/index.hpp)
_SPARE_BYTES_PER_SHARD = 64 * 8  # buckets beyond those


def table_key(seed: int, table: str) -> int:
    """64 bits that stand for (seed, table)."""
    digest = hashlib.blake2b(f"{seed}/{table}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def open_table(
    config: TableConfig, seed: int, shards: int, *, track_changes: bool = False
) -> native.Table:
    """An empty native table: the part of the rows that one of ``shards`` shards owns."""
    rule = config.optimizer
    options = native.Options()
    options.dim = config.dim
    options.storage = _STORAGE[config.storage, config.dtype]
    kind = "momentum" if rule.momentum else rule.kind
    options.optimizer = getattr(native.OptimizerKind, kind)
    options.initial_accumulator = rule.initial_accumulator
    options.eps, options.beta1, options.beta2 = rule.epsilon, rule.beta1, rule.beta2
    options.row_bias_correction = rule.bias_correction == "row"
    options.weight_decay, options.momentum = rule.weight_decay, rule.momentum
    options.l1, options.l2, options.ftrl_beta = rule.l1, rule.l2, rule.ftrl_beta
    options.weight_bound = config.weight_bound
    options.key = table_key(seed, config.name)
    _set_initial(options, config)
    _set_admission(options, config, shards)
    options.expire_after_steps = config.capacity.expire_after_steps or 0
    options.track_changes = track_changes
    native.set_memory_limit(allowed_bytes())
    _check_memory(config, options.row_bytes, shards)
    if config.capacity.limited:
        options.eviction = getattr(native.Eviction, config.capacity.eviction)
        options.capacity_rows = max(1, rows_allowed(config, options.row_bytes, shards) // shards)
    return native.Table(options)


def overhead_bytes_per_row(config: TableConfig) -> float:
    """Bytes that a row of a full table costs beside its values and state."""
    record_bytes = 16 + 4 * (config.capacity.expire_after_steps is not None)
    if config.capacity.limited and config.capacity.eviction == "lru":
        record_bytes += 8
    return record_bytes + _INDEX_BYTES_PER_ROW


def rows_allowed(config: TableConfig, row_bytes: int, shards: int) -> int:
    """The smaller of the two limits of a limited table, in rows over all shards."""
    limits = []
    if config.capacity.rows is not None:
        limits.append(config.capacity.rows)
    if config.capacity.memory_bytes is not None:
        one = row_bytes + overhead_bytes_per_row(config)
        usable = config.capacity.memory_bytes - shards * _SPARE_BYTES_PER_SHARD
        limits.append(int(usable / one))
    return min(limits)


def _check_memory(config: TableConfig, row_bytes: int, shards: int) -> None:
    """What the table asks for must be there when it is full, and be enough to start with."""
    allowed = allowed_bytes()
    capacity, name = config.capacity, f"table {config.name}: "
    one = row_bytes + overhead_bytes_per_row(config)
    least = shards * math.ceil(one + _SPARE_BYTES_PER_SHARD)
    if capacity.memory_bytes is not None:
        rule = f"must be at least {least} bytes, a row in each of {shards} shards"
        require(
            capacity.memory_bytes >= least,
            f"{name}capacity.memory_bytes",
            capacity.memory_bytes,
            rule,
        )
    wanted = {"capacity.memory_bytes": capacity.memory_bytes or 0}
    if capacity.rows is not None and capacity.memory_bytes is None:
        wanted["capacity.rows"] = int(capacity.rows * one)
    if config.admission.kind == "frequency":
        wanted["admission.counters"] = 2 * config.admission.counters
    for option, needed in wanted.items():
        group, _, field = option.partition(".")
        rule = f"needs {needed / 1e9:,.3g} GB, and this process may use {allowed / 1e9:,.3g} GB"
        value = getattr(getattr(config, group), field)
        require(needed <= allowed, name + option, value, rule, "lower it")


def _set_initial(options: native.Options, config: TableConfig) -> None:
    kind = "uniform" if config.initial == "inverse_sqrt" else config.initial
    options.initial = getattr(native.Initial, kind)
    options.initial_a = config.initial_scale
    if config.initial == "inverse_sqrt":
        options.initial_a = 1.0 / math.sqrt(config.dim)
    elif config.initial == "normal":
        options.initial_a, options.initial_b = config.initial_mean, config.initial_scale
    elif config.initial == "gamma":
        options.initial_a, options.initial_b = config.initial_shape, config.initial_scale


def _set_admission(options: native.Options, config: TableConfig, shards: int) -> None:
    admission = config.admission
    options.admission = getattr(native.Admission, admission.kind)
    options.admission_probability = admission.probability
    options.admission_sightings = admission.sightings
    options.admission_counters = max(1, admission.counters // shards)
