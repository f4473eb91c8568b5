"""Runs the measurements in child processes, and returns what they found as plain data."""

import dataclasses
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cases import PLAIN_FORM, Case
from protocol import FOLDER, Child

LEAST_ROUNDS, LEAST_SLOW_ROUNDS = 5, 2  # the first of the fast ones does not count
SLOW_SECONDS = 20.0
MOST_ROUNDS = 25
LOOP_SECONDS = 3.0


@dataclasses.dataclass(frozen=True)
class Tools:
    """What measurements need.

    Attributes:
        cache: Folder for compiled programs of the set-up, which is not measured.
        peers: Python of each peer's environment, by name.
        deadline: When all must be over, by `time.monotonic`.
        loop_seconds: How long each thing is measured, beyond the least number of rounds.
    """

    cache: str
    peers: Mapping[str, Path]
    deadline: float
    loop_seconds: float = LOOP_SECONDS

    def seconds_left(self) -> float:
        """Return how long there is still to measure."""
        return self.deadline - time.monotonic()


def measure(case: Case, tools: Tools) -> dict[str, Any]:
    """Measure a case, in turns with what it is compared with.

    Returns:
        `device`; the `case`; `ours` and `other`, what was found of each, lists holding one entry
        for each round, `other` being None where there is nothing to compare with; and what is
        known of matrix `products`. Times are in seconds.

    Raises:
        MeasureError: A process failed, or the time is over.
    """
    with _children(case, tools) as forms:
        found = {name: child.ask("describe") for name, child in forms.items()}
        device = {form.pop("device") for form in found.values()}.pop()
        for name, child in forms.items():
            compiled = child.ask("compile")
            found[name]["compile_seconds"] = compiled["seconds"]
            found[name]["program_bytes"] = compiled["program_bytes"]
        iterations = _in_turns([*_turns(forms, "iterate")], tools.loop_seconds)
        for name, child in forms.items():
            found[name]["iteration_seconds"] = iterations[name, "iterate"]["seconds"]
            found[name]["host_seconds"] = iterations[name, "iterate"]["host_seconds"]
            found[name]["peak_bytes"] = child.ask("memory")["peak_bytes"]
            found[name]["gradient_seconds"] = []
        phases = {name: child for name, child in forms.items() if _has_phases(case, name)}
        _ask_all(phases, "prepare gradient")
        products = forms["ours"].ask("prepare products")
        turns = [*_turns(phases, "gradient"), ("ours", "products", forms["ours"])]
        gradients = _in_turns(turns, tools.loop_seconds)
        for name in phases:
            found[name]["gradient_seconds"] = gradients[name, "gradient"]["seconds"]
    return {
        "device": device,
        "case": dataclasses.asdict(case),
        "ours": found["ours"],
        "other": found.get("other"),
        "products": {**products, **gradients["ours", "products"]},
    }


def measure_host(tools: Tools) -> dict[str, Any]:
    """Measure the training loop itself, as `host_worker.py` describes.

    Raises:
        MeasureError: The process failed, or the time is over.
    """
    child = Child([sys.executable, "host_worker.py"], _environment(tools), tools.seconds_left())
    try:
        described = child.ask("describe")
        compilations = child.ask("compilations")
        child.ask("fused")  # compiles
        runs = _in_turns([("", form, child) for form in ("single", "fused")], 0.0)
    finally:
        child.close()
    host_seconds = {form: runs["", form]["host_seconds"] for form in ("single", "fused")}
    return {**described, "compilations": compilations, "host_seconds": host_seconds}


def _has_phases(case: Case, name: str) -> bool:
    """Whether a form's gradient phase can be measured alone; a peer's cannot."""
    return name == "ours" or case.against == PLAIN_FORM


@contextmanager
def _children(case: Case, tools: Tools) -> Iterator[dict[str, Child]]:
    """Start the processes of a case, let them set up side by side, and end them."""
    text = json.dumps(dataclasses.asdict(case))
    commands = {"ours": [sys.executable, "worker.py", text, "fast"]}
    if case.against == PLAIN_FORM:
        commands["other"] = [sys.executable, "worker.py", text, "plain"]
    elif case.against is not None:
        commands["other"] = [
            str(tools.peers[case.against]),
            f"peers/{case.against}_worker.py",
            text,
        ]
    forms: dict[str, Child] = {}
    try:
        for name, command in commands.items():
            forms[name] = Child(command, _environment(tools), tools.seconds_left())
        _ask_all(forms, "describe")
        yield forms
    finally:
        for child in forms.values():
            child.close()


def _environment(tools: Tools) -> dict[str, str]:
    """Return the variables of a child."""
    return {
        **os.environ,
        "JAX_COMPILATION_CACHE_DIR": tools.cache,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "PYTHONPATH": str(FOLDER),
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",  # two processes share a GPU
    }


def _ask_all(children: Mapping[str, Child], command: str) -> None:
    """Give a command to all at once, and wait for them."""
    for child in children.values():
        child.send(command)
    for child in children.values():
        child.receive()


def _turns(children: Mapping[str, Child], command: str) -> Iterator[tuple[str, str, Child]]:
    """Yield the turns in which children are given a command."""
    return ((name, command, child) for name, child in children.items())


def _in_turns(
    turns: Sequence[tuple[str, str, Child]], seconds: float
) -> dict[tuple[str, str], dict[str, list[float]]]:
    """Ask one after the other, round by round.

    The first round, in which memory is touched for the first time, does not count if there are
    enough others.

    Args:
        turns: Who is asked, by name, and with which command.
        seconds: After how long to stop, if the rounds were enough.

    Returns:
        The answers by name and command: a list over the rounds for each entry.
    """
    answers: dict[tuple[str, str], dict[str, list[float]]] = {}
    start = time.monotonic()
    for done in range(MOST_ROUNDS + 1):
        for name, command, child in turns:
            for key, value in child.ask(command).items():
                answers.setdefault((name, command), {}).setdefault(key, []).append(value)
        elapsed = time.monotonic() - start
        if elapsed > SLOW_SECONDS * (done + 1) and done + 1 >= LEAST_SLOW_ROUNDS:
            return answers
        if elapsed > seconds and done >= LEAST_ROUNDS:
            break
    return {
        turn: {key: values[1:] for key, values in found.items()} for turn, found in answers.items()
    }
