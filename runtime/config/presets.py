"""What others run, by name: each a few options of the group `sync`, with its source.

A preset says when rows and dense weights are read and written, nothing else: data, network,
optimisers and ranks are those of the run. Where the original has no bound in steps, the concurrent
executor has what the original has, and the lag executor, which reaches a bound exactly, a number
that stands for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

from persia_sim.words.vocabulary import Mode
from runtime.config.sync import SyncConfig
from runtime.config.train import TrainConfig

PresetName = Literal[
    "torchrec-semisync",
    "torchrec-semisync-stash",
    "tfra-half-sync",
    "ascend-prefetch6",
    "deeprec-async",
    "persia-default",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """Options of the group `sync`, and where they are from."""

    says: str
    """What is late in it."""
    source: str
    sync: Mapping[str, Any]
    lag: Mapping[str, Any] = field(default_factory=dict)
    """What takes their place in the lag executor."""
    stands_for: str = ""
    """Why that does."""


_SEMISYNC = {"mode": Mode.HYBRID, "tau": 1, "sync_steps": 900}
_TORCHREC = "TorchRec, TrainPipelineSemiSync: start_batch=900 and stash_gradients, by default off"

PRESETS: Mapping[PresetName, Preset] = {
    "torchrec-semisync": Preset(
        says="rows one step late behind a synchronous start of 900 steps, dense weights fresh",
        source=f"{_TORCHREC} (train_pipelines.py, 1.8.0)",
        sync=_SEMISYNC,
    ),
    "torchrec-semisync-stash": Preset(
        says="rows one step late behind a synchronous start of 900 steps, dense weights one step"
        " late from the first on",
        source=f"{_TORCHREC}, here on (train_pipelines.py, 1.8.0); there it begins with the late"
        " rows, here with the run",
        sync=_SEMISYNC | {"dense_lag": 1},
    ),
    "tfra-half-sync": Preset(
        says="dense weights synchronous, rows written on arrival and read without any bound",
        source="TensorFlow Recommenders-Addons, README: half synchronous training based on Horovod",
        sync={"mode": Mode.HYBRID, "tau": None, "merge_pushes": False},
        lag={"tau": 1},
        stands_for="the least that is late at all; what theirs comes to is not published",
    ),
    "ascend-prefetch6": Preset(
        says="ids travel 6 batches ahead, rows are read when they are used: nothing is late",
        source="Ascend Rec SDK Torch, HybridTrainPipelineSparseDist: pipe_n_batch=6; its stages"
        " ahead split, exchange and merge ids and copy them, and the lookup is part of forward",
        sync={"mode": Mode.LOOKAHEAD, "ahead": 6},
    ),
    "deeprec-async": Preset(
        says="nobody waits for anybody; a worker's lookups run at most 4 steps ahead of its pushes",
        source="DeepRec, docs/docs_en/Async-Embedding-Stage.md: capacity 4 in its example (it has"
        " no default) on an asynchronous parameter server",
        sync={"mode": Mode.ASYNC, "tau": 4},
    ),
    "persia-default": Preset(
        says="10 batches of a rank in flight, pushes applied on arrival, rows' gradients summed",
        source="PERSIA's example: embedding_staleness=10, a semaphore from lookup to applied push"
        " (without it about 61 batches fit its buffers)",
        sync={
            "mode": Mode.HYBRID,
            "tau": None,
            "permits": 10,
            "merge_pushes": False,
            "row_gradients": "sum",
        },
        lag={"tau": 9, "permits": None},
        stands_for="10 batches in flight are a batch and the 9 that it may miss",
    ),
}
"""By name; `docs/training.md` has the same table."""

assert tuple(PRESETS) == get_args(PresetName)


def told_of(name: PresetName, config: TrainConfig) -> str:
    """What a person reads before a run of the preset."""
    preset, lag = PRESETS[name], config.engine.executor == "lag" and PRESETS[name].lag
    stands = f"; tau {config.sync.tau} stands for it here: {preset.stands_for}" if lag else ""
    return preset.says + stands


def with_preset(config: TrainConfig, name: PresetName, executor: str | None = None) -> TrainConfig:
    """The config with the preset's options for its executor; all others of `sync` have defaults.

    ``executor`` takes the place of the config's. Raises ValueError for a replay.
    """
    engine = config.engine
    if "replay" in (executor, engine.executor):
        raise ValueError(f"--preset {name} is not of a replay, which has its trace's; remove it")
    if executor is not None:
        engine = replace(engine, executor=executor)  # type: ignore[arg-type]
    preset = PRESETS[name]
    options = {**preset.sync, **(preset.lag if engine.executor == "lag" else {})}
    return replace(config, sync=SyncConfig(ranks=config.sync.ranks, **options), engine=engine)
