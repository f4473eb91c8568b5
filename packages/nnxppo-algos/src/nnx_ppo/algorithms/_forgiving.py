"""Loggers and renderers may fail; training goes on."""

import warnings
from collections.abc import Callable
from typing import Any


def call_forgivingly(
    callback: Callable[..., None],
    *args: Any,
    what: str | None = None,
    then: str = "Training goes on without it.",
) -> None:
    """Call a callback whose failure must not cost the run.

    Args:
        callback: What to call.
        *args: Passed on.
        what: What to call it in the warning; its own name if None.
        then: What follows from the failure, for the warning.
    """
    try:
        callback(*args)
    except Exception as error:
        name = what or getattr(callback, "__qualname__", repr(callback))
        warnings.warn(
            f"{name} raised {type(error).__name__}: {error}. {then}",
            RuntimeWarning,
            stacklevel=3,
        )
