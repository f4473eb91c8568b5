"""Small modules that keep the contract, each in its own way: `REFERENCE_BLOCKS`."""

import abc
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Key

from nnx_ppo.core import StatefulModule, StatefulModuleOutput
from nnx_ppo.core.testing.blocks import Block, quick_normal, same_size


class Affine(StatefulModule):
    """`x @ kernel + bias`; no memory.

    Args:
        in_size: Number of input features.
        out_size: Number of output features.
        rngs: Draws the initial kernel.
    """

    def __init__(self, in_size: int, out_size: int, rngs: nnx.Rngs) -> None:
        self.kernel = nnx.Param(quick_normal(rngs.params(), (in_size, out_size)))
        self.bias = nnx.Param(jnp.zeros(out_size))

    def __call__(
        self, state: tuple[()], x: Float[Array, "*batch features"], rollout_extras: Any = None
    ) -> StatefulModuleOutput:
        """Map the last axis of `x`."""
        bias = jnp.expand_dims(self.bias[...], range(x.ndim - 1))
        return StatefulModuleOutput(state, x @ self.kernel[...] + bias, jnp.zeros(()), {})


class LeakyMemory(StatefulModule):
    """`level' = decay * level + x @ kernel`, which is carry and output; the loss is its square.

    Args:
        in_size: Number of input features.
        out_size: Number of levels.
        rngs: Draws the initial kernel.
        decay: What is left of a level after one step. It is trained.
    """

    def __init__(self, in_size: int, out_size: int, rngs: nnx.Rngs, decay: float = 0.5) -> None:
        self.kernel = nnx.Param(quick_normal(rngs.params(), (in_size, out_size)))
        self.decay = nnx.Param(jnp.full((), decay))

    def __call__(
        self,
        state: Float[Array, "batch levels"],
        x: Float[Array, "batch features"],
        rollout_extras: Any = None,
    ) -> StatefulModuleOutput:
        """Run one step."""
        level = self.decay[...] * state + x @ self.kernel[...]
        return StatefulModuleOutput(level, level, jnp.square(level).mean(-1), {"level": level})

    def initialize_state(self, batch_size: int) -> Float[Array, "batch levels"]:
        """Return levels of zero."""
        return jnp.zeros((batch_size, self.kernel.shape[1]))

    def reset_state(self, prev_state: Float[Array, "*batch levels"]) -> Array:
        """Return levels of zero."""
        return jnp.zeros_like(prev_state)


class EnvironmentNoise(StatefulModule):
    """Adds normal noise, from a key for each environment that travels in the carry.

    So the replay repeats the noise of the rollout. Keys go on when an episode ends.

    Args:
        rngs: Gives the first keys.
        std: Standard deviation of the noise.
    """

    def __init__(self, rngs: nnx.Rngs, std: float = 1.0) -> None:
        self.stream = rngs["noise"].fork()
        self.std = std

    def __call__(
        self,
        state: Key[Array, " batch"],
        x: Float[Array, "batch features"],
        rollout_extras: Any = None,
    ) -> StatefulModuleOutput:
        """Split each key in two: one to go on with, one for the noise of this step."""
        keys = jax.vmap(jax.random.split)(state)
        noise = jax.vmap(lambda key: jax.random.normal(key, x.shape[1:]))(keys[:, 1])
        return StatefulModuleOutput(keys[:, 0], x + self.std * noise, jnp.zeros(()), {})

    def initialize_state(self, batch_size: int) -> Key[Array, " batch"]:
        """Draw the keys that a batch of episodes starts with."""
        return jax.random.split(self.stream(), batch_size)


class _Container(StatefulModule):
    """Runs modules in a row; carries and extras are lists with one entry for each."""

    def __init__(self, *parts: StatefulModule) -> None:
        self.parts = nnx.List(parts)

    @abc.abstractmethod
    def _input(self, x: Any, before: Sequence[Any]) -> Any:
        """Return the input of the next part, from that of all and the outputs so far."""

    @abc.abstractmethod
    def _output(self, outputs: Sequence[Any]) -> Any:
        """Return the output of all, from those of the parts."""

    def __call__(self, state: Any, x: Any, rollout_extras: Any = None) -> StatefulModuleOutput:
        """Run all parts for one step."""
        stored = [None] * len(self.parts) if rollout_extras is None else rollout_extras
        outs: list[StatefulModuleOutput] = []
        for part, carry, extras in zip(self.parts, state, stored, strict=True):
            x_part = self._input(x, [out.output for out in outs])
            outs.append(part(carry, x_part, extras))
        return StatefulModuleOutput(
            [out.next_state for out in outs],
            self._output([out.output for out in outs]),
            sum((out.regularization_loss for out in outs), jnp.zeros(())),
            {i: out.metrics for i, out in enumerate(outs)},
            [out.rollout_extras for out in outs],
        )

    def initialize_state(self, batch_size: int) -> Any:
        """Return the carries of the parts."""
        return [part.initialize_state(batch_size) for part in self.parts]

    def reset_state(self, prev_state: Any) -> Any:
        """Return the reset carries of the parts."""
        return [part.reset_state(s) for part, s in zip(self.parts, prev_state, strict=True)]

    def update_statistics(self, rollout_extras: Any) -> None:
        """Give each part its extras."""
        for part, extras in zip(self.parts, rollout_extras, strict=True):
            part.update_statistics(extras)


class Chain(_Container):
    """Runs modules one after the other, each on the output of the one before."""

    def _input(self, x: Any, before: Sequence[Any]) -> Any:
        return before[-1] if before else x

    def _output(self, outputs: Sequence[Any]) -> Any:
        return outputs[-1]


class Branch(_Container):
    """Runs modules on the same input, and joins their outputs along the last axis."""

    def _input(self, x: Any, before: Sequence[Any]) -> Any:
        return x

    def _output(self, outputs: Sequence[Any]) -> Any:
        return jnp.concatenate(outputs, axis=-1)


def in_sequence(in_size: int, out_size: int, width: int) -> list[tuple[int, int]]:
    """Return the sizes of two modules, the second on the output of the first."""
    return [(in_size, width), (width, out_size)]


def side_by_side(in_size: int, out_size: int, width: int) -> list[tuple[int, int]]:
    """Return the sizes of two modules on the same input, whose outputs are joined."""
    del width
    return [(in_size, out_size - out_size // 2), (in_size, out_size // 2)]


def can_be_joined(in_size: int, out_size: int) -> bool:
    """Accept an output that is wide enough for two."""
    del in_size
    return out_size >= 2


REFERENCE_BLOCKS: tuple[Block, ...] = (
    Block("Affine", Affine),
    Block("LeakyMemory", LeakyMemory, options={"decay": (0.5, 0.9)}),
    Block(
        "EnvironmentNoise",
        lambda in_size, out_size, rngs, std: EnvironmentNoise(rngs, std),
        options={"std": (0.0, 1.0)},
        accepts=same_size,
    ),
    Block("Chain", lambda in_size, out_size, rngs, *parts: Chain(*parts), parts=in_sequence),
    Block(
        "Branch",
        lambda in_size, out_size, rngs, *parts: Branch(*parts),
        parts=side_by_side,
        accepts=can_be_joined,
    ),
)
"""A block for each of these modules: three without parts and two containers."""
