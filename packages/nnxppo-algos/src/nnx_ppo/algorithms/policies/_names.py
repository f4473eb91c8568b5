"""Names of classes and functions, and the way back, which imports nothing and finds no others.

A name is the public one where there is one, so that a file outlives the moving of private modules.
"""

import dataclasses
import enum
import functools
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax.lax
import jax.numpy as jnp
from flax import nnx

from nnx_ppo.algorithms._lookup import find_class, is_in
from nnx_ppo.algorithms.policies import _functions

# The packages whose classes need not be trusted by name, beside those in `_shipped`.
_ROOTS = ("nnx_ppo.core", "nnx_ppo.networks")

PUBLIC = "jax.nn, jax.numpy or flax.nnx"


def name_of_class(cls: type) -> str:
    """Return the name of a class: public for known packages, by its module for others."""
    for name, known in _shipped().items():
        if known is cls:
            return name
    return _shortest_name(cls) if is_in(cls.__module__, _ROOTS) else _own_name(cls)


def name_of_function(function: Any) -> str | None:
    """Return the name that `find_function` finds a function by, None if there is none."""
    return _functions.names().get(id(function))


def find_function(name: str) -> Callable[..., Any]:
    """Return the function of a name.

    Raises:
        ValueError: It is none that a policy may use, or is not there.
    """
    found = _functions.functions().get(name)
    if found is None:
        raise ValueError(
            f"the function {name} is not one of {PUBLIC} that a policy may hold, or the installed "
            "versions do not have it"
        )
    return found


class Classes:
    """Finds the classes that a file names: those of known packages, and those that are trusted.

    Args:
        trusted: Further classes, which are matched by module and name.

    Raises:
        TypeError: Something in `trusted` is no class.
    """

    def __init__(self, trusted: Iterable[type]) -> None:
        self._trusted = tuple(trusted)
        for cls in self._trusted:
            if not isinstance(cls, type):
                raise TypeError(
                    f"load_policy: trusted must hold classes, got {cls!r}; write trusted=[MyLayer]."
                )

    def find(self, name: str) -> type:
        """Return the class of a name.

        Raises:
            ValueError: It is neither known nor trusted, or is not there.
        """
        for cls in self._trusted:
            if name in (_own_name(cls), name_of_class(cls)):
                return cls
        found = _shipped().get(name) or find_class(name, _ROOTS)
        if found is not None:
            return found
        if is_in(name, _ROOTS):
            raise ValueError(
                f"the class {name} is not there: the versions that are installed lack it, or its "
                "module is not imported; import it first"
            )
        of_script = [cls for cls in self._trusted if _may_be(name, cls)]
        if len(of_script) == 1:
            return of_script[0]
        last = name.rpartition(".")[2]
        if of_script:
            raise ValueError(f"the class {name} may be each of {of_script}; trust only one {last}")
        raise ValueError(
            f"the class {name} is not trusted; if you know it to be harmless, import it and "
            f"pass trusted=[{last}]"
        )

    def is_value(self, cls: type) -> bool:
        """Return whether a class may be the value of an attribute, where it may be called.

        Types of variables and numbers may; of others the constructor could do anything.
        """
        return cls in self._trusted or issubclass(cls, nnx.Variable) or _is_dtype(cls)


@functools.cache
def _shipped() -> Mapping[str, type]:
    """Return the classes of flax and JAX that networks are made of, by public name."""
    found: dict[str, type] = {}
    for module, kind in ((nnx, _is_part), (jax.lax, _is_setting), (jnp, _is_dtype)):
        for name, value in vars(module).items():
            if isinstance(value, type) and not name.startswith("_") and kind(value):
                found[f"{module.__name__}.{name}"] = value
    return found


def _is_part(cls: type) -> bool:
    """Whether a class of flax is that of a module, a variable, or a filter of variables."""
    kinds = (nnx.Pytree, nnx.Variable, nnx.OfType, nnx.PathContains, nnx.WithTag)
    return issubclass(cls, kinds)


def _is_setting(cls: type) -> bool:
    """Whether a class holds options of a function, such as its precision."""
    is_named_tuple = issubclass(cls, tuple) and hasattr(cls, "_fields")
    return issubclass(cls, enum.Enum) or is_named_tuple or dataclasses.is_dataclass(cls)


def _is_dtype(cls: type) -> bool:
    """Whether a class is a type of numbers of `jax.numpy`, such as `jax.numpy.float32`."""
    return isinstance(cls, type(jnp.float32))


def _own_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _shortest_name(cls: type) -> str:
    """Return the name by the outermost package that exports a class."""
    parts = cls.__module__.split(".")
    for length in range(1, len(parts)):
        package = ".".join(parts[:length])
        exported = vars(sys.modules[package]).get(cls.__name__) if package in sys.modules else None
        if exported is cls:
            return f"{package}.{cls.__name__}"
    return _own_name(cls)


def _may_be(name: str, cls: type) -> bool:
    """Whether it was the name in another process.

    The classes of a script are in `__main__` where it runs, and in its own module elsewhere.
    """
    if cls.__module__ == "__main__":
        return name.endswith(f".{cls.__qualname__}")
    return name == f"__main__.{cls.__qualname__}"
