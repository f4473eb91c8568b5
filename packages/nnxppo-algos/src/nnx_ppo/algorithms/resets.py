"""Resetting finished environments without resetting all of them.

`env.reset` can cost a hundred steps of `env.step` (some Playground resets let the body settle for
200 steps), and few environments finish at once. So finished environments are gathered into
chunks of a fixed size, and a loop runs while any chunk is left: not at all when none finished.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr
from jaxtyping import Array, Bool, PyTree, Shaped

from nnx_ppo.algorithms._functional import clone_keys, query_values, strongly_typed
from nnx_ppo.algorithms.keys import PurposeKeys
from nnx_ppo.algorithms.programs import traced
from nnx_ppo.core import RLEnv, StatefulModule

Tree = TypeVar("Tree")

LEAST_CHUNK = 8
"""Resetting so many environments takes less than twice as long as resetting one of them."""

UNKNOWN_TRIPS = 16
"""How often a loop is taken to run if its program does not say."""

QUERY_COST = 4.0
"""What a query of values is taken to cost, in steps. (Less; but products of few rows are fast.)"""


def chunk_size(n_envs: int, cost: float = math.inf) -> int:
    """Return how many environments to reset at a time.

    What is missing in the last chunk is reset in vain. With an eighth of the environments that is
    less than the step that all of them take; where a reset costs several steps, the chunk is
    smaller by that factor. (On a CPU of 2 cores, 1024 environments: chunks of 32 instead made
    rollouts 1.2 times as slow where a reset costs one step, as in CartpoleBalance, and a tenth of
    the episodes ends at each step; 1.8 times where it costs 200, as in CheetahRun, and one ends.)

    Args:
        n_envs: Environments that run side by side.
        cost: What the reset of an environment costs, in steps of it.
    """
    if jax.default_backend() != "cpu":
        # Small programs wait there more than they compute, so that a reset of many should take
        # about as long as one of few. (Not measured.)
        cost = 1.0
    return min(n_envs, max(LEAST_CHUNK, int(n_envs / (8.0 * max(cost, 1.0)))))


def reset_cost(env: RLEnv, keys: Shaped[Array, "batch ..."], env_state: Any, actions: Any) -> float:
    """Return what the reset of an environment costs, in steps of it, as their programs say.

    Nothing is run: the operations of both are counted.

    Args:
        env: The environment, written for a single instance.
        keys: Keys of resets.
        env_state: States, leaves `(batch, …)`.
        actions: Actions, leaves `(batch, …)`.
    """

    def count(function: Callable[..., Any], *args: Any) -> int:
        return operations(jax.make_jaxpr(jax.vmap(function))(*args).jaxpr)

    return count(env.reset, keys) / max(count(env.step, env_state, actions), 1)


def operations(jaxpr: Jaxpr) -> int:
    """Count the numbers that a program computes, and the terms of those that are products.

    All branches count, as `jax.vmap` takes all of them. What stands in a loop counts as often as
    it runs.
    """
    total = 0
    for equation in jaxpr.eqns:
        kind, params = equation.primitive.name, equation.params
        numbers = sum(math.prod(_shape(out)) for out in equation.outvars)
        if kind == "dot_general":
            contracted, _ = params["dimension_numbers"][0]
            numbers *= math.prod(_shape(equation.invars[0])[axis] for axis in contracted)
        trips = params["length"] if kind == "scan" else UNKNOWN_TRIPS if kind == "while" else 1
        total += numbers + trips * sum(map(operations, _inner(tuple(params.values()))))
    return total


def _shape(variable: Any) -> tuple[int, ...]:
    return getattr(variable.aval, "shape", ())


def _inner(params: Any) -> Iterator[Jaxpr]:
    """Yield the programs among the parameters of an equation."""
    if isinstance(params, ClosedJaxpr):
        yield params.jaxpr
    elif isinstance(params, Jaxpr):
        yield params
    elif isinstance(params, tuple | list):
        for param in params:
            yield from _inner(param)


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

    env = traced(env)

    @jax.jit
    def first(reset_key: Array, stagger_key: Array) -> Any:
        states = strongly_typed(jax.vmap(env.reset)(jax.random.split(reset_key, n_envs)))
        stagger = getattr(env, "stagger", None)
        return states if stagger is None else stagger(states, stagger_key)

    return env.program(lambda: first, "first states", n_envs)(keys.reset, keys.stagger)


def reset_finished(
    env: RLEnv,
    env_state: Tree,
    ended: Bool[Array, " batch"],
    keys: Shaped[Array, "batch ..."],
    actions: PyTree = None,
) -> Tree:
    """Give each finished environment a fresh state drawn from its own key.

    The result is that of resetting every environment and selecting by `ended`.

    (To do that instead made rollouts, on a CPU of 2 cores, 1.5 to 2 times as slow for 1024
    environments of CartpoleBalance and 9 to 50 times for 64 of CheetahRun, with a tenth and a
    thousandth of the episodes ending at each step; it was no faster where a reset costs less than
    a step.)

    Args:
        env: The environment.
        env_state: States after a step, leaves `(batch, …)`; others are kept as they are.
        ended: Which environments finished.
        keys: One key per environment; those of unfinished environments are not used.
        actions: The actions of the step, leaves `(batch, …)`, which tell what a step costs. Without
            them resets are taken to be costly. The result is the same.

    Returns:
        The states with the finished ones replaced.
    """
    batched = batched_leaves(env, keys)
    cost = math.inf if actions is None else reset_cost(env, keys, env_state, actions)

    def reset_chunk(states: Tree, rows: Array, valid: Array) -> Tree:
        # No key is used twice, but the key checker cannot tell rows of a loop apart.
        fresh = strongly_typed(jax.vmap(env.reset)(clone_keys(keys)[rows]))
        return jax.tree.map(
            lambda old, new, per_env: scatter_rows(old, new, rows, valid) if per_env else old,
            states,
            fresh,
            batched,
        )

    return _for_chunks(ended, env_state, reset_chunk, chunk_size(ended.shape[0], cost))


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

    size = chunk_size(truncated.shape[0], QUERY_COST)
    return _for_chunks(truncated, jax.tree.map(jnp.zeros_like, template), query_chunk, size)


def scatter_rows(old: Array, new: Array, rows: Array, valid: Array) -> Array:
    """Write `new` into the given rows of `old`, where valid."""
    return old.at[jnp.where(valid, rows, old.shape[0])].set(new, mode="drop")


def _for_chunks(chosen: Bool[Array, " batch"], carry: Tree, body: Any, size: int) -> Tree:
    """Run `body(carry, rows, valid)` over chunks of the chosen rows, each row once and in order."""
    n_envs, count = chosen.shape[0], chosen.sum()

    def step(loop: tuple[Array, Tree]) -> tuple[Array, Tree]:
        start, carry = loop
        ranks = start + jnp.arange(size, dtype=start.dtype)
        # The chosen row of rank r is the first with more than r of them up to itself. (Sorting
        # the rows takes ten times as long.)
        rows = jnp.searchsorted(jnp.cumsum(chosen, dtype=start.dtype), ranks, side="right")
        return start + size, body(carry, jnp.minimum(rows, n_envs - 1), ranks < count)

    start = jnp.zeros((), count.dtype)
    return jax.lax.while_loop(lambda loop: loop[0] < count, step, (start, carry))[1]
