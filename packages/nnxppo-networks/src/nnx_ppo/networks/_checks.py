"""Checks of what users hand to constructors; each message says how to repair the call."""

import math
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array

from nnx_ppo.core import StatefulModule


def check_module(child: Any, argument: str) -> StatefulModule:
    """Return `child` if it can be a child of a container.

    Args:
        child: What the user passed.
        argument: Where they passed it, e.g. `"Sequential: layers[1]"`.

    Raises:
        TypeError: It is not a `StatefulModule`.
    """
    if isinstance(child, StatefulModule):
        return child
    found = f"the class {child.__name__}" if isinstance(child, type) else type(child).__name__
    if isinstance(child, type) and issubclass(child, StatefulModule):
        cure = "make an instance of it."
    elif isinstance(child, nnx.Linear):
        cure = "use Dense(in_features, out_features, rngs) instead."
    elif isinstance(child, nnx.RNNCellBase):
        cure = "use Recurrent(cell)."
    elif isinstance(child, nnx.Module):
        cure = "use Lift(module) if it has no memory; otherwise write a StatefulModule."
    elif callable(child):
        cure = "pass an activation function as Dense(..., activation=...)."
    else:
        cure = "build the layer first and pass it here."
    raise TypeError(f"{argument} must be a StatefulModule, got {found}: {cure}")


def check_named_modules(
    owner: str, modules: Mapping[str, Any] | None, keywords: Mapping[str, Any]
) -> dict[str, StatefulModule]:
    """Merge the two ways to name the children of a container.

    Args:
        owner: Name of the container's class.
        modules: The positional mapping, or None.
        keywords: The keyword arguments.

    Raises:
        TypeError: `modules` is not a mapping with string keys, or a child is no `StatefulModule`.
        ValueError: Both ways were used, or neither, or a name cannot be used.
    """
    if modules is not None and not isinstance(modules, Mapping):
        raise TypeError(
            f"{owner}: expected a dict {{name: module}} or keywords, got "
            f"{type(modules).__name__}; write {owner}(name=module)."
        )
    if modules and keywords:
        raise ValueError(
            f"{owner} takes one dict or keywords, not both, got the dict {sorted(modules)} and "
            f"the keywords {sorted(keywords)}; put all modules into one of the two."
        )
    named = dict(modules or keywords)
    if not named:
        raise ValueError(f"{owner} needs at least one module; write {owner}(name=module).")
    for name in named:
        if not isinstance(name, str):
            raise TypeError(f"{owner}: module names must be strings, got {name!r}.")
        if name.startswith("__"):
            raise ValueError(
                f"{owner}: {name!r} cannot be the name of a module: Python keeps names with two "
                f"underscores in front for itself; write {name.strip('_')!r}."
            )
    return {name: check_module(child, f"{owner}: {name}") for name, child in named.items()}


def check_sizes(values: Any, argument: str) -> list[int]:
    """Return several sizes as ints.

    Args:
        values: What the user passed.
        argument: Where they passed it.

    Raises:
        TypeError: It is not a sequence of integers.
        ValueError: A size is below 1.
    """
    if not isinstance(values, Sequence) or isinstance(values, str):
        raise TypeError(
            f"{argument} must be a list of sizes, got {values!r}; write {argument}=[64, 64]."
        )
    return [check_size(value, f"{argument}[{i}]") for i, value in enumerate(values)]


def check_size(value: Any, argument: str, least: int = 1) -> int:
    """Return a size as an int.

    Args:
        value: What the user passed.
        argument: Where they passed it.
        least: The smallest that is allowed.

    Raises:
        TypeError: It is not an integer.
        ValueError: It is too small.
    """
    try:
        size = operator.index(value)
    except TypeError:
        raise TypeError(
            f"{argument} must be an integer, got {value!r} ({type(value).__name__})."
        ) from None
    if size < least:
        raise ValueError(f"{argument} must be at least {least}, got {size}.")
    return size


def check_weight(value: Any, argument: str) -> Array:
    """Return the weight of a loss as a float32 scalar.

    Args:
        value: What the user passed.
        argument: Where they passed it.

    Raises:
        TypeError: It is not a number.
        ValueError: It is not finite.
    """
    try:
        weight = float(value)
    except (TypeError, ValueError):
        raise TypeError(
            f"{argument} must be a number, got {value!r} ({type(value).__name__})."
        ) from None
    if not math.isfinite(weight):
        raise ValueError(f"{argument} must be finite, got {weight}.")
    return jnp.asarray(weight, jnp.float32)


def at_least_float32(x: Array) -> Array:
    """Return `x` as float32, or as it is if it is more exact.

    Logarithms of probabilities and their differences need more digits than layers that compute in
    bfloat16 give.
    """
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))
