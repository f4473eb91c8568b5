"""Errors that are the user's to mend."""

import contextlib
import os
from collections.abc import Iterator


class InputError(Exception):
    """Something is wrong with the input or the machine; the message says what and how to mend it.

    The command prints it without a traceback.
    """


@contextlib.contextmanager
def writing(path: str | os.PathLike[str], cure: str) -> Iterator[None]:
    """Say so, and how to mend it, where the system does not let something be written.

    Args:
        path: What is written.
        cure: What the user can do.

    Raises:
        InputError: The system refused.
    """
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise InputError(f"Cannot write {path}: {reason}; {cure}.") from error
