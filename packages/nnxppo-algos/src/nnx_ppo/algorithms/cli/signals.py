"""Signals that ask a run to end."""

import contextlib
import signal
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

# SIGTERM and SIGUSR1 are what clusters send before a job's time is up. Windows has no SIGUSR1.
_NAMES = ("SIGINT", "SIGTERM", "SIGUSR1")
_ASKING = [getattr(signal, name) for name in _NAMES if hasattr(signal, name)]


@contextlib.contextmanager
def stop_on_signals(say: Callable[[str], None]) -> Iterator[Callable[[], bool]]:
    """Turn Ctrl-C, SIGTERM and SIGUSR1 into a request to stop after the iteration under way.

    A second Ctrl-C interrupts at once.

    Args:
        say: Called with what the user is to know.

    Yields:
        A function that says whether a stop was asked for.
    """
    asked = False
    before: dict[int, Any] = {}

    def ask(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        asked = True
        text = f"{signal.Signals(number).name}: stopping after this iteration"
        if number == signal.SIGINT:
            signal.signal(number, before[number])
            text = "stopping after this iteration; press Ctrl-C again to stop at once"
        with contextlib.suppress(RuntimeError):  # a line was being written when the signal came
            say(text)

    for number in _ASKING:
        before[number] = signal.signal(number, ask)
    try:
        yield lambda: asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
