"""`describe`: the model and data of a run as a file that `persia-sim sharded --model` takes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from persia_sim.base.rules import printable
from runtime.train_options import read_train

if TYPE_CHECKING:
    from runtime.config import TrainConfig
    from runtime.data.batch import Batch, Layout
    from runtime.data.source import Source

_USAGE = """usage: persia-runtime describe [options of train] > model.toml

Write what a run's options describe as TOML for `persia-sim sharded --model`: multiplications and
weights of the dense network, and rows, ids a sample and popularity of each table, counted in the
training part. Nothing is trained. Options are those of `train` (train --help all)."""
_UPDATES = {
    "sgd": "sgd",
    "adagrad": "adagrad",
    "rowwise_adagrad": "rowwise_adagrad",
    "adam": "lazy_adam",
    "rowwise_adam": "lazy_adam",
    "ftrl": "adagrad",
}
"""Optimiser of the rows -> the simulator's word for one that keeps as many numbers, or more."""
_BATCHES = 64
"""Batches in which distinct ids are counted."""
_STEEPEST = 4.0
_HALVINGS = 24


def describe(arguments: list[str]) -> None:
    """Print the file; what it leaves out is a comment in it."""
    if {"-h", "--help"} & set(arguments):
        print(_USAGE)
        return
    config = read_train(arguments).run
    from runtime.engines.open import source_of

    print(printable(described(config, source_of(config)), keep="\n"))


def described(config: TrainConfig, source: Source) -> str:
    """A run's model and data as TOML."""
    from runtime.rank.parts import tables_of

    # The dense network: built as the run builds it, its operations counted.
    layout = source.layout
    dims = {name: table.dim for name, table in tables_of(config, layout, {}).items()}
    network = network_of(config, layout, dims)

    # The tables: what the training part holds.
    counted = count(source.chunks("train"), layout, config.batch)
    facts = source.provenance()
    values = {
        "name": f"{config.model.name} on {facts.name}",
        **network,
        "dense_features": len(layout.dense),
        "update": _UPDATES[config.rows.optimizer.kind],
        "source": f"persia-runtime describe: {counted.samples:,} training samples of {facts.name}, "
        f"sha256 {facts.sha256[:12]}; operations counted by torch",
    }
    lines = [
        "# For `persia-sim sharded --model`. A step of the run has",
        f"# {config.batch:,} samples: --gpus N --batch-per-gpu {config.batch:,} / N.",
        *(f"{name} = {json.dumps(value, ensure_ascii=False)}" for name, value in values.items()),
    ]
    if longs := [field.name for field in layout.fields if field.pooling == "sequence"]:
        lines.append(f"# Sequences count as one pooled vector each: {', '.join(longs)}.")
    for table, fields in counted.fields.items():
        ids = [counted.ids[name] / counted.samples for name in fields]
        rows = max(1, len(counted.rows[table]))
        zipf = exponent(counted.distinct[table], config.batch * sum(ids), rows)
        lines += [
            "",
            "[[tables]]",
            f"# {table}: read by {', '.join(fields)}; rows are those that training meets",
            f"rows = {rows}",
            f"dim = {dims[table]}",
            f"ids_per_sample = {[round(max(each, 1e-9), 6) for each in ids]}",
            f"zipf = {zipf:.3f}",
        ]
    return "\n".join(lines)


