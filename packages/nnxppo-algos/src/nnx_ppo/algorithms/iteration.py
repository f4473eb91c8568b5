"""One iteration of PPO: collect a window, learn from it, fold in statistics."""

from typing import Any

from jaxtyping import Array, Float, PyTree

from nnx_ppo.algorithms import chunks
from nnx_ppo.algorithms.bookkeeping import IterationKeys, finished, iteration_keys
from nnx_ppo.algorithms.config import PPOConfig
from nnx_ppo.algorithms.counters import as_float, words_of
from nnx_ppo.algorithms.entropy import schedule_entropy_weight
from nnx_ppo.algorithms.objective import (
    Estimates,
    LossSettings,
    estimate_from_rollout,
    loss_settings,
    objective,
)
from nnx_ppo.algorithms.optimizers import last_learning_rate, linear_rates, rate_changes
from nnx_ppo.algorithms.precision import OwnPrecision, matmul_precision
from nnx_ppo.algorithms.replay import carry_drift
from nnx_ppo.algorithms.rollout import Collected, collect
from nnx_ppo.algorithms.types import LoggingLevel, TrainingState, Transition
from nnx_ppo.algorithms.updates import LossFunction, learn
from nnx_ppo.core import RLEnv, StatefulModule


def iterate(
    env: RLEnv, state: TrainingState, config: PPOConfig, settings: LossSettings | None = None
) -> tuple[TrainingState, dict[str, Any]]:
    """Collect, learn, fold in statistics; network and optimiser are updated in place.

    Args:
        env: The environment, written for a single instance.
        state: The state to go on from.
        config: The configuration.
        settings: Settings of the loss in place of the configuration's.

    Returns:
        The next state, and the metrics by name.
    """
    networks, keys = state.networks, iteration_keys(state.rng_key)
    schedule_entropy_weight(networks, config, _steps_before(state))
    window = collect_window(env, state, config, keys.reset)
    settings = loss_settings(config) if settings is None else settings
    return conclude(state, window, config, settings, keys)


def collect_window(env: RLEnv, state: TrainingState, config: PPOConfig, key: Array) -> Collected:
    """Collect the window of an iteration; the network's random streams advance in place.

    Only what learning reads is stored: of `next_obs` the last step, leaves `(1, batch, …)`.

    Args:
        env: The environment, written for a single instance.
        state: The state to go on from.
        config: The configuration.
        key: The key of the environment resets.
    """
    env = OwnPrecision(env)
    with matmul_precision(config.matmul_precision):
        return collect(
            env,
            state.env_states,
            state.networks,
            state.network_states,
            config.rollout_length,
            key,
            keep=chunks.kept_steps(config),
            lean=True,
        )


def conclude(
    state: TrainingState,
    window: Collected,
    config: PPOConfig,
    settings: LossSettings,
    keys: IterationKeys,
) -> tuple[TrainingState, dict[str, Any]]:
    """Learn from a window, fold in statistics; network and optimiser are updated in place.

    Args:
        state: The state that the window was collected from.
        window: What `collect_window` returned.
        config: The configuration.
        settings: Settings of the loss.
        keys: The keys of the iteration.

    Returns:
        The next state, and the metrics by name.
    """
    networks = state.networks
    updates = learn_from(state, window, config, settings, keys.minibatches)
    if LoggingLevel.ACTOR_EXTRA in config.logging_level:
        with matmul_precision(config.matmul_precision):
            updates["losses/carry_drift"] = carry_drift(
                networks,
                state.network_states,
                window.rollout,
                window.network_state,
                config.remat_length,
            )
    networks.update_statistics(window.rollout.rollout_extras)
    state = state.replace(
        network_states=window.network_state, env_states=window.env_state, rng_key=keys.next
    )
    return finished(state, networks, updates, window.rollout, config)


def learn_from(
    state: TrainingState, window: Collected, config: PPOConfig, settings: LossSettings, key: Array
) -> dict[str, PyTree]:
    """Take the gradient steps of an iteration; network and optimiser are updated in place.

    Args:
        state: The state that the window was collected from.
        window: What `collect_window` returned.
        config: The configuration.
        settings: Settings of the loss.
        key: The key of the minibatches.

    Returns:
        What is logged of the gradient steps, and `TAKEN`.
    """
    networks, level = state.networks, config.logging_level
    with matmul_precision(config.matmul_precision):
        estimates = None
        if config.advantages == "window":
            estimates = estimate_from_rollout(
                networks, window.network_state, window.rollout, settings
            )
        data, loss_fn = _to_minimize(state, window, estimates, config, settings)
        updates = learn(
            networks,
            state.optimizer,
            data,
            loss_fn,
            key,
            n_epochs=config.n_epochs,
            n_minibatches=config.n_minibatches,
            learning_rates=linear_rates(config, _steps_before(state)),
            max_divergence=config.target_kl,
        )
    if LoggingLevel.LOSSES in level:
        rate = last_learning_rate(state.optimizer)
        if rate_changes(config) and rate is not None:
            updates["learning_rate"] = rate
    return updates


def _to_minimize(
    state: TrainingState,
    window: Collected,
    estimates: Estimates | None,
    config: PPOConfig,
    settings: LossSettings,
) -> tuple[tuple[PyTree, PyTree], LossFunction]:
    """Return the data that minibatches are made of, and the loss of one."""
    steps = (_what_learning_needs(window.rollout, config), estimates)
    chunked = config.chunk_length is not None
    data: tuple[PyTree, PyTree] = (state.network_states, steps)
    if chunked:
        data = chunks.cut(window.rollout, steps, window.kept, config)

    def loss_fn(networks: StatefulModule, network_state: PyTree, part: Any) -> Any:
        if chunked:
            network_state, part = chunks.joined(networks, network_state, part)
        rollout, estimates = part
        return objective(networks, network_state, rollout, estimates, settings)

    return data, loss_fn


def _steps_before(state: TrainingState) -> Float[Array, ""]:
    """Return the environment steps before an iteration."""
    return as_float(words_of(state.steps_taken, state.step_words))


def _what_learning_needs(rollout: Transition, config: PPOConfig) -> Transition:
    """Drop what the loss does not read, so that minibatches do not copy it."""
    output = rollout.network_output.replace(actions=None)
    if config.value_clip_range is None:
        output = output.replace(value_estimates=None)
    slim = rollout.replace(network_output=output, metrics={})
    if config.advantages == "window":
        return slim.replace(next_obs=None, bootstrap_values=None)
    return slim
