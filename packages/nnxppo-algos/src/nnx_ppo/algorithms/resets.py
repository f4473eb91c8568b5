"""Resetting finished environments without resetting all of them.

`env.reset` can cost a hundred steps of `env.step` (some Playground resets let the body settle for
200 steps), and few environments finish at once. So finished environments are gathered into
chunks of a fixed size, and a loop runs while any chunk is left: not at all when none finished.
"""

from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, PyTree, Shaped

from nnx_ppo.algorithms._functional import clone_keys, query_values, strongly_typed
from nnx_ppo.algorithms.keys import PurposeKeys
from nnx_ppo.core import RLEnv, StatefulModule

Tree = TypeVar("Tree")


def chunk_size(n_envs: int) -> int:
    """Return how many environments to reset at a time."""
    return min(n_envs, max(8, n_envs // 32))


def batched_leaves(env: RLEnv, keys: Shaped[Array, "batch ..."]) -> Any:
    """Return a tree of booleans: whether each leaf of the environment's state is per environment.

    A leaf is if its shape grows with the batch. (The size of its first axis proves nothing: it
    can equal the batch size by chance. MuJoCo Warp keeps such leaves.)
    """

    def shapes(batch: int) -> Any:
        spec = jax.ShapeDtypeStruct((batch, *keys.shape[1:]), keys.dtype)
        return jax.eval_shape(jax.vmap(env.reset), spec)

    return jax.tree.map(lambda two, three: two.shape != three.shape, shapes(2), shapes(3))


def first_env_states(env: RLEnv, n_envs: int, keys: PurposeKeys) -> Any:
    """Return the states from which training environments start, leaves `(n_envs, …)`.

    Environments that end by time limit are given different ages, so that they do not all end at
    the same step for ever (`EpisodeWrapper.stagger`).

    Args:
        env: The environment, written for a single instance.
        n_envs: Environments that run side by side.
        keys: The keys of the run; those for resets and ages are used.
    """

    @jax.jit
    def first(reset_key: Array, stagger_key: Array) -> Any:
        states = strongly_typed(jax.vmap(env.reset)(jax.random.split(reset_key, n_envs)))
        stagger = getattr(env, "stagger", None)
        return states if stagger is None else stagger(states, stagger_key)

    return first(keys.reset, keys.stagger)


def reset_finished(
    env: RLEnv,
    env_state: Tree,
    ended: Bool[Array, " batch"],
    keys: Shaped[Array, "batch ..."],
) -> Tree:
    """Give each finished environment a fresh state drawn from its own key.

    The result is that of resetting every environment and selecting by `ended`.

    Args:
        env: The environment.
        env_state: States after a step, leaves `(batch, …)`; others are kept as they are.
        ended: Which environments finished.
        keys: One key per environment; those of unfinished environments are not used.

    Returns:
        The states with the finished ones replaced.
    """
    batched = batched_leaves(env, keys)

    def reset_chunk(states: Tree, rows: Array, valid: Array) -> Tree:
        # No key is used twice, but the key checker cannot tell rows of a loop apart.
        fresh = strongly_typed(jax.vmap(env.reset)(clone_keys(keys)[rows]))
        return jax.tree.map(
            lambda old, new, per_env: scatter_rows(old, new, rows, valid) if per_env else old,
            states,
            fresh,
            batched,
        )

    return _for_chunks(ended, env_state, reset_chunk)


def values_before_reset(
    networks: StatefulModule,
    network_state: PyTree,
    obs: PyTree,
    template: PyTree,
    truncated: Bool[Array, " batch"],
) -> Any:
    """Return the value of the last observation of those episodes that a time limit cut.

    Args:
        networks: The network.
        network_state: The carry after the step and before any reset, leaves `(batch, …)`.
        obs: The true last observations, leaves `(batch, *feature)`.
        template: Value estimates of the step, for their tree, shapes and dtypes.
        truncated: For which environments to compute it.

    Returns:
        A tree like `template`, zero where not `truncated`.
    """

    def query_chunk(values: Any, rows: Array, valid: Array) -> Any:
        picked = jax.tree.map(lambda leaf: leaf[rows], (network_state, obs))
        found = query_values(networks, *picked)
        return jax.tree.map(lambda old, new: scatter_rows(old, new, rows, valid), values, found)

    return _for_chunks(truncated, jax.tree.map(jnp.zeros_like, template), query_chunk)


def scatter_rows(old: Array, new: Array, rows: Array, valid: Array) -> Array:
    """Write `new` into the given rows of `old`, where valid."""
    return old.at[jnp.where(valid, rows, old.shape[0])].set(new, mode="drop")


def _for_chunks(chosen: Bool[Array, " batch"], carry: Tree, body: Any) -> Tree:
    """Run `body(carry, rows, valid)` over chunks of the chosen rows, each row once."""
    n_envs = chosen.shape[0]
    size = chunk_size(n_envs)
    count = chosen.sum()
    # Chosen rows first, in order; padded so that the last chunk stays inside.
    order = jnp.argsort(~chosen, stable=True)
    order = jnp.concatenate([order, jnp.zeros(-n_envs % size, order.dtype)])

    def step(loop: tuple[Array, Tree]) -> tuple[Array, Tree]:
        start, carry = loop
        rows = jax.lax.dynamic_slice(order, (start,), (size,))
        return start + size, body(carry, rows, start + jnp.arange(size) < count)

    start = jnp.zeros((), count.dtype)
    return jax.lax.while_loop(lambda loop: loop[0] < count, step, (start, carry))[1]
