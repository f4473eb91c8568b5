"""Loggers and renderers may fail; training goes on."""

import warnings
from collections.abc import Callable
from typing import Any


def call_forgivingly(callback: Callable[..., None], *args: Any) -> None:
    """Call a callback whose failure must not cost the run."""
    try:
        callback(*args)
    except Exception as error:
        name = getattr(callback, "__qualname__", repr(callback))
        warnings.warn(
            f"{name} raised {type(error).__name__}: {error}. Training goes on without it.",
            RuntimeWarning,
            stacklevel=3,
        )
