"""Chunked resets give what resetting everything and selecting would give."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.interpreters import batching

from nnx_ppo.algorithms.resets import (
    batched_leaves,
    chunk_size,
    operations,
    reset_cost,
    reset_finished,
    values_before_reset,
)
from nnx_ppo.algorithms.rollout import tree_where
from nnx_ppo.core import JaxDataclass

from .helpers import CountingNetwork, IntegerEnv


def bits(tree):
    """Leaves as numpy arrays; keys as their data."""

    def raw(leaf):
        is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        return np.asarray(jax.random.key_data(leaf) if is_key else leaf)

    return [raw(leaf) for leaf in jax.tree.leaves(tree)]


def assert_bit_equal(left, right):
    for a, b in zip(bits(left), bits(right), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


N = 501  # no multiple of a chunk


@pytest.fixture(scope="module", params=[False, True], ids=["small chunks", "large chunks"])
def case(request):
    env = IntegerEnv()
    states = jax.vmap(env.reset)(jax.random.split(jax.random.key(0), N))
    actions = jnp.zeros((N, 1))
    stepped = jax.vmap(env.step)(states, actions)
    keys = jax.random.split(jax.random.key(1), N)
    known = (actions,) if request.param else ()
    size = chunk_size(N, reset_cost(env, keys, states, actions)) if request.param else 8
    assert (size > 8) == request.param and N % size
    chunked = jax.jit(lambda ended: reset_finished(env, stepped, ended, keys, *known))

    def plain(ended):
        fresh = jax.vmap(env.reset)(keys)
        return tree_where(ended, fresh, stepped)

    return chunked, plain, size


@pytest.mark.parametrize(
    "which",
    [
        lambda rows, size: rows < 0,
        lambda rows, size: rows >= 0,
        lambda rows, size: rows == 0,
        lambda rows, size: rows == N - 1,
        lambda rows, size: rows < size,
        lambda rows, size: rows >= N - size - 1,
        lambda rows, size: jax.random.bernoulli(jax.random.key(2), 0.3, rows.shape),
    ],
    ids=["none", "all", "first", "last", "one chunk", "one chunk and one", "random"],
)
def test_bit_equal_to_resetting_all(case, which):
    chunked, plain, size = case
    ended = which(jnp.arange(N), size)
    assert_bit_equal(chunked(ended), plain(ended))


@pytest.mark.parametrize(
    ("n_envs", "cost", "expected"),
    [
        (1024, 1.0, 128),  # an eighth
        (1024, 0.1, 128),
        (1024, 2.0, 64),
        (1024, 200.0, 8),  # 0.64 would be in proportion
        (1024, float("inf"), 8),
        (64, 1.0, 8),
        (5, 1.0, 5),
    ],
)
def test_chunks_are_small_where_a_reset_is_costly(n_envs, cost, expected):
    assert chunk_size(n_envs, cost) == expected


def test_chunks_are_large_where_the_cost_of_a_reset_is_one_of_waiting(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert chunk_size(1024, 200.0) == 128


class Settling(IntegerEnv):
    """Takes 50 steps to reset."""

    def reset(self, rng):
        def settle(state, _):
            return self.step(state, state.obs), None

        return jax.lax.scan(settle, super().reset(rng), length=50)[0]


def test_what_a_reset_costs():
    keys, actions = jax.random.split(jax.random.key(0), 3), jnp.zeros((3, 1))

    def cost(env):
        return reset_cost(env, keys, jax.vmap(env.reset)(keys), actions)

    np.testing.assert_allclose(cost(Settling()) - cost(IntegerEnv()), 50.0, rtol=0.05)


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        (lambda x, n: x + x, 3),
        # 3·3 numbers; those of the product have one term each.
        (lambda x, n: x[:, None] @ x[None], 3 + 3 + 9),
        # A number of 3 terms.
        (lambda x, n: x @ x, 3),
        # 3 in each of 4 steps, and 3 that come out.
        (lambda x, n: jax.lax.scan(lambda x, _: (x + x, None), x, length=4)[0], 12 + 3),
        # A comparison and a sum in each of 16 trips, and 1 that comes out.
        (lambda x, n: jax.lax.while_loop(lambda n: n < 9, lambda n: n + 1, n), 16 * 2 + 1),
        # A comparison, the number of the branch, both branches, and what comes out.
        (lambda x, n: jax.lax.cond(n > 0, lambda: x + x, lambda: x * x), 1 + 1 + 3 + 3 + 3),
        (lambda x, n: jax.jit(lambda x: x + x)(x), 3 + 3),
    ],
    ids=["sum", "outer product", "inner product", "scan", "while", "cond", "call"],
)
def test_operations_are_counted(program, expected):
    assert operations(jax.make_jaxpr(program)(jnp.ones(3), jnp.zeros((), int)).jaxpr) == expected


def test_nothing_runs_when_none_finished():
    """The reset stands in a loop without a trip, not in the straight path."""
    env = IntegerEnv()
    states = jax.vmap(env.reset)(jax.random.split(jax.random.key(0), N))
    keys = jax.random.split(jax.random.key(1), N)
    jaxpr = jax.make_jaxpr(lambda ended: reset_finished(env, states, ended, keys))(
        jnp.zeros(N, bool)
    )
    outside = [eqn.primitive.name for eqn in jaxpr.eqns]
    assert "while" in outside
    assert not any("random" in name or "threefry" in name for name in outside)


class Physics(JaxDataclass):
    """Physics whose scratch memory is shared by all environments, as in MuJoCo Warp's data.

    `vmap` passes the shared leaves by: they have no batch axis.
    """

    position: jax.Array
    scratch: jax.Array  # as long as there are environments, which must not matter
    counter: jax.Array


def vmappable_physics():
    def to_elt(cont, _, data, axis):
        return data.replace(position=cont(data.position, axis))

    def from_elt(cont, size, data, axis):
        return data.replace(position=cont(size, data.position, axis))

    batching.register_vmappable(Physics, int, int, to_elt, from_elt, None)


vmappable_physics()


class SharedMemoryEnv(IntegerEnv):
    """Keeps such physics in its info."""

    def reset(self, rng):
        state = super().reset(rng)
        data = Physics(state.obs, jnp.full(N, 7.0), jnp.zeros(()))
        return state.replace(info={**state.info, "data": data})

    def step(self, state, action):
        data = state.info["data"]
        state = super().step(state, action)
        data = data.replace(position=state.obs, scratch=data.scratch + 1.0)
        return state.replace(info={**state.info, "data": data})


def test_leaves_without_a_batch_axis_keep_the_stepped_value():
    """Neither a size equal to the number of environments nor a 0-d leaf misleads."""
    env = SharedMemoryEnv()
    states = jax.vmap(env.reset)(jax.random.split(jax.random.key(0), N))
    stepped = jax.vmap(env.step)(states, jnp.zeros((N, 1)))
    assert stepped.info["data"].scratch.shape == (N,)
    keys = jax.random.split(jax.random.key(1), N)
    flags = batched_leaves(env, keys)
    assert flags.info["data"].position and flags.info["shared"]
    assert not flags.info["data"].scratch and not flags.info["data"].counter

    actions = jnp.zeros((N, 1))
    found = jax.jit(lambda ended: reset_finished(env, stepped, ended, keys, actions))(
        jnp.arange(N) % 2 == 0
    )
    fresh = jax.vmap(env.reset)(keys)
    np.testing.assert_array_equal(found.info["data"].scratch, np.full(N, 8.0))
    np.testing.assert_array_equal(found.info["data"].position[::2], fresh.obs[::2])
    np.testing.assert_array_equal(found.info["data"].position[1::2], stepped.obs[1::2])


def test_raw_uint32_keys_are_accepted():
    env = IntegerEnv()
    keys = jax.random.split(jax.random.PRNGKey(0), N)
    states = jax.vmap(env.reset)(keys)
    other = jax.random.split(jax.random.PRNGKey(1), N)
    ended = jnp.arange(N) < 20
    fresh = jax.vmap(env.reset)(other)
    assert_bit_equal(reset_finished(env, states, ended, other), tree_where(ended, fresh, states))


def test_values_before_a_reset_are_those_of_the_truncated():
    network, carry = CountingNetwork(), jnp.arange(N, dtype=jnp.float32)
    obs, blank = jnp.full((N, 1), 0.5), jnp.zeros(N)
    query = jax.jit(lambda chosen: values_before_reset(network, carry, obs, blank, chosen))
    for chosen in (jnp.zeros(N, bool), jnp.ones(N, bool), jnp.arange(N) % 3 == 1):
        np.testing.assert_array_equal(query(chosen), jnp.where(chosen, carry + 0.5, 0.0))
