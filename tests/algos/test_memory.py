"""A policy with memory solves what one without cannot, and each kind of memory can be trained."""

import jax
import numpy as np
import pytest
from flax import nnx

from nnx_ppo.algorithms import (
    EvalConfig,
    LoggingLevel,
    PPOConfig,
    TrainConfig,
    new_training_state,
    ppo_step,
    train_ppo,
)
from nnx_ppo.core.testing import RememberCue
from nnx_ppo.networks import (
    LSTM,
    Dense,
    NormalTanhSampler,
    PPOAdapter,
    Sequential,
    make_lstm_actor_critic,
    make_mlp_actor_critic,
)
from nnx_ppo.networks.leaky import LeakyRNN
from nnx_ppo.networks.lift import Lift
from nnx_ppo.networks.recurrent import GRU, RNN, Recurrent

pytestmark = pytest.mark.slow

CONFIG = TrainConfig(
    ppo=PPOConfig(
        n_envs=128, rollout_length=20, total_steps=51_200, learning_rate=3e-3, n_minibatches=4
    ),
    eval=EvalConfig(every_steps=10**9, n_envs=256, logging_percentiles=None),
)
SHORT = TrainConfig(
    ppo=PPOConfig(
        n_envs=64, rollout_length=20, total_steps=25_600, learning_rate=1e-2, n_minibatches=4
    ),
    eval=CONFIG.eval,
)
ENV = RememberCue(delay=4)


def final_return(network, config=CONFIG):
    return train_ppo(ENV, network, config).final_metrics["eval/episode_reward/mean"]


def actor_critic(memory, width, rngs):
    """Actor and critic read the same memory."""
    actor = Sequential([Dense(width, 2, rngs), NormalTanhSampler(rngs, entropy_weight=1e-2)])
    return Sequential([*memory, PPOAdapter(action=actor, value=Dense(width, 1, rngs))])


def test_the_lstm_solves_the_memory_environment_and_the_perceptron_stays_at_chance():
    # The optimum is 1. Without memory the expected return is 0, and the mean of 256 returns of
    # −1 to 1 has a standard error of at most 1/16.
    lstm = make_lstm_actor_critic(2, 1, [16], [16], nnx.Rngs(0), lstm_features=16)
    assert final_return(lstm) >= 0.9
    mlp = make_mlp_actor_critic(2, 1, [32], [32], nnx.Rngs(0))
    np.testing.assert_allclose(final_return(mlp), 0.0, atol=4 / 16)


def test_gated_units_solve_the_memory_environment():
    rngs = nnx.Rngs(0)
    assert final_return(actor_critic([GRU(2, 16, rngs)], 16, rngs), SHORT) >= 0.9


def test_leaky_units_solve_the_memory_environment():
    # Time constants from half to four times the delay; a trace of exp(-4 / tau) is left at the end.
    rngs = nnx.Rngs(0)
    leaky = LeakyRNN(2, 16, rngs, tau=np.linspace(2.0, 16.0, 16), trainable_tau=True)
    before = np.asarray(leaky.tau)
    assert final_return(actor_critic([leaky], 16, rngs), SHORT) >= 0.9
    assert (np.abs(leaky.tau - before) > 1e-3).all()
    assert (leaky.tau >= leaky.dt).all()


def test_an_update_replays_the_rollout_and_trains_each_kind_of_memory():
    rngs = nnx.Rngs(0)
    memory = [
        RNN(2, 3, rngs),
        Recurrent(nnx.LSTMCell(3, 4, rngs=rngs), trainable_initial_state=True),
        LSTM(4, 5, rngs, trainable_initial_state=True),
        LeakyRNN(5, 6, rngs, tau=3.0, trainable_tau=True, noise_std=0.3),
        Lift(nnx.Sequential(nnx.LayerNorm(6, rngs=rngs), nnx.Dropout(0.3, rngs=rngs))),
    ]
    state = new_training_state(ENV, actor_critic(memory, 6, rngs), 4, seed=0)
    before = jax.tree.map(np.asarray, nnx.state(state.networks, nnx.Param))
    # Episodes of 5 steps end within the window, and the noise of both layers must come again. With
    # one minibatch and one epoch the weights have not changed in the replay: no ratio leaves
    # 1 ± 1e-4, so that none is clipped.
    for _ in range(2):  # the second window starts from the carry of the first one
        state, metrics = ppo_step(
            ENV, state, 4, 7, 0.95, 0.9, 1e-4, True, False, 1, 1,
            logging_level=LoggingLevel.LOSSES | LoggingLevel.ACTOR_EXTRA,
        )  # fmt: skip
        assert float(metrics["losses/clipping_fraction"]) == 0.0
    after = nnx.state(state.networks, nnx.Param)
    for (path, old), new in zip(
        jax.tree_util.tree_leaves_with_path(before), jax.tree.leaves(after), strict=True
    ):
        assert np.isfinite(new).all() and (np.asarray(new) != old).any(), path
