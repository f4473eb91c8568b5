"""Packages that only an extra brings."""

import importlib
from typing import Any


def optional_module(name: str, extra: str, purpose: str) -> Any:
    """Import a package that comes with an extra of nnxppo-algos.

    Args:
        name: Name of the module.
        extra: The extra.
        purpose: Who needs it, for the message.

    Raises:
        ModuleNotFoundError: It is not installed; names the extra.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f'{purpose} needs the package {name}: pip install "nnxppo-algos[{extra}]".', name=name
        ) from error
