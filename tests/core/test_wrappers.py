"""Environment wrappers: time limits and reward scale."""

import copy
import pickle
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nnx_ppo.core import EpisodeWrapper, RewardScalingWrapper, Wrapper, time_limit_flag
from nnx_ppo.core.testing import AnalyticState, Endless, FollowTarget, TwoHands

from .helpers import leaf_types

KEY = jax.random.key(0)
ACTION = jnp.zeros(1)


class Scripted:
    """Ends and flags by plan: `done` at step `dies`, and the flag `flag` at step `flags`."""

    action_size = 1

    def __init__(self, dies: int = 0, flags: int = 0, flag: str = "truncated") -> None:
        self.dies, self.flags, self.flag = dies, flags, flag

    def reset(self, rng: Any) -> AnalyticState:
        info = {"age": jnp.zeros((), int)}
        if self.flags:
            info[self.flag] = jnp.zeros(())
        return AnalyticState(jnp.zeros(1), jnp.zeros(()), jnp.zeros(()), info, {})

    def step(self, state: AnalyticState, action: Any) -> AnalyticState:
        age = state.info["age"] + 1
        info = {**state.info, "age": age}
        if self.flags:
            info[self.flag] = (age == self.flags).astype(float)
        return state.replace(done=(age == self.dies).astype(float), info=info)


def ends(env: Any, steps: int) -> list[tuple[bool, bool]]:
    """Step an environment; return `done` and `info["truncated"]` after each step."""
    state, found = env.reset(KEY), []
    for _ in range(steps):
        state = env.step(state, ACTION)
        found.append((bool(state.done), bool(state.info["truncated"])))
    return found


class TestTimeLimit:
    def test_ends_the_episode_and_flags_it(self) -> None:
        assert ends(EpisodeWrapper(Scripted(), 3), 3) == [
            (False, False),
            (False, False),
            (True, True),
        ]

    def test_a_real_end_before_the_limit_is_no_time_limit(self) -> None:
        assert ends(EpisodeWrapper(Scripted(dies=2), 3), 2)[-1] == (True, False)

    def test_a_real_end_on_the_last_step_wins(self) -> None:
        assert ends(EpisodeWrapper(Scripted(dies=3), 3), 3)[-1] == (True, False)

    @pytest.mark.parametrize("flag", ["truncation", "truncated"])
    def test_flags_of_the_environment_are_kept(self, flag: str) -> None:
        env = EpisodeWrapper(Scripted(dies=2, flags=2, flag=flag), 5)
        assert ends(env, 2) == [(False, False), (True, True)]

    @pytest.mark.parametrize("flag", ["truncation", "truncated"])
    def test_the_environments_flag_on_the_last_step_is_kept(self, flag: str) -> None:
        env = EpisodeWrapper(Scripted(dies=2, flags=2, flag=flag), 2)
        assert ends(env, 2)[-1] == (True, True)

    def test_a_flag_lasts_for_one_step(self) -> None:
        assert ends(EpisodeWrapper(Scripted(flags=1), 9), 2) == [(False, True), (False, False)]

    @pytest.mark.parametrize("flag", ["truncation", "truncated"])
    def test_both_spellings_keep_their_dtype(self, flag: str) -> None:
        env = EpisodeWrapper(Scripted(flags=1, flag=flag), 2)
        first = env.reset(KEY)
        second = env.step(first, ACTION)
        assert first.info[flag].dtype == second.info[flag].dtype == jnp.float32
        assert first.info["truncated"].dtype == second.info["truncated"].dtype

    def test_age_is_counted(self) -> None:
        env = EpisodeWrapper(Scripted(), 3)
        state = env.reset(KEY)
        assert state.info["step_counter"] == 0
        for age in (1, 2, 3):
            state = env.step(state, ACTION)
            assert state.info["step_counter"] == age

    def test_states_keep_their_types(self) -> None:
        env = EpisodeWrapper(FollowTarget(), 3)
        first = jax.eval_shape(env.reset, KEY)
        second = jax.eval_shape(env.step, first, ACTION)
        assert jax.tree.structure(first) == jax.tree.structure(second)
        assert leaf_types(first) == leaf_types(second)

    def test_works_in_vmap_and_jit(self) -> None:
        env = EpisodeWrapper(FollowTarget(length=9), 2)
        state = jax.jit(jax.vmap(env.reset))(jax.random.split(KEY, 3))
        for expected in (False, True):
            state = jax.jit(jax.vmap(env.step))(state, jnp.zeros((3, 1)))
            assert state.info["truncated"].tolist() == [expected] * 3

    def test_dicts_of_the_caller_stay_as_they_are(self) -> None:
        class Scribbles(Scripted):
            """Writes into the dicts it is given, as Playground's environments do."""

            def step(self, state: AnalyticState, action: Any) -> AnalyticState:
                state.info["age"] += 1
                state.metrics["speed"] = jnp.ones(())
                return state

        env = EpisodeWrapper(Scribbles(), 3)
        first = env.reset(KEY).replace(metrics={"speed": jnp.zeros(())})
        second = env.step(first, ACTION)
        assert (first.info["age"], first.info["step_counter"], first.metrics["speed"]) == (0, 0, 0)
        assert (second.info["age"], second.info["step_counter"]) == (1, 1)
        assert second.metrics["speed"] == 1

    def test_wrapping_twice_is_refused(self) -> None:
        with pytest.raises(ValueError, match="'step_counter'.*EpisodeWrapper already.*Wrap it on"):
            EpisodeWrapper(EpisodeWrapper(Scripted(), 3), 5).reset(KEY)

    @pytest.mark.parametrize("max_len", [0, -3])
    def test_limit_must_be_positive(self, max_len: int) -> None:
        with pytest.raises(ValueError, match=f"max_len={max_len} must be at least 1"):
            EpisodeWrapper(Scripted(), max_len)


