"""`AccumulateEvidence`, a task that cannot be solved without memory, and its provider."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from nnx_ppo.core import JaxDataclass


class EvidenceState(JaxDataclass):
    """State of `AccumulateEvidence`.

    Attributes:
        obs: `[cue, go]`.
        reward: Reward of the last step.
        done: 1.0 where the episode has ended, else 0.0.
        info: The episode's `"cues"`, and its `"age"` in steps.
        metrics: Scalars to log: none.
    """

    obs: jax.Array
    reward: jax.Array
    done: jax.Array
    info: dict[str, Any]
    metrics: dict[str, jax.Array]


class AccumulateEvidence:
    """See cues of −1 or 1, one a step; later, act on the side that most of them were on.

    The observation is `[cue, go]`. After the `num_cues` cues come zeros, and `go` is 1 at the
    last step, `delay` steps after the last cue: its reward is side · action, where `side` is the
    sign of the cues' sum. Cues are independent, both sides equally likely.

    With actions in [−1, 1] the best return is 1. Without memory it is 0 on average, whatever the
    policy. Who remembers one cue only is right with it more often than wrong, by the share of
    sequences in which the other `m = num_cues − 1` cues are balanced: C(m, m / 2) / 2^m, which is
    6 / 16 = 0.375 for five cues.

    Args:
        num_cues: Number of cues, odd, so that there is a majority.
        delay: Steps from the last cue to the go signal, at least 1.

    Raises:
        ValueError: An argument is out of range.

    Example:
        >>> env = AccumulateEvidence(num_cues=3, delay=2)
        >>> state = env.reset(jax.random.key(0))
        >>> for _ in range(4):  # two more cues, a pause, the go signal
        ...     state = env.step(state, jnp.zeros(1))
        >>> state.obs.tolist(), float(state.done)
        ([0.0, 1.0], 0.0)
    """

    action_size = 1

    def __init__(self, num_cues: int = 5, delay: int = 3) -> None:
        if num_cues < 1 or num_cues % 2 == 0:
            raise ValueError(f"num_cues={num_cues} must be odd: there would be ties.")
        if delay < 1:
            raise ValueError(f"delay={delay} must be at least 1: the go signal follows the cues.")
        self.num_cues = num_cues
        self.delay = delay

    def reset(self, rng: jax.Array) -> EvidenceState:
        """Draw the cues, show the first."""
        cues = jax.random.rademacher(rng, (self.num_cues,), jnp.float32)
        info = {"cues": cues, "age": jnp.zeros((), jnp.int32)}
        zero = jnp.zeros(())
        return EvidenceState(self._observe(cues, info["age"]), zero, zero, info, {})

    def step(self, state: EvidenceState, action: jax.Array) -> EvidenceState:
        """Reward the action if it was due, show the next cue or the go signal."""
        cues, age = state.info["cues"], state.info["age"]
        due = age == self._due
        reward = jnp.where(due, jnp.sign(cues.sum()) * action.sum(), 0.0)
        return state.replace(
            obs=self._observe(cues, age + 1),
            reward=reward,
            done=due.astype(jnp.float32),
            info={**state.info, "age": age + 1},
        )

    @property
    def _due(self) -> int:
        return self.num_cues - 1 + self.delay

    def _observe(self, cues: jax.Array, age: jax.Array) -> jax.Array:
        # Past the last cue the index runs out of the array: zeros.
        cue = jnp.take(cues, age, mode="fill", fill_value=0.0)
        return jnp.stack([cue, (age == self._due).astype(jnp.float32)])


class EvidenceEnvironments:
    """What the entry point `nnx_ppo.environments` names: the package's environments."""

    def names(self) -> Sequence[str]:
        """Return the names that `load` accepts."""
        return ["AccumulateEvidence"]

    def load(self, name: str, **overrides: Any) -> AccumulateEvidence:
        """Return an environment; it ends by itself, so it gets no time limit.

        Args:
            name: One of `names()`.
            **overrides: Arguments of the environment's class.
        """
        del name  # there is one
        return AccumulateEvidence(**overrides)

    def preset(self, name: str) -> Mapping[str, Any]:
        """Return settings of `nnxppo train` that are known to train the environment."""
        del name
        ppo = {"total_steps": 300_000, "learning_rate": 3e-3, "rollout_length": 24}
        return {"network": {"kind": "lstm"}, "train": {"ppo": ppo}}
