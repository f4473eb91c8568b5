"""Checkpoints of an earlier implementation of this API act as they did there, and train on."""

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from nnx_ppo.algorithms import load_checkpoint, new_training_state, train_ppo
from nnx_ppo.mujoco import load
from nnx_ppo.networks import (
    LSTM,
    Dense,
    Normalizer,
    NormalTanhSampler,
    PPOAdapter,
    Sequential,
    make_mlp_actor_critic,
)

pytestmark = pytest.mark.physics
FOLDER = Path(__file__).parent / "data" / "earlier_checkpoints"


def mlp():
    return make_mlp_actor_critic(5, 1, [8], [8], nnx.Rngs(0))


def lstm():
    rngs = nnx.Rngs(0)
    action = Sequential(
        [
            Dense(5, 8, rngs, activation=nnx.swish),
            LSTM(8, 8, rngs),
            Dense(8, 2, rngs),
            NormalTanhSampler(rngs, entropy_weight=1e-2),
        ]
    )
    value = Sequential([Dense(5, 8, rngs, activation=nnx.swish), Dense(8, 1, rngs)])
    return Sequential([Normalizer(5), PPOAdapter(action=action, value=value)])


@pytest.fixture(scope="module")
def env():
    return load("CartpoleBalance", impl="jax")


@pytest.mark.parametrize("version", ["jax-0.10", "jax-0.12"])
@pytest.mark.parametrize("make", [mlp, lstm])
def test_actions_values_and_training(version, make, env):
    folder = FOLDER / version / make.__name__
    expected = json.loads((folder / "expected.json").read_text())
    network = make()
    first = new_training_state(env, network, n_envs=2, seed=0)
    loaded = load_checkpoint(folder / "step_0000000020", network, first.optimizer)
    state, config = loaded["training_state"], loaded["config"]
    assert (loaded["step"], config.ppo.n_envs, config.seed) == (20, 2, 3)

    network.eval()
    carry = network.initialize_state(2)
    obs = jnp.asarray(expected["obs"])
    actions, values = expected["deterministic_actions_3_steps"], expected["values_3_steps"]
    for want_actions, want_values in zip(actions, values, strict=True):
        out = network(carry, obs)
        carry = out.next_state
        np.testing.assert_allclose(out.output.actions, want_actions, atol=1e-5)
        np.testing.assert_allclose(out.output.value_estimates, want_values, rtol=1e-6)
    network.train()

    result = train_ppo(env, network, config, initial_state=state, total_steps=30)
    assert (result.total_steps, result.total_iterations) == (30, 1)
    after = result.training_state
    # 20 steps of 2 environments are in the statistics already, these 10 steps come on top.
    assert int(network.layers[0].counter[...]) == 30
    assert int(after.optimizer.step[...]) == 3  # updates
    assert np.isfinite(result.final_metrics["losses/critic/mean"])