class TestStagger:
    def test_ages_are_uniform_below_the_limit(self) -> None:
        env = EpisodeWrapper(Scripted(), 4)
        state = jax.vmap(env.reset)(jax.random.split(KEY, 8000))
        state = env.stagger(state, jax.random.key(1))
        ages, counts = np.unique(state.info["step_counter"], return_counts=True)
        assert ages.tolist() == [0, 1, 2, 3]
        # 2000 of each are expected, with a deviation of √(8000 · ¼ · ¾) = 39.
        assert abs(counts - 2000).max() < 4 * 39

    def test_an_old_episode_ends_sooner(self) -> None:
        env = EpisodeWrapper(Scripted(), 4)
        state = env.reset(KEY)
        state = state.replace(info={**state.info, "step_counter": jnp.asarray(2)})
        state = env.step(env.step(state, ACTION), ACTION)
        assert state.info["truncated"]

    def test_nothing_else_changes(self) -> None:
        env = EpisodeWrapper(FollowTarget(), 4)
        first = jax.vmap(env.reset)(jax.random.split(KEY, 3))
        staggered = env.stagger(first, jax.random.key(1))
        assert jax.tree.structure(first) == jax.tree.structure(staggered)
        assert staggered.info["step_counter"].dtype == first.info["step_counter"].dtype
        assert (staggered.obs == first.obs).all()
        assert first.info["step_counter"].tolist() == [0, 0, 0]


class TestFlags:
    def state(self, **info: Any) -> AnalyticState:
        return AnalyticState(jnp.zeros(1), jnp.zeros(2), jnp.zeros(2), info, {})

    def test_none(self) -> None:
        assert time_limit_flag(self.state()).tolist() == [False, False]

    def test_either_counts(self) -> None:
        one, other = jnp.asarray([1.0, 0.0]), jnp.asarray([False, True])
        assert time_limit_flag(self.state(truncation=one)).tolist() == [True, False]
        assert time_limit_flag(self.state(truncated=other)).tolist() == [False, True]
        both = self.state(truncation=one, truncated=other)
        assert time_limit_flag(both).tolist() == [True, True]


class TestRewardScale:
    def test_scalar(self) -> None:
        env = RewardScalingWrapper(Endless(), 0.1)
        state = env.reset(KEY)
        assert state.reward == 0.0
        np.testing.assert_allclose(env.step(state, ACTION).reward, 0.1)  # 1 a step

    def test_tree(self) -> None:
        env = RewardScalingWrapper(TwoHands(), 10.0)
        state = env.reset(KEY)
        action = {hand: state.obs[hand]["target"] for hand in ("left", "right")}
        # Each hand is on its target: 10 · (1 − 0).
        assert env.step(state, action).reward == {"left": 10.0, "right": 10.0}

    def test_types_are_kept(self) -> None:
        env = RewardScalingWrapper(Endless(), 2.0)
        state = env.reset(KEY)
        for reward in (state.reward, env.step(state, ACTION).reward):
            assert (reward.dtype, reward.weak_type) == (jnp.float32, False)


class TestForwarding:
    def test_attributes_come_from_inside(self) -> None:
        env = RewardScalingWrapper(EpisodeWrapper(Scripted(dies=7), 3), 2.0)
        assert env.action_size == 1
        assert env.dies == 7
        assert env.max_len == 3
        assert env.reward_scale == 2.0

    def test_unknown_attributes_raise(self) -> None:
        with pytest.raises(AttributeError, match="no_such_thing"):
            _ = Wrapper(Scripted()).no_such_thing

    def test_plain_wrapper_changes_nothing(self) -> None:
        env = Wrapper(Endless())
        state = env.step(env.reset(KEY), ACTION)
        assert (state.reward, state.info["age"]) == (1.0, 1)

    @pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy])
    def test_copies(self, copied: Any) -> None:
        env = copied(EpisodeWrapper(Scripted(dies=7), 3))
        assert (env.dies, env.max_len) == (7, 3)
        assert ends(env, 3)[-1] == (True, True)

    def test_pickles(self) -> None:
        env = pickle.loads(pickle.dumps(EpisodeWrapper(FollowTarget(length=7), 3)))
        assert (env.length, env.max_len) == (7, 3)
        assert ends(env, 3)[-1] == (True, True)
