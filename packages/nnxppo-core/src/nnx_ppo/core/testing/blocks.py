"""Building blocks of random networks, and the plan of a network that is made of them.

Nothing here draws at random: `nnx_ppo.core.testing.strategies` does, which needs hypothesis.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from nnx_ppo.core import StatefulModule

Parts: TypeAlias = Callable[[int, int, int], Sequence[tuple[int, int]]]
"""From input size, output size and a hidden width to the sizes of each part of a container."""


def any_sizes(in_size: int, out_size: int) -> bool:
    """Accept all sizes."""
    del in_size, out_size
    return True


def same_size(in_size: int, out_size: int) -> bool:
    """Accept an output that is as wide as the input."""
    return in_size == out_size


@dataclasses.dataclass(frozen=True, eq=False)
class Block:
    """A kind of module that random networks are made of: `(batch, in_size)` to `(batch, out_size)`.

    Attributes:
        name: How networks show it when they are printed.
        make: Makes one, by `make(in_size, out_size, rngs, *parts, **options)`.
        options: What to choose from for each keyword of `make`, the simplest choice first:
            hypothesis prefers it in the examples that it reports.
        parts: For a container, the input and output size of each module inside, from the
            container's own and a hidden width; None for other blocks.
        accepts: Whether there is such a module for an input and an output size.

    Example:
        >>> from nnx_ppo.core.testing.modules import LeakyMemory
        >>> block = Block("LeakyMemory", LeakyMemory, options={"decay": (0.5, 0.9)})
        >>> block.make(3, 2, nnx.Rngs(0), decay=0.9).initialize_state(4).shape
        (4, 2)
    """

    name: str
    make: Callable[..., StatefulModule] = dataclasses.field(repr=False)
    options: Mapping[str, Sequence[Any]] = dataclasses.field(default_factory=dict, repr=False)
    parts: Parts | None = dataclasses.field(default=None, repr=False)
    accepts: Callable[[int, int], bool] = dataclasses.field(
        default_factory=lambda: any_sizes, repr=False
    )


@dataclasses.dataclass(frozen=True, repr=False)
class NetworkPlan:
    """A network in words: it prints as the calls that would make it, and makes it.

    Attributes:
        block: The outermost module.
        in_size: Number of input features.
        out_size: Number of output features.
        options: What was chosen for the keywords of `block.make`.
        parts: What is inside of it.

    Example:
        >>> from nnx_ppo.core.testing.modules import REFERENCE_BLOCKS
        >>> affine, leaky, _, chain, _ = REFERENCE_BLOCKS
        >>> inside = (NetworkPlan(affine, 3, 4), NetworkPlan(leaky, 4, 2, {"decay": 0.9}))
        >>> plan = NetworkPlan(chain, 3, 2, parts=inside)
        >>> plan
        Chain(3, 2, Affine(3, 4), LeakyMemory(4, 2, decay=0.9))
        >>> network = plan.build(seed=0)
        >>> network(network.initialize_state(5), jnp.ones((5, 3))).output.shape
        (5, 2)
    """

    block: Block
    in_size: int
    out_size: int
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    parts: tuple["NetworkPlan", ...] = ()

    def build(self, seed: int = 0) -> StatefulModule:
        """Make the network, anew in each call.

        Args:
            seed: Of its parameters and random streams.
        """
        return self._make(nnx.Rngs(seed))

    def _make(self, rngs: nnx.Rngs) -> StatefulModule:
        parts = [part._make(rngs) for part in self.parts]
        return self.block.make(self.in_size, self.out_size, rngs, *parts, **self.options)

    @property
    def sample_input(self) -> Float[Array, " in_size"]:
        """An input for one environment, as `check_module` wants it."""
        return jnp.zeros(self.in_size)

    @property
    def depth(self) -> int:
        """How many modules are nested in each other; 1 for one that is no container."""
        return 1 + max((part.depth for part in self.parts), default=0)

    def names(self) -> Iterator[str]:
        """Yield the names of all blocks in it, from the outside in."""
        yield self.block.name
        for part in self.parts:
            yield from part.names()

    def __repr__(self) -> str:
        words = [str(self.in_size), str(self.out_size), *map(repr, self.parts)]
        words += [f"{name}={_show(value)}" for name, value in self.options.items()]
        return f"{self.block.name}({', '.join(words)})"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        # hypothesis and IPython would print a dataclass field by field.
        del cycle
        printer.text(repr(self))


def quick_normal(
    key: Array, shape: Sequence[int], dtype: Any = jnp.float32, out_sharding: Any = None
) -> Array:
    """Initialize parameters with normal numbers of variance 1 / fan-in, by NumPy.

    Takes the place of JAX's initializers, which are compiled anew for each shape: that would take
    longer than many a test.

    Args:
        key: A concrete random key.
        shape: The fan-in is its first entry.
        dtype: Of the result.
        out_sharding: Ignored.
    """
    del out_sharding
    rng = np.random.default_rng(np.asarray(jax.random.key_data(key)).tolist())
    return jnp.asarray(rng.normal(size=tuple(shape)) / np.sqrt(max(1, *shape[:1])), dtype)


def _show(value: Any) -> str:
    return getattr(value, "__name__", None) or repr(value)
