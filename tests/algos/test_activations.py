"""Activations of whole episodes."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from nnx_ppo.algorithms import record_activations_rollout

from .helpers import IntegerEnv, lstm_network

TIME, ENVS = 5, 2


def test_activations_are_those_of_a_deterministic_episode():
    network = lstm_network()
    before = [leaf.copy() for leaf in jax.tree.leaves(nnx.state(network))]
    env, key = IntegerEnv(3, 4), jax.random.key(0)
    record = jax.jit(lambda key: record_activations_rollout(env, network, ENVS, TIME, key))
    activations, dones = record(key)

    # Episodes last 3 steps, counting down from 3, and are not started again.
    np.testing.assert_array_equal(dones, np.arange(TIME)[:, None].repeat(ENVS, 1) >= 3)
    # The layers: 0 the normaliser (which divides by 10 at first), 1 the LSTM, 2 the heads.
    assert set(activations) == {0, 1, 2}
    np.testing.assert_allclose(
        activations[0], np.broadcast_to([[[0.3]], [[0.2]], [[0.1]], [[0.0]], [[-0.1]]], (5, 2, 1)),
        rtol=1e-6, atol=1e-7,
    )  # fmt: skip
    lstm, state = network.layers[1], network.layers[1].initialize_state(ENVS)
    for t in range(TIME):
        out = lstm(state, activations[0][t])
        state = out.next_state
        np.testing.assert_allclose(activations[1][t], out.output, rtol=1e-5, atol=1e-6)
    heads = activations[2]["action"]
    np.testing.assert_allclose(
        heads[1]["action"], jnp.tanh(heads[0][..., :1]), rtol=1e-5, atol=1e-6
    )  # the mean, no noise

    assert not network.layers[2].action.layers[1].deterministic
    for old, new in zip(before, jax.tree.leaves(nnx.state(network)), strict=True):
        assert bool((old == new).all())
