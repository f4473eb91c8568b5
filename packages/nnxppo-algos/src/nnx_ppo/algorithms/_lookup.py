"""Classes by the names that files give them."""

import sys
from collections.abc import Iterable
from types import ModuleType


def find_class(path: str, roots: Iterable[str]) -> type | None:
    """Return the class of a name, None unless it belongs to one of certain packages.

    Only modules that are imported already are searched, so a file can import nothing. From a
    module the way leads through classes alone, so no name leads to what a module imported from
    elsewhere.

    Args:
        path: `module.Class` or `module:Class`, of a nested class with the names around it.
        roots: Names of the packages.

    Example:
        >>> import nnx_ppo.core
        >>> find_class("nnx_ppo.core:StatefulModule", ["nnx_ppo.core"]).__name__
        'StatefulModule'
        >>> find_class("nnx_ppo.core.nnx.Linear", ["nnx_ppo.core"]) is None
        True
    """
    parts = path.replace(":", ".").split(".")
    if not is_in(".".join(parts), roots):
        return None
    for length in range(len(parts) - 1, 0, -1):
        module = sys.modules.get(".".join(parts[:length]))
        if not isinstance(module, ModuleType):
            continue
        found: ModuleType | type = module
        for part in parts[length:]:
            step = vars(found).get(part)
            if not isinstance(step, type):
                return None
            found = step
        return found if isinstance(found, type) and is_in(found.__module__, roots) else None
    return None


def is_in(name: str, roots: Iterable[str]) -> bool:
    """Return whether a dotted name is one of certain packages, or of something in them."""
    return any(f"{name}.".startswith(f"{root}.") for root in roots)
