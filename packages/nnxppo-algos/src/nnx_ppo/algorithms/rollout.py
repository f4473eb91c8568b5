"""Collecting data: the network and the environments, step by step."""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.core import Tracer
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
from nnx_ppo.algorithms.types import DistillationTransition, Transition
from nnx_ppo.core import RLEnv, StatefulModule, reset_where, scan_module, time_limit_flag

Module = TypeVar("Module", bound=nnx.Module)
Step = TypeVar("Step", Transition, DistillationTransition)

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
    env_state = reset_finished(env, stepped, ended, rng_keys_for_env_reset, out.output.actions)
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
    lean: bool = False,
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
        lean: Whether to store only what learning reads, as `stack_transitions` says.

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
    carry, inputs = ((network_state, env_state), kept), (keys, jnp.asarray(slots))
    if lean:
        carry, rollout = stack_transitions(networks, step, carry, inputs, env_state.obs)
    else:
        carry, rollout = scan_module(networks, step, carry, inputs)
    (network_state, env_state), kept = carry
    return Collected(network_state, env_state, rollout, kept)


def stack_transitions(
    module: Module,
    step: Callable[[Module, Any, Any], tuple[Any, Step]],
    carry: Any,
    xs: PyTree,
    obs: PyTree,
) -> tuple[Any, Step]:
    """`scan_module` for steps that return transitions, in as little memory as learning needs.

    Of `next_obs` only the last step is stored, leaves `(1, batch, …)`: of the others a window reads
    nothing. An array that a transition holds twice is stored once; a normaliser emits the
    observations again, for its statistics.

    Args:
        module: As in `scan_module`.
        step: `(module, carry, x) -> (carry, transition)`.
        carry: As in `scan_module`.
        xs: As in `scan_module`.
        obs: Observations of the shapes and dtypes of `next_obs`.

    Returns:
        The final carry, and the transitions.
    """
    layouts: list[tuple[Any, list[int]]] = []  # of the leaves; every step has the same

    def lean_step(live: Module, loop: tuple[Any, Any], x: Any) -> tuple[tuple[Any, Any], Any]:
        carry, seen = step(live, loop[0], x)
        stored, tree, places = distinct_arrays(seen.replace(next_obs=None))
        layouts.append((tree, places))
        return (carry, seen.next_obs), stored

    (carry, last), stored = scan_module(module, lean_step, (carry, obs), xs)
    tree, places = layouts[-1]
    rollout = jax.tree.unflatten(tree, [stored[place] for place in places])
    return carry, rollout.replace(next_obs=jax.tree.map(lambda leaf: leaf[None], last))


def distinct_arrays(tree: PyTree) -> tuple[list[Any], Any, list[int]]:
    """Return the different arrays of a tree, its structure, and where each leaf is among them.

    Only arrays that are being traced are found to be the same.
    """
    leaves, structure = jax.tree.flatten(tree)
    # Of values that are not traced, one step may by chance share what another does not.
    names = [id(leaf) if isinstance(leaf, Tracer) else (i,) for i, leaf in enumerate(leaves)]
    distinct = dict(zip(names, leaves, strict=True))
    order = {name: place for place, name in enumerate(distinct)}
    return list(distinct.values()), structure, [order[name] for name in names]


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
