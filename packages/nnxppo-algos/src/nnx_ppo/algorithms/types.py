"""The vocabulary of the algorithms: training states, transitions, logging levels."""

import enum
from typing import Any

from jaxtyping import Array, Bool, Float, Key, PyTree, Shaped, UInt32

from nnx_ppo.core import EnvState, JaxDataclass, PPONetworkOutput, RLEnv

__all__ = [
    "DistillationState",
    "DistillationTransition",
    "EnvState",
    "LoggingLevel",
    "RLEnv",
    "TrainingState",
    "Transition",
]


class TrainingState(JaxDataclass):
    """Everything that PPO needs to go on.

    Attributes:
        networks: The network, an `nnx.Module`; the caller's own object, updated in place.
        network_states: Its carry, leaves `(n_envs, …)`.
        env_states: Environment states, leaves `(n_envs, …)`.
        optimizer: An `nnx.Optimizer` over the network's parameters.
        rng_key: Key of the next iteration.
        steps_taken: Environment steps so far, rounded to float32.
        step_words: The same count exactly, as its low and high 32 bits.
    """

    networks: Any
    network_states: Any
    env_states: Any
    optimizer: Any
    rng_key: Key[Array, ""] | UInt32[Array, "2"] | UInt32[Array, "4"]
    steps_taken: Float[Array, ""]
    step_words: UInt32[Array, "2"] | None = None


class DistillationState(JaxDataclass):
    """Everything that distillation needs to go on; the teacher's parameters are not part of it.

    Attributes:
        student: The network that learns, updated in place.
        student_states: Its carry, leaves `(n_envs, …)`.
        teacher_states: The teacher's carry, leaves `(n_envs, …)`.
        env_states: Environment states, leaves `(n_envs, …)`.
        optimizer: An `nnx.Optimizer` over the student's parameters.
        rng_key: Key of the next iteration.
        steps_taken: Environment steps so far, rounded to float32.
        step_words: The same count exactly, as its low and high 32 bits.
    """

    student: Any
    student_states: Any
    teacher_states: Any
    env_states: Any
    optimizer: Any
    rng_key: Key[Array, ""] | UInt32[Array, "2"] | UInt32[Array, "4"]
    steps_taken: Float[Array, ""]
    step_words: UInt32[Array, "2"] | None = None


class Transition(JaxDataclass):
    """One step of every environment, or a window of steps with a leading time axis.

    Attributes:
        obs: What the network saw, leaves `(*time, batch, *feature)`.
        network_output: What it answered.
        rewards: Reward of the step, one array or a tree of named ones.
        done: Whether the episode ended with this step, for whatever reason.
        truncated: Whether it ended by time limit.
        next_obs: The observation after the step, before any reset.
        metrics: Metrics of the environment under `"env"` and of the network under `"net"`.
        rollout_extras: What the network emitted for its replay.
        bootstrap_values: Where `truncated`, the value of `next_obs` under the carry before its
            reset; zero elsewhere. A tree like the network's value estimates.
    """

    obs: PyTree[Shaped[Array, "..."]]
    network_output: PPONetworkOutput
    rewards: PyTree[Float[Array, "*time batch"]]
    done: Bool[Array, "*time batch"]
    truncated: Bool[Array, "*time batch"]
    next_obs: PyTree[Shaped[Array, "..."]]
    metrics: dict[str, Any]
    rollout_extras: Any = None
    bootstrap_values: Any = None


class DistillationTransition(JaxDataclass):
    """One step of every environment, driven by the student, with both networks' extras.

    Attributes:
        obs: What both networks saw, leaves `(*time, batch, *feature)`.
        student_output: The student's answer, which drove the environment.
        rewards: Reward of the step.
        done: Whether the episode ended with this step.
        truncated: Whether it ended by time limit.
        next_obs: The observation after the step, before any reset.
        metrics: Metrics of the environment and the networks.
        student_rollout_extras: What the student emitted for its replay.
        teacher_rollout_extras: What the teacher emitted.
        teacher_actions: The teacher's raw action, its mean or likeliest choice, of each head: a
            tree like the student's actions. If None, `teacher_rollout_extras` must be a tree like
            the student's, and holds them.
        bootstrap_values: As in `Transition`, of the student; None where no loss asks for values.
    """

    obs: PyTree[Shaped[Array, "..."]]
    student_output: PPONetworkOutput
    rewards: PyTree[Float[Array, "*time batch"]]
    done: Bool[Array, "*time batch"]
    truncated: Bool[Array, "*time batch"]
    next_obs: PyTree[Shaped[Array, "..."]]
    metrics: dict[str, Any]
    student_rollout_extras: Any = None
    teacher_rollout_extras: Any = None
    teacher_actions: Any = None
    bootstrap_values: Any = None


class LoggingLevel(enum.Flag):
    """What to log; combine with `|`."""

    LOSSES = 1
    CRITIC_EXTRA = 2
    ACTOR_EXTRA = 4
    ROLLOUT_STATS = 8
    ROLLOUT_OBS = 16
    ENV_METRICS = 32
    NETWORK_METRICS = 64
    GRAD_NORM = 128
    WEIGHTS = 256
    THROUGHPUT = 512
    BASIC = LOSSES
    # Everything but the observations, which are large.
    ALL = 1023 & ~16
    NONE = 0
