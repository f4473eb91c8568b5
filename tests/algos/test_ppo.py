"""The PPO loss and one iteration."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from nnx_ppo.algorithms import LoggingLevel, PPOConfig, Transition, ppo_loss, ppo_step
from nnx_ppo.algorithms.heads import advantages_per_action, match_rewards
from nnx_ppo.algorithms.optimizers import linear_rates
from nnx_ppo.algorithms.ppo import new_training_state
from nnx_ppo.algorithms.rollout import unroll_env
from nnx_ppo.core import EpisodeWrapper, PPONetworkOutput, StatefulModule, StatefulModuleOutput
from nnx_ppo.core.testing import Endless, FollowTarget

from .helpers import CountingNetwork, IntegerEnv, lstm_network, mlp_network

SETTINGS = {
    "clip_range": 0.2,
    "normalize_advantages": False,
    "combine_advantages": False,
    "discounting_factor": 0.9,
    "gae_lambda": 0.95,
    "critic_loss_weight": 0.5,
    "logging_level": LoggingLevel.ALL,
}


class Scripted(StatefulModule):
    """Says whatever the observation says: `[log-likelihood, value, regularisation]`."""

    def __init__(self):
        self.shift = nnx.Param(jnp.zeros(()))

    def __call__(self, module_state, obs, rollout_extras=None):
        output = PPONetworkOutput(obs[:, :1], obs[:, 0] + self.shift[...], obs[:, 1])
        return StatefulModuleOutput((), output, obs[:, 2], {}, obs[:, :1])


def scripted_window(**changes):
    """Two steps of one environment."""
    obs = jnp.asarray([[[jnp.log(1.5), 10.0, 0.25]], [[0.0, 10.0, 0.75]]])
    window = Transition(
        obs=obs,
        network_output=PPONetworkOutput(obs[..., :1], jnp.zeros((2, 1)), obs[..., 1]),
        rewards=jnp.asarray([[1.0], [5.0]]),
        done=jnp.zeros((2, 1), bool),
        truncated=jnp.zeros((2, 1), bool),
        next_obs=jnp.concatenate([obs[1:], jnp.asarray([[[0.0, 20.0, 0.0]]])]),
        metrics={},
        rollout_extras=obs[..., :1],
    )
    return window.replace(**changes)


def test_ppo_loss_by_hand():
    # γ = 0.9, λ = 0.95; V = 10, 10 and 20 at the bootstrap.
    # A₁ = 5 + 0.9·20 − 10 = 13; A₀ = 1 + 0.9·10 − 10 + 0.855·13 = 11.115.
    # Ratios 1.5 and 1; −(min(1.5, 1.2)·11.115 + 13)/2 = −(13.338 + 13)/2 = −13.169.
    # Critic: targets V + A, so ½·(11.115² + 13²)/2 = 73.1358..., weighted by ½.
    # Regularisation: (0.25 + 0.75)/2 = 0.5.
    loss, metrics = ppo_loss(Scripted(), (), scripted_window(), **SETTINGS)
    critic = 0.25 * (11.115**2 + 13**2)
    np.testing.assert_allclose(loss, -13.169 + 0.5 * critic + 0.5, rtol=1e-6)
    np.testing.assert_allclose(metrics["losses/actor"], -13.169, rtol=1e-6)
    np.testing.assert_allclose(metrics["losses/critic"], critic, rtol=1e-6)
    np.testing.assert_allclose(metrics["losses/regularization"], 0.5, rtol=1e-6)
    np.testing.assert_array_equal(metrics["losses/clipping_fraction"], [[True], [False]])
    np.testing.assert_allclose(metrics["losses/advantages"], [[11.115], [13.0]], rtol=1e-6)


def test_settings_of_the_loss_may_be_arrays_and_nothing_may_be_clipped():
    # As above with ratio 1.5 unclipped: −(1.5·11.115 + 13)/2 = −14.83625.
    scalars = {
        name: jnp.asarray(value) for name, value in SETTINGS.items() if isinstance(value, float)
    }
    settings = {**SETTINGS, **scalars, "clip_range": np.inf}
    _, metrics = ppo_loss(Scripted(), (), scripted_window(), **settings)
    np.testing.assert_allclose(metrics["losses/actor"], -14.83625, rtol=1e-6)
    # With no range at all the ratio counts as 1: −(11.115 + 13)/2 = −12.0575.
    settings["clip_range"] = jnp.asarray(0.0)
    _, metrics = ppo_loss(Scripted(), (), scripted_window(), **settings)
    np.testing.assert_allclose(metrics["losses/actor"], -12.0575, rtol=1e-6)


def test_normalised_advantages():
    # Standardised, two advantages are −1 and 1, the first the smaller one here.
    # −(min(1.5·−1, 1.2·−1) + 1)/2 = −(−1.5 + 1)/2 = 0.25
    settings = {**SETTINGS, "normalize_advantages": True}
    _, metrics = ppo_loss(Scripted(), (), scripted_window(), **settings)
    np.testing.assert_allclose(metrics["losses/actor"], 0.25, rtol=1e-5)


def test_neither_advantages_nor_targets_have_a_gradient():
    # d/d shift of −ratio·A at the unclipped step only: −(1·13)/2 = −6.5.
    gradient = nnx.grad(lambda net: ppo_loss(net, (), scripted_window(), **SETTINGS)[0])(Scripted())
    np.testing.assert_allclose(gradient["shift"][...], -6.5, rtol=1e-6)


def test_the_loss_refuses_a_rollout_without_extras():
    with pytest.raises(ValueError, match="rollout_extras is None"):
        ppo_loss(Scripted(), (), scripted_window(rollout_extras=None), **SETTINGS)


def test_carry_before_reset_enters_the_advantage():
    # V = carry + observation (age/3), reward 1, γ = 0.9, λ = 0: A = δ.
    # The truncated step 2: δ = 1 + 0.9·4 − 8/3; the step before: 1 + 0.9·8/3 − 4/3;
    # the step after the reset: 1 + 0.9·4/3 − 0.
    env, network = Endless(max_len=3), CountingNetwork()
    states = jax.vmap(env.reset)(jax.random.split(jax.random.key(0), 2))
    carry = network.initialize_state(2)
    _, _, rollout = unroll_env(env, states, network, carry, 4, jax.random.key(1))
    _, metrics = ppo_loss(network, carry, rollout, **{**SETTINGS, "gae_lambda": 0.0})
    expected = [1 + 0.9 * 4 / 3, 1 + 0.9 * 8 / 3 - 4 / 3, 1 + 0.9 * 4 - 8 / 3, 1 + 0.9 * 4 / 3]
    np.testing.assert_allclose(metrics["losses/advantages"][:, 0], expected, rtol=1e-6)


def test_heads():
    ones = jnp.ones((1, 1))
    rewards = {"a": ones, "b": 2.0 * ones}
    same = advantages_per_action(rewards, {"a": ones, "b": ones}, False)
    np.testing.assert_allclose([same["a"], same["b"]], [ones, 2.0 * ones])
    combined = advantages_per_action(rewards, {"x": ones, "y": ones}, True)
    np.testing.assert_allclose([combined["x"], combined["y"]], [3.0 * ones, 3.0 * ones])
    single = advantages_per_action(ones, {"x": ones, "y": ones}, False)
    np.testing.assert_allclose([single["x"], single["y"]], [ones, ones])
    with pytest.raises(ValueError, match="combine_advantages=True"):
        advantages_per_action(rewards, ones, False)


def test_one_reward_and_one_value_belong_together():
    ones = jnp.ones((1, 1))
    assert match_rewards(ones, {"value": ones}) == {"value": ones}
    with pytest.raises(ValueError, match="one value for each reward"):
        match_rewards({"a": ones, "b": ones}, ones)


@pytest.mark.parametrize("make", [mlp_network, lstm_network], ids=["mlp", "lstm"])
@pytest.mark.parametrize(
    "env",
    [EpisodeWrapper(FollowTarget(length=7), 3), IntegerEnv(low=1, high=4)],
    ids=["time limits", "short episodes"],
)
def test_replay_of_unchanged_weights_has_ratio_1(make, env):
    """Over windows that begin in mid-episode, at every step, with episodes of one step."""
    network, n_envs = make(), 6
    states = jax.vmap(env.reset)(jax.random.split(jax.random.key(0), n_envs))

    @nnx.jit
    def two_windows(network, states):
        carry = network.initialize_state(n_envs)
        reset_keys = jax.random.split(jax.random.key(1))
        carry, states, first = unroll_env(env, states, network, carry, 5, reset_keys[0])
        network.update_statistics(first.rollout_extras)
        _, _, rollout = unroll_env(env, states, network, carry, 10, reset_keys[1])
        replay = network.unroll(carry, rollout.obs, rollout.done, rollout.rollout_extras)
        return rollout, replay.output

    rollout, replayed = two_windows(network, states)
    assert rollout.done.any() and not rollout.done.all()
    ratio = jnp.exp(replayed.loglikelihoods - rollout.network_output.loglikelihoods)
    assert ratio.shape == (10, n_envs)
    np.testing.assert_allclose(ratio, 1.0, atol=1e-4)
    np.testing.assert_allclose(
        replayed.value_estimates, rollout.network_output.value_estimates, rtol=1e-4, atol=1e-5
    )


CONFIG = PPOConfig(n_envs=4, rollout_length=6, n_epochs=1, n_minibatches=1)


def step_arguments(config):
    names = [
        "n_envs",
        "rollout_length",
        "gae_lambda",
        "discounting_factor",
        "clip_range",
        "normalize_advantages",
        "combine_advantages",
        "n_epochs",
        "n_minibatches",
        "critic_loss_weight",
        "logging_level",
        "logging_percentiles",
    ]
    return {name: getattr(config, name) for name in names}


@pytest.mark.parametrize("make", [mlp_network, lstm_network], ids=["mlp", "lstm"])
@pytest.mark.parametrize("n_minibatches", [1, 4])
def test_no_ratio_moves_while_no_weight_does(make, n_minibatches):
    """With a learning rate of 0 nothing is clipped at any step, epoch or minibatch."""
    env = IntegerEnv(low=1, high=4)
    state = new_training_state(env, make(), 4, seed=0, learning_rate=0.0)
    config = dataclasses.replace(
        CONFIG,
        n_minibatches=n_minibatches,
        n_epochs=2,
        clip_range=1e-4,
        logging_level=LoggingLevel.ACTOR_EXTRA,
    )
    step = nnx.jit(lambda state: ppo_step(env, state, **step_arguments(config)))
    for _ in range(3):
        state, metrics = step(state)
        assert metrics["losses/clipping_fraction"] == 0.0


def test_an_iteration_works_in_the_users_transforms():
    """`nnx.jit` and `jax.jit` on split state give the same network as no jit, updated in place."""
    env = IntegerEnv()
    arguments = step_arguments(CONFIG)
    networks = [mlp_network() for _ in range(3)]
    states = [new_training_state(env, network, 4, seed=0) for network in networks]
    before = [np.asarray(leaf) for leaf in jax.tree.leaves(nnx.state(networks[0], nnx.Param))]
    ppo_step(env, states[0], **arguments)
    nnx.jit(lambda state: ppo_step(env, state, **arguments))(states[1])

    graphdef, variables = nnx.split((networks[2], states[2].optimizer))

    @jax.jit
    def pure(variables, rest):
        network, optimizer = nnx.merge(graphdef, variables, copy=True)
        state, _ = ppo_step(env, rest.replace(networks=network, optimizer=optimizer), **arguments)
        return nnx.state((state.networks, state.optimizer)), state.steps_taken

    variables, steps = pure(variables, states[2].replace(networks=None, optimizer=None))
    nnx.update((networks[2], states[2].optimizer), variables)
    assert steps == 24.0
    expected = nnx.to_pure_dict(nnx.state(networks[0], nnx.Param))
    for network in networks[1:]:
        found = nnx.to_pure_dict(nnx.state(network, nnx.Param))
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), found, expected)
    assert any((a != b).any() for a, b in zip(before, jax.tree.leaves(expected), strict=True))


def test_the_loss_works_in_the_users_grad():
    gradient = nnx.grad(lambda net: ppo_loss(net, (), scripted_window(), **SETTINGS)[0])
    graphdef, params = nnx.split(Scripted())

    def pure(params):
        return ppo_loss(nnx.merge(graphdef, params), (), scripted_window(), **SETTINGS)[0]

    np.testing.assert_allclose(
        gradient(Scripted())["shift"][...], jax.grad(pure)(params)["shift"][...]
    )


def test_statistics_are_folded_in_once_from_what_the_forward_pass_saw():
    """However many epochs: mean and variance are those of the 24 observations of the window."""
    env = IntegerEnv()
    network, twin = mlp_network(), mlp_network()
    state = new_training_state(env, network, 4, seed=0)
    config = dataclasses.replace(CONFIG, n_epochs=3, n_minibatches=2)
    reset_key = jax.random.split(state.rng_key, 3)[1]
    _, _, window = unroll_env(env, state.env_states, twin, state.network_states, 6, reset_key)
    ppo_step(env, state, **step_arguments(config))
    normalizer = network.layers[0]
    np.testing.assert_allclose(normalizer.mean[...], window.obs.mean((0, 1)), rtol=1e-5)
    np.testing.assert_allclose(normalizer.M2[...] / 24, window.obs.var((0, 1)), rtol=1e-4)


def test_first_episodes_have_different_ages():
    env = EpisodeWrapper(FollowTarget(length=1000), 500)
    state = new_training_state(env, mlp_network(), 32, seed=0)
    ages = np.asarray(state.env_states.info["step_counter"])
    assert len(np.unique(ages)) > 20 and ages.min() >= 0 and ages.max() < 500


def test_the_learning_rate_falls_to_its_final_value():
    # Iterations of 24 steps with 2·2 updates, from 1 to 0.5 over 96 steps: by 1/32 each 6 steps,
    # however many updates there were before; from the end on 0.5.
    config = PPOConfig(
        n_envs=4,
        rollout_length=6,
        total_steps=96,
        n_epochs=2,
        n_minibatches=2,
        learning_rate=1.0,
        final_learning_rate=0.5,
    )
    falling = np.arange(4) / 32
    for steps, expected in ((0.0, 1.0 - falling), (48.0, 0.75 - falling), (96.0, [0.5] * 4)):
        found = linear_rates(config, jnp.asarray(steps))
        assert found is not None
        np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert linear_rates(PPOConfig(learning_rate=0.25), jnp.asarray(0.0)) is None
