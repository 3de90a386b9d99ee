"""`describe`: the model and data of a run as a workload, which every simulation takes.

Counted are the dense network, by torch on the model itself, and the tables, in the training part
of the log. A log may be a cut of the one that a cluster would train: its tables then have as many
rows as their own growth makes likely.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np

from persia_sim.base.command_line import Unset, read_options
from persia_sim.base.files import toml_document
from persia_sim.base.popularity import exponent, grown
from persia_sim.base.rules import printable, require
from persia_sim.base.schema import Checked, Within
from runtime.train_options import read_train

if TYPE_CHECKING:
    from runtime.config import TrainConfig
    from runtime.data.batch import Batch, Layout
    from runtime.data.source import Source

_UPDATES = {
    "sgd": "sgd",
    "adagrad": "adagrad",
    "rowwise_adagrad": "rowwise_adagrad",
    "adam": "lazy_adam",
    "rowwise_adam": "lazy_adam",
    "ftrl": "adagrad",
}
"""Optimiser of the rows -> the simulator's word for one that keeps as many numbers, or more."""
MOST_SCALE = 1e9
MOST_BATCH_PER_RANK = 65535
"""What a batch of the simulator may have."""
_BLOCK = 65536
"""Samples whose ids are sorted at once."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Describe(Checked):
    """Print what a run's options describe as a workload, a TOML file for `persia-sim --workload`
    and `persia-sim sharded --model`: the dense network's weights and operations, and rows, ids a
    sample and popularity of each table, counted in the training part. Nothing is trained. All other
    options are those of `train`: persia-runtime describe --config run.toml > workload.toml"""

    scale: Annotated[float, Within(1, MOST_SCALE)] = 1.0
    """Of how many times as many samples the log is a cut: tables get the rows that those would
    have, by the growth of the log's own distinct ids."""
    batch_per_rank: Annotated[int | None, Unset("batch / ranks"), Within(1, 65535)] = None
    """Samples of a rank in one step, in which distinct ids are counted."""
    dense_flops: Annotated[float | None, Unset("counted"), Within(1, 1e18)] = None
    """Operations of a sample's forward and backward pass, of a model whose operations torch cannot
    count."""


def describe(arguments: list[str]) -> None:
    """Print the file; what it leaves out is a comment in it."""
    own, others = _apart(arguments)
    if {"-h", "--help"} & set(arguments):
        own = ["--help"]
    asked = read_options(Describe, own, "persia-runtime describe")
    config = read_train(others).run
    from runtime.executors.open import source_of

    source = source_of(config)
    document = described(config, source, asked)
    print(
        printable(
            "\n".join([*_comments(config, source, document), toml_document(document)]), keep="\n"
        )
    )


def _comments(config: TrainConfig, source: Source, document: Mapping[str, Any]) -> list[str]:
    """What a reader of the file wants to know, and no key of it says."""
    from runtime.embedding.native.store import open_table
    from runtime.rank.components import tables_of

    first = next(iter(tables_of(config, source.layout, {}).values()))
    row_bytes = 4 * (first.dim + open_table(first, 0, 1).state_floats)
    rows = sum(table["rows"] for table in document["tables"])
    lines = [
        "# For `persia-sim --workload` and `persia-sim sharded --model`.",
        f"# Rows with their optimiser state: {rows * row_bytes:,.0f} bytes, {row_bytes} a row.",
    ]
    longs = [field.name for field in source.layout.fields if field.pooling == "sequence"]
    if longs:
        lines.append(f"# Sequences count as one pooled vector each: {', '.join(longs)}.")
    return lines


