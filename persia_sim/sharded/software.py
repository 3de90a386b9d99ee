"""Training systems that keep tables on the GPUs, and how far a prediction made of these is off.

A system that nobody measured takes the fitted constants of its kind.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from math import exp, log, sqrt
from statistics import median, pstdev
from typing import Any

from persia_sim.base.rules import counted
from persia_sim.cluster.machine import Fabric, Host, Reach
from persia_sim.presets.fitted import FITTED, REACH, fitted_fields, holders
from persia_sim.sharded.plan import HostTime, Keys, Software, Strategy
from persia_sim.sharded.stages import Job, step_s


def applied(values: Mapping[str, float]) -> tuple[Reach, dict[str, Software]]:
    """The presets with other values of constants of `FITTED`; a constant of one system stands
    behind that of its kind, and overrides it."""
    reach = REACH
    software = dict(SOFTWARE)
    for name, value in values.items():
        owner, _, what = name.rpartition(".")
        changed: dict[str, Any] = {what: value}
        if owner == "reach":
            reach = replace(reach, **changed)
        else:
            for holder in holders(owner):
                software[holder] = replace(software[holder], **changed)
    return reach, software


def _software(name: str, source: str, **fields: object) -> Software:
    usual: dict[str, object] = {"launch_s": 0.0, "id_s": 0.0}
    usual["replay_s"] = FITTED["graphs.replay_s"].value  # of a GPU, whatever launches
    chosen = usual | fields | fitted_fields(name)
    return Software(name=name, source=source, **chosen)  # type: ignore[arg-type]


_PLAN = "hot and small tables replicated, threshold of rows assumed"
_GRAPHS = {"host_time": HostTime.HIDDEN}
_MLPERF = _GRAPHS | {"replicate_rows": 3e3, "planned_id_bytes": 64.0, "id_s": 4e-11}
_TENSORFLOW = {
    "sparse_gradients": True,
    "planned_id_bytes": 2048.0,
    "sgd_sorts": False,
    "fused_tables": False,
    "table_kernels": 3.0,
    "casts": True,
}
_ALL = (
    _software(
        "hugectr", "HugeCTR as submitted to MLPerf: graphs, layers of fused kernels; cost of an id "
        f"assumed; {_PLAN}",
        versions="MLPerf 1.0 to 5.1", layer_kernels=4.0, **_MLPERF,
    ),
    _software(
        "hugectr-v07", "HugeCTR in its first round: layers of fused kernels, replayed, and tables "
        "launched by a thread for each GPU; 7 FusedInnerProduct, 1 Cast: mlcommons/"
        "training_results_v0.7 NVIDIA/benchmarks/dlrm/implementations/hugectr/"
        "mlperf_fp16_dgxa100.json; NVIDIA-Merlin/HugeCTR v2.1_a100_update HugeCTR/src/"
        "network.cu:76, HugeCTR/include/embeddings/localized_slot_sparse_embedding_one_hot.hpp:586"
        f"; cost of an id assumed; {_PLAN}",
        versions="MLPerf 0.7", layer_kernels=4.0, layers_replayed=True,
        **_MLPERF | {"host_time": HostTime.EXPOSED},
    ),
    _software(
        "hugectr-2", "HugeCTR 2.2.1, Wide & Deep: slots dealt to GPUs, the wide part in rows; one "
        "thread launches all tables of a machine, one for each GPU its layers; NVIDIA-Merlin/"
        "HugeCTR v2.2.1 HugeCTR/include/embeddings/localized_slot_sparse_embedding_hash.hpp:244,368"
        " and distributed_slot_sparse_embedding_hash.hpp:172,231, HugeCTR/src/embeddings/"
        "backward_functor.cu:184,218 and update_params_functor.cu:566 (a GPU's sort is waited for),"
        " HugeCTR/src/session.cpp:227, HugeCTR/src/parser.cpp:477 (Dropout: no graph); keys and "
        "offsets come from the host meanwhile: HugeCTR/include/data_reader.hpp:195, HugeCTR/include"
        "/data_readers/data_reader_worker.hpp:186, HugeCTR/src/session.cpp:226; slots: "
        "Oneflow-Inc/DLPerf b4ab820 HugeCTR/scripts/gen_hugectr_conf_json.py:53",
        versions="2.0 to 3.0", strategy=Strategy.SLOT, keys=Keys.DEALT, tables_by_one_thread=True,
    ),
    _software(
        "hugectr-3", "HugeCTR outside MLPerf: layers replayed, tables launched by a thread for "
        "each GPU, in rows, all keys on every GPU; NVIDIA-Merlin/HugeCTR v3.2 HugeCTR/pybind/"
        "model.cpp:1331, HugeCTR/include/embeddings/localized_slot_sparse_embedding_hash.hpp:235,"
        "365, HugeCTR/pybind/solver_wrapper.hpp:126 (graphs), HugeCTR/src/data_readers/"
        "data_collector.cu:76 and HugeCTR/include/embedding.hpp:75 (keys); v25.03.00 HugeCTR/src/"
        "pybind/model_pipeline.cpp:461; rows: Oneflow-Inc/DLPerf c89430b HugeCTR/wdl/scripts/"
        "wdl.py:30,37", versions="3.1 on", strategy=Strategy.ROW, keys=Keys.TO_ALL,
        layers_replayed=True,
    ),
    _software(
        "torchrec", "TorchRec with FBGEMM's fused tables, eager; cost of an id assumed",
        versions="0.1 on (2022)", id_s=0.2e-9, casts=True,
    ),
    _software(
        "tf2", "embedding libraries on TensorFlow 2 with XLA: Horovod hybrid-parallel, SOK, "
        "distributed-embeddings; SGD scatters; kernels of a table assumed",
        versions="2.3 on", **_TENSORFLOW,
    ),
    _software(
        "tf2-plain", "TensorFlow 2 without XLA: elementwise layers are not fused; else as tf2",
        versions="2.3 on", **_TENSORFLOW,
    ),
    _software(
        "tf2-copies", "TensorFlow 2 with Horovod, a copy of all tables on every GPU: its host "
        "takes longer than the GPUs, whatever XLA does", versions="2.3 on", **_TENSORFLOW,
        strategy=Strategy.DATA_PARALLEL,
    ),
    _software(
        "torch", "PyTorch, eager: a lookup for each table, split by hand",
        versions="1.0 on", fused_tables=False, casts=True,
    ),
    _software(
        "torch-fused", "PyTorch, eager, as first submitted to MLPerf: layers of fused kernels, one "
        "joint table; cost of an id assumed",
        versions="MLPerf 0.7", layer_kernels=4.0, id_s=0.4e-9,
    ),
    _software(
        "torch-graphs", "the same in CUDA graphs; cost of an id assumed",
        versions="MLPerf 1.0 on", **_GRAPHS, layer_kernels=4.0, id_s=0.4e-9,
    ),
    _software(
        "oneflow", "OneFlow (2020): columns over all GPUs, every GPU sees all ids; a thread for "
        "each GPU and kind of work, one call for the collectives of a process: Oneflow-Inc/oneflow "
        "b16a8d42f (v0.2) oneflow/core/thread/thread_manager.cpp:42, oneflow/core/thread/"
        "gpu_thread.cpp:23, oneflow/core/job/id_manager.h:32, oneflow/core/job/"
        "collective_boxing_executor.cpp:581; what crosses nodes passes its host: fitted",
        versions="0.2", strategy=Strategy.COLUMN, host_time=HostTime.PARTLY,
        host_time_across=HostTime.EXPOSED,
    ),
    _software(
        "oneflow-v06", "OneFlow (2021): columns over all GPUs, every GPU sees all ids; a process "
        "a GPU: Oneflow-Inc/DLPerf c89430b OneFlow/ClickThroughRate/WideDeepLearning/scripts/"
        "bsz_x2.sh; Oneflow-Inc/oneflow 3c2e05d49 (v0.6.0) oneflow/core/thread/"
        "thread_manager.cpp:47; columns: Oneflow-Inc/models 62dfc401 RecommenderSystems/"
        "wide_and_deep/models/wide_and_deep.py:55,90; what crosses nodes as in its release 0.2",
        versions="0.5 to 0.7", strategy=Strategy.COLUMN,
        host_time=HostTime.PARTLY, host_time_across=HostTime.EXPOSED,
    ),
)  # fmt: skip

SOFTWARE = {software.name: software for software in _ALL}
"""By name."""
_WORD = re.compile("[a-z]+")


def is_named(title: str, name: str) -> bool:
    """Whether a title may mean a system: the first word of its name is in it.

    >>> [is_named("PyTorch 1.6", name) for name in ("torch-graphs", "torchrec")]
    [True, False]
    """
    words = _WORD.findall(title.lower().replace("tensorflow", "tf").replace("pytorch", "torch"))
    return _WORD.findall(name)[0] in words


def is_unknown(software: Software) -> bool:
    """Whether a title is all that is known of it: it was made by `guessed`."""
    return bool(software.unmeasured)


@dataclass(frozen=True, slots=True)
class Seen:
    """What was measured of one system."""

    models: tuple[tuple[float, float], ...]
    """Multiplications and ids of a sample of the models."""
    nodes: int
    """Most groups of GPUs that reach each other by NIC only."""
    copies: bool = False
    """Every GPU had a copy of all tables."""


_DLRM = (2.5e6, 26)
_DCNV2 = (16e6, 214)
_WIDE_AND_DEEP = (6.7e6, 28)
SEEN = {
    "hugectr": Seen((_DLRM, _DCNV2), 16), "hugectr-v07": Seen((_DLRM,), 1),
    "hugectr-2": Seen(((1.5e6, 28), _WIDE_AND_DEEP), 4), "torchrec": Seen((_DLRM,), 1),
    "tf2": Seen((_DLRM, (0.21e6, 85), (1.5e6, 377), (3.2e6, 1611), (12e6, 6312), (5.3e6, 26),
                 (9.3e6, 1000)), 16),
    "tf2-plain": Seen(((5.3e6, 26), (9.3e6, 1000)), 1),
    "tf2-copies": Seen(((5.3e6, 26),), 1, copies=True),
    "torch": Seen((_DLRM, (0.11e6, 4)), 1, copies=True),
    "torch-fused": Seen((_DLRM,), 1), "torch-graphs": Seen((_DLRM,), 1),
    "hugectr-3": Seen(((1.5e6, 28), _WIDE_AND_DEEP), 1),
    "oneflow": Seen(((1.5e6, 28), _WIDE_AND_DEEP), 4),
    "oneflow-v06": Seen(((1.5e6, 28), _WIDE_AND_DEEP), 1),
}  # fmt: skip
"""What was measured of each system, by its name."""
GENERATIONS = frozenset({"V100", "A100", "H100", "H200", "B200", "GB200"})
"""The generations of GPUs with NVLinks that ran such steps; GPUs alone in a machine need none."""


@dataclass(frozen=True, slots=True)
class Band:
    """How far a prediction is off beside what its constants leave open: standard deviations of the
    logarithm, each of what is new to the measurements."""

    known: float
    """Where nothing is."""
    software: float
    """A system that nobody measured, or dealt the tables out in this way, or of which a title alone
    is known: that beside what those that it may mean differ by."""
    model: float
    """A model unlike those that the system was measured with."""
    machine: float
    """GPUs, or a box of them without NVLinks: how its switches and sockets hang together."""
    nodes: float
    """More of them than the system was measured on."""


BAND = Band(known=0.15, software=0.22, model=0.2, machine=0.15, nodes=0.15)
"""Widths for which the bands hold most of what `persia-experiments predict-published --left-out`
left out, but no more than 95 %: of each software, machine, and software on a machine, and of whole
sources and software by titles alone."""
TRACED_LN = 0.18
"""Of a step whose constants come from a trace of the same program on one CPU core: with it the
bands hold 32 of 36 steps that were predicted before they ran (three programs at other batches,
widths of rows and layers, numbers of tables, 2026-11-29; the fastest of two runs each)."""
TRACED_RANKS_LN = 0.6
"""Of such a step on more ranks than the trace has: four steps of two processes on two cores took
1.5 to 2.7 times as long as predicted from one. It was never tried on GPUs."""
_BATCHES = 4.0
"""A batch is like that of a trace up to so many times as many samples, and as few."""
_SIDES = 1.645
"""Standard deviations of a normal law that leave 5 % on either side."""
_STEP = 0.05


def generation(host: Host, gpus: int) -> str:
    """The kind of machine: its GPU's generation, and whether several have no NVLinks.

    >>> from persia_sim.presets.catalogue import MACHINES
    >>> generation(MACHINES["p5.48xlarge"], 8), generation(MACHINES["g6.48xlarge"], 8)
    ('H100', 'L4 by PCIe')
    """
    match = re.match(r"[A-Za-z]*\d*", host.chip.name)
    boxed = host.fabric is Fabric.PCIE and gpus > 1
    return (match.group() if match else host.chip.name) + " by PCIe" * boxed


def strange(
    job: Job, seen: Mapping[str, Seen] = SEEN, generations: Iterable[str] = GENERATIONS
) -> dict[str, str]:
    """What of a job nobody measured, each a field of `Band`, in words."""
    soft = job.software
    ranker = job.ranker
    system = job.system
    traced = soft.traced
    measured = seen.get(soft.unmeasured or soft.name)
    if traced is not None:
        measured = Seen(((traced.dense_macs, traced.ids),), 1, copies=True)
    unmeasured = {}
    copies = soft.strategy is Strategy.DATA_PARALLEL and system.gpus > 1

    # The software, or the way in which it deals tables.
    if is_unknown(soft):
        unmeasured["software"] = f"{soft.name} is a title: taken for {soft.unmeasured}"
    elif measured is None:
        unmeasured["software"] = f"no measured step of {soft.name}"
    elif copies and not measured.copies:
        unmeasured["software"] = f"no measured step of {soft.name} with all tables on every GPU"

    # The model: its size within a factor of two of a measured one.
    like = any(
        max(abs(log(ranker.dense_macs / macs)), abs(log(ranker.ids / ids))) <= log(2)  # by a factor
        for macs, ids in (measured.models if measured else ())
    )
    if measured and not like:
        unmeasured["model"] = f"no measured step of {soft.name} with such a model"
    elif traced and abs(log(job.per_gpu / traced.batch_per_gpu)) > log(_BATCHES):
        unmeasured["model"] = f"no step of {soft.name} with such a batch in its trace"

    # The machine, and how many of them.
    machine = generation(system.host, system.gpus)
    known = machine in generations or not (system.gpus > 1 or measured is None)
    if traced is not None:
        machine = system.host.name
        known = machine == traced.machine
    if not known:
        unmeasured["machine"] = f"no measured step on {machine}"
    if traced and system.gpus > traced.gpus:
        unmeasured["nodes"] = f"the trace of {soft.name} has {counted(traced.gpus, 'rank')}"
    elif measured and system.nodes > measured.nodes:
        nodes = "one node" if measured.nodes == 1 else f"at most {measured.nodes} nodes"
        unmeasured["nodes"] = f"{soft.name} was measured on {nodes}"
    return unmeasured


def guessed(title: str, jobs: Iterable[Job], seen: Mapping[str, Seen] = SEEN) -> Job:
    """The job of a system of which a title alone is known: of ``jobs``, one by each system, that
    whose step is in the middle of those that it may be.

    It may be any that was measured with such a model and tables dealt so, if there is one; those
    that the title names count twice. Left-out steps were nearer so than where it may be these only.
    """
    jobs = list(jobs)
    may_be = [job for job in jobs if not {"software", "model"} & strange(job, seen).keys()] or jobs
    may_be += [job for job in may_be if is_named(title, job.software.name)]
    logs = [log(step_s(job)) for job in may_be]
    chosen = may_be[min(range(len(logs)), key=lambda k: abs(logs[k] - median(logs)))]
    taken = chosen.software
    soft = replace(taken, name=title, unmeasured=taken.name, guess_ln=pstdev(logs))
    return replace(chosen, software=soft)


def spreads_of(software: Software, spreads: Mapping[str, float]) -> dict[str, float]:
    """Field of a system -> how uncertain the logarithm of its constant is."""
    if software.traced is not None:
        return {}  # its steps say all of it together
    name = software.unmeasured or software.name
    fitted = name if name in SOFTWARE else "torch"  # somebody's own: as wide as one of ours
    by_field: dict[str, float] = {}
    for constant in FITTED:
        owner, _, field = constant.rpartition(".")
        if fitted in holders(owner):
            by_field[field] = spreads[constant]
    return by_field


def constants_ln(job: Job, spreads: Mapping[str, float]) -> float:
    """Standard deviation of the logarithm of a job's step that its constants leave open, and whose
    they are."""
    here = log(step_s(job))
    variance = job.software.guess_ln**2
    shorter = exp(-_STEP)  # downwards: a share may stand at its limit
    mine = {name.removeprefix("reach."): s for name, s in spreads.items() if name[:6] == "reach."}
    for field, spread in mine.items():
        reach = replace(job.reach, **{field: getattr(job.reach, field) * shorter})
        variance += ((here - log(step_s(replace(job, reach=reach)))) / _STEP * spread) ** 2
    for field, spread in spreads_of(job.software, spreads).items():
        soft = replace(job.software, **{field: getattr(job.software, field) * shorter})
        variance += ((here - log(step_s(replace(job, software=soft)))) / _STEP * spread) ** 2
    return sqrt(variance)


def band_ln(job: Job) -> float:
    """Half width of the 90 % band of a predicted rate, in its logarithm: from what the constants
    leave open, and from what of the job nobody measured."""
    spreads = {name: constant.spread for name, constant in FITTED.items()}
    return half_ln(constants_ln(job, spreads), strange(job), band_of(job))


def band_of(job: Job) -> Band:
    """The widths for a job: of one's own program the steps of its trace say how far they differ,
    and never less than what was found where traces were held against other steps."""
    traced = job.software.traced
    if traced is None:
        return BAND
    return replace(BAND, known=max(TRACED_LN, traced.spread), nodes=TRACED_RANKS_LN)


def half_ln(spread: float, new: Iterable[str], band: Band = BAND) -> float:
    """Half width of a 90 % band of a logarithm: of the constants' ``spread``, and of what is new,
    fields of `Band`."""
    beside = [band.known, *(getattr(band, each) for each in new)]
    return _SIDES * sqrt(spread**2 + sum(each**2 for each in beside))
