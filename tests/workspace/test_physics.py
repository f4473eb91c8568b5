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


def test_chunked_resets_on_cheetah_run():
    """The same environments are reset from the same keys; the others are bit-equal."""
    env, n = load("CheetahRun"), 10
    assert n % chunk_size(n)
    keys, other_keys = jax.random.split(jax.random.key(0), (2, n))
    reset_all = jax.jit(jax.vmap(env.reset))
    before, fresh = reset_all(keys), reset_all(other_keys)
    ended = jnp.asarray([True, True, False, True, True, True, True, False, True, True])

    after = jax.jit(lambda state: reset_finished(env, state, ended, other_keys))(before)

    def rows(state, which):
        is_key = lambda leaf: jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)  # noqa: E731
        leaves = [jax.random.key_data(v) if is_key(v) else v for v in jax.tree.leaves(state)]
        return [np.asarray(leaf)[np.asarray(which)] for leaf in leaves]

    for kept, old in zip(rows(after, ~ended), rows(before, ~ended), strict=True):
        np.testing.assert_array_equal(kept, old)
    drawn = [jax.random.key_data(state.info["rng"]) for state in (after, fresh)]
    np.testing.assert_array_equal(drawn[0][ended], drawn[1][ended])
    # The body settles for 200 steps after the draw, which amplifies rounding.
    np.testing.assert_allclose(after.obs[ended], fresh.obs[ended], atol=1e-2)


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
