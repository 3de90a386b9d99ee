"""Models for tables on the GPUs: MLPerf's, and any workload of the simulator seen that way."""

from __future__ import annotations

from functools import cache

from persia_sim.model.workload import Workload
from persia_sim.sharded.tables import Ranker, RowUpdate, Table

_RULES = "rules and reference code of MLPerf training; multiplications derived from its layers"

_CRITEO = (
    (39884406, 1), (39043, 1), (17289, 1), (7420, 1), (20263, 1), (3, 1), (7120, 1), (1543, 1),
    (63, 1), (38532951, 1), (2953546, 1), (403346, 1), (10, 1), (2208, 1), (11938, 1), (155, 1),
    (4, 1), (976, 1), (14, 1), (39979771, 1), (25641295, 1), (39664984, 1), (585935, 1),
    (12972, 1), (108, 1), (36, 1),
)  # fmt: skip
"""Rows and ids a sample of each table of DLRM."""
_MULTI_HOT = (3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1)
"""Ids a sample of each table of DLRM-DCNv2."""


@cache
def rankers() -> dict[str, Ranker]:
    """By name."""
    multi_hot = zip(_CRITEO, _MULTI_HOT, strict=True)
    return {
        "dlrm": Ranker(
            name="dlrm",
            tables=tuple(Table(rows=rows, dim=128) for rows, _ in _CRITEO),
            dense_macs=2_458_496,
            dense_params=2_368_897,
            source=_RULES,
        ),
        "dlrm-dcnv2": Ranker(
            name="dlrm-dcnv2",
            tables=tuple(
                # Tables end at 40 million rows; but for the first id of a sample, ids are uniform.
                Table(
                    rows=40_000_000 if rows > 25e6 else rows,
                    dim=128,
                    ids_per_sample=(float(ids),),
                    zipf=1.05 if ids == 1 else 0.0,
                )
                for (rows, _), ids in multi_hot
            ),
            dense_macs=16_030_464,
            dense_params=16_042_832,
            update=RowUpdate.ADAGRAD,
            source=f"{_RULES}; rows of small tables as DLRM's",
        ),
    }


def ranker_of(workload: Workload, update: RowUpdate = RowUpdate.ROWWISE_ADAGRAD) -> Ranker:
    """The same data and network with its tables on GPUs: one table a field, all alike.

    Rows and dims are the workload's, so that modes of both kinds answer the same question.
    """
    table = Table(
        rows=workload.rows / workload.fields,
        dim=workload.dim,
        ids_per_sample=(workload.ids_per_field,),
        count=workload.fields,
        zipf=workload.zipf,
    )
    return Ranker(
        name=workload.name,
        tables=(table,),
        dense_macs=workload.dense_params,
        dense_params=workload.dense_params,
        dense_features=workload.dense_features,
        update=update,
        source=f"{workload.source}; seen as tables on GPUs",
    )
