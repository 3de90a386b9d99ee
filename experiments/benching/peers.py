"""The peers' embedding layers on workload `wide`: FBGEMM TBE, TorchRec fused, torch sparse.

Each gets its ids as row numbers in its own layout, made before the clock starts; ours gets raw ids.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from experiments.benching.wide import FIELDS
from runtime.data.batch import Batch
from runtime.data.ids import hash_integers, tag

LR, EPS = 0.05, 1e-10
Look = Callable[[int], Tensor]
"""From the number of a batch to its pooled vectors [B, fields * dim], with gradients enabled."""
EXTRA = 'pip install -e ".[bench]" && pip install --no-deps torchrec==1.8.0'


def row_numbers(batches: tuple[Batch, ...], rows: int) -> list[np.ndarray]:
    """Per batch the row number of each id in its field's table, [B, fields, ids per field].

    The order of hashed ids is a permutation of the ranks, so hot rows are spread over the table.
    """
    values = rows // FIELDS
    known = [np.sort(tag(f, hash_integers(np.arange(values)))) for f in range(FIELDS)]
    numbers = []
    for batch in batches:
        ids = batch.ids.reshape(batch.size, FIELDS, -1)
        found = [np.searchsorted(known[f], ids[:, f]) for f in range(FIELDS)]
        numbers.append(np.stack(found, axis=1))
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

    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return look, step


def fbgemm_tbe(numbers: list[np.ndarray], rows: int, dim: int) -> tuple[Look, Callable[[], None]]:
    """FBGEMM's table-batched embeddings with exact Adagrad; the update runs inside backward."""
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
    inputs = [jagged(n) for n in numbers]

    def look(batch: int) -> Tensor:
        indices, offsets, _ = inputs[batch]
        pooled: Tensor = layer(indices, offsets)
        return pooled

    return look, lambda: None


def torchrec_fused(
    numbers: list[np.ndarray], rows: int, dim: int
) -> tuple[Look, Callable[[], None]]:
    """TorchRec's FusedEmbeddingBagCollection with Adagrad on a KeyedJaggedTensor."""
    fused = extra("torchrec.modules.fused_embedding_modules")
    configs = extra("torchrec.modules.embedding_configs")
    sparse = extra("torchrec.sparse.jagged_tensor")
    keys = [f"f{f}" for f in range(FIELDS)]
    layer = fused.FusedEmbeddingBagCollection(
        tables=[
            configs.EmbeddingBagConfig(
                name=f"t{key}",
                embedding_dim=dim,
                num_embeddings=rows // FIELDS,
                feature_names=[key],
            )
            for key in keys
        ],
        optimizer_type=torch.optim.Adagrad,
        optimizer_kwargs={"lr": LR, "eps": EPS},
        device=torch.device("cpu"),
    )
    inputs = []
    for one in numbers:
        indices, _, lengths = jagged(one)
        inputs.append(sparse.KeyedJaggedTensor(keys=keys, values=indices, lengths=lengths))

    def look(batch: int) -> Tensor:
        pooled: Tensor = layer(inputs[batch]).values()
        return pooled

    return look, lambda: None


def jagged(numbers: np.ndarray) -> tuple[Tensor, Tensor, Tensor]:
    """Indices, offsets and lengths, all samples of a field side by side."""
    size, fields, bag = numbers.shape
    indices = torch.from_numpy(np.ascontiguousarray(numbers.transpose(1, 0, 2)).ravel())
    offsets = torch.arange(0, size * fields * bag + 1, bag)
    return indices, offsets, torch.full((size * fields,), bag, dtype=torch.long)


def extra(module: str) -> Any:
    """A module of the extra `bench`; raises ValueError that says how to install it."""
    import importlib

    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ValueError(
            f"bench-peers needs {module.split('.')[0]}, which is not installed ({error}): {EXTRA}"
        ) from error
