"""Nodes and edges of a graph."""

from collections.abc import Callable

from flax import nnx
from jaxtyping import Array

from nnx_ppo.core import StatefulModule
from nnx_ppo.networks._checks import check_module, check_size


class Population(nnx.Module):
    """A group of units of a `PopulationGraph`, which makes it.

    Args:
        name: Its name.
        size: Number of units.
        activation: Transfer function, applied to the summed input; None is the identity.
        input_from: Key of the observation that is added to its input, or None.
        output_to: Key of the graph's output that shows its activation, or None.

    Raises:
        TypeError: `name` or a key is not a string, `size` is not an integer, or `activation` is
            not a function.
        ValueError: `name` is empty, or `size` is below 1.
    """

    def __init__(
        self,
        name: str,
        size: int,
        activation: Callable[[Array], Array] | None,
        input_from: str | None,
        output_to: str | None,
    ) -> None:
        if not isinstance(name, str):
            raise TypeError(f"A population's name must be a string, got {name!r}.")
        if not name:
            raise ValueError("A population's name must not be empty.")
        where = f"Population {name!r}:"
        for argument, key in (("input_from", input_from), ("output_to", output_to)):
            if not isinstance(key, str | None):
                raise TypeError(f"{where} {argument} must be a string, got {key!r}.")
        if activation is not None and not callable(activation):
            raise TypeError(
                f"{where} activation must be a function or None, got {activation!r}; pass the "
                "function itself, e.g. jax.nn.relu."
            )
        self.name = name
        self.size = check_size(size, f"{where} size")
        self.activation = activation
        self.input_from = input_from
        self.output_to = output_to

    def activate(self, x: Array) -> Array:
        """Return the activation of the units from their summed input."""
        return x if self.activation is None else self.activation(x)


class Connection(nnx.Module):
    """A directed connection of a `PopulationGraph`, which makes it.

    Args:
        src: Name of the population that is read.
        dst: Name of the population that receives.
        transform: Module from `(batch, src.size)` to `(batch, dst.size)`.
        delay: How many steps ago the source is read.

    Raises:
        TypeError: `transform` is not a `StatefulModule`, or `delay` is not an integer.
        ValueError: `delay` is negative.
    """

    def __init__(self, src: str, dst: str, transform: StatefulModule, delay: int) -> None:
        self.src = src
        self.dst = dst
        self.transform = check_module(transform, f"Connection {src} -> {dst}: transform")
        self.delay = check_size(delay, f"Connection {src} -> {dst}: delay", least=0)