def _apart(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """The words of this command's own options, and those of `train`."""
    names = {f"--{name.replace('_', '-')}" for name in Describe.__slots__}
    own: list[str] = []
    others: list[str] = []
    goes_to = others
    for word in arguments:
        if word.startswith("--"):
            goes_to = own if word.partition("=")[0] in names else others
        goes_to.append(word)
    return own, others


def described(config: TrainConfig, source: Source, asked: Describe = Describe()) -> dict[str, Any]:
    """A run's model and data in the words of a workload's file.

    Raises ValueError where the training part is empty or the network's operations cannot be
    counted.
    """
    from runtime.rank.components import tables_of

    # The dense network: built as the run builds it, its operations counted.
    layout = source.layout
    dims = {name: table.dim for name, table in tables_of(config, layout, {}).items()}
    network = network_of(config, layout, dims, asked.dense_flops)

    # The tables: what the training part holds.
    batch = asked.batch_per_rank or max(1, config.batch // config.sync.ranks)
    remedy = "give --batch-per-rank"
    rule = f"of a rank must be <= {MOST_BATCH_PER_RANK:,}"
    require(batch <= MOST_BATCH_PER_RANK, "batch", f"{batch:,}", rule, remedy)
    counted = count(source.chunks("train"), layout, batch)
    facts = source.provenance()
    of_scale = f", taken for 1 / {asked.scale:g} of all" if asked.scale > 1 else ""
    return {
        "name": f"{config.model.name} on {facts.name}",
        "source": f"persia-runtime describe: {counted.samples:,} training samples of {facts.name}, "
        f"sha256 {facts.sha256[:12]}{of_scale}; operations counted by torch",
        "batch_per_rank": batch,
        "dense_features": len(layout.dense),
        **network,
        "update": _UPDATES[config.rows.optimizer.kind],
        "tables": [
            _described_table(table, counted, dims[table.table], asked.scale)
            for table in counted.tables
        ],
    }


def _described_table(
    table: CountedTable, counted: Counted, dim: int, scale: float
) -> dict[str, Any]:
    """A table of the file."""
    ids = [table.ids[name] / counted.samples for name in table.fields]
    rows = table.rows_of(scale)
    return {
        "name": table.name,
        "fields": list(table.fields),
        "rows": float(round(rows)),
        "dim": dim,
        "ids_per_sample": [round(max(each, 1e-9), 6) for each in ids],
        "zipf": round(exponent(table.batch.distinct, table.batch.draws, rows), 3),
    }


def network_of(
    config: TrainConfig, layout: Layout, dims: Mapping[str, int], flops: float | None = None
) -> dict[str, Any]:
    """Layers, weights and operations of the dense network, of one sample.

    ``flops``: of a sample's forward and backward pass; None: counted, or a ValueError that asks.
    """
    from torch import nn

    from runtime.models.inputs import InputShape
    from runtime.models.networks import build_model

    # The network as the run builds it.
    shape = InputShape(layout=layout, dims=dict(dims))
    network = config.model
    model = build_model(network.name, shape, network.hidden, config.seed, network.dropout)
    if flops is None:
        flops, widths = _counted_pass(model, shape, network.name)
    else:
        widths = [each.out_features for each in model.modules() if isinstance(each, nn.Linear)]
    return {
        "mlp": widths or [len(layout.tasks)],
        "dense_params": max(1, sum(each.numel() for each in model.parameters())),
        "dense_flops": flops,
    }


def _counted_pass(model: Any, shape: Any, name: str) -> tuple[float, list[int]]:
    """Operations of a sample forward and backward, and what each layer hands on of it."""
    from torch import nn
    from torch.utils.flop_counter import FlopCounterMode

    from runtime.models.networks import blamed_on

    # Each layer notes how many numbers it hands on.
    outputs: list[int] = []
    samples = 2
    for each in model.modules():
        if isinstance(each, nn.Linear):
            each.register_forward_hook(lambda _, __, output: outputs.append(output.numel()))

    # One step of two samples: torch counts its products, those for the rows' gradients, too.
    remedy = "give --dense-flops, the operations of a sample's forward and backward pass"
    counter = FlopCounterMode(display=False)
    with (
        counter,
        blamed_on(name, "cannot be run on zeros, so its operations stay uncounted", remedy),
    ):
        model(*zeros(shape, samples)).sum().backward()
    flops = counter.get_total_flops() / samples
    rule = "torch finds no product that it can count"
    require(flops > 0, f"operations of model {name}", f"{flops:g}", rule, remedy)
    return flops, [max(1, numbers // samples) for numbers in outputs]


def zeros(shape: Any, samples: int) -> tuple[Any, Any]:
    """Inputs of a model: dense features, and embeddings that want a gradient, all 0."""
    import torch

    from runtime.models.inputs import Embeddings

    sequences = {
        field.name: torch.zeros(
            samples, field.max_length, shape.dims[field.table], requires_grad=True
        )
        for field in shape.layout.fields
        if field.pooling == "sequence"
    }
    masks = {name: torch.ones(rows.shape[:2], dtype=torch.bool) for name, rows in sequences.items()}
    pooled = torch.zeros(samples, sum(shape.pooled_dims), requires_grad=True)
    dense = torch.zeros(samples, len(shape.layout.dense))
    return dense, Embeddings(pooled=pooled, sequences=sequences, masks=masks)


@dataclass
class Windows:
    """Stretches of a log of one length: how many there were, and what they had in the mean."""

    count: int = 0
    draws: float = 0.0
    """Ids."""
    distinct: float = 0.0
    """Different ones of them."""

    def add(self, draws: float, distinct: float) -> None:
        """One stretch more."""
        self.count += 1
        self.draws += (draws - self.draws) / self.count
        self.distinct += (distinct - self.distinct) / self.count


@dataclass
class CountedTable:
    """The ids of fields that share rows."""

    table: str
    """The run's table that holds the rows; in it fields may have rows of their own."""
    name: str
    fields: list[str]
    ids: dict[str, int]
    """Field -> occurrences of ids."""
    windows: list[Windows] = field(default_factory=list)
    """Batches, pairs of batches, pairs of these and so on."""
    rest: np.ndarray = field(default_factory=lambda: np.empty(0, np.uint64))
    """Ids of a short last batch, which is in no window."""
    _waiting: list[np.ndarray | None] = field(default_factory=list)
    """Of each length the distinct ids of a window that has no pair yet, sorted."""

    def add_batch(self, ids: np.ndarray) -> None:
        """Ids of a batch; windows that have a pair now become one of twice the length."""
        met = np.unique(ids)
        draws = float(len(ids))
        for length in range(len(self.windows) + 1):
            if length == len(self.windows):
                self.windows.append(Windows())
                self._waiting.append(None)
            self.windows[length].add(draws, len(met))
            pair = self._waiting[length]
            if pair is None:
                self._waiting[length] = met
                return
            self._waiting[length] = None
            met = np.union1d(pair, met)
            draws = 2 * self.windows[length].draws  # as many as others of that length have

    @property
    def batch(self) -> Windows:
        """Its batches; of a log that is shorter than one, all of it."""
        return (
            self.windows[0]
            if self.windows
            else Windows(1, len(self.rest), len(np.unique(self.rest)))
        )

    @property
    def rows(self) -> np.ndarray:
        """All distinct ids, sorted."""
        parts = [part for part in self._waiting if part is not None]
        return np.unique(np.concatenate([self.rest, *parts]))

    def rows_of(self, scale: float) -> float:
        """Rows that so many times as many samples would have."""
        met = float(len(self.rows))
        if scale == 1 or met < 2:
            return max(1.0, met)
        lengths = self.windows[-1 : -_LENGTHS - 1 : -1]
        draws = [float(sum(self.ids.values())), *(each.draws for each in lengths)]
        distinct = [met, *(each.distinct for each in lengths)]
        return grown(np.array(draws), np.array(distinct), scale)


_LENGTHS = 8
"""Lengths of windows by which growth is judged, the longest: from the log's half on."""


@dataclass
class Counted:
    """What the training part holds."""

    samples: int
    tables: list[CountedTable]


def count(chunks: Iterator[Batch], layout: Layout, batch: int) -> Counted:
    """Count ids by field and table, and the distinct ones of batches of so many samples; raises
    ValueError for a training part without samples."""
    from runtime.data.source import rebatch

    tables: list[CountedTable] = []
    samples = 0
    for block in rebatch(chunks, batch * max(1, _BLOCK // batch)):
        samples += block.size
        by_field = ids_by_field(block, layout)
        tables = tables or _tables(by_field, layout)
        ends = np.arange(batch, block.size + 1, batch)
        for table in tables:
            parts = [by_field[name] for name in table.fields]
            for name, (ids, _) in zip(table.fields, parts, strict=True):
                table.ids[name] += len(ids)
            ids = np.concatenate([ids for ids, _ in parts])
            places = np.concatenate([places for _, places in parts])
            order = np.argsort(places, kind="stable")
            batches = np.split(ids[order], np.searchsorted(places[order], ends))
            for own in batches[:-1]:
                table.add_batch(own)
            table.rest = batches[-1]
    if not samples:
        raise ValueError("the training part has no sample: name data that has, or another split")
    return Counted(samples=samples, tables=tables)


def _tables(
    by_field: Mapping[str, tuple[np.ndarray, np.ndarray]], layout: Layout
) -> list[CountedTable]:
    """Fields that share rows, together: a table holds fields whose ids carry numbers of their own
    beside each other."""
    from runtime.data.ids import VALUE_BITS

    found: dict[tuple[str, int], list[str]] = {}
    for each in layout.fields:
        ids, _ = by_field[each.name]
        number = int(ids[0]) >> VALUE_BITS if len(ids) else -1 - len(found)
        found.setdefault((each.table, number), []).append(each.name)
    names = {each.name for each in layout.fields}
    whole = [table for table, _ in found]
    tables = []
    for (table, _), fields in found.items():
        alone = whole.count(table) == 1 and (table in fields or table not in names)
        name = table if alone else fields[0]
        tables.append(CountedTable(table, name, fields, dict.fromkeys(fields, 0)))
    return tables


def ids_by_field(batch: Batch, layout: Layout) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Field -> uint64, the ids of all its bags; and int64, the place of the sample of each."""
    names = [field.name for field in layout.fields]
    lengths = np.ones(batch.size * len(names), np.int64)
    if batch.offsets is not None:
        lengths = np.diff(batch.offsets)
    bag = np.repeat(np.arange(len(lengths)), lengths)
    place = bag % len(names)
    sample = bag // len(names)
    return {name: (batch.ids[place == k], sample[place == k]) for k, name in enumerate(names)}