def network_of(config: TrainConfig, layout: Layout, dims: Mapping[str, int]) -> dict[str, Any]:
    """Multiplications, weights, layers and widths of the dense network, of one sample."""
    import torch
    from torch import nn
    from torch.utils.flop_counter import FlopCounterMode

    from runtime.models.inputs import InputShape
    from runtime.models.networks import blamed_on, build_model

    # The network as the run builds it.
    shape = InputShape(layout=layout, dims=dict(dims))
    network = config.model
    model = build_model(network.name, shape, network.hidden, config.seed, network.dropout)
    outputs: list[int] = []

    def note(module: nn.Module, inputs: Any, output: torch.Tensor) -> None:
        outputs.append(output.numel())

    # One forward pass of two samples: products are counted, and what each layer hands on.
    samples = 2
    linear = [each for each in model.modules() if isinstance(each, nn.Linear)]
    for each in linear:
        each.register_forward_hook(note)
    counter = FlopCounterMode(display=False)
    with counter, torch.no_grad(), blamed_on(network.name, "cannot be run on zeros"):
        model(*zeros(shape, samples))
    width = shape.width - len(layout.dense)
    return {
        "dense_macs": max(1, counter.get_total_flops() // 2 // samples),
        "dense_params": max(1, sum(each.numel() for each in model.parameters())),
        "dense_layers": max(1, len(outputs)),
        "dense_widths": width + sum(outputs) // samples,
    }


def zeros(shape: Any, samples: int) -> tuple[Any, Any]:
    """Inputs of a model: dense features and embeddings, all 0."""
    import torch

    from runtime.models.inputs import Embeddings

    sequences = {
        field.name: torch.zeros(samples, field.max_length, shape.dims[field.table])
        for field in shape.layout.fields
        if field.pooling == "sequence"
    }
    masks = {name: torch.ones(rows.shape[:2], dtype=torch.bool) for name, rows in sequences.items()}
    pooled = torch.zeros(samples, sum(shape.pooled_dims))
    dense = torch.zeros(samples, len(shape.layout.dense))
    return dense, Embeddings(pooled=pooled, sequences=sequences, masks=masks)


@dataclass
class Counted:
    """What the training part holds."""

    samples: int
    fields: dict[str, list[str]]
    """Table -> the fields that read it."""
    ids: dict[str, int]
    """Field -> occurrences of ids."""
    rows: dict[str, np.ndarray]
    """Table -> its distinct ids, sorted."""
    distinct: dict[str, float]
    """Table -> mean distinct ids of a batch."""


def count(chunks: Iterator[Batch], layout: Layout, batch: int) -> Counted:
    """Count ids by field and table; raises ValueError for a training part without samples."""
    # Ids of each field and table, over the whole part.
    fields: dict[str, list[str]] = {}
    for field in layout.fields:
        fields.setdefault(field.table, []).append(field.name)
    result = Counted(
        samples=0,
        fields=fields,
        ids=dict.fromkeys((field.name for field in layout.fields), 0),
        rows={table: np.empty(0, np.uint64) for table in fields},
        distinct={},
    )
    per_batch: dict[str, list[int]] = {table: [] for table in fields}

    # Distinct ids of the first batches tell how often a batch repeats itself.
    for chunk in chunks:
        result.samples += chunk.size
        _add(result, chunk, layout)
        whole = chunk.size // batch or (
            not result.samples - chunk.size
        )  # a short part is one batch
        for start in range(0, whole * batch, batch):
            if len(next(iter(per_batch.values()))) == _BATCHES:
                break
            ids = ids_by_table(chunk.rows(start, min(start + batch, chunk.size)), layout)
            for table, of_table in ids.items():
                per_batch[table].append(len(np.unique(of_table)))

    # Means over these batches.
    if not result.samples:
        raise ValueError("the training part has no sample: name data that has, or another split")
    result.distinct = {table: float(np.mean(many)) for table, many in per_batch.items()}
    return result


def _add(counted: Counted, chunk: Batch, layout: Layout) -> None:
    for name, of_table in ids_by_field(chunk, layout).items():
        counted.ids[name] += len(of_table)
    for table, of_table in ids_by_table(chunk, layout).items():
        counted.rows[table] = np.union1d(counted.rows[table], of_table)


def ids_by_field(batch: Batch, layout: Layout) -> dict[str, np.ndarray]:
    """Field -> uint64, the ids of all its bags."""
    names = [field.name for field in layout.fields]
    lengths = np.ones(batch.size * len(names), np.int64)
    if batch.offsets is not None:
        lengths = np.diff(batch.offsets)
    place = np.repeat(np.arange(len(lengths)) % len(names), lengths)
    return {name: batch.ids[place == k] for k, name in enumerate(names)}


def ids_by_table(batch: Batch, layout: Layout) -> dict[str, np.ndarray]:
    """Table -> uint64, the ids of all bags that it holds the rows of."""
    by_field = ids_by_field(batch, layout)
    tables = dict.fromkeys(field.table for field in layout.fields)
    return {
        table: np.concatenate([by_field[f.name] for f in layout.fields if f.table == table])
        for table in tables
    }


def exponent(distinct: float, draws: float, rows: int) -> float:
    """Zipf's exponent with which so many draws are expected to have so many distinct ids.

    >>> round(exponent(expected(100.0, 1000, 1.05), 100.0, 1000), 3)
    1.05
    """
    low = 0.0
    high = _STEEPEST
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        few = expected(draws, rows, middle) < distinct
        low, high = (low, middle) if few else (middle, high)
    return (low + high) / 2


def expected(draws: float, rows: int, zipf: float) -> float:
    """Expected distinct ids of so many draws: the sum over ids of 1 - (1 - p)^draws."""
    weights = np.arange(1, rows + 1, dtype=float) ** -zipf
    share = np.minimum(weights / weights.sum(), 1 - 1e-12)
    return float(-np.expm1(draws * np.log1p(-share)).sum())
