"""Training systems that keep tables on the GPUs, and what kernels and links reach of their rates.

`FITTED` holds every fitted constant: what `persia-experiments fit` found, and where it started.
"""

from __future__ import annotations

from dataclasses import dataclass

from persia_sim.model.machine import Reach
from persia_sim.sharded.plan import Pipeline, Software, Strategy


@dataclass(frozen=True, slots=True)
class Constant:
    """One fitted constant."""

    value: float
    """What the fit found."""
    start: float
    """Where it started: what a document or an assumption says."""
    width: float
    """Standard deviation of the logarithm of the start: how far it is trusted."""
    is_share: bool = False
    """At most 1."""
    points: str = ""
    """The published points that narrow it, or that none does, where somebody looked."""


FITTED = {
    "reach.fp32": Constant(0.7864, 0.72, 0.1, True),
    "reach.tf32": Constant(0.4906, 0.5, 0.2, True),
    "reach.fp16": Constant(0.5524, 0.5, 0.2, True),
    "reach.hbm": Constant(0.8055, 0.8, 0.1, True),
    "reach.switch": Constant(0.7769, 0.7, 0.2, True),
    "reach.mesh": Constant(0.8503, 0.85, 0.1, True),
    "reach.pairs": Constant(0.1451, 0.15, 0.3, True),
    "reach.pcie": Constant(0.75, 0.75, 0.2, True),
    "reach.nic": Constant(0.8695, 0.85, 0.1, True),
    "reach.activation_passes": Constant(3.247, 4.0, 0.5),
    "hugectr.gpu_s": Constant(0.0002151, 0.4e-3, 0.5),
    "hugectr.id_bytes": Constant(61.08, 64.0, 1.0),
    "hugectr.exposed": Constant(0.5016, 0.5, 0.5, True),
    "hugectr-v07.gpu_s": Constant(0.001439, 1.2e-3, 0.5),
    "hugectr-2.host_s": Constant(0.001027, 1e-3, 0.5),
    "hugectr-2.host_multi_s": Constant(0.003318, 5e-3, 1.0),
    "torchrec.host_s": Constant(0.004817, 6e-3, 0.5),
    "tf2.host_reading_s": Constant(0.00223, 2e-3, 0.7),
    "tf2.host_per_table_s": Constant(5.075e-05, 80e-6, 0.5),
    "tf2.host_multi_s": Constant(0.0009409, 1e-3, 0.7),
    "tf2.exposed": Constant(0.6009, 0.7, 0.5, True),
    "tf2.id_bytes": Constant(2595, 1024.0, 1.0),
    "torch.id_bytes": Constant(9131, 4096.0, 1.0),
    "torch-graphs.gpu_s": Constant(0.001784, 1.5e-3, 0.5),
    "oneflow.host_s": Constant(0.001299, 1.6e-3, 0.5),
    "oneflow.host_multi_s": Constant(0.00474, 6e-3, 0.5),
    "oneflow.id_bytes": Constant(820.4, 1024.0, 1.0),
}
"""By owner and field. What stands in no line here is assumed, and its owner's `source` says so."""

BAND_LN = 0.34
"""Half width of the 90 % band of a predicted rate, in its logarithm: the 90 % point of the errors
where whole classes were left out of the fit, as `experiments fit` prints it."""


def _fitted(owner: str) -> dict[str, float]:
    """The fitted fields of one owner."""
    parts = {name: name.rpartition(".") for name in FITTED}
    return {what: FITTED[name].value for name, (who, _, what) in parts.items() if who == owner}


REACH = Reach(
    **_fitted("reach"),
    tcp=0.6,
    host=0.8,
    uvm=0.1,
    intra_latency_s=1.9e-6,
    inter_latency_s=4e-6,
    source="fitted to published steps on V100 to B200; tcp, host and uvm assumed (page faults take "
    "a row over the bus down to a tenth); hops: NCCL's own table (its protocol LL128 round a ring)",
)


def _software(name: str, source: str, **fields: object) -> Software:
    chosen: dict[str, object] = {"host_s": 0.0, "id_bytes": 512.0} | fields | _fitted(name)
    return Software(name=name, source=source, **chosen)  # type: ignore[arg-type]


_MLPERF = "HugeCTR in MLPerf training"
_PLAN = "hot and small tables replicated, threshold of rows assumed"

SOFTWARE = {
    software.name: software
    for software in (
        _software(
            "hugectr",
            f"{_MLPERF} 1.0 to 5.1: graphs, fused kernels; {_PLAN}",
            graphs=True,
            replicate_rows=3e3,
            planned_id_bytes=64.0,
        ),
        _software(
            "hugectr-v07",
            f"{_MLPERF} 0.7, its first round; all but gpu_s as later",
            graphs=True,
            replicate_rows=3e3,
            planned_id_bytes=64.0,
            id_bytes=FITTED["hugectr.id_bytes"].value,
            exposed=FITTED["hugectr.exposed"].value,
        ),
        _software(
            "hugectr-2",
            "HugeCTR 2.2 (2020), Wide & Deep; rows over all GPUs",
            strategy=Strategy.ROW,
            pipeline=Pipeline.BASE,
        ),
        _software(
            "torchrec",
            "TorchRec with FBGEMM's fused tables, eager; cost of an id and of collectives assumed",
            host_multi_s=1e-3,
            id_bytes=256.0,
        ),
        _software(
            "tf2",
            "TensorFlow 2 with Horovod, SOK or distributed-embeddings; SGD scatters its gradients",
            host_s=0.2e-3,
            planned_id_bytes=2048.0,
            sgd_sorts=False,
        ),
        _software(
            "torch",
            "PyTorch with tables split by hand, eager; host as TorchRec, assumed",
            host_s=8e-3,
            host_multi_s=1e-3,
        ),
        _software("torch-graphs", "the same with CUDA graphs; cost of an id assumed", graphs=True),
        _software(
            "oneflow",
            "OneFlow 0.2 (2020): columns over all GPUs, every GPU sees all ids",
            strategy=Strategy.COLUMN,
        ),
    )
}
"""By name."""
