"""Environment wrappers that Playground leaves to the training library."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from nnx_ppo.core import Wrapper, time_limit_flag
from nnx_ppo.core.wrappers import TIME_LIMIT_FLAGS


class ActionRepeatWrapper(Wrapper):
    """Applies every action for several steps of the wrapped environment and sums the rewards.

    Playground's environments state an `action_repeat` but do not apply it: in Playground's own
    training Brax does, and this wrapper takes its place. The first end in a repeat counts, real or
    by time limit (Brax keeps only that of the last step), and no reward is counted after it.
    Metrics are those of the last step.

    Args:
        env: The environment to wrap.
        action_repeat: How many steps each action lasts, at least 1.
    """

    def __init__(self, env: Any, action_repeat: int) -> None:
        super().__init__(env)
        if action_repeat < 1:
            raise ValueError(f"action_repeat={action_repeat} must be at least 1 step.")
        self.action_repeat = action_repeat

    @property
    def dt(self) -> float:
        """Seconds that an action lasts."""
        return self.env.dt * self.action_repeat

    def step(self, state: Any, action: Any) -> Any:
        """Step the wrapped environment `action_repeat` times with one action."""

        def once(carry: tuple[Any, ...], _: None) -> tuple[tuple[Any, ...], None]:
            state, total, done, flag = carry
            state = self.env.step(state, action)
            over = (done > 0) | flag
            total = total + jnp.where(over, jnp.zeros_like(state.reward), state.reward)
            flag = jnp.where(over, flag, time_limit_flag(state))
            return (state, total, jnp.where(over, done, state.done), flag), None

        start = (
            state,
            jnp.zeros_like(state.reward),
            jnp.zeros_like(state.done),
            jnp.zeros(jnp.shape(state.done), bool),
        )
        (state, total, done, flag), _ = jax.lax.scan(once, start, length=self.action_repeat)
        flags = {
            key: flag.astype(jnp.asarray(state.info[key]).dtype)
            for key in TIME_LIMIT_FLAGS
            if key in state.info
        }
        info = {**state.info, **flags}
        return dataclasses.replace(state, reward=total, done=done, info=info)
