"""Policy distillation: a student learns to act as a teacher would, in the states it gets into.

The student drives the environments and the teacher says what it would have done there, as in
DAgger (Ross et al., 2011, arXiv:1011.0686).
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import optax
from flax import nnx
from jaxtyping import Array, PyTree, Shaped

from nnx_ppo.algorithms._validation import check_schedule
from nnx_ppo.algorithms.checks import (
    check_discounts,
    check_kind,
    check_module,
    check_network,
    check_number_of_environments,
    check_training_mode,
    check_video,
    first_state_shapes,
    network_output,
)
from nnx_ppo.algorithms.compiled_run import Algorithm
from nnx_ppo.algorithms.config import (
    DistillationConfig,
    DistillationTrainConfig,
    DistillationTrainResult,
    VideoData,
)
from nnx_ppo.algorithms.imitation import heads_that_learn, imitation_loss, iterate
from nnx_ppo.algorithms.keys import purpose_keys
from nnx_ppo.algorithms.lessons import Lesson, by_its_means, matched_heads, step, unroll
from nnx_ppo.algorithms.optimizers import make_optimizer
from nnx_ppo.algorithms.ppo import new_training_state
from nnx_ppo.algorithms.programs import frozen, traced
from nnx_ppo.algorithms.resuming import resumed
from nnx_ppo.algorithms.training_loop import Callbacks, Schedule, run_training
from nnx_ppo.algorithms.types import (
    DistillationState,
    DistillationTransition,
    LoggingLevel,
)
from nnx_ppo.core import RLEnv, StatefulModule

__all__ = [
    "default_distillation_config",
    "distillation_loss",
    "distillation_single_transition",
    "distillation_step",
    "distillation_unroll_env",
    "new_distillation_state",
    "train_distillation",
]


def default_distillation_config() -> DistillationTrainConfig:
    """Return the default configuration of a distillation."""
    return DistillationTrainConfig()


def train_distillation(
    env: RLEnv,
    teacher: StatefulModule,
    student: StatefulModule,
    config: DistillationTrainConfig | None = None,
    *,
    total_steps: int | None = None,
    seed: int | None = None,
    log_fn: Callable[[dict[str, Any], int], None] | None = None,
    video_fn: Callable[[VideoData], None] | None = None,
    checkpoint_fn: Callable[[DistillationState, int], None] | None = None,
    eval_env: RLEnv | None = None,
    initial_state: DistillationState | None = None,
    stop_fn: Callable[[], bool] | None = None,
) -> DistillationTrainResult:
    """Train a student to act as a teacher would.

    Both see the same observations, of which each may read other parts. Only their action heads
    must be alike; see `distillation_loss`. Evaluation and videos are of the student.

    Args:
        env: The environment, written for a single instance.
        teacher: The network to learn from. It acts by its means, as in evaluation mode, and
            nothing of it is ever changed.
        student: The network that learns, updated in place as `train_ppo` does. Its value
            estimates are used only with `config.distillation.ppo_weight`; without it they may be
            None.
        config: The configuration; `default_distillation_config()` if None.
        total_steps: Replaces `config.distillation.total_steps`.
        seed: Replaces `config.seed`.
        log_fn: As in `train_ppo`.
        video_fn: As in `train_ppo`.
        checkpoint_fn: As in `train_ppo`, with a `DistillationState`.
        eval_env: Environment for evaluation and videos; `env` if None.
        initial_state: A state to go on from, as in `train_ppo`.
        stop_fn: Asked whether to end early, as in `train_ppo`.

    Returns:
        The final state, metrics and evaluation history.

    Raises:
        TypeError: `config`, `teacher` or `student` is of another kind than it must be.
        ValueError: A network does not fit the environment, the networks do not fit each other, or
            `initial_state` does not fit the configuration. Raised before anything compiles.
    """
    config = _resolved(config, total_steps, seed)
    check_module("teacher", teacher)
    check_module("student", student)
    settings = config.distillation
    eval_env = env if eval_env is None else eval_env
    check_video(config.video, eval_env)
    env, eval_env = traced(env), traced(eval_env)
    check_training_mode(student, "student")
    for place in (env,) if eval_env is env else (env, eval_env):
        check_network(
            place, student, settings.combine_advantages, name="student", values=settings.uses_ppo
        )
    _check_teacher(env, teacher, student)
    check_schedule("ppo_weight", settings.ppo_weight, jnp.float32)
    check_schedule("learning_rate", settings.learning_rate, jnp.int32)
    if settings.uses_ppo:
        check_discounts(env, settings.discounting_factor)
    optimizer_settings = (
        settings.learning_rate,
        settings.gradient_clipping,
        settings.weight_decay,
    )
    if initial_state is None:
        state = new_distillation_state(
            env, teacher, student, settings.n_envs, config.seed, *optimizer_settings
        )
    else:
        state = resumed(
            initial_state,
            student,
            make_optimizer(student, *optimizer_settings),
            env,
            settings.n_envs,
            network_field="student",
            carries={"student_states": student, "teacher_states": teacher},
        )
    graphdef, variables = nnx.split(teacher)
    outcome = run_training(
        Algorithm(
            iteration=lambda state, variables: iterate(
                env, nnx.merge(graphdef, variables, copy=True), state, settings
            ),
            key=("distillation", frozen(settings), graphdef),
            network_field="student",
            steps_per_iteration=settings.n_envs * settings.rollout_length,
            arguments=(variables,),
        ),
        state,
        Schedule(
            settings.total_steps,
            config.eval,
            config.video,
            config.checkpoint_every_steps,
            config.iterations_per_call,
        ),
        Callbacks(log_fn, video_fn, checkpoint_fn, stop_fn),
        env=env,
        eval_env=eval_env,
        keys=purpose_keys(config.seed),
        throughput=LoggingLevel.THROUGHPUT in settings.logging_level,
    )
    return DistillationTrainResult(**outcome._asdict())


def new_distillation_state(  # noqa: PLR0917  (documented)
    env: RLEnv,
    teacher: StatefulModule,
    student: StatefulModule,
    n_envs: int,
    seed: int,
    learning_rate: float | optax.Schedule = 1e-4,
    gradient_clipping: float | None = None,
    weight_decay: float | None = None,
) -> DistillationState:
    """Return the state from which a distillation starts.

    Args:
        env: The environment, written for a single instance.
        teacher: The network to learn from; not changed and not part of the state.
        student: The network that learns; becomes part of the state.
        n_envs: Environments that run side by side.
        seed: Seed of the environments and of everything that training draws.
        learning_rate: As in `new_training_state`.
        gradient_clipping: As in `new_training_state`.
        weight_decay: As in `new_training_state`.
    """
    start = new_training_state(
        env, student, n_envs, seed, learning_rate, gradient_clipping, weight_decay
    )
    return DistillationState(
        student=start.networks,
        student_states=start.network_states,
        teacher_states=by_its_means(teacher).initialize_state(n_envs),
        env_states=start.env_states,
        optimizer=start.optimizer,
        rng_key=start.rng_key,
        steps_taken=start.steps_taken,
        step_words=start.step_words,
    )


def distillation_step(  # noqa: PLR0917  (documented)
    env: RLEnv,
    teacher: StatefulModule,
    distillation_state: DistillationState,
    n_envs: int,
    rollout_length: int,
    n_epochs: int,
    n_minibatches: int,
    logging_level: LoggingLevel = LoggingLevel.LOSSES,
    logging_percentiles: tuple[int, ...] | None = None,
) -> tuple[DistillationState, dict[str, Any]]:
    """Run one iteration: collect a window, learn from the teacher, fold in statistics.

    Student and optimiser are updated in place; the teacher is not changed.

    Args:
        env: The environment, written for a single instance.
        teacher: The network to learn from.
        distillation_state: The state to go on from.
        n_envs: Environments in `distillation_state`.
        rollout_length: Steps of the window.
        n_epochs: Passes over the window.
        n_minibatches: Minibatches per pass.
        logging_level: What to log.
        logging_percentiles: Percentiles to log, or None for mean and std.

    Returns:
        The next state, and the metrics by name.

    Raises:
        ValueError: The networks share variables, their heads do not match, or a setting is wrong.
    """
    config = DistillationConfig(
        n_envs=n_envs,
        rollout_length=rollout_length,
        n_epochs=n_epochs,
        n_minibatches=n_minibatches,
        logging_level=logging_level,
        logging_percentiles=logging_percentiles,
    )
    check_number_of_environments(distillation_state.env_states, n_envs)
    _check_apart(teacher, distillation_state.student)
    return iterate(env, teacher, distillation_state, config)


def distillation_loss(
    student: StatefulModule,
    student_state: PyTree,
    rollout_data: DistillationTransition,
    logging_level: LoggingLevel,
) -> tuple[Array, dict[str, PyTree]]:
    """Replay a window under the student's current weights and return its loss.

    The student's samplers evaluate the teacher's actions in the place of those that were taken.
    Everything else is replayed as it was.

    Args:
        student: The network that learns; its random streams advance.
        student_state: Its carry at the window's start, leaves `(batch, …)`.
        rollout_data: The window, leaves `(time, batch, …)`.
        logging_level: Which metrics to return.

    Returns:
        The loss: the negative log-likelihood of the teacher's means under the student, averaged
        over steps and environments and summed over action heads, plus the student's mean
        regularisation; and the metrics by name, with one entry per head where there are several.

    Raises:
        ValueError: The student is in evaluation mode, the rollout lacks what the student or the
            teacher emitted, or has the teacher's extras alone and they are no tree like the
            student's.
    """
    return imitation_loss(student, student_state, rollout_data, logging_level)


def distillation_unroll_env(  # noqa: PLR0917  (documented)
    env: RLEnv,
    env_state: Any,
    teacher: StatefulModule,
    student: StatefulModule,
    student_state: PyTree,
    teacher_state: PyTree,
    unroll_length: int,
    rng_key_for_env_reset: Shaped[Array, "..."],
) -> tuple[PyTree, PyTree, Any, DistillationTransition]:
    """Collect a window of steps.

    Args:
        env: The environment, written for a single instance.
        env_state: Its states, leaves `(batch, …)`.
        teacher: The network to learn from; not changed.
        student: The network that acts; its random streams advance.
        student_state: The student's carry, leaves `(batch, …)`.
        teacher_state: The teacher's carry, leaves `(batch, …)`.
        unroll_length: Steps to take.
        rng_key_for_env_reset: One key; every step and environment gets its own from it.

    Returns:
        The student's and the teacher's carry and the environment states after the window, and the
        transitions, leaves `(unroll_length, batch, …)`.
    """
    carry = (student_state, teacher_state, env_state)
    return unroll(
        env, teacher, student, carry, unroll_length, rng_key_for_env_reset, bootstrap=False
    )


def distillation_single_transition(
    env: RLEnv,
    teacher: StatefulModule,
    student: StatefulModule,
    carry: tuple[PyTree, PyTree, Any],
    rng_keys_for_env_reset: Shaped[Array, "batch ..."],
) -> tuple[tuple[PyTree, PyTree, Any], DistillationTransition]:
    """Let the student act once in every environment, and ask the teacher what it would have done.

    Where an episode ended, both carries and the environment are reset after the step.

    Args:
        env: The environment, written for a single instance.
        teacher: The network to learn from; not changed.
        student: The network that acts.
        carry: `(student_state, teacher_state, env_state)`, leaves `(batch, …)`.
        rng_keys_for_env_reset: One key per environment, used where it is reset.

    Returns:
        The carry for the next step, and the transition, leaves `(batch, …)`.
    """
    lesson = Lesson(student, by_its_means(teacher))
    actions_of = matched_heads(teacher, student, carry[-1].obs)
    return step(env, lesson, actions_of, carry, rng_keys_for_env_reset, bootstrap=False)


def _check_teacher(env: RLEnv, teacher: StatefulModule, student: StatefulModule) -> None:
    """Raise if a teacher cannot teach a student in an environment, from shapes alone.

    Raises:
        TypeError: The teacher's output is no `PPONetworkOutput`.
        ValueError: The teacher does not run on the environment's observations, its action heads
            are not the student's, one of those is in evaluation mode, or the networks share
            variables.
    """
    obs = first_state_shapes(env).obs
    network_output(teacher, obs, "teacher", values=False)
    matched_heads(teacher, student, obs)
    heads_that_learn(student, obs)
    _check_apart(teacher, student)


def _check_apart(teacher: StatefulModule, student: StatefulModule) -> None:
    """Raise if two networks share variables."""
    own = {id(node) for _, node in nnx.iter_graph(student) if isinstance(node, nnx.Variable)}
    for path, node in nnx.iter_graph(teacher):
        if isinstance(node, nnx.Variable) and id(node) in own:
            raise ValueError(
                f"teacher and student share the variable {'/'.join(map(str, path))}, so learning "
                "would change the teacher. Pass a copy of the teacher: nnx.clone(teacher)."
            )


def _resolved(
    config: DistillationTrainConfig | None, total_steps: int | None, seed: int | None
) -> DistillationTrainConfig:
    """Apply the convenience arguments of `train_distillation`; the result is checked."""
    config = default_distillation_config() if config is None else config
    cure = "Build it as DistillationTrainConfig(DistillationConfig(…)); a TrainConfig is PPO's."
    check_kind("config", config, DistillationTrainConfig, cure)
    if total_steps is not None:
        settings = dataclasses.replace(config.distillation, total_steps=total_steps)
        config = dataclasses.replace(config, distillation=settings)
    return config if seed is None else dataclasses.replace(config, seed=seed)
