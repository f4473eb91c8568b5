"""Modules and environments that several tests of algorithms share."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from nnx_ppo.core import JaxDataclass, PPONetworkOutput, StatefulModule, StatefulModuleOutput
from nnx_ppo.networks.adapter import PPOAdapter
from nnx_ppo.networks.containers import Sequential
from nnx_ppo.networks.factories import make_mlp_layers
from nnx_ppo.networks.feedforward import Dense
from nnx_ppo.networks.normalizer import Normalizer
from nnx_ppo.networks.recurrent import LSTM
from nnx_ppo.networks.sampling_layers import NormalTanhSampler


def mlp_network(obs_size=1, action_size=1, seed=0, normalize=True) -> Any:
    """A small perceptron."""
    rngs = nnx.Rngs(seed)
    sampler = NormalTanhSampler(rngs, entropy_weight=1e-2)
    actor = make_mlp_layers([obs_size, 8, 2 * action_size], rngs, nnx.tanh, False)
    critic = make_mlp_layers([obs_size, 8, 1], rngs, nnx.tanh, False)
    adapter = PPOAdapter(action=Sequential([*actor, sampler]), value=Sequential(critic))
    return Sequential([Normalizer(obs_size), adapter] if normalize else [adapter])


def lstm_network(obs_size=1, action_size=1, seed=0) -> Any:
    """A small network whose actor and critic share an LSTM."""
    rngs = nnx.Rngs(seed)
    sampler = NormalTanhSampler(rngs, entropy_weight=1e-2)
    trunk = LSTM(obs_size, 8, rngs)
    adapter = PPOAdapter(
        action=Sequential([Dense(8, 2 * action_size, rngs), sampler]), value=Dense(8, 1, rngs)
    )
    return Sequential([Normalizer(obs_size), trunk, adapter])


class CountingNetwork(StatefulModule):
    """Value = carry + observation, carry = number of steps in the episode; acts 0."""

    def __init__(self):
        self.scale = nnx.Param(jnp.ones(()))

    def __call__(self, module_state, obs, rollout_extras=None):
        value = self.scale[...] * (module_state + obs[:, 0])
        output = PPONetworkOutput(jnp.zeros_like(obs), jnp.zeros_like(value), value)
        return StatefulModuleOutput(
            module_state + 1.0, output, jnp.zeros(()), {}, jnp.zeros_like(obs)
        )

    def initialize_state(self, batch_size):
        return jnp.zeros(batch_size)

    def reset_state(self, prev_state):
        return jnp.zeros_like(prev_state)


class IntegerState(JaxDataclass):
    """State of `IntegerEnv`."""

    obs: jax.Array
    reward: jax.Array
    done: jax.Array
    info: dict
    metrics: dict


class IntegerEnv:
    """Starts at a random integer and counts down; ends at 0. Exact in every float and integer."""

    action_size = 1

    def __init__(self, low=1, high=6):
        self.low, self.high = low, high

    def reset(self, rng):
        rng, left_key, bits_key = jax.random.split(rng, 3)
        left = jax.random.randint(left_key, (), self.low, self.high)
        bits = jax.random.bits(bits_key, (2,))
        info = {"left": left, "bits": bits, "key": rng, "shared": jnp.zeros(())}
        return IntegerState(left.astype(jnp.float32)[None], jnp.zeros(()), jnp.zeros(()), info, {})

    def step(self, state, action):
        left = state.info["left"] - 1
        return state.replace(
            obs=left.astype(jnp.float32)[None],
            reward=jnp.ones(()) + 0.0 * action.sum(),
            done=(left <= 0).astype(jnp.float32),
            info={**state.info, "left": left},
        )
