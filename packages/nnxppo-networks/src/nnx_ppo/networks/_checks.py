"""Checks of what users hand to constructors; each message says how to repair the call."""

import operator
from collections.abc import Mapping, Sequence
from typing import Any

from flax import nnx

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
    elif isinstance(child, nnx.Module):
        cure = "wrap it in a StatefulModule subclass whose __call__ returns a StatefulModuleOutput."
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
        ValueError: Both ways were used, or neither.
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


def check_size(value: Any, argument: str) -> int:
    """Return a size as an int.

    Args:
        value: What the user passed.
        argument: Where they passed it.

    Raises:
        TypeError: It is not an integer.
        ValueError: It is below 1.
    """
    try:
        size = operator.index(value)
    except TypeError:
        raise TypeError(
            f"{argument} must be an integer, got {value!r} ({type(value).__name__})."
        ) from None
    if size < 1:
        raise ValueError(f"{argument} must be at least 1, got {size}.")
    return size
