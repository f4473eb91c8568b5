"""One iteration of PPO: collect a window, learn from it, fold in statistics."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from nnx_ppo.algorithms import chunks
from nnx_ppo.algorithms._functional import clone_keys, functional_copy
from nnx_ppo.algorithms.bookkeeping import finished, iteration_keys
from nnx_ppo.algorithms.config import PPOConfig
from nnx_ppo.algorithms.counters import as_float, words_of
from nnx_ppo.algorithms.entropy import schedule_entropy_weight
from nnx_ppo.algorithms.objective import estimate_from_rollout, objective
from nnx_ppo.algorithms.optimizers import last_learning_rate, rate_changes
from nnx_ppo.algorithms.rollout import Collected, collect
from nnx_ppo.algorithms.types import LoggingLevel, TrainingState, Transition
from nnx_ppo.algorithms.updates import learn
from nnx_ppo.core import RLEnv, StatefulModule


def iterate(
    env: RLEnv, state: TrainingState, config: PPOConfig
) -> tuple[TrainingState, dict[str, Any]]:
    """Collect, learn, fold in statistics; network and optimiser are updated in place.

    Args:
        env: The environment, written for a single instance.
        state: The state to go on from.
        config: The configuration.

    Returns:
        The next state, and the metrics by name.
    """
    networks, keys = state.networks, iteration_keys(state.rng_key)
    steps = as_float(words_of(state.steps_taken, state.step_words))
    schedule_entropy_weight(networks, config, steps)
    window = collect(
        env,
        state.env_states,
        networks,
        state.network_states,
        config.rollout_length,
        keys.reset,
        keep=chunks.kept_steps(config),
    )
    updates = _learn(state, window, keys.minibatches, config)
    if LoggingLevel.ACTOR_EXTRA in config.logging_level:
        updates["losses/carry_drift"] = carry_drift(
            networks, state.network_states, window.rollout, window.network_state
        )
    networks.update_statistics(window.rollout.rollout_extras)
    state = state.replace(
        network_states=window.network_state, env_states=window.env_state, rng_key=keys.next
    )
    return finished(state, networks, updates, window.rollout, config)


def _learn(
    state: TrainingState, window: Collected, key: Array, config: PPOConfig
) -> dict[str, PyTree]:
    """Take the gradient steps of an iteration; return what is logged of them, and `TAKEN`."""
    networks, level = state.networks, config.logging_level
    estimates = None
    if config.advantages == "window":
        estimates = estimate_from_rollout(networks, window.network_state, window.rollout, config)
    steps = (_what_learning_needs(window.rollout, config), estimates)
    chunked = config.chunk_length is not None
    data: tuple[PyTree, PyTree] = (state.network_states, steps)
    if chunked:
        data = chunks.cut(window.rollout, steps, window.kept, config)

    def loss_fn(networks: StatefulModule, network_state: PyTree, part: Any) -> Any:
        if chunked:
            network_state, part = chunks.joined(networks, network_state, part)
        rollout, estimates = part
        return objective(networks, network_state, rollout, estimates, config)

    updates = learn(
        networks,
        state.optimizer,
        data,
        loss_fn,
        key,
        n_epochs=config.n_epochs,
        n_minibatches=config.n_minibatches,
        max_divergence=config.target_kl,
    )
    if LoggingLevel.LOSSES in level:
        rate = last_learning_rate(state.optimizer)
        if rate_changes(config) and rate is not None:
            updates["learning_rate"] = rate
    return updates


def _what_learning_needs(rollout: Transition, config: PPOConfig) -> Transition:
    """Drop what the loss does not read, so that minibatches do not copy it."""
    output = rollout.network_output.replace(actions=None)
    if config.value_clip_range is None:
        output = output.replace(value_estimates=None)
    slim = rollout.replace(network_output=output, metrics={})
    if config.advantages == "window":
        return slim.replace(next_obs=None, bootstrap_values=None)
    return slim.replace(next_obs=jax.tree.map(lambda leaf: leaf[-1:], rollout.next_obs))


def carry_drift(
    networks: StatefulModule, network_state: PyTree, rollout: Transition, end_state: PyTree
) -> Float[Array, ""]:
    """Return how far new weights have moved the carry at the end of a window.

    It is the root mean square, over all floats of the carry and all environments, of the
    difference between the carry that the rollout ended with and that of a replay of the window.
    Floats that are NaN at the rollout's end do not count (some modules mark a fresh carry so).

    Args:
        networks: The network with the new weights; not changed.
        network_state: The carry at the window's start, leaves `(batch, …)`.
        rollout: The window, leaves `(time, batch, …)`.
        end_state: The carry at the window's end, leaves `(batch, …)`.

    Returns:
        The drift; 0 for a carry without floats.
    """
    replayed = functional_copy(networks).unroll(
        clone_keys(network_state), rollout.obs, rollout.done, rollout.rollout_extras
    )
    total, count = jnp.zeros(()), jnp.zeros(())
    pairs = zip(jax.tree.leaves(end_state), jax.tree.leaves(replayed.next_state), strict=True)
    for old, new in pairs:
        if jnp.issubdtype(old.dtype, jnp.floating):
            counts = ~jnp.isnan(old)
            total += jnp.square(jnp.where(counts, new - old, 0.0)).sum()
            count += counts.sum()
    return jnp.sqrt(total / jnp.maximum(count, 1.0))
