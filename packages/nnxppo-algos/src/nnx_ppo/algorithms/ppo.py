"""Proximal policy optimisation for stateful networks."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jaxtyping import Array, PyTree

from nnx_ppo.algorithms._functional import clone_keys, query_values, strongly_typed
from nnx_ppo.algorithms.checks import (
    check_network,
    check_number_of_environments,
    check_same_variables,
    check_training_mode,
    check_video,
)
from nnx_ppo.algorithms.config import PPOConfig, TrainConfig, TrainResult, VideoData
from nnx_ppo.algorithms.counters import add_steps, as_float, step_words, words_of
from nnx_ppo.algorithms.heads import advantages_per_action, match_rewards, sum_heads
from nnx_ppo.algorithms.keys import purpose_keys
from nnx_ppo.algorithms.losses import (
    Scalar,
    approximate_kl,
    clipped_surrogate,
    explained_variance,
    gae,
    normalized,
    outside_clip,
    r_squared,
    value_loss,
)
from nnx_ppo.algorithms.metrics import compute_metrics, log_weight_stats
from nnx_ppo.algorithms.rollout import unroll_env
from nnx_ppo.algorithms.training_loop import Algorithm, Callbacks, Schedule, run_training
from nnx_ppo.algorithms.types import LoggingLevel, TrainingState, Transition
from nnx_ppo.algorithms.updates import learn, make_optimizer
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
) -> TrainResult:
    """Train a network with PPO.

    Callbacks may write to the network's variables (the weight of the entropy, say); training goes
    on with what they wrote. Evaluation, video and checkpoint also run once at the start and once at
    the end. Neither of them, nor any logging level, changes what is learned.

    Args:
        env: The environment, written for a single instance.
        networks: The network, whose output is a `PPONetworkOutput`. It is updated in place, and
            up to date whenever a callback runs, at the end, and when an exception leaves.
        config: The configuration; `default_config()` if None.
        total_steps: Replaces `config.ppo.total_steps`.
        seed: Replaces `config.seed`.
        log_fn: Called with the metrics and the step after each iteration, and before the first
            one with those of the first evaluation. If it raises an `Exception`, that becomes a
            warning and training goes on.
        video_fn: Called with a rendered episode, if `config.video.enabled`. What it or the
            renderer raises becomes a warning.
        checkpoint_fn: Called with a training state of its own, which later steps do not change,
            and the step. What it raises ends training.
        eval_env: Environment for evaluation and videos; `env` if None.
        initial_state: A state to go on from. Its network's variables are copied to `networks`,
            its optimiser's go on under the settings of `config`.
        stop_fn: Asked after each iteration whether to end early.

    Returns:
        The final state, metrics and evaluation history.

    Raises:
        ValueError: The network does not fit the environment, or `initial_state` the
            configuration. Raised before anything compiles.
    """
    config = _resolved(config, total_steps, seed)
    check_training_mode(networks)
    eval_env = env if eval_env is None else eval_env
    check_video(config.video, eval_env)
    check_network(env, networks, config.ppo.combine_advantages)
    if eval_env is not env:
        check_network(eval_env, networks, config.ppo.combine_advantages)
    if initial_state is None:
        state = _new_state(env, networks, config)
    else:
        state = _resumed_state(initial_state, networks, config.ppo)
    outcome = run_training(
        Algorithm(
            iteration=lambda state: _iteration(env, state, config.ppo),
            network_field="networks",
            steps_per_iteration=config.ppo.n_envs * config.ppo.rollout_length,
        ),
        state,
        Schedule(config.ppo.total_steps, config.eval, config.video, config.checkpoint_every_steps),
        Callbacks(log_fn, video_fn, checkpoint_fn, stop_fn),
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
    """
    keys = purpose_keys(seed)

    @jax.jit
    def first_states(reset_key: Array, stagger_key: Array) -> Any:
        states = strongly_typed(jax.vmap(env.reset)(jax.random.split(reset_key, n_envs)))
        stagger = getattr(env, "stagger", None)
        return states if stagger is None else stagger(states, stagger_key)

    return TrainingState(
        networks=networks,
        network_states=networks.initialize_state(n_envs),
        env_states=first_states(keys.reset, keys.stagger),
        optimizer=make_optimizer(networks, learning_rate, gradient_clipping, weight_decay),
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
    discounting_factor: Scalar,
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
        discounting_factor: γ.
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
        gae_lambda=gae_lambda,  # pyright: ignore[reportArgumentType]  (may be traced)
        discounting_factor=discounting_factor,  # pyright: ignore[reportArgumentType]
        clip_range=clip_range,  # pyright: ignore[reportArgumentType]
        normalize_advantages=normalize_advantages,
        combine_advantages=combine_advantages,
        n_epochs=n_epochs,
        n_minibatches=n_minibatches,
        critic_loss_weight=critic_loss_weight,  # pyright: ignore[reportArgumentType]
        logging_level=logging_level,
        logging_percentiles=logging_percentiles,
    )
    check_number_of_environments(training_state.env_states, n_envs)
    return _iteration(env, training_state, config)


