"""Algorithms on real physics."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from nnx_ppo.algorithms import EvalConfig, PPOConfig, TrainConfig, train_ppo
from nnx_ppo.algorithms.resets import chunk_size, reset_finished
from nnx_ppo.mujoco import load
from nnx_ppo.networks import make_mlp_actor_critic

pytestmark = pytest.mark.physics


def rows(state, which):
    """The chosen environments' leaves as numpy arrays; keys as their data."""

    def raw(leaf):
        is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        return np.asarray(jax.random.key_data(leaf) if is_key else leaf)

    return [raw(leaf)[np.asarray(which)] for leaf in jax.tree.leaves(state)]


def test_chunked_resets_on_cheetah_run():
    """The same environments are reset, from the same keys; the others are bit-equal."""
    env, n = load("CheetahRun"), 10
    assert n % chunk_size(n)
    reset = jax.jit(lambda state, ended, keys: reset_finished(env, state, ended, keys))
    plain_rng = jax.jit(lambda keys: jax.vmap(env.reset)(keys).info["rng"])  # physics is left out
    first_keys, keys = jax.random.split(jax.random.key(0), (2, n))
    shapes = jax.eval_shape(jax.vmap(env.reset), keys)
    blank = jax.tree.map(lambda leaf: jnp.full(leaf.shape, 0, leaf.dtype), shapes.data)
    anything = shapes.replace(
        data=blank, obs=jnp.zeros(shapes.obs.shape), info={**shapes.info, "rng": keys}
    )
    anything = jax.tree.map(
        lambda leaf: (
            jnp.zeros(leaf.shape, leaf.dtype) if isinstance(leaf, jax.ShapeDtypeStruct) else leaf
        ),
        anything,
    )

    everyone = jnp.ones(n, bool)
    before = reset(anything, everyone, first_keys)
    fresh = reset(anything, everyone, keys)
    np.testing.assert_array_equal(
        jax.random.key_data(fresh.info["rng"]), jax.random.key_data(plain_rng(keys))
    )
    ended = jnp.asarray([True, True, False, True, True, True, True, False, True, True])
    after = reset(before, ended, keys)
    for found, expected in zip(rows(after, ~ended), rows(before, ~ended), strict=True):
        np.testing.assert_array_equal(found, expected)
    for found, expected in zip(rows(after, ended), rows(fresh, ended), strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-2)  # settling amplifies rounding
    np.testing.assert_array_equal(
        rows(after.info["rng"], ended)[0], rows(fresh.info["rng"], ended)[0]
    )


def test_training_on_cartpole():
    env = load("CartpoleBalance", episode_length=4)
    config = TrainConfig(
        ppo=PPOConfig(n_envs=8, rollout_length=6, total_steps=96, n_minibatches=2),
        eval=EvalConfig(n_envs=2, max_episode_length=10, logging_percentiles=None),
    )
    network = make_mlp_actor_critic(env.observation_size, env.action_size, [8], [8], nnx.Rngs(0))
    metrics = train_ppo(env, network, config).final_metrics
    assert metrics["total_steps"] == 96
    assert metrics["eval/lifespan/mean"] == 4.0
    assert np.isfinite(list(metrics.values())).all()
