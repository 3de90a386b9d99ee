"""The peers of bench-peers: FBGEMM TBE, TorchRec fused and semi-synchronous, torch by two ways.

Each gets its ids as row numbers in its own layout, made before the clock starts; ours gets raw ids.
TorchRec's pipeline is made for GPUs. On a CPU two things stop it (torchrec 1.8.0): its forward asks
CUDA for the current stream, and tensors of a CPU refuse `record_stream`. Both are set right here;
what it computes stays its own: rows one step late, as `hybrid --tau 1`.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from experiments.benching.wide import FIELDS
from runtime.data.batch import Batch
from runtime.data.ids import hash_integers, tag
from runtime.models.inputs import Embeddings

LR = 0.05
EPS = 1e-10
Look = Callable[[int], Tensor]
"""From the number of a batch to its pooled vectors [B, fields * dim], with gradients enabled."""
EXTRA = 'pip install -e ".[bench]" && pip install --no-deps torchrec==1.8.0'


def row_numbers(batches: tuple[Batch, ...], rows: int) -> list[np.ndarray]:
    """The row number of each id in its field's table, [B, fields, ids per field] for each batch.

    The order of hashed ids is a permutation of the ranks, so hot rows are spread over the table.
    """
    values = rows // FIELDS
    sorted_ids = [np.sort(tag(f, hash_integers(np.arange(values)))) for f in range(FIELDS)]
    numbers = []
    for batch in batches:
        ids = batch.ids.reshape(batch.size, FIELDS, -1)
        places = [np.searchsorted(sorted_ids[f], ids[:, f]) for f in range(FIELDS)]
        numbers.append(np.stack(places, axis=1))
    return numbers


def torch_sparse(numbers: list[np.ndarray], rows: int, dim: int) -> tuple[Look, Callable[[], None]]:
    """26 `nn.EmbeddingBag(sparse=True)` and `torch.optim.Adagrad`; also the step to call."""
    values = rows // FIELDS
    bags = nn.ModuleList(
        nn.EmbeddingBag(values, dim, sparse=True, mode="sum") for _ in range(FIELDS)
    )
    for bag in bags:
        nn.init.uniform_(bag.weight, -0.01, 0.01)  # type: ignore[arg-type]
    optimizer = torch.optim.Adagrad(bags.parameters(), lr=LR, eps=EPS)
    inputs = [
        [torch.from_numpy(np.ascontiguousarray(n[:, f])) for f in range(FIELDS)] for n in numbers
    ]

    def look(batch: int) -> Tensor:
        return torch.cat([bag(i) for bag, i in zip(bags, inputs[batch], strict=True)], dim=1)

    return look, _stepping(optimizer)


def _stepping(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return step


def torch_merged(
    numbers: list[np.ndarray], rows: int, dim: int, device: str, sparse_adam: bool
) -> tuple[Look, Callable[[], None]]:
    """The 26 bags as one `nn.EmbeddingBag(sparse=True)` on the device: one lookup, one update."""
    values = rows // FIELDS
    bag = nn.EmbeddingBag(values * FIELDS, dim, sparse=True, mode="sum", device=device)
    nn.init.uniform_(bag.weight, -0.01, 0.01)
    if sparse_adam:
        optimizer: torch.optim.Optimizer = torch.optim.SparseAdam(bag.parameters(), lr=1e-3)
    else:
        optimizer = torch.optim.Adagrad(bag.parameters(), lr=LR, eps=EPS)
    first = np.arange(FIELDS)[:, None] * values
    inputs = [torch.from_numpy(n + first).flatten(0, 1).to(device) for n in numbers]

    def look(batch: int) -> Tensor:
        return bag(inputs[batch]).view(-1, FIELDS * dim)

    return look, _stepping(optimizer)


def fbgemm_tbe(numbers: list[np.ndarray], rows: int, dim: int) -> tuple[Look, Callable[[], None]]:
    """FBGEMM's table-batched embeddings with exact Adagrad; the update runs inside backward."""
    # On the CPU, as many tables as fields.
    ops = extra("fbgemm_gpu.split_table_batched_embeddings_ops_training")
    common = extra("fbgemm_gpu.split_table_batched_embeddings_ops_common")
    tables = [
        (rows // FIELDS, dim, ops.EmbeddingLocation.HOST, ops.ComputeDevice.CPU)
        for _ in range(FIELDS)
    ]
    layer = ops.SplitTableBatchedEmbeddingBagsCodegen(
        tables,
        optimizer=ops.OptimType.EXACT_ADAGRAD,
        learning_rate=LR,
        eps=EPS,
        pooling_mode=common.PoolingMode.SUM,
    )
    layer.init_embedding_weights_uniform(-0.01, 0.01)

    # Ids are brought into its form before anything is timed.
    inputs = [jagged(n) for n in numbers]

    def look(batch: int) -> Tensor:
        indices, offsets, _ = inputs[batch]
        return layer(indices, offsets)

    return look, lambda: None


def torchrec_fused(
    numbers: list[np.ndarray], rows: int, dim: int
) -> tuple[Look, Callable[[], None]]:
    """TorchRec's FusedEmbeddingBagCollection with Adagrad on a KeyedJaggedTensor."""
    fused = extra("torchrec.modules.fused_embedding_modules")
    layer = fused.FusedEmbeddingBagCollection(
        tables=tables_of([rows // FIELDS] * FIELDS, dim),
        optimizer_type=torch.optim.Adagrad,
        optimizer_kwargs={"lr": LR, "eps": EPS},
        device=torch.device("cpu"),
    )
    inputs = [keyed(one) for one in numbers]

    def look(batch: int) -> Tensor:
        return layer(inputs[batch]).values()

    return look, lambda: None


def tables_of(rows: Iterable[int], dim: int) -> list[Any]:
    """TorchRec's description of a table for each field."""
    config = extra("torchrec.modules.embedding_configs").EmbeddingBagConfig
    return [
        config(name=f"t{f}", embedding_dim=dim, num_embeddings=n, feature_names=[f"f{f}"])
        for f, n in enumerate(rows)
    ]


def keyed(numbers: np.ndarray) -> Any:
    """TorchRec's KeyedJaggedTensor of row numbers [B, fields, ids per field]."""
    indices, _, lengths = jagged(numbers)
    keys = [f"f{f}" for f in range(numbers.shape[1])]
    made = extra("torchrec.sparse.jagged_tensor").KeyedJaggedTensor
    return made(keys=keys, values=indices, lengths=lengths)


def jagged(numbers: np.ndarray) -> tuple[Tensor, Tensor, Tensor]:
    """Indices, offsets and lengths, all samples of a field side by side."""
    size, fields, bag = numbers.shape
    indices = torch.from_numpy(np.ascontiguousarray(numbers.transpose(1, 0, 2)).ravel())
    offsets = torch.arange(0, size * fields * bag + 1, bag)
    return indices, offsets, torch.full((size * fields,), bag, dtype=torch.long)


def extra(module: str) -> Any:
    """A module of the extra `bench`; raises ValueError that says how to install it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ValueError(
            f"bench-peers needs {module.split('.')[0]}, which is not installed ({error}): {EXTRA}"
        ) from error


CPU = torch.device("cpu")


@dataclass(slots=True)
class PipelineBatch:
    """What the pipeline hands on."""

    dense: Tensor
    sparse: Any
    """KeyedJaggedTensor"""
    labels: Tensor

    def to(self, device: torch.device, non_blocking: bool = False) -> PipelineBatch:
        """It lies where it is needed."""
        return self

    def record_stream(self, stream: object) -> None:
        """A CPU has one."""


class _Whole(nn.Module):
    def __init__(self, tables: nn.Module, network: nn.Module) -> None:
        super().__init__()
        self.tables = tables
        self.network = network

    def forward(self, batch: PipelineBatch) -> tuple[Tensor, Tensor]:
        pooled = self.tables(batch.sparse).values()
        logits = self.network(batch.dense, Embeddings(pooled, {}, {}))
        loss = binary_cross_entropy_with_logits(logits, batch.labels)
        return loss, loss.detach()


def batches_of(
    numbers: Iterable[np.ndarray], dense: Iterable[Tensor], labels: Iterable[Tensor]
) -> list[PipelineBatch]:
    """From row numbers [B, fields, ids per field] and the rest of each batch."""
    extra("torchrec.streamable").Pipelineable.register(PipelineBatch)
    parts = zip(dense, map(keyed, numbers), labels, strict=True)
    return [PipelineBatch(*part) for part in parts]


class SemiSync:
    """The pipeline over one process: tables with Adagrad in backward, the network as given."""

    def __init__(
        self,
        network: nn.Module,
        optimizer: torch.optim.Optimizer,
        rows: list[int],
        dim: int,
        initial: Tensor | None = None,
    ) -> None:
        """``rows``: of each table; ``initial``: of all tables together, else small random values.

        Starts a process group of one process where there is none.
        """
        # TorchRec is imported late: few have it.
        modules = extra("torchrec.modules.embedding_modules")
        in_backward = extra("torchrec.optim.apply_optimizer_in_backward")
        parallel = extra("torchrec.distributed.model_parallel")
        plans = extra("torchrec.distributed.sharding_plan")
        types = extra("torchrec.distributed.types")
        sharder = extra("torchrec.distributed.embeddingbag").EmbeddingBagCollectionSharder()
        if not dist.is_initialized():
            os.environ.setdefault("LOCAL_RANK", "0")
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

        # Adagrad runs inside backward, as TorchRec advises.
        tables = modules.EmbeddingBagCollection(tables=tables_of(rows, dim), device=CPU)
        in_backward.apply_optimizer_in_backward(
            torch.optim.Adagrad, tables.parameters(), {"lr": LR, "eps": EPS}
        )

        # All tables on one process; the planner's own choice would not know Adagrad.
        whole_tables = {f"t{f}": plans.table_wise(rank=0) for f in range(len(rows))}
        plan = plans.construct_module_sharding_plan(
            tables, whole_tables, sharder=sharder, local_size=1, world_size=1, device_type="cpu"
        )
        model = parallel.DistributedModelParallel(
            _Whole(tables, network),
            device=CPU,
            sharders=[sharder],
            plan=types.ShardingPlan({"tables": plan}),  # the planner's own: tables without Adagrad
            init_data_parallel=False,  # one process has nobody to average with
        )
        with torch.no_grad():  # sharded tables begin anew
            start = 0
            state = model.state_dict()
            for f, n in enumerate(rows):
                shard = state[f"tables.embedding_bags.t{f}.weight"].local_shards()[0].tensor
                if initial is None:
                    shard.uniform_(-0.01, 0.01)
                else:
                    shard.copy_(initial[start : start + n])
                start += n
        self._pipeline = _pipeline_class()(model, optimizer, CPU, start_batch=0)

    def steps(self, batches: Iterator[PipelineBatch], count: int) -> list[float]:
        """The losses of ``count`` more steps, or of fewer where the batches end."""
        losses = []
        with _without_streams():
            for _ in range(count):
                try:
                    losses.append(float(self._pipeline.progress(batches)))
                except StopIteration:
                    break
        return losses

    def close(self) -> None:
        """Leave the process group, so that another may begin."""
        if dist.is_initialized():
            dist.destroy_process_group()


def _pipeline_class() -> Any:
    forwards = extra("torchrec.distributed.train_pipeline.runtime_forwards")
    pipelines = extra("torchrec.distributed.train_pipeline.train_pipelines")

    class OnCpu(forwards.EmbeddingPipelinedForward):  # type: ignore[misc]
        def __init__(self, *given: Any, **named: Any) -> None:
            super().__init__(*given, **named)
            self._device = CPU

    class SemiSyncOnCpu(pipelines.TrainPipelineSemiSync):  # type: ignore[misc]
        _pipelined_forward_type = OnCpu

    return SemiSyncOnCpu


@contextmanager
def _without_streams() -> Iterator[None]:
    """Memory of a CPU belongs to no stream."""
    Tensor.record_stream = lambda self, stream: None  # type: ignore[method-assign]
    try:
        yield
    finally:
        del Tensor.record_stream  # that of the base class shows again
