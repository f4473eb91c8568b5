"""Configuration: frozen dataclasses, checked when they are made."""

import dataclasses
from typing import Any

import numpy as np

from nnx_ppo.algorithms._validation import (
    Rule,
    check_fields,
    check_minibatches,
    frozen_config,
    instance,
    integer,
    number,
    optional,
    percentiles,
    tuples_for_lists,
)
from nnx_ppo.algorithms.types import DistillationState, LoggingLevel, TrainingState

_LOGGING: dict[str, Rule] = {
    "logging_level": instance(LoggingLevel, "a LoggingLevel"),
    "logging_percentiles": percentiles(),
}
_LEARNING: dict[str, Rule] = {
    "n_envs": integer(1),
    "rollout_length": integer(1),
    "total_steps": integer(0),
    "learning_rate": number(0.0),
    "n_epochs": integer(1),
    "n_minibatches": integer(1),
    "gradient_clipping": optional(number(0.0, open_low=True)),
    "weight_decay": optional(number(0.0)),
    **_LOGGING,
}


@frozen_config
class PPOConfig:
    """How PPO collects data and learns from it.

    Attributes:
        n_envs: Environments that run side by side.
        rollout_length: Steps of each environment per iteration (the window).
        total_steps: Environment steps to train for, all environments together; a resumed run
            counts from its beginning. Training ends with the first iteration that reaches it.
        gae_lambda: λ of generalised advantage estimation.
        discounting_factor: γ.
        clip_range: ε of the clipped surrogate.
        learning_rate: Step size of Adam.
        normalize_advantages: Whether to standardise advantages within each minibatch.
        combine_advantages: Whether the sum over the reward heads serves every action head.
        n_epochs: Passes over each window.
        n_minibatches: Parts into which the environments are dealt per pass.
        critic_loss_weight: Weight of the value loss.
        gradient_clipping: Largest global norm of a gradient, or None.
        weight_decay: Decay of AdamW, or None for Adam.
        logging_level: What to log.
        logging_percentiles: Percentiles to log of each array, or None for mean and std.
        final_learning_rate: Step size at `total_steps`, approached linearly, or None for a
            constant one.
    """

    n_envs: int = 256
    rollout_length: int = 20
    total_steps: int = 512000
    gae_lambda: float = 0.95
    discounting_factor: float = 0.99
    clip_range: float = 0.2
    learning_rate: float = 1e-4
    normalize_advantages: bool = True
    combine_advantages: bool = False
    n_epochs: int = 4
    n_minibatches: int = 4
    critic_loss_weight: float = 1.0
    gradient_clipping: float | None = None
    weight_decay: float | None = None
    logging_level: LoggingLevel = LoggingLevel.LOSSES
    logging_percentiles: tuple[int, ...] | None = None
    final_learning_rate: float | None = None

    def __post_init__(self) -> None:
        tuples_for_lists(self, "logging_percentiles")
        rules = {
            **_LEARNING,
            "final_learning_rate": optional(number(0.0)),
            "gae_lambda": number(0.0, 1.0),
            "discounting_factor": number(0.0, 1.0),
            "clip_range": number(0.0, open_low=True),
            "critic_loss_weight": number(0.0),
            "normalize_advantages": instance(bool, "True or False"),
            "combine_advantages": instance(bool, "True or False"),
        }
        check_fields(self, rules)
        check_minibatches(self)


@frozen_config
class DistillationConfig:
    """How distillation collects data and learns from it; fields as in `PPOConfig`."""

    n_envs: int = 256
    rollout_length: int = 20
    total_steps: int = 512000
    learning_rate: float = 1e-4
    n_epochs: int = 4
    n_minibatches: int = 4
    gradient_clipping: float | None = None
    weight_decay: float | None = None
    logging_level: LoggingLevel = LoggingLevel.LOSSES
    logging_percentiles: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        tuples_for_lists(self, "logging_percentiles")
        check_fields(self, _LEARNING)
        check_minibatches(self)


