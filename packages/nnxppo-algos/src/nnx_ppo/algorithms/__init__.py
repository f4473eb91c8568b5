"""PPO for stateful networks: rollout, learning, evaluation, training."""

from nnx_ppo.algorithms.config import (
    DistillationConfig,
    DistillationTrainConfig,
    DistillationTrainResult,
    EvalConfig,
    PPOConfig,
    TrainConfig,
    TrainResult,
    VideoConfig,
    VideoData,
)
from nnx_ppo.algorithms.ppo import (
    default_config,
    gae,
    new_training_state,
    ppo_loss,
    ppo_step,
    train_ppo,
)
from nnx_ppo.algorithms.rollout import eval_rollout, single_transition, tree_where, unroll_env
from nnx_ppo.algorithms.types import LoggingLevel, TrainingState, Transition

__all__ = [
    "DistillationConfig",
    "DistillationTrainConfig",
    "DistillationTrainResult",
    "EvalConfig",
    "LoggingLevel",
    "PPOConfig",
    "TrainConfig",
    "TrainResult",
    "TrainingState",
    "Transition",
    "VideoConfig",
    "VideoData",
    "default_config",
    "eval_rollout",
    "gae",
    "new_training_state",
    "ppo_loss",
    "ppo_step",
    "single_transition",
    "train_ppo",
    "tree_where",
    "unroll_env",
]
