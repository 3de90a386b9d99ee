"""From a table's configuration to the native table that one shard owns."""

from __future__ import annotations

from runtime.embedding.config import TableConfig
from runtime.embedding.extension import native
from runtime.embedding.initial import table_key


def open_table(config: TableConfig, seed: int, shards: int) -> native.Table:
    """An empty native table: the part of the rows that one of ``shards`` shards owns."""
    rule = config.optimizer
    options = native.Options()
    options.dim = config.dim
    options.storage = {"float32": native.Storage.f32, "float64": native.Storage.f64}[config.dtype]
    options.optimizer = getattr(native.OptimizerKind, rule.kind)
    options.initial_accumulator = rule.initial_accumulator
    options.eps, options.beta1, options.beta2 = rule.eps, rule.beta1, rule.beta2
    options.row_bias_correction = rule.bias_correction == "row"
    options.key = table_key(seed, config.name)
    options.initial_a = config.initial_scale
    return native.Table(options)
