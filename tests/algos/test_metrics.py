"""Names and values of metrics, for training and evaluation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nnx_ppo.algorithms import LoggingLevel, Transition, eval_rollout
from nnx_ppo.algorithms.metrics import compute_metrics, log_weight_stats
from nnx_ppo.core import PPONetworkOutput
from nnx_ppo.core.testing import Endless, FollowTarget, TwoHands

from .helpers import CountingNetwork, IntegerEnv, mlp_network
from .test_training import hands_network

ROLLOUT = Transition(
    obs={"x": jnp.asarray([[[1.0], [3.0]]])},
    network_output=PPONetworkOutput(
        {"arm": jnp.asarray([[[1.0], [2.0]]])}, jnp.zeros((1, 2)), jnp.zeros((1, 2))
    ),
    rewards=jnp.asarray([[0.0, 4.0]]),
    done=jnp.asarray([[True, False]]),
    truncated=jnp.asarray([[False, False]]),
    next_obs={"x": jnp.zeros((1, 2, 1))},
    metrics={"env": {"speed": jnp.asarray([[2.0, 2.0]])}, "net": {0: {"mu": jnp.ones((1, 2, 1))}}},
)


@pytest.mark.parametrize(
    ("level", "expected"),
    [
        (LoggingLevel.NONE, {"losses/actor/mean": 2.0, "losses/actor/std": 1.0}),
        (
            LoggingLevel.ROLLOUT_STATS,
            {
                "rollout_batch/reward/mean": 2.0,
                "rollout_batch/reward/std": 2.0,
                "rollout_batch/action/arm/mean": 1.5,
                "rollout_batch/action/arm/std": 0.5,
                "rollout_batch/done_rate": 0.5,
                "rollout_batch/truncation_rate": 0.0,
            },
        ),
        (LoggingLevel.ROLLOUT_OBS, {"rollout_batch/obs/x/mean": 2.0, "rollout_batch/obs/x/std": 1}),
        (LoggingLevel.ENV_METRICS, {"env/speed/mean": 2.0, "env/speed/std": 0.0}),
        (LoggingLevel.NETWORK_METRICS, {"net/0/mu/mean": 1.0, "net/0/mu/std": 0.0}),
    ],
)
def test_names_and_values(level, expected):
    # Mean and population std of (1, 3) are 2 and 1, of (0, 4) 2 and 2, of (1, 2) 1.5 and 0.5.
    losses = {"losses/actor": jnp.asarray([1.0, 3.0])}
    metrics = compute_metrics(losses, ROLLOUT, level)
    if level is not LoggingLevel.NONE:
        del metrics["losses/actor/mean"], metrics["losses/actor/std"]
    assert metrics.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(metrics[name], value, rtol=1e-6)


def test_percentiles():
    # Between 0 and 4 the median is 2, and a quarter of the way 1.
    metrics = compute_metrics({}, ROLLOUT, LoggingLevel.ROLLOUT_STATS, (25, 50))
    assert metrics["rollout_batch/reward/p25"] == 1.0
    assert metrics["rollout_batch/reward/p50"] == 2.0
    assert metrics["rollout_batch/done_rate"] == 0.5
    assert not any(name.endswith(("mean", "std")) for name in metrics)


def test_percentiles_beside_an_infinity_and_of_nothing():
    # The middle one of 1, 2, ∞ is 2; a quarter of the way from 1 is halfway to 2.
    losses = {"losses/actor": jnp.asarray([1.0, jnp.inf, 2.0])}
    metrics = compute_metrics(losses, ROLLOUT, LoggingLevel.NONE, (0, 25, 50, 100))
    found = [metrics[f"losses/actor/p{level}"] for level in (0, 25, 50, 100)]
    np.testing.assert_array_equal(found, [1.0, 1.5, 2.0, np.inf])
    metrics = compute_metrics({"losses/actor": jnp.zeros(0)}, ROLLOUT, LoggingLevel.NONE, (50,))
    assert np.isnan(metrics["losses/actor/p50"])


def test_heads_and_booleans():
    losses = {"losses/actor": {"left": jnp.ones(3)}, "losses/clipping_fraction": jnp.ones(3) > 0}
    metrics = compute_metrics(losses, ROLLOUT, LoggingLevel.NONE)
    assert set(metrics) == {
        "losses/actor/left/mean",
        "losses/actor/left/std",
        "losses/clipping_fraction",
    }


def test_weight_statistics():
    metrics = {}
    log_weight_stats(metrics, CountingNetwork())
    assert metrics == {"weights/mean": 1.0, "weights/std": 0.0}
    log_weight_stats(metrics, CountingNetwork(), (50,))
    assert metrics["weights/p50"] == 1.0


def test_evaluation_of_fixed_length_episodes():
    # Reward 1 at each of 5 steps; V = carry + observation needs no averaging here.
    found = eval_rollout(Endless(max_len=5), CountingNetwork(), 3, 100, jax.random.key(0))
    assert set(found) == {
        f"eval/{n}/{e}" for n in ("episode_reward", "lifespan") for e in ("mean", "std")
    }
    assert found["eval/episode_reward/mean"] == 5.0 and found["eval/episode_reward/std"] == 0.0
    assert found["eval/lifespan/mean"] == 5.0


def test_evaluation_cuts_at_the_maximum():
    found = eval_rollout(Endless(max_len=50), CountingNetwork(), 2, 7, jax.random.key(0))
    assert found["eval/lifespan/mean"] == found["eval/episode_reward/mean"] == 7.0


def test_evaluation_counts_each_episode_once():
    # Episodes last as long as their first integer says, with reward 1 a step, and are not
    # started again: returns and lifespans are those integers.
    key = jax.random.key(3)
    lengths = jax.vmap(IntegerEnv().reset)(jax.random.split(key, 9)).info["left"]
    assert len(set(map(int, lengths))) > 2
    found = eval_rollout(IntegerEnv(), CountingNetwork(), 9, 100, key, (0, 50, 100))
    for level in (0, 50, 100):
        expected = np.percentile(lengths, level)
        np.testing.assert_allclose(found[f"eval/lifespan/p{level}"], expected)
        np.testing.assert_allclose(found[f"eval/episode_reward/p{level}"], expected)
    np.testing.assert_allclose(found["eval/episode_reward/mean"], np.mean(lengths), rtol=1e-6)


def test_evaluation_averages_metrics_over_the_steps_of_each_episode():
    class Metered(IntegerEnv):
        """Its metric is the integer that is left after the step."""

        def reset(self, rng):
            state = super().reset(rng)
            return state.replace(metrics={"left": state.obs[0]})

        def step(self, state, action):
            state = super().step(state, action)
            return state.replace(metrics={"left": state.obs[0]})

    # An episode from n: (n − 1 + … + 0)/n = (n − 1)/2, whatever comes after its end.
    key = jax.random.key(3)
    lengths = np.asarray(jax.vmap(IntegerEnv().reset)(jax.random.split(key, 9)).info["left"])
    found = eval_rollout(Metered(), CountingNetwork(), 9, 100, key, None, LoggingLevel.ENV_METRICS)
    np.testing.assert_allclose(found["eval/env/left/mean"], np.mean((lengths - 1) / 2), rtol=1e-6)


def test_evaluation_of_named_rewards_and_networks_metrics():
    found = eval_rollout(
        TwoHands(length=3),
        hands_network(),
        2,
        10,
        jax.random.key(0),
        None,
        LoggingLevel.NETWORK_METRICS,
    )
    parts = found["eval/episode_reward/left/mean"] + found["eval/episode_reward/right/mean"]
    np.testing.assert_allclose(found["eval/episode_reward/mean"], parts, rtol=1e-6)
    assert any(name.startswith("eval/net/") for name in found)


def test_evaluation_leaves_the_network_alone():
    network = mlp_network()
    sampler = network.layers[1].action.layers[-1]
    counts = int(sampler.rng.count[...])
    eval_rollout(FollowTarget(length=3), network, 2, 5, jax.random.key(0))
    assert int(sampler.rng.count[...]) == counts and sampler.deterministic is False
