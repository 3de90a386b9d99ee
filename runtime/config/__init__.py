"""Everything that decides a training run, in frozen groups that the command line mirrors.

Free of torch, so that `--help` answers at once.
"""

from runtime.config.checkpoints import CheckpointConfig
from runtime.config.sync import SyncConfig
from runtime.config.train import (
    DataConfig,
    DenseOptimizer,
    EngineConfig,
    EvaluationConfig,
    ModelConfig,
    TrainConfig,
    read_config,
)

__all__ = [
    "CheckpointConfig",
    "DataConfig",
    "DenseOptimizer",
    "EngineConfig",
    "EvaluationConfig",
    "ModelConfig",
    "SyncConfig",
    "TrainConfig",
    "read_config",
]
