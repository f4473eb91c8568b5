"""Chunked resets give what resetting everything and selecting would give."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.interpreters import batching

from nnx_ppo.algorithms.resets import batched_leaves, chunk_size, reset_finished
from nnx_ppo.algorithms.rollout import tree_where
from nnx_ppo.core import JaxDataclass

from .helpers import IntegerEnv


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


N = 50  # no multiple of the chunk size


@pytest.fixture(scope="module")
def case():
    env = IntegerEnv()
    states = jax.vmap(env.reset)(jax.random.split(jax.random.key(0), N))
    stepped = jax.vmap(env.step)(states, jnp.zeros((N, 1)))
    keys = jax.random.split(jax.random.key(1), N)
    chunked = jax.jit(lambda ended: reset_finished(env, stepped, ended, keys))

    def plain(ended):
        fresh = jax.vmap(env.reset)(keys)
        return tree_where(ended, fresh, stepped)

    return chunked, plain


@pytest.mark.parametrize(
    "ended",
    [
        jnp.zeros(N, bool),
        jnp.ones(N, bool),
        jnp.arange(N) == 0,
        jnp.arange(N) == N - 1,
        jnp.arange(N) < 8,
        jnp.arange(N) < 9,
        jax.random.bernoulli(jax.random.key(2), 0.3, (N,)),
    ],
    ids=["none", "all", "first", "last", "one chunk", "one chunk and one", "random"],
)
def test_bit_equal_to_resetting_all(case, ended):
    chunked, plain = case
    assert N % chunk_size(N)
    assert_bit_equal(chunked(ended), plain(ended))


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

    found = jax.jit(lambda ended: reset_finished(env, stepped, ended, keys))(jnp.arange(N) % 2 == 0)
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
