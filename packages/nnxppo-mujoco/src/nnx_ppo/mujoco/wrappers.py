"""Environment wrappers that Playground leaves to the training library."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from nnx_ppo.core import Wrapper


class ActionRepeatWrapper(Wrapper):
    """Applies every action for several steps of the wrapped environment and sums the rewards.

    Playground's environments state an `action_repeat` but do not apply it: in Playground's own
    training Brax does, and this wrapper takes its place. An end in the middle of a repeat counts
    (Brax keeps only that of the last step), and no reward is counted after it.

    Args:
        env: The environment to wrap.
        action_repeat: How many steps each action lasts, at least 1.
    """

    def __init__(self, env: Any, action_repeat: int) -> None:
        super().__init__(env)
        if action_repeat < 1:
            raise ValueError(f"action_repeat={action_repeat} must be at least 1 step.")
        self.action_repeat = action_repeat

    def step(self, state: Any, action: Any) -> Any:
        """Step the wrapped environment `action_repeat` times with one action."""

        def once(carry: tuple[Any, Any, Any], _: None) -> tuple[tuple[Any, Any, Any], None]:
            state, total, ended = carry
            state = self.env.step(state, action)
            total = total + jnp.where(ended > 0, jnp.zeros_like(state.reward), state.reward)
            return (state, total, jnp.maximum(ended, state.done)), None

        start = (state, jnp.zeros_like(state.reward), jnp.zeros_like(state.done))
        (state, total, ended), _ = jax.lax.scan(once, start, length=self.action_repeat)
        return dataclasses.replace(state, reward=total, done=ended)
