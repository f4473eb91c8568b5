"""Modules whose outputs are known on paper, and what several tests ask."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from nnx_ppo.core import StatefulModule, StatefulModuleOutput


class Leak(StatefulModule):
    """level' = gain · level + obs; the output is the new level, the loss its square."""

    def __init__(self, gain: Any = 0.5) -> None:
        self.gain = nnx.Param(jnp.asarray(gain))

    def __call__(
        self, module_state: Any, obs: Any, rollout_extras: Any = None
    ) -> StatefulModuleOutput:
        level = self.gain[...] * module_state + obs
        return StatefulModuleOutput(level, level, jnp.square(level).sum(-1), {})

    def initialize_state(self, batch_size: int) -> Any:
        return jnp.zeros((batch_size, 1))

    def reset_state(self, prev_state: Any) -> Any:
        return jnp.zeros_like(prev_state)


class Scale(StatefulModule):
    """output = gain · obs, with a constant loss of 1. Notes the shape of every input."""

    def __init__(self, gain: float = 2.0) -> None:
        self.gain = nnx.Param(jnp.asarray(gain))
        self.seen = Shapes()

    def __call__(
        self, module_state: Any, obs: Any, rollout_extras: Any = None
    ) -> StatefulModuleOutput:
        self.seen.note(obs)
        offset = 0.0 if rollout_extras is None else rollout_extras
        return StatefulModuleOutput((), self.gain[...] * obs + offset, jnp.ones(()), {})


class Noise(StatefulModule):
    """output = obs + normal noise from a stream of its own."""

    def __init__(self, seed: int = 0) -> None:
        self.noise = nnx.Rngs(noise=seed)["noise"].fork()
        self.seen = Shapes()

    def __call__(
        self, module_state: Any, obs: Any, rollout_extras: Any = None
    ) -> StatefulModuleOutput:
        self.seen.note(obs)
        output = obs + jax.random.normal(self.noise(), obs.shape)
        return StatefulModuleOutput((), output, jnp.zeros(obs.shape[0]), {})


class Shapes:
    """A list of shapes that all copies of a module share, and that is no part of its tree."""

    def __init__(self) -> None:
        self.shapes: list[tuple[int, ...]] = []

    def note(self, array: Any) -> None:
        self.shapes.append(array.shape)

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return id(self)


def leaf_types(tree: Any) -> list[tuple[Any, ...]]:
    """Shape, dtype and weak type of every leaf of an abstract tree."""
    return [(leaf.shape, leaf.dtype, leaf.weak_type) for leaf in jax.tree.leaves(tree)]
