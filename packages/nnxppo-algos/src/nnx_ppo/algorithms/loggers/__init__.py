"""Loggers that need no service: JSON lines and TensorBoard."""

from nnx_ppo.algorithms.loggers.json_lines import JsonLinesLogger, read_metrics
from nnx_ppo.algorithms.loggers.tensorboard import TensorBoardLogger

__all__ = ["JsonLinesLogger", "TensorBoardLogger", "read_metrics"]
