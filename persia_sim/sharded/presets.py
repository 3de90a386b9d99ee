"""Models whose tables are on GPUs, and what is read of a file for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from persia_sim.base.schema import fit
from persia_sim.cluster.tables import RowUpdate, Table
from persia_sim.cluster.workload import Workload
from persia_sim.presets.from_file import document_of, find, read_record, read_workload
from persia_sim.sharded.plan import Software
from persia_sim.sharded.ranker import Ranker
from persia_sim.sharded.software import SOFTWARE

_RULES = "rules and reference code of MLPerf training; multiplications derived from its layers"

_CRITEO = (
    39884406, 39043, 17289, 7420, 20263, 3, 7120, 1543, 63, 38532951, 2953546, 403346, 10, 2208,
    11938, 155, 4, 976, 14, 39979771, 25641295, 39664984, 585935, 12972, 108, 36,
)  # fmt: skip
"""Rows of each table of DLRM."""
_MULTI_HOT = (3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1)
"""Ids a sample of each table of DLRM-DCNv2."""


@cache
def rankers() -> dict[str, Ranker]:
    """The models with tables on GPUs, by name."""
    # Tables of DCNv2 end at 40 million rows; but for a sample's only id of one, ids are uniform.
    multi_hot = (
        Table(
            rows=40_000_000 if rows > 25e6 else rows,
            dim=128,
            ids_per_sample=(float(ids),),
            zipf=1.05 if ids == 1 else 0.0,
        )
        for rows, ids in zip(_CRITEO, _MULTI_HOT, strict=True)
    )
    return {
        "dlrm": Ranker(
            name="dlrm",
            tables=tuple(Table(rows=rows, dim=128) for rows in _CRITEO),
            dense_macs=2_458_496,
            dense_params=2_368_897,
            dense_layers=8,
            source=_RULES,
        ),
        "dlrm-dcnv2": Ranker(
            name="dlrm-dcnv2",
            tables=tuple(multi_hot),
            dense_macs=16_030_464,
            dense_params=16_042_832,
            dense_layers=14,
            update=RowUpdate.ADAGRAD,
            source=f"{_RULES}; rows of small tables as DLRM's",
        ),
    }


def ranker_of(workload: Workload) -> Ranker:
    """A workload's data and network with its tables on GPUs.

    Rows and dims are the workload's, so that modes of both kinds answer the same question.
    """
    return Ranker(
        name=workload.name,
        tables=workload.alike,
        dense_macs=workload.flops_per_sample / 6,
        dense_params=workload.weights,
        dense_widths=workload.widths,
        dense_layers=len(workload.mlp),
        dense_features=workload.dense_features,
        update=workload.update or RowUpdate.ROWWISE_ADAGRAD,
        source=f"{workload.source}; seen as tables on GPUs",
    )


def read_model(path: Path) -> Ranker | Workload:
    """A model whose tables are on GPUs, each with rows, dim, ids, skew and storage of its own; or a
    workload (its file says ``batch_per_rank``), which `ranker_of` sees that way."""
    document = document_of(path, "model")
    if ("tables" in document and "batch_per_rank" not in document) or str(
        document.get("base")
    ) in rankers():
        return read_record(Ranker, path, "model", rankers(), _made_of_layers)
    return read_workload(path)


def _made_of_layers(document: dict[str, Any], make: Callable[[], Ranker]) -> Ranker:
    """A model whose file says widths of layers (`mlp`, behind all pooled rows and dense features)
    instead of multiplications and weights."""
    if "mlp" not in document:
        return make()
    mlp = fit(document.pop("mlp"), tuple[int, ...], "mlp")
    document |= {"dense_macs": 1.0, "dense_params": 1.0}
    ranker = make()
    pairs = list(pairwise((ranker.pooled + ranker.dense_features, *mlp)))
    return replace(
        ranker,
        dense_macs=sum(a * b for a, b in pairs),
        dense_params=sum((a + 1) * b for a, b in pairs),
        dense_widths=ranker.pooled + sum(mlp),
        dense_layers=len(mlp),
    )


def find_software(name: str) -> Software:
    """A training system's own costs."""
    read = partial(read_record, Software, what="software", presets=SOFTWARE)
    return find(name, "--software", SOFTWARE, read)
