"""Whether everything that a module owns can be seen by JAX, the optimiser and a checkpoint."""

import contextlib
import functools
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
from flax import nnx

from nnx_ppo.core.testing._conformance.findings import Finding
from nnx_ppo.core.testing._conformance.subject import Subject, path_name

_VISIBLE = (nnx.Pytree, nnx.Variable)


def hidden_state(subject: Subject) -> Iterator[Finding]:
    """No bare arrays, no module or array out of sight, no attribute that cannot be hashed."""
    for path, node in nnx.iter_graph(subject.module):
        if not isinstance(node, nnx.Pytree):
            continue
        for name, value in vars(node).items():
            if not name.startswith("_pytree__"):
                yield from _judge(f"{path_name(path)}.{name}", value)


def _judge(where: str, value: Any) -> Iterator[Finding]:
    if isinstance(value, _VISIBLE):
        return
    if isinstance(value, jax.Array | np.ndarray):
        yield Finding(
            "hidden-state",
            where,
            "an nnx.Variable (nnx.Param if it is learned) or a plain Python value",
            f"a bare {type(value).__name__} of shape {value.shape}",
            "wrap it: nnx.Param(…) or nnx.Variable(…); a bare array is in no optimiser.",
        )
        return
    for place, hidden in _find_hidden(value, where, set()):
        yield Finding(
            "hidden-state",
            place,
            "modules and arrays to be attributes of the module",
            f"{type(hidden).__name__} inside {_kind(value)}",
            "make it an attribute (lists and dicts as nnx.List and nnx.Dict); where it is now, "
            "neither gradients nor checkpoints nor train() and eval() reach it.",
        )
        return
    try:
        hash(value)
    except TypeError:
        yield Finding(
            "hidden-state",
            where,
            "a static attribute that can be hashed",
            f"{type(value).__name__}",
            "use a tuple for a list and a tuple of pairs for a dict; JAX compares static "
            "attributes to decide whether to compile again.",
        )


def _find_hidden(value: Any, where: str, seen: set[int]) -> Iterator[tuple[str, Any]]:
    """Yield modules, variables and JAX arrays that hang on a static value."""
    if isinstance(value, (*_VISIBLE, jax.Array)):
        yield where, value
    elif id(value) not in seen:
        seen.add(id(value))
        for place, inner in _inside(value, where):
            yield from _find_hidden(inner, place, seen)


def _inside(value: Any, where: str) -> Iterator[tuple[str, Any]]:
    """Yield what hangs on a static value: its elements, or its attributes."""
    if isinstance(value, Mapping):
        yield from ((f"{where}[{key!r}]", item) for key, item in value.items())
    elif isinstance(value, list | tuple | set | frozenset):
        yield from ((f"{where}[{i}]", item) for i, item in enumerate(value))
    elif callable(value):
        yield from _behind(value, where)
    elif hasattr(value, "__dict__") and not _is_library_object(value):
        yield from ((f"{where}.{name}", item) for name, item in vars(value).items())


def _behind(function: Any, where: str) -> Iterator[tuple[str, Any]]:
    """Yield what a function closes over, is bound to, or wraps."""
    if isinstance(function, functools.partial):
        yield from _inside((*function.args, *function.keywords.values()), f"{where}.args")
        yield f"{where}.func", function.func
        return
    if hasattr(function, "__self__"):
        yield f"{where}.__self__", function.__self__
    if hasattr(function, "__wrapped__"):  # a jitted function
        yield where, function.__wrapped__
    names = getattr(getattr(function, "__code__", None), "co_freevars", ())
    for name, cell in zip(names, getattr(function, "__closure__", None) or (), strict=True):
        with contextlib.suppress(ValueError):  # an empty cell
            yield f"{where} (closes over {name!r})", cell.cell_contents
    if not _is_library_object(function) and not isinstance(function, type):
        attributes = getattr(function, "__dict__", {})
        yield from ((f"{where}.{name}", item) for name, item in attributes.items())


def _is_library_object(value: Any) -> bool:
    """Whether an object is JAX's or flax's own, such as a dtype."""
    module = getattr(type(value), "__module__", "") or ""
    return module.split(".")[0] in ("jax", "jaxlib", "flax", "numpy", "builtins")


def _kind(value: Any) -> str:
    return "a function" if callable(value) else f"a plain {type(value).__name__}"
