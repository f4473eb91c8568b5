"""How the benchmark talks to its child processes: by lines, commands there and JSON back.

Each form that is measured has a process of its own, so that its peak memory is its own, and
compiling it profits from nothing that another has traced. The processes live side by side and are
asked in turns.
"""

import json
import os
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent

Answer = dict[str, Any]


class MeasureError(Exception):
    """A measurement failed; the message says why."""


class OutOfTimeError(MeasureError):
    """A process was ended because its time was over."""


class Child:
    """A process that answers commands.

    Args:
        command: Its command line, run in this folder.
        environment: Its environment variables.
        seconds: How long it may live.
    """

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], seconds: float
    ) -> None:
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  (lives as long as the process)
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=dict(environment),
            cwd=FOLDER,
            text=True,
        )
        self._late = threading.Event()
        self._timer = threading.Timer(max(seconds, 0.0), self._stop)
        self._timer.start()

    def send(self, command: str) -> None:
        """Give a command without waiting for the answer."""
        assert self._process.stdin is not None
        try:
            print(command, file=self._process.stdin, flush=True)
        except BrokenPipeError:
            pass  # `receive` says why

    def receive(self) -> Answer:
        """Wait for the answer to the command that was given first.

        Raises:
            OutOfTimeError: Its time is over.
            MeasureError: The process failed.
        """
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if self._late.is_set():
            raise OutOfTimeError("no time left")
        if not line:
            self._process.wait()
            self._errors.seek(0)
            raise MeasureError(f"a process ended early:\n{self._errors.read()[-2000:]}")
        answer = json.loads(line)
        if "error" in answer:
            raise MeasureError(answer["error"])
        return answer

    def ask(self, command: str) -> Answer:
        """Give a command and wait for its answer."""
        self.send(command)
        return self.receive()

    def close(self) -> None:
        """End the process."""
        self._timer.cancel()
        self._process.kill()
        self._process.communicate()
        self._errors.close()

    def _stop(self) -> None:
        self._late.set()
        self._process.kill()


def serve(make: Callable[[], Mapping[str, Callable[[], Answer]]]) -> None:
    """Answer commands until there are no more.

    Args:
        make: Returns the commands by name. It is called once what libraries print can no longer
            be taken for an answer.
    """
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    commands: Mapping[str, Callable[[], Answer]] | None = None
    for line in sys.stdin:
        try:
            commands = make() if commands is None else commands
            answer = commands[line.strip()]()
        except Exception:
            answer = {"error": traceback.format_exc()}
        print(json.dumps(answer), file=answers, flush=True)
