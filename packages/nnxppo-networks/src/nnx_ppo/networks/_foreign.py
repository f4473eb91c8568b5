"""Modules of flax, or of users, that know nothing of carries: how they are looked into and run."""

from typing import Any, TypeVar

import jax
from flax import nnx

Node = TypeVar("Node")


def find(module: nnx.Module, kind: type[Node] | tuple[type[Node], ...]) -> Node | None:
    """Return a part of a module, or the module itself, that is of the given class, if any."""
    return next((node for _, node in nnx.iter_graph(module) if isinstance(node, kind)), None)


def describe(value: Any) -> str:
    """Return what something is, for a message: a class, or an instance of one."""
    return f"the class {value.__name__}" if isinstance(value, type) else type(value).__name__


def copy_of(module: nnx.Module) -> Any:
    """Return a copy of a module, with the same arrays in variables of its own."""
    return nnx.merge(*nnx.split(module), copy=True)


def call_unchanged(argument: str, live: Any, *args: Any) -> Any:
    """Call a module; its forward pass may draw from random streams, but change no more.

    Args:
        argument: What the module was passed as, for the message.
        live: A copy of the module.
        *args: Passed on.

    Raises:
        TypeError: The forward pass wrote a variable.
    """
    before = _variables(live)
    output = live(*args)
    after = _variables(live)
    # A variable that was not written holds the very same array (or tracer).
    written = sorted(
        "/".join(map(str, path)) for path in before if before[path] is not after.get(path)
    ) or sorted("/".join(map(str, path)) for path in after.keys() - before.keys())
    if written:
        raise TypeError(
            f"{argument} writes {written} in its forward pass, which must be pure: the replay "
            "would not repeat the rollout. Use a layer without such variables, or write a "
            "StatefulModule that keeps them in its carry or changes them in update_statistics."
        )
    return output


def _variables(module: nnx.Module) -> dict[tuple[Any, ...], jax.Array]:
    """Return the value of each variable that is not random state, by path."""
    state = nnx.to_flat_state(nnx.state(module, nnx.Not(nnx.RngState)))
    return {path: variable.get_value() for path, variable in state}