def ppo_loss(  # noqa: PLR0917  (documented)
    networks: StatefulModule,
    network_state: PyTree,
    rollout_data: Transition,
    clip_range: Scalar,
    normalize_advantages: bool,
    combine_advantages: bool,
    discounting_factor: Scalar,
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
        discounting_factor: γ.
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
    replay = networks.unroll(
        clone_keys(network_state),
        rollout_data.obs,
        rollout_data.done,
        rollout_data.rollout_extras,
    )
    values = replay.output.value_estimates
    last_obs = jax.tree.map(lambda leaf: leaf[-1], rollout_data.next_obs)
    raw_advantages = gae(
        match_rewards(rollout_data.rewards, values),
        jax.lax.stop_gradient(values),
        jax.lax.stop_gradient(query_values(networks, replay.next_state, last_obs)),
        rollout_data.done,
        rollout_data.truncated,
        gae_lambda,
        discounting_factor,
        rollout_data.bootstrap_values,
    )
    targets = jax.tree.map(lambda a, v: a + jax.lax.stop_gradient(v), raw_advantages, values)
    loglikelihoods = replay.output.loglikelihoods
    ratios = jax.tree.map(
        lambda new, old: jnp.exp(new - old),
        loglikelihoods,
        rollout_data.network_output.loglikelihoods,
    )
    advantages = advantages_per_action(raw_advantages, ratios, combine_advantages)
    if normalize_advantages:
        advantages = jax.tree.map(normalized, advantages)
    actor = jax.tree.map(lambda r, a: clipped_surrogate(r, a, clip_range), ratios, advantages)
    critic = jax.tree.map(value_loss, values, targets)
    regularization = replay.regularization_loss.mean()
    loss = sum_heads(actor) + critic_loss_weight * sum_heads(critic) + regularization

    metrics: dict[str, PyTree] = {}
    if LoggingLevel.LOSSES in logging_level:
        metrics["losses/actor"] = actor
        metrics["losses/critic"] = critic
        metrics["losses/regularization"] = regularization
    if LoggingLevel.ACTOR_EXTRA in logging_level:
        clipped = jax.tree.map(lambda ratio: outside_clip(ratio, clip_range), ratios)
        metrics["losses/clipping_fraction"] = clipped
        metrics["losses/approx_kl"] = jax.tree.map(
            approximate_kl, loglikelihoods, rollout_data.network_output.loglikelihoods
        )
        metrics["loglikelihood"] = loglikelihoods
    if LoggingLevel.CRITIC_EXTRA in logging_level:
        metrics["losses/advantages"] = raw_advantages
        metrics["losses/critic_R^2"] = jax.tree.map(r_squared, values, targets)
        metrics["losses/explained_variance"] = jax.tree.map(explained_variance, values, targets)
        metrics["losses/predicted_value"] = values
    return loss, metrics


def _iteration(
    env: RLEnv, state: TrainingState, config: PPOConfig
) -> tuple[TrainingState, dict[str, Any]]:
    """Collect, learn, fold in statistics."""
    networks, keys = state.networks, _IterationKeys(*jax.random.split(state.rng_key, 3))
    network_states, env_states, rollout = unroll_env(
        env, state.env_states, networks, state.network_states, config.rollout_length, keys.reset
    )

    def loss_fn(networks: StatefulModule, network_state: PyTree, part: Transition) -> Any:
        return ppo_loss(
            networks,
            network_state,
            part,
            config.clip_range,
            config.normalize_advantages,
            config.combine_advantages,
            config.discounting_factor,
            config.gae_lambda,
            config.critic_loss_weight,
            config.logging_level,
        )

    updates = learn(
        networks,
        state.optimizer,
        (state.network_states, _what_learning_needs(rollout)),
        loss_fn,
        keys.minibatches,
        n_epochs=config.n_epochs,
        n_minibatches=config.n_minibatches,
    )
    networks.update_statistics(rollout.rollout_extras)
    if LoggingLevel.GRAD_NORM not in config.logging_level:
        del updates["grad_norm"]
    metrics = compute_metrics(updates, rollout, config.logging_level, config.logging_percentiles)
    if LoggingLevel.WEIGHTS in config.logging_level:
        log_weight_stats(metrics, networks, config.logging_percentiles)
    words = words_of(state.steps_taken, state.step_words)
    words = add_steps(words, config.n_envs * config.rollout_length)
    metrics["total_steps"] = as_float(words)
    state = state.replace(
        network_states=network_states,
        env_states=env_states,
        rng_key=keys.next,
        steps_taken=as_float(words),
        step_words=words,
    )
    return state, metrics


class _IterationKeys(NamedTuple):
    next: Array
    reset: Array
    minibatches: Array


def _what_learning_needs(rollout: Transition) -> Transition:
    """Drop what the loss does not read, so that minibatches do not copy it."""
    output = rollout.network_output
    return rollout.replace(
        network_output=output.replace(actions=None, value_estimates=None),
        next_obs=jax.tree.map(lambda leaf: leaf[-1:], rollout.next_obs),
        metrics={},
    )


def _new_state(env: RLEnv, networks: StatefulModule, config: TrainConfig) -> TrainingState:
    ppo = config.ppo
    return new_training_state(
        env,
        networks,
        ppo.n_envs,
        config.seed,
        learning_rate_of(ppo),
        ppo.gradient_clipping,
        ppo.weight_decay,
    )


def learning_rate_of(config: PPOConfig) -> float | optax.Schedule:
    """Return the learning rate, a schedule over gradient steps where it is to change."""
    if config.final_learning_rate is None:
        return config.learning_rate
    iterations = -(-config.total_steps // (config.n_envs * config.rollout_length))
    updates = iterations * config.n_epochs * config.n_minibatches
    return optax.linear_schedule(config.learning_rate, config.final_learning_rate, updates)


def _resumed_state(
    state: TrainingState, networks: StatefulModule, config: PPOConfig
) -> TrainingState:
    """Return a state that goes on from another, with the caller's network and configuration."""
    check_number_of_environments(state.env_states, config.n_envs)
    optimizer = make_optimizer(
        networks, learning_rate_of(config), config.gradient_clipping, config.weight_decay
    )
    stored = nnx.state(state.optimizer)
    check_same_variables("initial_state.optimizer", nnx.state(optimizer), stored)
    nnx.update(optimizer, stored)
    if state.networks is not networks:
        weights = nnx.state(state.networks)
        check_same_variables("initial_state.networks", nnx.state(networks), weights)
        nnx.update(networks, weights)
    return state.replace(
        networks=networks,
        optimizer=optimizer,
        step_words=words_of(state.steps_taken, state.step_words),
    )


def _resolved(config: TrainConfig | None, total_steps: int | None, seed: int | None) -> TrainConfig:
    """Apply the convenience arguments of `train_ppo`; the result is checked like any config."""
    config = default_config() if config is None else config
    if total_steps is not None:
        ppo = dataclasses.replace(config.ppo, total_steps=total_steps)
        config = dataclasses.replace(config, ppo=ppo)
    return config if seed is None else dataclasses.replace(config, seed=seed)
