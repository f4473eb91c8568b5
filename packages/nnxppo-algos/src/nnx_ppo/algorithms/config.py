"""Configuration: frozen dataclasses, checked when they are made."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, get_args

import numpy as np
from tyro.constructors import PrimitiveConstructorSpec

from nnx_ppo.algorithms._validation import (
    Rule,
    check_fields,
    check_minibatches,
    check_remat,
    check_schedules,
    check_windows,
    frozen_config,
    instance,
    integer,
    number,
    number_or_mapping,
    number_or_schedule,
    one_of,
    optional,
    percentiles,
    tuples_for_lists,
)
from nnx_ppo.algorithms.precision import MatmulPrecision
from nnx_ppo.algorithms.types import DistillationState, LoggingLevel, TrainingState

Schedule = Callable[[Any], Any]
"""A function from a count to a number, called inside the compiled iteration; those of optax fit."""

_AS_NUMBER = PrimitiveConstructorSpec(  # how the command line reads what may also be a schedule
    nargs=1,
    metavar="FLOAT",
    instance_from_str=lambda words: None if words == ["None"] else float(words[0]),
    is_instance=lambda value: value is None or isinstance(value, float | int),
    str_from_instance=lambda value: [str(value)],
)

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
    "remat_length": optional(integer(1)),
    "matmul_precision": optional(one_of(*get_args(MatmulPrecision))),
    "gradient_clipping": optional(number(0.0, open_low=True)),
    "weight_decay": optional(number(0.0)),
    **_LOGGING,
}
_PPO_LOSS: dict[str, Rule] = {
    "gae_lambda": number(0.0, 1.0),
    "discounting_factor": number(0.0, 1.0),
    "clip_range": number(0.0, open_low=True),
    "critic_loss_weight": number(0.0),
    "normalize_advantages": instance(bool, "True or False"),
    "combine_advantages": instance(bool, "True or False"),
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
        discounting_factor: γ; a number, or one for each reward head by its name.
        clip_range: ε of the clipped surrogate.
        learning_rate: Step size of Adam; a number, or a schedule over the updates taken.
        normalize_advantages: Whether to standardise advantages; `advantage_normalization` says
            over what.
        combine_advantages: Whether the sum over the reward heads serves every action head.
        n_epochs: Passes over each window.
        n_minibatches: Parts into which the environments are dealt per pass.
        critic_loss_weight: Weight of the value loss.
        gradient_clipping: Largest global norm of a gradient, or None.
        weight_decay: Decay of AdamW, or None for Adam.
        logging_level: What to log.
        logging_percentiles: Percentiles to log of each array, or None for mean and std.
        final_learning_rate: Step size at `total_steps`, approached linearly in environment steps,
            or None for a constant one.
        adaptive_kl: Divergence of the policy that the learning rate is adapted to, or None. From
            the second update of an iteration on, the rate is divided by 1.5 where the divergence
            exceeds twice this, and multiplied by 1.5 where it is below half of it.
        min_learning_rate: Lowest rate with `adaptive_kl`.
        max_learning_rate: Highest rate with `adaptive_kl`.
        target_kl: Divergence of the policy beyond which the rest of an iteration's updates are
            left out, or None.
        value_clip_range: How far a value may move from that of the rollout before its loss no
            longer falls, or None.
        huber_delta: Error of a value from which on its loss grows linearly, or None for a
            quadratic loss.
        entropy_weight: Weight of the entropy of all action samplers; a number, or a schedule over
            environment steps. None leaves the samplers' own weights alone.
        final_entropy_weight: Weight of the entropy at `total_steps`, approached linearly from
            `entropy_weight`, or None.
        advantages: Whether advantages and the targets of values are computed for each minibatch
            from the values of its replay, or once for the window from those of the rollout.
        advantage_normalization: Whether advantages are standardised over a minibatch or over the
            window.
        chunk_length: Steps of the chunks in which windows are replayed, each from its own carry,
            or None for whole windows.
        burn_in: Steps before each chunk from which its carry is recomputed under the current
            weights.
        remat_length: Steps of the segments in which a replay keeps activations for the gradient,
            computing those of other segments again when it comes to them, or None to keep those of
            the whole window (or chunk).
        matmul_precision: What the network's matrix products round their inputs to, in rollout and
            replay alike, or None for JAX's default. Sums and everything else stay float32.
    """

    n_envs: int = 256
    rollout_length: int = 20
    total_steps: int = 512000
    gae_lambda: float = 0.95
    discounting_factor: float | Mapping[str, float] = 0.99
    clip_range: float = 0.2
    learning_rate: Annotated[float | Schedule, _AS_NUMBER] = 1e-4
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
    adaptive_kl: float | None = None
    min_learning_rate: float = 1e-5
    max_learning_rate: float = 1e-2
    target_kl: float | None = None
    value_clip_range: float | None = None
    huber_delta: float | None = None
    entropy_weight: Annotated[float | Schedule | None, _AS_NUMBER] = None
    final_entropy_weight: float | None = None
    advantages: Literal["minibatch", "window"] = "minibatch"
    advantage_normalization: Literal["minibatch", "window"] = "minibatch"
    chunk_length: int | None = None
    burn_in: int = 0
    remat_length: int | None = None
    matmul_precision: MatmulPrecision | None = None

    def __post_init__(self) -> None:
        tuples_for_lists(self, "logging_percentiles")
        if isinstance(self.discounting_factor, Mapping):
            object.__setattr__(self, "discounting_factor", dict(self.discounting_factor))
        positive = optional(number(0.0, open_low=True))
        rules = {
            **_LEARNING,
            **_PPO_LOSS,
            "discounting_factor": number_or_mapping(number(0.0, 1.0)),
            "learning_rate": number_or_schedule(number(0.0)),
            "final_learning_rate": optional(number(0.0)),
            "adaptive_kl": positive,
            "min_learning_rate": number(0.0, open_low=True),
            "max_learning_rate": number(0.0, open_low=True),
            "target_kl": positive,
            "value_clip_range": positive,
            "huber_delta": positive,
            "entropy_weight": optional(number_or_schedule(number(0.0))),
            "final_entropy_weight": optional(number(0.0)),
            "advantages": one_of("minibatch", "window"),
            "advantage_normalization": one_of("minibatch", "window"),
            "chunk_length": optional(integer(1)),
            "burn_in": integer(0),
        }
        check_fields(self, rules)
        check_minibatches(self)
        check_schedules(self)
        check_windows(self)
        check_remat(self, self.chunk_length)


