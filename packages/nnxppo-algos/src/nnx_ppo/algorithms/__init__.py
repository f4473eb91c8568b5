"""PPO for stateful networks: rollout, learning, evaluation, training."""

from nnx_ppo.algorithms.activations import RecordedEpisodes, record_episodes, save_activations
from nnx_ppo.algorithms.checkpointing import (
    CheckpointCallback,
    best_checkpoint,
    latest_checkpoint,
    load_checkpoint,
    make_checkpoint_fn,
)
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
from nnx_ppo.algorithms.distillation import (
    default_distillation_config,
    distillation_loss,
    distillation_single_transition,
    distillation_step,
    distillation_unroll_env,
    new_distillation_state,
    train_distillation,
)
from nnx_ppo.algorithms.planning import plan_training
from nnx_ppo.algorithms.policies import Policy, load_policy, save_policy
from nnx_ppo.algorithms.ppo import (
    default_config,
    gae,
    new_training_state,
    ppo_loss,
    ppo_step,
    train_ppo,
)
from nnx_ppo.algorithms.resuming import restart_environments
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
from nnx_ppo.algorithms.training_plan import PlannedPart, TrainingPlan
from nnx_ppo.algorithms.types import (
    DistillationState,
    DistillationTransition,
    LoggingLevel,
    TrainingState,
    Transition,
)

__all__ = [
    "CheckpointCallback",
    "DistillationConfig",
    "DistillationState",
    "DistillationTrainConfig",
    "DistillationTrainResult",
    "DistillationTransition",
    "EvalConfig",
    "LoggingLevel",
    "PlannedPart",
    "PPOConfig",
    "Policy",
    "RecordedEpisodes",
    "SlimData",
    "SlimState",
    "TrainConfig",
    "TrainResult",
    "TrainingPlan",
    "TrainingState",
    "Transition",
    "VideoConfig",
    "VideoData",
    "best_checkpoint",
    "default_config",
    "default_distillation_config",
    "distillation_loss",
    "distillation_single_transition",
    "distillation_step",
    "distillation_unroll_env",
    "eval_rollout",
    "eval_rollout_for_render_scan",
    "gae",
    "latest_checkpoint",
    "load_checkpoint",
    "load_policy",
    "make_checkpoint_fn",
    "new_distillation_state",
    "new_training_state",
    "plan_training",
    "ppo_loss",
    "ppo_step",
    "record_activations_rollout",
    "record_episodes",
    "restart_environments",
    "save_activations",
    "save_policy",
    "single_transition",
    "train_distillation",
    "train_ppo",
    "tree_where",
    "unroll_env",
    "unstack_trajectory",
]
