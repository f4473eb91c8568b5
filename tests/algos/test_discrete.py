"""PPO with actions that are choices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from nnx_ppo.algorithms import (
    EvalConfig,
    LoggingLevel,
    PPOConfig,
    TrainConfig,
    train_ppo,
)
from nnx_ppo.algorithms.checks import check_network
from nnx_ppo.core import JaxDataclass
from nnx_ppo.core.testing import FollowTarget, PickTarget
from nnx_ppo.networks.adapter import PPOAdapter
from nnx_ppo.networks.containers import Parallel, Sequential
from nnx_ppo.networks.feedforward import Dense
from nnx_ppo.networks.sampling_layers import CategoricalSampler, MultiCategoricalSampler
from nnx_ppo.networks.utils import Filter, Flattener
from nnx_ppo.networks.variational import AR1VariationalBottleneck

CONFIG = TrainConfig(
    ppo=PPOConfig(
        n_envs=64,
        rollout_length=10,
        total_steps=640 * 15,
        learning_rate=5e-2,
        n_epochs=4,
        n_minibatches=2,
        logging_level=LoggingLevel.ALL,
    ),
    eval=EvalConfig(
        every_steps=640 * 15,
        n_envs=64,
        max_episode_length=20,
        logging_percentiles=None,
        logging_level=LoggingLevel.ENV_METRICS | LoggingLevel.NETWORK_METRICS,
    ),
)


def part(name):
    """A stack that takes one array out of the observation."""
    return [Filter({name: name}), Flattener()]


def masked_network(choices=4):
    """Linear logits of the target, with the observation's mask."""
    rngs = nnx.Rngs(0)
    logits = Sequential([*part("target"), Dense(choices, choices, rngs)])
    action = Sequential(
        [
            Parallel(logits=logits, mask=Sequential(part("mask"))),
            CategoricalSampler(rngs, entropy_weight=1e-2),
        ]
    )
    value = Sequential([*part("target"), Dense(choices, 1, rngs)])
    return PPOAdapter(action=action, value=value)


@pytest.fixture(scope="module")
def trained():
    """One short run with masks."""
    network, logged = masked_network(), []
    result = train_ppo(
        PickTarget(masked=True), network, CONFIG, log_fn=lambda metrics, _: logged.append(metrics)
    )
    return network, result, logged


def test_a_categorical_policy_picks_the_target(trained) -> None:
    _, result, _ = trained
    # Best 10; at random among those allowed (1 + Binomial(3, 1/2) of them) (1 - 1/16) / 2 = 0.47
    # a step, since E[1 / (1 + K)] = (1 - 2^-4) / (4 * 1/2).
    first, last = (entry["eval/episode_reward/mean"] for entry in result.eval_history)
    assert first < 8.0
    assert last >= 9.0


def test_what_the_mask_forbids_is_never_done(trained) -> None:
    _, result, logged = trained
    rollouts = [metrics for metrics in logged if "env/disallowed/mean" in metrics]
    assert len(rollouts) == 15
    assert all(metrics["env/disallowed/mean"] == 0.0 for metrics in rollouts)
    assert result.final_metrics["eval/env/disallowed/mean"] == 0.0


def test_metrics_of_integer_actions(trained) -> None:
    _, _, logged = trained
    last = logged[-1]
    # Targets are uniform on 0, 1, 2, 3: mean 1.5, standard deviation sqrt(5/4) = 1.118.
    assert last["rollout_batch/action/mean"] == pytest.approx(1.5, abs=0.3)
    assert last["rollout_batch/action/std"] == pytest.approx(1.118, abs=0.2)
    assert 0 <= last["net/action/1/entropy/mean"] <= np.log(4)
    assert last["net/action/1/probabilities/mean"] == pytest.approx(0.25)
    assert np.isfinite(list(last.values())).all()


class TwoDigits:
    """Reward 1 for each digit that is right, one of 2 and one of 3; an episode is two steps."""

    action_size = 2

    def reset(self, rng):
        return self._state(rng, jnp.zeros(()), jnp.zeros(()))

    def step(self, state, action):
        assert (action.shape, action.dtype) == ((2,), jnp.int32)
        hits = (action == jnp.argmax(state.obs["digits"], axis=-1)).astype(jnp.float32)
        return self._state(state.info["rng"], hits.sum(), 1.0 - state.info["late"])

    def _state(self, rng, reward, late):
        rng, key = jax.random.split(rng)
        digits = jax.random.randint(key, (2,), 0, jnp.array([2, 3]))
        obs = {"digits": jax.nn.one_hot(digits, 3)}
        return DigitsState(obs, reward, 1.0 - late, {"rng": rng, "late": late}, {})


class DigitsState(JaxDataclass):
    obs: dict
    reward: jax.Array
    done: jax.Array
    info: dict
    metrics: dict


def test_one_update_with_several_choices() -> None:
    """Behind a bottleneck, whose noise the replay must meet again."""
    rngs = nnx.Rngs(0)
    sampler = MultiCategoricalSampler(rngs, [2, 3], entropy_weight=1e-2)
    action = Sequential([AR1VariationalBottleneck(3, rngs, 0.1), Dense(3, 5, rngs), sampler])
    adapter = PPOAdapter(action=action, value=Dense(6, 1, rngs))
    network = Sequential([Flattener(), adapter])
    before = jax.tree.map(np.asarray, nnx.state(network, nnx.Param))
    ppo = PPOConfig(
        n_envs=8,
        rollout_length=5,
        total_steps=40,
        n_epochs=1,
        n_minibatches=1,
        clip_range=1e-4,  # only a ratio of 1 stays inside, as the only update has to find it
        learning_rate=1e-2,
        logging_level=LoggingLevel.ALL,
    )
    result = train_ppo(TwoDigits(), network, TrainConfig(ppo=ppo, eval=EvalConfig(enabled=False)))
    metrics = result.final_metrics
    assert metrics["losses/clipping_fraction"] == 0.0
    assert 0 <= metrics["rollout_batch/action/mean"] <= 2
    assert np.isfinite(list(metrics.values())).all()
    after = nnx.state(network, nnx.Param)
    for old, new in zip(*map(jax.tree.leaves, (before, after)), strict=True):
        assert np.isfinite(new).all() and (old != new).any()


def test_an_action_size_does_not_go_with_one_choice() -> None:
    rngs = nnx.Rngs(0)
    action = Sequential([Dense(1, 3, rngs), CategoricalSampler(rngs, 0.0)])
    network = PPOAdapter(action=action, value=Dense(1, 1, rngs))
    with pytest.raises(ValueError, match=r"shape \(3, 1\) .* got \(3,\)\. .*declares no action_s"):
        check_network(FollowTarget(), network, combine_advantages=False)
