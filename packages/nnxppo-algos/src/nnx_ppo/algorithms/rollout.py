"""Collecting data: the network and the environments, step by step."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, PyTree, Shaped

from nnx_ppo.algorithms._functional import clone_keys, strongly_typed
from nnx_ppo.algorithms.activations import record_activations_rollout
from nnx_ppo.algorithms.evaluation import eval_rollout
from nnx_ppo.algorithms.rendering import (
    SlimData,
    SlimState,
    eval_rollout_for_render_scan,
    unstack_trajectory,
)
from nnx_ppo.algorithms.resets import reset_finished, values_before_reset
from nnx_ppo.algorithms.types import Transition
from nnx_ppo.core import RLEnv, StatefulModule, reset_where, scan_module, time_limit_flag

__all__ = [
    "SlimData",
    "SlimState",
    "eval_rollout",
    "eval_rollout_for_render_scan",
    "record_activations_rollout",
    "single_transition",
    "tree_where",
    "unroll_env",
    "unstack_trajectory",
]


def single_transition(
    env: RLEnv,
    networks: StatefulModule,
    carry: tuple[PyTree, Any],
    rng_keys_for_env_reset: Shaped[Array, "batch ..."],
) -> tuple[tuple[PyTree, Any], Transition]:
    """Let the network act once in every environment, and reset those that finished.

    An episode ends if the environment says `done` or flags a time limit. Its carry and its
    environment are reset after the step.

    Args:
        env: The environment, written for a single instance.
        networks: The network.
        carry: `(network_state, env_state)`, leaves `(batch, …)`.
        rng_keys_for_env_reset: One key per environment, used where it is reset.

    Returns:
        The carry for the next step, and the transition, leaves `(batch, …)`.
    """
    return transition(env, networks, carry, rng_keys_for_env_reset, bootstrap=True)


def transition(
    env: RLEnv,
    networks: StatefulModule,
    carry: tuple[PyTree, Any],
    rng_keys_for_env_reset: Shaped[Array, "batch ..."],
    *,
    bootstrap: bool,
) -> tuple[tuple[PyTree, Any], Transition]:
    """Take one step as `single_transition` does, with or without bootstrap values."""
    network_state, env_state = carry
    out = networks(network_state, env_state.obs)
    stepped = strongly_typed(jax.vmap(env.step)(env_state, out.output.actions))
    truncated = time_limit_flag(stepped)
    ended = jnp.asarray(stepped.done).astype(bool) | truncated
    values = None
    if bootstrap:
        values = values_before_reset(
            networks, out.next_state, stepped.obs, out.output.value_estimates, truncated
        )
    seen = Transition(
        obs=env_state.obs,
        network_output=out.output,
        rewards=stepped.reward,
        done=ended,
        truncated=truncated,
        next_obs=stepped.obs,
        metrics={"env": stepped.metrics, "net": out.metrics},
        rollout_extras=out.rollout_extras,
        bootstrap_values=values,
    )
    network_state = reset_where(networks, ended, out.next_state)
    env_state = reset_finished(env, stepped, ended, rng_keys_for_env_reset)
    return (network_state, env_state), seen


def unroll_env(
    env: RLEnv,
    env_state: Any,
    networks: StatefulModule,
    network_state: PyTree,
    unroll_length: int,
    rng_key_for_env_reset: Shaped[Array, "..."],
) -> tuple[PyTree, Any, Transition]:
    """Collect a window of steps.

    Args:
        env: The environment, written for a single instance.
        env_state: Its states, leaves `(batch, …)`.
        networks: The network; its random streams advance.
        network_state: Its carry, leaves `(batch, …)`.
        unroll_length: Steps to take.
        rng_key_for_env_reset: One key; every step and environment gets its own from it.

    Returns:
        The carry and the environment states after the window, and the transitions, leaves
        `(unroll_length, batch, …)`.
    """
    collected = collect(
        env, env_state, networks, network_state, unroll_length, rng_key_for_env_reset
    )
    return collected.network_state, collected.env_state, collected.rollout


class Collected(NamedTuple):
    """A window, and where it left networks and environments."""

    network_state: PyTree
    env_state: Any
    rollout: Transition
    kept: PyTree


def collect(
    env: RLEnv,
    env_state: Any,
    networks: StatefulModule,
    network_state: PyTree,
    unroll_length: int,
    rng_key_for_env_reset: Shaped[Array, "..."],
    *,
    keep: tuple[int, ...] = (),
) -> Collected:
    """Collect a window as `unroll_env` does, and keep the carries before some of its steps.

    Args:
        env: As in `unroll_env`.
        env_state: As in `unroll_env`.
        networks: As in `unroll_env`.
        network_state: As in `unroll_env`.
        unroll_length: As in `unroll_env`.
        rng_key_for_env_reset: As in `unroll_env`.
        keep: The steps, different ones in order.

    Returns:
        What `unroll_env` returns; and `kept`, the carries with leaves `(len(keep), batch, …)`, or
        None if there are no such steps.
    """
    n_envs = jnp.shape(env_state.done)[0]
    keys = jax.random.split(rng_key_for_env_reset, (unroll_length, n_envs))
    # Where each step's carry goes; beyond the end for those that are not kept.
    slots = np.full(unroll_length, len(keep), np.int32)
    slots[list(keep)] = np.arange(len(keep))

    def step(live: StatefulModule, carry: Any, inputs: Any) -> tuple[Any, Transition]:
        carry, kept = carry
        keys, slot = inputs
        if keep:
            kept = jax.tree.map(
                lambda old, new: old.at[slot].set(new, mode="drop"), kept, clone_keys(carry[0])
            )
        carry, seen = single_transition(env, live, carry, keys)
        return (carry, kept), seen

    kept = None
    if keep:
        kept = jax.tree.map(
            lambda leaf: jnp.broadcast_to(leaf, (len(keep), *leaf.shape)), clone_keys(network_state)
        )
    carry = ((network_state, env_state), kept)
    carry, rollout = scan_module(networks, step, carry, (keys, jnp.asarray(slots)))
    (network_state, env_state), kept = carry
    return Collected(network_state, env_state, rollout, kept)


def tree_where(cond: Bool[Array, " batch"], on_true: PyTree, on_false: PyTree) -> Any:
    """Select between two trees, environment by environment.

    A leaf whose first axis is not `batch` long is shared by all environments and comes from
    `on_false`. (`reset_finished` knows such leaves for certain; here only the shape can tell.)

    Args:
        cond: Where to take `on_true`.
        on_true: A tree with leaves `(batch, …)`.
        on_false: A tree of the same structure.
    """

    def select(new: Any, old: Any) -> Any:
        if jnp.ndim(old) == 0 or jnp.shape(old)[0] != cond.shape[0]:
            return old
        return jnp.where(cond.reshape((-1,) + (1,) * (jnp.ndim(old) - 1)), new, old)

    return jax.tree.map(select, on_true, on_false)
