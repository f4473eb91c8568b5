"""A policy with memory solves what one without cannot."""

import numpy as np
from flax import nnx

from nnx_ppo.algorithms import EvalConfig, PPOConfig, TrainConfig, train_ppo
from nnx_ppo.core.testing import RememberCue
from nnx_ppo.networks.factories import make_lstm_actor_critic, make_mlp_actor_critic

CONFIG = TrainConfig(
    ppo=PPOConfig(
        n_envs=128, rollout_length=20, total_steps=51_200, learning_rate=3e-3, n_minibatches=4
    ),
    eval=EvalConfig(every_steps=10**9, n_envs=256, logging_percentiles=None),
)
ENV = RememberCue(delay=4)


def final_return(network):
    return train_ppo(ENV, network, CONFIG).final_metrics["eval/episode_reward/mean"]


def test_the_lstm_solves_the_memory_environment_and_the_perceptron_stays_at_chance():
    # The optimum is 1. Without memory the expected return is 0, and the mean of 256 returns of
    # −1 to 1 has a standard error of at most 1/16.
    lstm = make_lstm_actor_critic(2, 1, [16], [16], nnx.Rngs(0), lstm_features=16)
    assert final_return(lstm) >= 0.9
    mlp = make_mlp_actor_critic(2, 1, [32], [32], nnx.Rngs(0))
    np.testing.assert_allclose(final_return(mlp), 0.0, atol=4 / 16)
