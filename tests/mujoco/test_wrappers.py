"""The action repeat, on environments whose rewards are known."""

import jax
import jax.numpy as jnp
import pytest

from nnx_ppo.core import EpisodeWrapper
from nnx_ppo.core.testing import Endless, FollowTarget
from nnx_ppo.mujoco import ActionRepeatWrapper


def test_rewards_of_a_repeat_are_summed() -> None:
    env = ActionRepeatWrapper(Endless(max_len=10), 3)
    state = env.step(env.reset(jax.random.key(0)), jnp.zeros(1))
    assert state.reward == 3.0  # 1 a step
    assert state.info["age"] == 3
    assert state.done == 0.0


def test_an_end_within_a_repeat_counts_and_ends_the_rewards() -> None:
    env = ActionRepeatWrapper(Endless(max_len=2), 3)
    state = env.step(env.reset(jax.random.key(0)), jnp.zeros(1))
    assert state.reward == 2.0  # steps 1 and 2; the episode is over before step 3
    assert state.done == 1.0


def test_end_of_the_last_step_only_would_be_lost_without_memory() -> None:
    class DiesOnce(FollowTarget):
        """Says that it has ended on its second step only."""

        def step(self, state, action):
            state = super().step(state, action)
            return state.replace(done=(state.info["age"] == 2).astype(jnp.float32))

    env = ActionRepeatWrapper(DiesOnce(), 4)
    assert env.step(env.reset(jax.random.key(0)), jnp.zeros(1)).done == 1.0


class Scripted(FollowTarget):
    """Ends and flags as told, by the age of the episode."""

    def __init__(self, ends, flags):
        super().__init__()
        self.ends, self.flags = jnp.asarray(ends), jnp.asarray(flags)

    def reset(self, rng):
        state = super().reset(rng)
        return state.replace(info={**state.info, "truncation": jnp.zeros(())})

    def step(self, state, action):
        state = super().step(state, action)
        age = state.info["age"] - 1
        info = {**state.info, "truncation": self.flags[age].astype(jnp.float32)}
        return state.replace(done=self.ends[age].astype(jnp.float32), info=info)


@pytest.mark.parametrize(
    ("ends", "flags", "done", "truncation"),
    [
        ([0, 1, 0], [0, 1, 0], 1.0, 1.0),  # a time limit that is not repeated stays one
        ([0, 0, 0], [0, 1, 0], 0.0, 1.0),  # so does a flag without done
        ([1, 0, 0], [0, 1, 0], 1.0, 0.0),  # a real end is no time limit afterwards
        ([0, 0, 0], [0, 0, 0], 0.0, 0.0),
    ],
)
def test_the_first_end_of_a_repeat_decides_what_it_is(ends, flags, done, truncation) -> None:
    env = ActionRepeatWrapper(Scripted(ends, flags), 3)
    state = env.step(env.reset(jax.random.key(0)), jnp.zeros(1))
    assert (state.done, state.info["truncation"]) == (done, truncation)


def test_time_limits_count_actions() -> None:
    env = EpisodeWrapper(ActionRepeatWrapper(Endless(max_len=100), 3), 2)
    state = env.reset(jax.random.key(0))
    for done in (False, True):
        state = env.step(state, jnp.zeros(1))
        assert bool(state.done) is done
    assert state.info["age"] == 6
    assert state.info["truncated"]


def test_repeat_must_be_positive() -> None:
    with pytest.raises(ValueError, match="action_repeat=0 must be at least 1"):
        ActionRepeatWrapper(Endless(), 0)


def test_attributes_are_forwarded() -> None:
    assert ActionRepeatWrapper(FollowTarget(), 2).action_size == 1