@frozen_config
class EvalConfig:
    """How the policy is evaluated during training.

    Attributes:
        enabled: Whether to evaluate.
        every_steps: Environment steps between evaluations.
        n_envs: Episodes per evaluation.
        max_episode_length: Steps after which an episode is cut.
        logging_level: What to log beyond return and lifespan.
        logging_percentiles: Percentiles to log, or None for mean and std.
    """

    enabled: bool = True
    every_steps: int = 50000
    n_envs: int = 64
    max_episode_length: int = 1000
    logging_level: LoggingLevel = LoggingLevel.NONE
    logging_percentiles: tuple[int, ...] | None = (0, 25, 50, 75, 100)

    def __post_init__(self) -> None:
        tuples_for_lists(self, "logging_percentiles")
        rules = {
            "enabled": instance(bool, "True or False"),
            "every_steps": integer(1),
            "n_envs": integer(1),
            "max_episode_length": integer(1),
            **_LOGGING,
        }
        check_fields(self, rules)


@frozen_config
class VideoConfig:
    """How episodes are rendered during training, for `video_fn`.

    Attributes:
        enabled: Whether to render.
        every_steps: Environment steps between videos.
        episode_length: Steps of a video.
        render_kwargs: Keyword arguments for `render(trajectory, …)` of the environment, which
            returns one image for each state of the trajectory.
    """

    enabled: bool = False
    every_steps: int = 200000
    episode_length: int = 1000
    render_kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        rules = {
            "enabled": instance(bool, "True or False"),
            "every_steps": integer(1),
            "episode_length": integer(1),
            "render_kwargs": instance(dict, "a dict of arguments"),
        }
        check_fields(self, rules)


@frozen_config
class TrainConfig:
    """A whole PPO run.

    Attributes:
        ppo: Data collection and learning.
        eval: Evaluation.
        video: Videos.
        seed: Seed of everything random in the run, the network's own streams excepted.
        checkpoint_every_steps: Environment steps between checkpoints.
    """

    ppo: PPOConfig = dataclasses.field(default_factory=PPOConfig)
    eval: EvalConfig = dataclasses.field(default_factory=EvalConfig)
    video: VideoConfig = dataclasses.field(default_factory=VideoConfig)
    seed: int = 17
    checkpoint_every_steps: int = 500000

    def __post_init__(self) -> None:
        check_fields(self, {"ppo": instance(PPOConfig, "a PPOConfig"), **_RUN})


@frozen_config
class DistillationTrainConfig:
    """A whole distillation run; fields as in `TrainConfig`."""

    distillation: DistillationConfig = dataclasses.field(default_factory=DistillationConfig)
    eval: EvalConfig = dataclasses.field(default_factory=EvalConfig)
    video: VideoConfig = dataclasses.field(default_factory=VideoConfig)
    seed: int = 17
    checkpoint_every_steps: int = 500000

    def __post_init__(self) -> None:
        kind = instance(DistillationConfig, "a DistillationConfig")
        check_fields(self, {"distillation": kind, **_RUN})


_RUN: dict[str, Rule] = {
    "eval": instance(EvalConfig, "an EvalConfig"),
    "video": instance(VideoConfig, "a VideoConfig"),
    "seed": integer(0, 2**32 - 1),  # JAX drops higher bits without a word
    "checkpoint_every_steps": integer(1),
}


@dataclasses.dataclass(frozen=True)
class VideoData:
    """A rendered episode.

    Attributes:
        frames: Images, `(time, height, width, 3)`, uint8.
        step: Environment step of the training when it was rendered.
        episode_reward: Return of the first episode shown.
        episode_length: Steps shown.
    """

    frames: np.ndarray
    step: int
    episode_reward: float
    episode_length: int


@dataclasses.dataclass(frozen=True)
class TrainResult:
    """What `train_ppo` returns.

    Attributes:
        training_state: The final state.
        final_metrics: Metrics of the last iteration and of the last evaluation.
        eval_history: One dict per evaluation: its metrics and `"step"`.
        total_steps: Environment steps in all, those before a resume included.
        total_iterations: Iterations of this call.
    """

    training_state: TrainingState
    final_metrics: dict[str, Any]
    eval_history: list[dict[str, Any]]
    total_steps: int
    total_iterations: int


@dataclasses.dataclass(frozen=True)
class DistillationTrainResult:
    """What `train_distillation` returns; fields as in `TrainResult`."""

    training_state: DistillationState
    final_metrics: dict[str, Any]
    eval_history: list[dict[str, Any]]
    total_steps: int
    total_iterations: int
