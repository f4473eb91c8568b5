"""The analytic environments keep what they promise on paper."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nnx_ppo.core import EpisodeWrapper
from nnx_ppo.core.testing import (
    AnalyticEnvironments,
    Endless,
    FollowTarget,
    PickTarget,
    RememberCue,
    TwoHands,
)

from .helpers import leaf_types

KEY = jax.random.key(0)
ALL = [
    FollowTarget(),
    RememberCue(),
    TwoHands(),
    PickTarget(),
    PickTarget(masked=True),
    Endless(),
    Endless(flag="truncated"),
]


def full_action(env: Any, value: float = 0.0) -> Any:
    if isinstance(env, PickTarget):
        return jnp.asarray(value, jnp.int32)
    return jax.tree.map(lambda size: jnp.full(size, value), env.action_size)


def episode(env: Any, policy: Any, key: Any = KEY) -> tuple[Any, int]:
    """Return of one episode, summed over rewards of a step, and its length."""
    state, total, steps = env.reset(key), 0.0, 0
    while not state.done:
        state = env.step(state, policy(state))
        total, steps = total + sum(jax.tree.leaves(state.reward)), steps + 1
    return total, steps


@pytest.mark.parametrize("env", ALL, ids=lambda env: type(env).__name__)
def test_states_keep_structure_dtypes_and_weak_types(env: Any) -> None:
    first = jax.eval_shape(env.reset, KEY)
    second = jax.eval_shape(env.step, first, full_action(env))
    assert jax.tree.structure(first) == jax.tree.structure(second)
    assert leaf_types(first) == leaf_types(second)


@pytest.mark.parametrize("env", ALL, ids=lambda env: type(env).__name__)
def test_batches_equal_single_environments(env: Any) -> None:
    keys = jax.random.split(KEY, 3)
    action = full_action(env, 0.25)
    states = jax.jit(jax.vmap(lambda key: env.step(env.reset(key), action)))(keys)
    for index, key in enumerate(keys):
        single = env.step(env.reset(key), action)
        batch = jax.tree.leaves((states.obs, states.reward, states.done))
        for found, expected in zip(
            batch, jax.tree.leaves((single.obs, single.reward, single.done)), strict=True
        ):
            np.testing.assert_allclose(found[index], expected, rtol=1e-6)


class TestFollowTarget:
    def test_best_return_is_the_length(self) -> None:
        assert episode(FollowTarget(length=4), lambda state: state.obs) == (4.0, 4)

    def test_reward_falls_with_the_square(self) -> None:
        env = FollowTarget()
        state = env.reset(KEY)
        # 1 − 0.5² = 0.75.
        np.testing.assert_allclose(env.step(state, state.obs + 0.5).reward, 0.75, rtol=1e-6)
        np.testing.assert_allclose(env.step(state, state.obs - 0.5).metrics["error"], 0.25, 1e-6)

    def test_acting_zero_earns_eleven_twelfths(self) -> None:
        env = FollowTarget()
        state = jax.vmap(env.reset)(jax.random.split(KEY, 10_000))
        assert abs(state.obs).max() <= 0.5
        reward = jax.vmap(env.step)(state, jnp.zeros((10_000, 1))).reward
        # The target's square has mean 1/12 and variance 1/80 − 1/144 = 1/180.
        assert abs(reward.mean() - 11 / 12) < 4 / np.sqrt(180 * 10_000)

    def test_targets_change(self) -> None:
        env = FollowTarget()
        first = env.reset(KEY)
        second = env.step(first, jnp.zeros(1))
        third = env.step(second, jnp.zeros(1))
        assert len({float(state.obs[0]) for state in (first, second, third)}) == 3


class TestRememberCue:
    @pytest.mark.parametrize("delay", [1, 4])
    def test_best_return_is_one_and_due_after_the_delay(self, delay: int) -> None:
        # The cue is seen at step 0, and the action at step `delay` ends the episode.
        env = RememberCue(delay)
        found = episode(env, lambda state: state.info["cue"][None])
        assert found == (1.0, delay + 1)

    def test_only_the_action_at_the_signal_counts(self) -> None:
        env = RememberCue(3)
        found = episode(env, lambda state: (1 - state.obs[1:]) * 5)
        assert found == (0.0, 4)

    def test_observations(self) -> None:
        env = RememberCue(2)
        state = env.reset(KEY)
        seen = [state.obs.tolist()]
        for _ in range(2):
            state = env.step(state, jnp.zeros(1))
            seen.append(state.obs.tolist())
        assert seen == [[state.info["cue"], 0.0], [0.0, 0.0], [0.0, 1.0]]

    def test_without_memory_nothing_can_be_earned(self) -> None:
        # What is seen at the signal is the same for both cues, so any policy without memory
        # acts the same, and earns a − a = 0 over the two.
        env = RememberCue(2)
        returns, signals = {}, []
        for key in jax.random.split(KEY, 16):
            cue = float(env.reset(key).info["cue"])
            if cue in returns:
                continue
            state = env.step(env.step(env.reset(key), jnp.ones(1)), jnp.ones(1))
            signals.append(state.obs.tolist())
            returns[cue] = float(env.step(state, jnp.full(1, 0.7)).reward)
        assert signals[0] == signals[1]
        assert sorted(returns) == [-1.0, 1.0]
        assert sum(returns.values()) == 0.0

    def test_cues_are_balanced(self) -> None:
        cues = jax.vmap(RememberCue().reset)(jax.random.split(KEY, 10_000)).info["cue"]
        assert set(np.unique(cues)) == {-1.0, 1.0}
        assert abs(cues.mean()) < 4 / np.sqrt(10_000)

    def test_delay_must_be_positive(self) -> None:
        with pytest.raises(ValueError, match="delay=0 must be at least 1"):
            RememberCue(0)


class TestTwoHands:
    def test_best_return_is_the_length_for_each_hand(self) -> None:
        def follow(state: Any) -> Any:
            return {hand: state.obs[hand]["target"] for hand in ("left", "right")}

        assert episode(TwoHands(length=3), follow) == (6.0, 3)

    def test_hands_are_rewarded_apart(self) -> None:
        env = TwoHands()
        state = env.reset(KEY)
        action = {
            "left": state.obs["left"]["target"] + 0.5,
            "right": state.obs["right"]["target"] + jnp.asarray([0.0, 0.25]),
        }
        reward = env.step(state, action).reward
        # 1 − 0.5² = 0.75;  1 − (0² + 0.25²) = 0.9375.
        np.testing.assert_allclose(reward["left"], 0.75, rtol=1e-6)
        np.testing.assert_allclose(reward["right"], 0.9375, rtol=1e-6)


class TestPickTarget:
    def test_best_return_is_the_length(self) -> None:
        found = episode(PickTarget(3, length=4), lambda state: jnp.argmax(state.obs))
        assert found == (4.0, 4)

    def test_only_the_target_is_rewarded(self) -> None:
        env = PickTarget(5)
        state = env.reset(KEY)
        rewards = [float(env.step(state, jnp.asarray(i)).reward) for i in range(5)]
        assert rewards == state.obs.tolist()
        assert sorted(rewards) == [0.0, 0.0, 0.0, 0.0, 1.0]

    def test_targets_are_uniform_and_independent_of_the_last(self) -> None:
        env = PickTarget(4)

        def two(key: Any) -> Any:
            first = env.reset(key)
            return first.info["target"], env.step(first, jnp.asarray(0)).info["target"]

        pairs = jax.vmap(two)(jax.random.split(KEY, 16_000))
        counts = np.bincount(4 * pairs[0] + pairs[1], minlength=16)
        # Each of 16 pairs has probability 1/16: 1000 expected, deviation sqrt(1000 * 15/16) < 31.
        assert abs(counts - 1000).max() < 4 * 31

    def test_masks_allow_the_target_and_half_of_the_others(self) -> None:
        env = PickTarget(4, masked=True)
        obs = jax.vmap(env.reset)(jax.random.split(KEY, 10_000)).obs
        assert obs["mask"].dtype == bool
        assert obs["mask"][obs["target"] == 1].all()
        # 30,000 fair coins: deviation of the mean sqrt(1/4 / 30,000) < 0.003.
        assert abs(obs["mask"][obs["target"] == 0].mean() - 0.5) < 4 * 0.003

    def test_what_is_not_allowed_is_counted(self) -> None:
        env = PickTarget(8, masked=True)
        state = env.reset(KEY)
        found = [float(env.step(state, jnp.asarray(i)).metrics["disallowed"]) for i in range(8)]
        assert found == (~state.obs["mask"]).astype(float).tolist()
        assert 0 < sum(found) < 8

    def test_at_least_one_action(self) -> None:
        with pytest.raises(ValueError, match="num_actions=0 must be at least 1"):
            PickTarget(0)


class TestEndless:
    @pytest.mark.parametrize("flag", ["truncation", "truncated"])
    def test_ends_by_its_time_limit_only(self, flag: Any) -> None:
        env = Endless(max_len=3, flag=flag)
        state, found = env.reset(KEY), []
        for _ in range(3):
            state = env.step(state, jnp.ones(1))
            found.append((float(state.reward), bool(state.done), bool(state.info[flag])))
        assert found == [(1.0, False, False), (1.0, False, False), (1.0, True, True)]

    def test_observes_its_age(self) -> None:
        env = Endless(max_len=4)
        state = env.reset(KEY)
        assert state.obs.tolist() == [0.0]
        assert env.step(state, jnp.zeros(1)).obs.tolist() == [0.25]


class TestProvider:
    def test_loads_every_name(self) -> None:
        provider = AnalyticEnvironments()
        for name in provider.names():
            assert type(provider.load(name)).__name__ == name

    def test_overrides_are_arguments(self) -> None:
        assert AnalyticEnvironments().load("FollowTarget", length=3).length == 3

    def test_max_len_is_a_time_limit(self) -> None:
        limited = AnalyticEnvironments().load("FollowTarget", max_len=5)
        assert isinstance(limited, EpisodeWrapper)
        assert limited.max_len == 5
        assert isinstance(AnalyticEnvironments().load("Endless", max_len=5), Endless)

    def test_presets_are_plain_data(self) -> None:
        provider = AnalyticEnvironments()
        assert provider.preset("RememberCue")["network"]["kind"] == "lstm"
        assert provider.preset("FollowTarget") == {}
