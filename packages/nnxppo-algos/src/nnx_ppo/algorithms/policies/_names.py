"""Names of classes and functions, and the way back, which imports nothing but what is listed here.

A name is the public one where there is one, so that a file outlives the moving of private modules.
"""

import functools
import importlib
import sys
from collections.abc import Callable, Iterable, Mapping
from types import ModuleType
from typing import Any

import flax.nnx
import jax
import jax.lax
import jax.nn
import jax.nn.initializers
import jax.numpy

# Whose public functions a policy may use; the first that has one gives it its name.
_NAMESPACES: tuple[ModuleType, ...] = (
    jax.nn,
    jax.numpy,
    flax.nnx,
    jax.lax,
    jax.nn.initializers,
)
# They read and write files: a policy that named one of them could do harm when it acts.
_FORBIDDEN = frozenset({"fromfile", "load", "save", "savez"})
# Packages whose further functions are taken by the name of their module, such as flax's
# `promote_dtype`, which every layer holds.
_FUNCTION_ROOTS = ("flax.nnx", "nnx_ppo.core", "nnx_ppo.networks")
_CLASS_ROOTS = ("flax.nnx", "jax", "nnx_ppo", "optax")

PUBLIC = "jax.nn, jax.numpy or flax.nnx"


def name_of_class(cls: type) -> str:
    """Return the name of a class: public for known packages, by its module for others."""
    public = _public_names().get(id(cls))
    if public is not None:
        return public
    return _shortest_name(cls) if _is_in(cls.__module__, _CLASS_ROOTS) else _own_name(cls)


def name_of_function(function: Any) -> str | None:
    """Return the name that `find_function` finds a function by, None if there is none."""
    if isinstance(function, type):
        return None
    public = _public_names().get(id(function))
    if public is not None:
        return public
    module, name = (getattr(function, field, None) for field in ("__module__", "__qualname__"))
    if not (isinstance(module, str) and isinstance(name, str) and _is_in(module, _FUNCTION_ROOTS)):
        return None
    found = getattr(sys.modules.get(module), name, None)
    return f"{module}.{name}" if found is function else None


def find_function(name: str) -> Callable[..., Any]:
    """Return the function of a name.

    Raises:
        ValueError: It is none that a policy may use, or is not there.
    """
    home, _, last = name.rpartition(".")
    for namespace in _NAMESPACES:
        if namespace.__name__ == home and last not in _FORBIDDEN:
            found = vars(namespace).get(last)
            if callable(found) and not isinstance(found, type):
                return found
    if not _is_in(home, _FUNCTION_ROOTS):
        raise ValueError(f"the function {name} is not one of {PUBLIC}")
    module = _imported(home)
    found = None if module is None else vars(module).get(last)
    is_own = getattr(found, "__module__", None) == home
    if not (is_own and callable(found)) or isinstance(found, type):
        raise ValueError(f"the function {name} is not there, in the versions that are installed")
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
            if _is_name_of(name, cls):
                return cls
        if not _is_in(name, _CLASS_ROOTS):
            last = name.rpartition(".")[2]
            raise ValueError(
                f"the class {name} is not trusted; if you know it to be harmless, import it and "
                f"pass trusted=[{last}]"
            )
        found = _lookup(name)
        if not isinstance(found, type) or not _is_in(found.__module__, _CLASS_ROOTS):
            raise ValueError(f"the class {name} is not there, in the versions that are installed")
        return found


@functools.cache
def _public_names() -> Mapping[int, str]:
    """Return the public name of each object by its identity; of several, the first."""
    names: dict[int, str] = {}
    for namespace in _NAMESPACES:
        for name, value in vars(namespace).items():
            if callable(value) and not name.startswith("_") and name not in _FORBIDDEN:
                names.setdefault(id(value), f"{namespace.__name__}.{name}")
    return names


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


def _is_name_of(name: str, cls: type) -> bool:
    if name in {_own_name(cls), name_of_class(cls)}:
        return True
    # The classes of a script are in `__main__` where it runs, and in its own module elsewhere.
    if cls.__module__ == "__main__":
        return name.endswith(f".{cls.__qualname__}")
    return name == f"__main__.{cls.__qualname__}"


def _lookup(name: str) -> Any:
    """Return what a name in a known package stands for, None if it is not there."""
    parts = name.split(".")
    for length in range(len(parts) - 1, 0, -1):
        module = _imported(".".join(parts[:length]))
        if module is not None:
            found: Any = module
            for part in parts[length:]:
                if found is not module and not isinstance(found, type):
                    return None  # through modules, a name would lead out of its package
                found = vars(found).get(part)
            return found
    return None


def _imported(name: str) -> ModuleType | None:
    """Import a module, None if there is no such module."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{name}.".startswith(f"{error.name}."):
            return None
        raise


def _is_in(name: str, roots: Iterable[str]) -> bool:
    return any(f"{name}.".startswith(f"{root}.") for root in roots)
