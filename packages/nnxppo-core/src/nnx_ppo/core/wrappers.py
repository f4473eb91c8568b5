"""Environment wrappers: time limits and reward scale."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

TIME_LIMIT_FLAGS = ("truncation", "truncated")
"""Keys of `info` that flag the end of an episode by time limit; either counts."""


def time_limit_flag(state: Any) -> Array:
    """Whether a state's `info` flags the end of its episode by time limit.

    Args:
        state: An `EnvState`, batched or not.

    Returns:
        A boolean array of the shape of `state.done`.
    """
    flag = jnp.zeros(jnp.shape(state.done), bool)
    for key in TIME_LIMIT_FLAGS:
        if key in state.info:
            flag = flag | jnp.asarray(state.info[key]).astype(bool)
    return flag


class Wrapper:
    """Base of environment wrappers: forwards whatever it does not define to `env`.

    Args:
        env: The environment to wrap.
    """

    def __init__(self, env: Any) -> None:
        self.env = env

    def reset(self, rng: Any) -> Any:
        """Reset the wrapped environment."""
        return self.env.reset(rng)

    def step(self, state: Any, action: Any) -> Any:
        """Step the wrapped environment."""
        return self.env.step(state, action)

    def __getattr__(self, name: str) -> Any:
        # Copying and unpickling ask for attributes before `env` is there.
        if name == "env" or (name.startswith("__") and name.endswith("__")):
            raise AttributeError(name)
        return getattr(self.env, name)


class EpisodeWrapper(Wrapper):
    """Ends every episode after `max_len` steps, as a time limit.

    On the last step `done` is set, and `info["truncated"]` unless the environment ended by
    itself on that very step: a real end wins, and is no time limit. A flag that the wrapped
    environment sets is kept. The age of the episode is kept in `info["step_counter"]`.

    Args:
        env: The environment to wrap.
        max_len: Length of an episode in steps, at least 1.

    Raises:
        ValueError: `max_len` is below 1. At reset, also if `info` holds a `"step_counter"`
            already, as it does in an environment that has been wrapped before.

    Example:
        >>> from nnx_ppo.core.testing import Endless
        >>> env = EpisodeWrapper(Endless(max_len=1000), max_len=1)
        >>> state = env.step(env.reset(jax.random.key(0)), jnp.zeros(1))
        >>> bool(state.done), bool(state.info["truncated"])
        (True, True)
    """

    def __init__(self, env: Any, max_len: int) -> None:
        super().__init__(env)
        if max_len < 1:
            raise ValueError(f"max_len={max_len} must be at least 1 step.")
        self.max_len = max_len

    def reset(self, rng: Any) -> Any:
        """Reset the wrapped environment and the age of the episode."""
        state = self.env.reset(rng)
        if "step_counter" in state.info:
            raise ValueError(
                "info['step_counter'] is taken: the environment "
                f"{type(self.env).__name__} counts steps under that name. "
                "Is it wrapped in an EpisodeWrapper already? Wrap it once, with the shorter limit."
            )
        info = {
            "truncated": jnp.zeros(jnp.shape(state.done), bool),
            **state.info,
            "step_counter": jnp.zeros(jnp.shape(state.done), jnp.int32),
        }
        return _replace(state, info=info)

    def step(self, state: Any, action: Any) -> Any:
        """Step the wrapped environment; end the episode at the time limit."""
        age = state.info["step_counter"] + 1
        no_flag = jnp.zeros_like(state.info["truncated"])
        # Cleared first, so that the flag found afterwards is the environment's own. New dicts,
        # since Playground's environments write into those they are given.
        info = {**state.info, "truncated": no_flag}
        state = self.env.step(_replace(state, info=info, metrics=dict(state.metrics)), action)
        flag = time_limit_flag(state)
        time_up = (age >= self.max_len) & ~jnp.asarray(state.done).astype(bool) & ~flag
        info = {
            **state.info,
            "truncated": (flag | time_up).astype(no_flag.dtype),
            "step_counter": age,
        }
        done = jnp.where(time_up, jnp.ones_like(state.done), state.done)
        return _replace(state, info=info, done=done)

    def stagger(self, state: Any, rng: Any) -> Any:
        """Give a batch of first states random ages, uniform below `max_len`."""
        age = state.info["step_counter"]
        ages = jax.random.randint(rng, age.shape, 0, self.max_len, age.dtype)
        return _replace(state, info={**state.info, "step_counter": ages})


class RewardScalingWrapper(Wrapper):
    """Multiplies every reward by a factor; trees of rewards too.

    Args:
        env: The environment to wrap.
        reward_scale: The factor.
    """

    def __init__(self, env: Any, reward_scale: float) -> None:
        super().__init__(env)
        self.reward_scale = reward_scale

    def reset(self, rng: Any) -> Any:
        """Reset the wrapped environment; its first reward is scaled like any other."""
        return self._scaled(self.env.reset(rng))

    def step(self, state: Any, action: Any) -> Any:
        """Step the wrapped environment and scale its reward."""
        return self._scaled(self.env.step(state, action))

    def _scaled(self, state: Any) -> Any:
        return _replace(
            state, reward=jax.tree.map(lambda leaf: leaf * self.reward_scale, state.reward)
        )


def _replace(state: Any, **changes: Any) -> Any:
    """Copy a state with some fields changed."""
    return dataclasses.replace(state, **changes)
