"""Saving and loading training states.

A checkpoint is a folder `step_{step:010d}` with `networks/` and `optimizer/` (arrays, written by
orbax), `metadata.pkl` (random keys, carries, environment states, counters, configuration: builtin
containers and NumPy arrays, nothing that runs) and `metrics.json`.
"""

from nnx_ppo.algorithms.checkpointing._folders import best_checkpoint, latest_checkpoint
from nnx_ppo.algorithms.checkpointing._loading import load_checkpoint
from nnx_ppo.algorithms.checkpointing._saving import CheckpointCallback, make_checkpoint_fn

__all__ = [
    "CheckpointCallback",
    "best_checkpoint",
    "latest_checkpoint",
    "load_checkpoint",
    "make_checkpoint_fn",
]
