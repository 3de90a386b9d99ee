"""TorchRec's semi-synchronous pipeline on a CPU: rows one step late, as `hybrid --tau 1`.

The pipeline is made for GPUs. On a CPU two things stop it (torchrec 1.8.0): its forward asks CUDA
for the current stream, and tensors of a CPU refuse `record_stream`. Both are set right here; what
it computes stays its own.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from experiments.benching.peers import EPS, LR, extra, jagged
from runtime.models.inputs import Embeddings

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
        self.tables, self.network = tables, network

    def forward(self, batch: PipelineBatch) -> tuple[Tensor, Tensor]:
        pooled = self.tables(batch.sparse).values()
        logits = self.network(batch.dense, Embeddings(pooled, {}, {}))
        loss = binary_cross_entropy_with_logits(logits, batch.labels)
        return loss, loss.detach()


def batches_of(
    numbers: Iterable[np.ndarray], dense: Iterable[Tensor], labels: Iterable[Tensor]
) -> list[PipelineBatch]:
    """From row numbers [B, fields, ids per field] and the rest of each batch."""
    sparse = extra("torchrec.sparse.jagged_tensor")
    extra("torchrec.streamable").Pipelineable.register(PipelineBatch)
    made = []
    for one, inputs, wanted in zip(numbers, dense, labels, strict=True):
        indices, _, lengths = jagged(one)
        keys = [f"f{f}" for f in range(one.shape[1])]
        ids = sparse.KeyedJaggedTensor(keys=keys, values=indices, lengths=lengths)
        made.append(PipelineBatch(inputs, ids, wanted))
    return made


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
        modules = extra("torchrec.modules.embedding_modules")
        configs = extra("torchrec.modules.embedding_configs")
        in_backward = extra("torchrec.optim.apply_optimizer_in_backward")
        parallel = extra("torchrec.distributed.model_parallel")
        plans = extra("torchrec.distributed.sharding_plan")
        types = extra("torchrec.distributed.types")
        sharder = extra("torchrec.distributed.embeddingbag").EmbeddingBagCollectionSharder()
        _alone()
        tables = modules.EmbeddingBagCollection(
            tables=[
                configs.EmbeddingBagConfig(
                    name=f"t{f}", embedding_dim=dim, num_embeddings=n, feature_names=[f"f{f}"]
                )
                for f, n in enumerate(rows)
            ],
            device=CPU,
        )
        in_backward.apply_optimizer_in_backward(
            torch.optim.Adagrad, tables.parameters(), {"lr": LR, "eps": EPS}
        )
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
            start, state = 0, model.state_dict()
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
        import torch.distributed as dist

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


def _alone() -> None:
    import torch.distributed as dist

    if not dist.is_initialized():
        os.environ.setdefault("LOCAL_RANK", "0")
        store = dist.HashStore()
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
