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
from nnx_ppo.algorithms.rollout import (
    SlimData,
    SlimState,
    eval_rollout,
    eval_rollout_for_render_scan,
    record_activations_rollout,
    single_transition,
    tree_where,
    unroll_env,
    unstack_trajectory,
)
from nnx_ppo.algorithms.types import LoggingLevel, TrainingState, Transition

__all__ = [
    "DistillationConfig",
    "DistillationTrainConfig",
    "DistillationTrainResult",
    "EvalConfig",
    "LoggingLevel",
    "PPOConfig",
    "SlimData",
    "SlimState",
    "TrainConfig",
    "TrainResult",
    "TrainingState",
    "Transition",
    "VideoConfig",
    "VideoData",
    "default_config",
    "eval_rollout",
    "eval_rollout_for_render_scan",
    "gae",
    "new_training_state",
    "ppo_loss",
    "ppo_step",
    "record_activations_rollout",
    "single_transition",
    "train_ppo",
    "tree_where",
    "unroll_env",
    "unstack_trajectory",
]
