"""Everything that decides a training run, in frozen groups that the command line mirrors.

Free of torch, so that `--help` answers at once.
"""

from runtime.config.checkpoints import CheckpointConfig
from runtime.config.sync import SyncConfig
from runtime.config.train import (
    DENSE_OPTIMIZERS,
    OF_TORCH,
    DataConfig,
    EngineConfig,
    EvaluationConfig,
    ModelConfig,
    TrainConfig,
)
from runtime.config.training_file import read_config

__all__ = [
    "DENSE_OPTIMIZERS",
    "OF_TORCH",
    "CheckpointConfig",
    "DataConfig",
    "EngineConfig",
    "EvaluationConfig",
    "ModelConfig",
    "SyncConfig",
    "TrainConfig",
    "read_config",
]