@frozen_config
class DistillationConfig:
    """How distillation collects data and learns from it.

    Attributes:
        n_envs: Environments that run side by side.
        rollout_length: Steps of each environment per iteration (the window).
        total_steps: Environment steps to train for, as in `PPOConfig`.
        learning_rate: Step size of Adam: a number, or a schedule over updates.
        n_epochs: Passes over each window.
        n_minibatches: Parts into which the environments are dealt per pass.
        gradient_clipping: Largest global norm of a gradient, or None.
        weight_decay: Decay of AdamW, or None for Adam.
        logging_level: What to log.
        logging_percentiles: Percentiles to log of each array, or None for mean and std.
        ppo_weight: Weight of PPO's surrogate and value loss, which are added to that of
            distillation: a number, or a schedule over environment steps. With the number 0 they
            are left out, and of the fields after this one only the last two are read.
        gae_lambda: λ of generalised advantage estimation.
        discounting_factor: γ, one number or one for each reward by name.
        clip_range: ε of the clipped surrogate.
        normalize_advantages: Whether to standardise advantages within each minibatch.
        combine_advantages: Whether the sum over the reward heads serves every action head.
        critic_loss_weight: Weight of the value loss.
        remat_length: As in `PPOConfig`.
        matmul_precision: As in `PPOConfig`, of student and teacher.
    """

    n_envs: int = 256
    rollout_length: int = 20
    total_steps: int = 512000
    learning_rate: Annotated[float | Schedule, _AS_NUMBER] = 1e-4
    n_epochs: int = 4
    n_minibatches: int = 4
    gradient_clipping: float | None = None
    weight_decay: float | None = None
    logging_level: LoggingLevel = LoggingLevel.LOSSES
    logging_percentiles: tuple[int, ...] | None = None
    ppo_weight: Annotated[float | Schedule, _AS_NUMBER] = 0.0
    gae_lambda: float = 0.95
    discounting_factor: float | Mapping[str, float] = 0.99
    clip_range: float = 0.2
    normalize_advantages: bool = True
    combine_advantages: bool = False
    critic_loss_weight: float = 1.0
    remat_length: int | None = None
    matmul_precision: MatmulPrecision | None = None

    def __post_init__(self) -> None:
        tuples_for_lists(self, "logging_percentiles")
        if isinstance(self.discounting_factor, Mapping):
            object.__setattr__(self, "discounting_factor", dict(self.discounting_factor))
        rules = {
            **_LEARNING,
            **_PPO_LOSS,
            "discounting_factor": number_or_mapping(number(0.0, 1.0)),
            "learning_rate": number_or_schedule(number(0.0)),
            "ppo_weight": number_or_schedule(number(0.0)),
        }
        check_fields(self, rules)
        check_minibatches(self)
        check_remat(self)

    @property
    def uses_ppo(self) -> bool:
        """Whether PPO's losses are part of the loss."""
        return callable(self.ppo_weight) or self.ppo_weight > 0


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
        iterations_per_call: Iterations that are handed to the device at a time, as far as no
            evaluation, video or checkpoint comes between. More than 1 saves about a millisecond for
            each; callbacks then run after all of them. What is learned is the same.
    """

    ppo: PPOConfig = dataclasses.field(default_factory=PPOConfig)
    eval: EvalConfig = dataclasses.field(default_factory=EvalConfig)
    video: VideoConfig = dataclasses.field(default_factory=VideoConfig)
    seed: int = 17
    checkpoint_every_steps: int = 500000
    iterations_per_call: int = 1

    def __post_init__(self) -> None:
        check_fields(self, {"ppo": instance(PPOConfig, "a PPOConfig"), **_RUN})


@frozen_config
class DistillationTrainConfig:
    """A whole distillation run.

    Attributes:
        distillation: Data collection and learning.
        eval: Evaluation of the student.
        video: Videos of the student.
        seed: Seed of everything random in the run, the networks' own streams excepted.
        checkpoint_every_steps: Environment steps between checkpoints.
        iterations_per_call: Iterations that are handed to the device at a time, as far as no
            evaluation, video or checkpoint comes between. More than 1 saves about a millisecond for
            each; callbacks then run after all of them. What is learned is the same.
    """

    distillation: DistillationConfig = dataclasses.field(default_factory=DistillationConfig)
    eval: EvalConfig = dataclasses.field(default_factory=EvalConfig)
    video: VideoConfig = dataclasses.field(default_factory=VideoConfig)
    seed: int = 17
    checkpoint_every_steps: int = 500000
    iterations_per_call: int = 1

    def __post_init__(self) -> None:
        kind = instance(DistillationConfig, "a DistillationConfig")
        check_fields(self, {"distillation": kind, **_RUN})


_RUN: dict[str, Rule] = {
    "eval": instance(EvalConfig, "an EvalConfig"),
    "video": instance(VideoConfig, "a VideoConfig"),
    "seed": integer(0, 2**32 - 1),  # JAX drops higher bits without a word
    "checkpoint_every_steps": integer(1),
    "iterations_per_call": integer(1),
}


@dataclasses.dataclass(frozen=True)
class VideoData:
    """A rendered episode.

    Attributes:
        frames: Images, `(time, height, width, 3)`, uint8.
        step: Environment step of the training when it was rendered.
        episode_reward: Return of the first episode shown.
        episode_length: Steps shown.
        fps: Frames for each second of the simulation, if it has a step length; else 30.
    """

    frames: np.ndarray
    step: int
    episode_reward: float
    episode_length: int
    fps: float = 30.0


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
