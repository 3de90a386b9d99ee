"""Training systems that keep tables on the GPUs, and what kernels and links reach of their rates.

`FITTED` holds every fitted constant: what `persia-experiments fit` found, and where it started.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log

from persia_sim.model.machine import Reach
from persia_sim.sharded.plan import Pipeline, Software, Strategy
from persia_sim.sharded.stages import Job


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
    "reach.fp32": Constant(0.7916, 0.72, 0.1, True),
    "reach.tf32": Constant(0.4991, 0.5, 0.2, True),
    "reach.fp16": Constant(0.5205, 0.5, 0.2, True),
    "reach.hbm": Constant(0.812, 0.8, 0.1, True),
    "reach.switch": Constant(0.7776, 0.7, 0.2, True),
    "reach.mesh": Constant(0.8505, 0.85, 0.1, True),
    "reach.pairs": Constant(0.1558, 0.15, 0.3, True),
    "reach.pcie": Constant(0.75, 0.75, 0.2, True),
    "reach.nic": Constant(0.8604, 0.85, 0.1, True),
    "reach.activation_passes": Constant(3.777, 4.0, 0.5),
    "hugectr.gpu_s": Constant(0.0002582, 0.4e-3, 0.5),
    "hugectr.id_s": Constant(3.106e-11, 4e-11, 1.0),
    "hugectr.exposed": Constant(0.4948, 0.5, 0.5, True),
    "hugectr-v07.gpu_s": Constant(0.001356, 1.2e-3, 0.5),
    "hugectr-2.host_s": Constant(0.0009975, 1e-3, 0.5),
    "hugectr-2.host_multi_s": Constant(0.002933, 5e-3, 1.0),
    "torchrec.host_s": Constant(0.004815, 6e-3, 0.5),
    "tf2.host_reading_s": Constant(0.002482, 2e-3, 0.7),
    "tf2.host_per_table_s": Constant(5.831e-5, 80e-6, 0.5),
    "tf2.host_multi_s": Constant(0.001032, 1e-3, 0.7),
    "tf2.exposed": Constant(0.6111, 0.7, 0.5, True),
    "torch-graphs.gpu_s": Constant(0.00207, 1.5e-3, 0.5),
    "oneflow.host_s": Constant(0.001283, 1.6e-3, 0.5),
    "oneflow.host_multi_s": Constant(0.004643, 6e-3, 0.5),
    "sort.id_s": Constant(1.51e-9, 1e-9, 1.0),
}
"""By owner and field. What stands in no line here is assumed, and its owner's `source` says so."""

BAND_LN = 0.3
"""Half width of the 90 % band of a predicted rate, in its logarithm: the 90 % point of the errors
where whole classes were left out of the fit, as `experiments fit` prints it."""
BAND_UNLIKE_LN = 0.51
"""The same of the points in `experiments/published/gpu`, which no fit has seen: their models are
unlike those that their software was fitted to, or every GPU holds all tables."""
_DLRM, _DCNV2, _WIDE_AND_DEEP = (2.5e6, 26), (16e6, 214), (6.7e6, 28)
_MODELS = {
    "hugectr": (_DLRM, _DCNV2), "hugectr-v07": (_DLRM,), "hugectr-2": (_WIDE_AND_DEEP,),
    "torchrec": (_DLRM,), "tf2": (_DLRM, (0.21e6, 85), (3.2e6, 1611)), "torch": (_DLRM,),
    "torch-graphs": (_DLRM,), "oneflow": ((1.5e6, 28), _WIDE_AND_DEEP),
}  # fmt: skip
"""Software -> multiplications and ids of a sample of the models that it was fitted to."""


def holders(owner: str) -> tuple[str, ...]:
    """Whose field an owner's constant is: its own, or that of all whose ids a library sorts, which
    takes as long on V100 as on A100, whose memories differ by 1.8."""
    return ("tf2", "torch", "oneflow") if owner == "sort" else (owner,)


def _fitted(holder: str) -> dict[str, float]:
    """The fitted fields of one of them."""
    parts = {name: name.rpartition(".") for name in FITTED}
    mine = {name: what for name, (who, _, what) in parts.items() if holder in holders(who)}
    return {what: FITTED[name].value for name, what in mine.items()}


REACH = Reach(
    **_fitted("reach"), tcp=0.6, host=0.8, uvm=0.1, intra_latency_s=1.9e-6, inter_latency_s=4e-6,
    source="fitted to published steps on V100 to B200; tcp, host and uvm assumed (page faults take "
    "a row over the bus down to a tenth); hops: NCCL's own table (its protocol LL128 round a ring)",
)  # fmt: skip


def _software(name: str, source: str, **fields: object) -> Software:
    chosen: dict[str, object] = {"host_s": 0.0, "id_s": 0.0} | fields | _fitted(name)
    return Software(name=name, source=source, **chosen)  # type: ignore[arg-type]


_MLPERF = "HugeCTR in MLPerf training"
_PLAN = "hot and small tables replicated, threshold of rows assumed"

_HUGECTR = {"graphs": True, "replicate_rows": 3e3, "planned_id_bytes": 64.0}
_ALL = (
    _software(
        "hugectr", f"{_MLPERF} 1.0 to 5.1: graphs, fused kernels; {_PLAN}", **_HUGECTR
    ),
    _software(
        "hugectr-v07", f"{_MLPERF} 0.7, its first round; all but gpu_s as later", **_HUGECTR,
        id_s=FITTED["hugectr.id_s"].value, exposed=FITTED["hugectr.exposed"].value,
    ),
    _software(
        "hugectr-2", "HugeCTR 2.2 (2020), Wide & Deep; rows over all GPUs; cost of an id assumed",
        id_s=0.7e-9, strategy=Strategy.ROW, pipeline=Pipeline.BASE,
    ),
    _software(
        "torchrec",
        "TorchRec with FBGEMM's fused tables, eager; cost of an id and of collectives assumed",
        host_multi_s=1e-3, id_s=0.2e-9,
    ),
    _software(
        "tf2", "TensorFlow 2: Horovod, SOK or distributed-embeddings; SGD scatters; host_s assumed",
        host_s=0.2e-3, sparse_gradients=True, planned_id_bytes=2048.0, sgd_sorts=False,
    ),
    _software(
        "torch", "PyTorch with tables split by hand, eager; host as TorchRec, assumed",
        host_s=FITTED["torchrec.host_s"].value, host_multi_s=1e-3,
    ),
    _software("torch-graphs", "torch in CUDA graphs; id_s assumed", graphs=True, id_s=0.4e-9),
    _software(
        "oneflow", "OneFlow 0.2 (2020): columns over all GPUs, every GPU sees all ids",
        strategy=Strategy.COLUMN,
    ),
)  # fmt: skip

SOFTWARE = {software.name: software for software in _ALL}
"""By name."""


def band_ln(job: Job) -> float:
    """Half width of the 90 % band of a predicted rate, in its logarithm: wider where nobody
    measured this software with such a model, or with its tables dealt in this way."""
    soft, ranker = job.software, job.ranker
    usual = soft.name in SOFTWARE and SOFTWARE[soft.name].strategy is soft.strategy
    like = any(
        max(abs(log(ranker.dense_macs / macs)), abs(log(ranker.ids / ids))) <= log(2)  # by a factor
        for macs, ids in _MODELS.get(soft.name, ())
    )
    return BAND_LN if usual and like else BAND_UNLIKE_LN
