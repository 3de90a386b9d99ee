"""Everything that decides a training run, in frozen groups that the command line mirrors.

Free of torch, so that `--help` answers at once.
"""

from runtime.config.checkpoint import CheckpointConfig
from runtime.config.engine import EngineConfig
from runtime.config.read import read_config
from runtime.config.sync import SyncConfig
from runtime.config.train import TrainConfig
from runtime.config.what import DataConfig, DenseOptimizer, EvaluationConfig, ModelConfig

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
