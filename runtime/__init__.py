"""The training runtime: data, embedding store, dense models and the executors of every mode.

Importing the package loads nothing heavy: a name is fetched from its module when it is asked for.
What ``__all__`` lists is for programs of your own (docs/python.md); `persia-runtime --help` is the
reference of the commands.

>>> import runtime
>>> runtime.TrainConfig(sync=runtime.SyncConfig(mode="hybrid", tau=16)).sync.tau
16
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from runtime.config import (
        CheckpointConfig,
        DataConfig,
        EngineConfig,
        EvaluationConfig,
        ModelConfig,
        SyncConfig,
        TrainConfig,
    )
    from runtime.data.frames import write_data_set
    from runtime.inference import open_model
    from runtime.run.record import run_into
    from runtime.run.session import train

__all__ = [
    "CheckpointConfig",
    "DataConfig",
    "EngineConfig",
    "EvaluationConfig",
    "ModelConfig",
    "SyncConfig",
    "TrainConfig",
    "open_model",
    "run_into",
    "train",
    "write_data_set",
]

_HOMES = {
    "open_model": "inference",
    "run_into": "run.record",
    "train": "run.session",
    "write_data_set": "data.frames",
}
"""The modules of the functions; all others are of `runtime.config`."""


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module runtime has no attribute {name!r}; it has {__all__}")
    return getattr(import_module(f"runtime.{_HOMES.get(name, 'config')}"), name)


def __dir__() -> list[str]:
    return [*__all__, *(name for name in globals() if name.startswith("__"))]
