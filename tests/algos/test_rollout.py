"""Rollouts: ends, carries, bootstraps, keys."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from nnx_ppo.algorithms.rollout import single_transition, tree_where, unroll_env
from nnx_ppo.core import EpisodeWrapper
from nnx_ppo.core.testing import Endless, FollowTarget

from .helpers import CountingNetwork, IntegerEnv, lstm_network, mlp_network


def first_states(env, n, seed=0):
    return jax.vmap(env.reset)(jax.random.split(jax.random.key(seed), n))


def collect(env, network, n, length, seed=0):
    return unroll_env(
        env,
        first_states(env, n, seed),
        network,
        network.initialize_state(n),
        length,
        jax.random.key(seed + 1),
    )


@pytest.mark.parametrize("flag", ["truncation", "truncated"])
def test_truncated_steps_store_the_value_before_the_reset(flag):
    # Episodes of 3 steps by time limit; the observation is age/3 and V = carry + observation.
    # The last step of an episode sees the carry 2 and leaves the carry 3 with the observation
    # 3/3 = 1: V = 3 + 1 = 4. Afterwards both start at 0 again.
    network = CountingNetwork()
    state, env_state, rollout = collect(Endless(max_len=3, flag=flag), network, 2, 7)
    ends = [False, False, True, False, False, True, False]
    np.testing.assert_array_equal(rollout.truncated, np.stack([ends, ends], axis=1))
    np.testing.assert_array_equal(rollout.done, rollout.truncated)
    values = rollout.network_output.value_estimates[:, 0]
    # V = carry + age/3: 0, 1 + 1/3, 2 + 2/3, and so on after each end.
    np.testing.assert_allclose(values, [0, 4 / 3, 8 / 3, 0, 4 / 3, 8 / 3, 0], rtol=1e-6)
    np.testing.assert_allclose(rollout.bootstrap_values[:, 0], [0, 0, 4, 0, 0, 4, 0])
    np.testing.assert_allclose(rollout.next_obs[:, 0, 0], [1 / 3, 2 / 3, 1, 1 / 3, 2 / 3, 1, 1 / 3])
    np.testing.assert_allclose(rollout.obs[:, 0, 0], [0, 1 / 3, 2 / 3, 0, 1 / 3, 2 / 3, 0])
    np.testing.assert_allclose(state, [1, 1])
    np.testing.assert_allclose(env_state.obs, [[1 / 3], [1 / 3]])


def test_terminations_store_nothing():
    _, _, rollout = collect(FollowTarget(length=3), CountingNetwork(), 2, 4)
    np.testing.assert_array_equal(rollout.done[:, 0], [False, False, True, False])
    assert not rollout.truncated.any()
    assert not rollout.bootstrap_values.any()


def test_a_real_end_on_the_limits_step_is_a_termination():
    env = EpisodeWrapper(FollowTarget(length=3), max_len=3)
    _, _, rollout = collect(env, CountingNetwork(), 2, 3)
    np.testing.assert_array_equal(rollout.done[:, 0], [False, False, True])
    assert not rollout.truncated.any()
    assert not rollout.bootstrap_values.any()


def test_one_step_episodes():
    env = IntegerEnv(low=1, high=2)
    state, _, rollout = collect(env, CountingNetwork(), 3, 4)
    assert rollout.done.all()
    np.testing.assert_allclose(rollout.network_output.value_estimates, np.ones((4, 3)))
    np.testing.assert_allclose(state, 0.0)


def test_every_finished_environment_gets_a_fresh_draw():
    """Neither environments that end together nor later episodes repeat each other."""
    env = IntegerEnv(low=1, high=2)
    _, env_state, _ = collect(env, CountingNetwork(), 64, 3)
    _, later, _ = collect(env, CountingNetwork(), 64, 4)
    draws = np.concatenate([np.asarray(s.info["bits"]) for s in (env_state, later)])
    assert len(np.unique(draws, axis=0)) == len(draws)


def test_one_transition_is_a_window_of_one():
    env, network = IntegerEnv(), CountingNetwork()
    states = first_states(env, 4)
    carry = network.initialize_state(4)
    reset_key = jax.random.key(1)
    state, env_state, rollout = unroll_env(env, states, network, carry, 1, reset_key)
    step_keys = jax.random.split(reset_key, (1, 4))[0]
    (next_state, next_env), transition = single_transition(env, network, (carry, states), step_keys)
    np.testing.assert_array_equal(state, next_state)
    np.testing.assert_array_equal(env_state.obs, next_env.obs)
    np.testing.assert_array_equal(rollout.rewards[0], transition.rewards)


def test_windows_join_without_a_seam():
    """Two windows of 5 steps see what steps 0 to 9 of a single run see, reset keys apart."""
    env = Endless(max_len=4)
    network = lstm_network()
    network.eval()
    key = jax.random.key(1)
    states = first_states(env, 3)
    carry = network.initialize_state(3)
    _, _, whole = unroll_env(env, states, network, carry, 10, key)
    carry, states, first = unroll_env(env, states, network, carry, 5, key)
    _, _, second = unroll_env(env, states, network, carry, 5, key)
    joined = jnp.concatenate([first.network_output.actions, second.network_output.actions])
    np.testing.assert_allclose(joined, whole.network_output.actions, rtol=1e-6)


def test_value_queries_leave_streams_and_memory_alone():
    """A rollout with time limits draws what one without them draws."""
    draws = []
    for max_len in (3, 50):
        network = mlp_network(normalize=False)
        env = EpisodeWrapper(Endless(max_len=100), max_len)
        _, _, rollout = collect(env, network, 2, 3)
        assert rollout.truncated.any() == (max_len == 3)
        draws.append(np.asarray(rollout.network_output.actions))
        assert network.layers[0].action.layers[-1].rng.count[...] == 3
    np.testing.assert_array_equal(*draws)


def test_rollout_works_in_the_users_jit():
    env = Endless(max_len=3)
    eager, jitted = mlp_network(), mlp_network()
    expected = collect(env, eager, 2, 5)
    found = nnx.jit(lambda network: collect(env, network, 2, 5))(jitted)
    np.testing.assert_allclose(
        found[2].network_output.actions, expected[2].network_output.actions, rtol=1e-5
    )
    count = jitted.layers[1].action.layers[-1].rng.count[...]
    assert count == eager.layers[1].action.layers[-1].rng.count[...] == 5


def test_tree_where_selects_by_environment_and_keeps_shared_leaves():
    cond = jnp.asarray([True, False])
    on_true = {"own": jnp.ones((2, 3)), "shared": jnp.ones(3), "scalar": jnp.ones(())}
    on_false = jax.tree.map(jnp.zeros_like, on_true)
    found = tree_where(cond, on_true, on_false)
    np.testing.assert_array_equal(found["own"], [[1, 1, 1], [0, 0, 0]])
    assert not found["shared"].any() and not found["scalar"]
