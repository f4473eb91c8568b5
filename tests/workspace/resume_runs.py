"""Runs that `test_resume.py` compares; `python resume_runs.py ENV FOLDER` resumes them."""

import functools
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
from flax import nnx

from nnx_ppo.algorithms import (
    EvalConfig,
    PPOConfig,
    TrainConfig,
    latest_checkpoint,
    load_checkpoint,
    make_checkpoint_fn,
    new_training_state,
    train_ppo,
)
from nnx_ppo.core import EpisodeWrapper, Wrapper
from nnx_ppo.core.testing import RememberCue
from nnx_ppo.mujoco import load
from nnx_ppo.networks import (
    LSTM,
    AR1VariationalBottleneck,
    Dense,
    Filter,
    Flattener,
    Normalizer,
    NormalTanhSampler,
    PPOAdapter,
    Sequential,
    make_mlp_actor_critic,
)
from nnx_ppo.networks.graph import PopulationGraph

ITERATION = 4 * 5
OBS_SIZES = {"analytic": 2, "physics": 5}


class Traced(Wrapper):
    """Traces an environment once for all runs of a process; MuJoCo's takes seconds each time."""

    def __init__(self, env):
        super().__init__(env)
        self.reset, self.step = jax.jit(env.reset), jax.jit(env.step)


@functools.cache
def environment_of(kind):
    """Episodes of three steps, so that ends fall everywhere."""
    if kind == "analytic":
        return EpisodeWrapper(RememberCue(), 3)
    return Traced(load("CartpoleBalance", impl="jax", episode_length=3))


def mlp(obs_size):
    """A perceptron."""
    return make_mlp_actor_critic(obs_size, 1, [8], [8], nnx.Rngs(0))


def lstm(obs_size):
    """An LSTM that actor and critic share."""
    rngs = nnx.Rngs(0)
    actor = Sequential([Dense(8, 2, rngs), NormalTanhSampler(rngs, entropy_weight=1e-2)])
    adapter = PPOAdapter(action=actor, value=Dense(8, 1, rngs))
    return Sequential([Normalizer(obs_size), LSTM(obs_size, 8, rngs), adapter])


def graph(obs_size):
    """Populations with a delay, and a connection with autoregressive noise."""
    rngs = nnx.Rngs(0)
    noisy = Sequential([Dense(6, 12, rngs), AR1VariationalBottleneck(6, rngs)])
    populations = PopulationGraph(rngs)
    populations.add_input("sensors", obs_size, input_from="obs")
    populations.add_population("inner", 6, activation=jnp.tanh)
    populations.add_output("motor", 2)
    populations.add_output("critic", 1)
    populations.connect("sensors", "inner")
    populations.connect("inner", "inner", transform=noisy, delay=1)
    populations.connect("inner", "motor", delay=2)
    populations.connect("inner", "critic")
    populations.finalize()
    sampler = NormalTanhSampler(rngs, entropy_weight=1e-2)
    adapter = PPOAdapter(
        action=Sequential([Filter({"motor": "motor"}), Flattener(), sampler]),
        value=Sequential([Filter({"critic": "critic"}), Flattener()]),
    )
    return Sequential([Filter({"obs": lambda obs: obs}), populations, adapter])


NETWORKS = {"mlp": mlp, "lstm": lstm, "graph": graph}


def config(iterations):
    """A run of some iterations, with a rate that falls, without evaluation."""
    ppo = PPOConfig(
        n_envs=4,
        rollout_length=5,
        total_steps=iterations * ITERATION,
        n_epochs=2,
        n_minibatches=2,
        gradient_clipping=1.0,
    )
    return TrainConfig(ppo=ppo, eval=EvalConfig(enabled=False), checkpoint_every_steps=10**6)


def train(environment, name, folder, iterations, *, resume=False):
    """Train a network and leave the final checkpoint in `folder`."""
    env, network = environment_of(environment), NETWORKS[name](OBS_SIZES[environment])
    state = None
    if resume:
        first = new_training_state(env, network, n_envs=4, seed=99)
        path = latest_checkpoint(folder)
        assert path is not None
        state = load_checkpoint(path, network, first.optimizer)["training_state"]
    settings = config(iterations)
    train_ppo(
        env,
        network,
        settings,
        checkpoint_fn=make_checkpoint_fn(folder, settings),
        initial_state=state,
    )


def main(environment, folder):
    """Go on with the run of each network."""
    for name in NETWORKS:
        train(environment, name, Path(folder, name), 6, resume=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
