"""Proximal policy optimisation for stateful networks."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
import optax
from flax import nnx
from jaxtyping import Array, PyTree

from nnx_ppo.algorithms.checks import (
    check_discounts,
    check_kind,
    check_module,
    check_network,
    check_number_of_environments,
    check_training_mode,
    check_video,
)
from nnx_ppo.algorithms.compiled_run import Algorithm
from nnx_ppo.algorithms.config import PPOConfig, TrainConfig, TrainResult, VideoData
from nnx_ppo.algorithms.counters import step_words
from nnx_ppo.algorithms.entropy import check_entropy_weight
from nnx_ppo.algorithms.iteration import iterate
from nnx_ppo.algorithms.keys import purpose_keys
from nnx_ppo.algorithms.losses import Scalar, gae
from nnx_ppo.algorithms.objective import LossSettings, objective
from nnx_ppo.algorithms.optimizers import (
    configured_optimizer,
    given_optimizer,
    make_optimizer,
)
from nnx_ppo.algorithms.programs import frozen, traced
from nnx_ppo.algorithms.resets import first_env_states
from nnx_ppo.algorithms.resuming import resumed
from nnx_ppo.algorithms.training_loop import Callbacks, Schedule, run_training
from nnx_ppo.algorithms.types import LoggingLevel, TrainingState, Transition
from nnx_ppo.core import RLEnv, StatefulModule

__all__ = ["default_config", "gae", "new_training_state", "ppo_loss", "ppo_step", "train_ppo"]


def default_config() -> TrainConfig:
    """Return the default training configuration."""
    return TrainConfig()


def train_ppo(
    env: RLEnv,
    networks: StatefulModule,
    config: TrainConfig | None = None,
    *,
    total_steps: int | None = None,
    seed: int | None = None,
    log_fn: Callable[[dict[str, Any], int], None] | None = None,
    video_fn: Callable[[VideoData], None] | None = None,
    checkpoint_fn: Callable[[TrainingState, int], None] | None = None,
    eval_env: RLEnv | None = None,
    initial_state: TrainingState | None = None,
    stop_fn: Callable[[], bool] | None = None,
    optimizer: optax.GradientTransformation | None = None,
) -> TrainResult:
    """Train a network with PPO.

    Callbacks may write to the network's variables (the weight of the entropy, say); training goes
    on with what they wrote from the next call to the device. Evaluation, video and checkpoint also
    run once at the start and once at the end. Neither of them, nor any logging level, changes what
    is learned.

    Args:
        env: The environment, written for a single instance.
        networks: The network, whose output is a `PPONetworkOutput`. It is updated in place, and
            up to date whenever a callback runs, at the end, and when an exception leaves.
        config: The configuration; `default_config()` if None.
        total_steps: Replaces `config.ppo.total_steps`.
        seed: Replaces `config.seed`.
        log_fn: Called with the metrics and the step after each iteration, in order, and before
            the first one with those of the first evaluation. The device goes on meanwhile: where
            no evaluation, video or checkpoint is due, the network is one call further than the
            metrics. If it raises an `Exception`, that becomes a
            warning and training goes on.
        video_fn: Called with a rendered episode, if `config.video.enabled`. What it or the
            renderer raises becomes a warning.
        checkpoint_fn: Called with a training state of its own, which later steps do not change,
            and the step. What it raises ends training.
        eval_env: Environment for evaluation and videos; `env` if None.
        initial_state: A state to go on from. Its network's variables are copied to `networks`,
            its optimiser's go on under the settings of `config`.
        stop_fn: Asked whether to end early: after each call to the device, which is one iteration
            unless `config.iterations_per_call` says more, and after the evaluation, video and
            checkpoint that follow it. The last checkpoint is of the step at which it ends.
        optimizer: Takes the place of the configuration's Adam; `config.ppo.learning_rate` is then
            not read.

    Returns:
        The final state, metrics and evaluation history.

    Raises:
        TypeError: `config`, `networks` or `optimizer` is of another kind than it must be.
        ValueError: The network does not fit the environment, `initial_state` or `optimizer` the
            configuration, or the configuration the network. Raised before anything compiles.
    """
    config = _resolved(config, total_steps, seed)
    check_module("networks", networks)
    check_training_mode(networks)
    check_entropy_weight(networks, config.ppo)
    eval_env = env if eval_env is None else eval_env
    check_video(config.video, eval_env)
    env, eval_env = traced(env), traced(eval_env)
    check_network(env, networks, config.ppo.combine_advantages)
    check_discounts(env, config.ppo.discounting_factor)
    if eval_env is not env:
        check_network(eval_env, networks, config.ppo.combine_advantages)
    own_optimizer = configured_optimizer(networks, config.ppo, optimizer)
    if initial_state is None:
        state = _first_state(env, networks, config.ppo.n_envs, config.seed, own_optimizer)
    else:
        state = resumed(initial_state, networks, own_optimizer, env, config.ppo.n_envs)
    outcome = run_training(
        Algorithm(
            iteration=lambda state: iterate(env, state, config.ppo),
            key=("ppo", frozen(config.ppo)),
            network_field="networks",
            steps_per_iteration=config.ppo.n_envs * config.ppo.rollout_length,
        ),
        state,
        Schedule(
            config.ppo.total_steps,
            config.eval,
            config.video,
            config.checkpoint_every_steps,
            config.iterations_per_call,
        ),
        Callbacks(log_fn, video_fn, checkpoint_fn, stop_fn),
        env=env,
        eval_env=eval_env,
        keys=purpose_keys(config.seed),
        throughput=LoggingLevel.THROUGHPUT in config.ppo.logging_level,
    )
    return TrainResult(**outcome._asdict())


def new_training_state(  # noqa: PLR0917  (documented)
    env: RLEnv,
    networks: StatefulModule,
    n_envs: int,
    seed: int,
    learning_rate: float | optax.Schedule = 1e-4,
    gradient_clipping: float | None = None,
    weight_decay: float | None = None,
    optimizer: optax.GradientTransformation | None = None,
) -> TrainingState:
    """Return the state from which training starts.

    Environments that end by time limit are given different ages, so that they do not all end at
    the same step for ever (`EpisodeWrapper.stagger`).

    Args:
        env: The environment, written for a single instance.
        networks: The network; becomes part of the state.
        n_envs: Environments that run side by side.
        seed: Seed of the environments and of everything that training draws.
        learning_rate: Step size of Adam, or a schedule that gives it for a number of updates.
        gradient_clipping: Largest global norm of a gradient, or None.
        weight_decay: Decay of AdamW, or None for Adam.
        optimizer: Takes the place of Adam; `learning_rate` is then not read.

    Raises:
        TypeError: `optimizer` is no `optax.GradientTransformation`.
        ValueError: `gradient_clipping` or `weight_decay` are given beside `optimizer`.
    """
    if optimizer is None:
        own = make_optimizer(networks, learning_rate, gradient_clipping, weight_decay)
    else:
        replaced = {"gradient_clipping": gradient_clipping, "weight_decay": weight_decay}
        own = given_optimizer(networks, optimizer, replaced)
    return _first_state(env, networks, n_envs, seed, own)


def _first_state(
    env: RLEnv, networks: StatefulModule, n_envs: int, seed: int, optimizer: nnx.Optimizer
) -> TrainingState:
    """Return the state from which training starts."""
    keys = purpose_keys(seed)
    return TrainingState(
        networks=networks,
        network_states=networks.initialize_state(n_envs),
        env_states=first_env_states(env, n_envs, keys),
        optimizer=optimizer,
        rng_key=keys.training,
        steps_taken=jnp.zeros((), jnp.float32),
        step_words=step_words(0),
    )


def ppo_step(  # noqa: PLR0917  (documented)
    env: RLEnv,
    training_state: TrainingState,
    n_envs: int,
    rollout_length: int,
    gae_lambda: Scalar,
    discounting_factor: Scalar | Mapping[str, Scalar],
    clip_range: Scalar,
    normalize_advantages: bool,
    combine_advantages: bool,
    n_epochs: int,
    n_minibatches: int,
    critic_loss_weight: Scalar = 1.0,
    logging_level: LoggingLevel = LoggingLevel.LOSSES,
    logging_percentiles: tuple[int, ...] | None = None,
) -> tuple[TrainingState, dict[str, Any]]:
    """Run one iteration: collect a window, learn from it, fold in statistics.

    Network and optimiser are updated in place. Fields of the configuration are as in
    `PPOConfig`.

    Args:
        env: The environment, written for a single instance.
        training_state: The state to go on from.
        n_envs: Environments in `training_state`.
        rollout_length: Steps of the window.
        gae_lambda: λ.
        discounting_factor: γ, or one for each reward head by its name.
        clip_range: ε.
        normalize_advantages: Whether to standardise advantages.
        combine_advantages: Whether the sum over reward heads serves every action head.
        n_epochs: Passes over the window.
        n_minibatches: Minibatches per pass.
        critic_loss_weight: Weight of the value loss.
        logging_level: What to log.
        logging_percentiles: Percentiles to log, or None for mean and std.

    Returns:
        The next state, and the metrics by name.
    """
    config = PPOConfig(
        n_envs=n_envs,
        rollout_length=rollout_length,
        n_epochs=n_epochs,
        n_minibatches=n_minibatches,
        logging_level=logging_level,
        logging_percentiles=logging_percentiles,
    )
    settings = LossSettings(
        clip_range=clip_range,
        normalize_advantages=normalize_advantages,
        combine_advantages=combine_advantages,
        discounting_factor=discounting_factor,
        gae_lambda=gae_lambda,
        critic_loss_weight=critic_loss_weight,
        logging_level=logging_level,
    )
    check_number_of_environments(training_state.env_states, n_envs)
    return iterate(env, training_state, config, settings)


def ppo_loss(  # noqa: PLR0917  (documented)
    networks: StatefulModule,
    network_state: PyTree,
    rollout_data: Transition,
    clip_range: Scalar,
    normalize_advantages: bool,
    combine_advantages: bool,
    discounting_factor: Scalar | Mapping[str, Scalar],
    gae_lambda: Scalar,
    critic_loss_weight: Scalar,
    logging_level: LoggingLevel,
) -> tuple[Array, dict[str, PyTree]]:
    """Replay a window under the current weights and return PPO's loss.

    Args:
        networks: The network; its random streams advance.
        network_state: The carry at the window's start, leaves `(batch, …)`.
        rollout_data: The window, leaves `(time, batch, …)`; of `next_obs` the last step is read.
        clip_range: ε of the clipped surrogate.
        normalize_advantages: Whether to standardise advantages over the window.
        combine_advantages: Whether the sum over reward heads serves every action head.
        discounting_factor: γ, or one for each reward head by its name.
        gae_lambda: λ.
        critic_loss_weight: Weight of the value loss.
        logging_level: Which metrics to return.

    Returns:
        The loss: surrogates and weighted value losses summed over heads, plus the network's mean
        regularisation; and the metrics by name, with one entry per head where there are several.

    Raises:
        ValueError: The rollout holds no extras, or heads of rewards, values and actions do not
            fit each other.
    """
    if rollout_data.rollout_extras is None:
        raise ValueError(
            "rollout_data.rollout_extras is None, but replaying needs what the network emitted "
            "during the rollout: without it other actions would be drawn. Pass the rollout as "
            "unroll_env returned it."
        )
    settings = LossSettings(
        clip_range=clip_range,
        normalize_advantages=normalize_advantages,
        combine_advantages=combine_advantages,
        discounting_factor=discounting_factor,
        gae_lambda=gae_lambda,
        critic_loss_weight=critic_loss_weight,
        logging_level=logging_level,
    )
    return objective(networks, network_state, rollout_data, None, settings)


def _resolved(config: TrainConfig | None, total_steps: int | None, seed: int | None) -> TrainConfig:
    """Apply the convenience arguments of `train_ppo`; the result is checked like any config."""
    config = default_config() if config is None else config
    cure = "Build it as TrainConfig(ppo=PPOConfig(…)); train_distillation takes its own kind."
    check_kind("config", config, TrainConfig, cure)
    if total_steps is not None:
        ppo = dataclasses.replace(config.ppo, total_steps=total_steps)
        config = dataclasses.replace(config, ppo=ppo)
    return config if seed is None else dataclasses.replace(config, seed=seed)
