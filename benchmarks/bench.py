"""Measures how fast training is, row by row, prints a table and saves it.

`make bench` runs it; docs/benchmarks.md explains the table. Without a selection of rows the
results go to `benchmarks/results/` and onto that page.
"""

import dataclasses
import importlib.metadata
import json
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import tyro
from cases import HOST, PLAIN_FORM, QUICK, Case, all_cases, chosen, is_chosen, place
from measure import Tools, measure, measure_host
from peers import PeerError, python_of
from protocol import MeasureError, OutOfTimeError
from rich.console import Console
from table import PAGE, RESULTS, for_terminal, page_with_results

PACKAGES = ("nnxppo-algos", "jax", "flax", "optax", "mujoco", "mujoco-mjx", "playground")
NARROWEST = 200
"""Columns of the table where the output is no terminal."""


@dataclasses.dataclass(frozen=True)
class Options:
    """What to measure, and for how long.

    Attributes:
        rows: Patterns of rows, such as mlp/CartpoleBalance/256, */FollowTarget/* or host.
        names: Print the names of the rows, and measure nothing.
        full: Add the rows with 2048 environments.
        quick: Measure one tiny row, in seconds, to see that everything works.
        minutes: What has not been measured by then is left out.
        output: File for the results, in place of the one in benchmarks/results/.
    """

    rows: tuple[str, ...] = ("*",)
    names: bool = False
    full: bool = False
    quick: bool = False
    minutes: float = 30.0
    output: Path | None = None

    def cases(self) -> list[Case]:
        """Return the cases that are chosen."""
        return [QUICK] if self.quick else chosen(all_cases(self.full), self.rows)

    def with_host(self) -> bool:
        """Whether the loop itself is chosen."""
        return not self.quick and is_chosen(HOST, self.rows)

    def file(self, machine: str) -> Path | None:
        """Return where the results go; a selection goes nowhere unless told."""
        whole = not self.quick and self.rows == ("*",)
        name = machine.lower().replace(", ", "-").replace(" ", "-")
        return self.output or (RESULTS / f"{name}.json" if whole else None)


class Measurements:
    """What has been measured so far, and what could not be.

    Attributes:
        rows: What `measure` returned.
        left_out: Why something is missing, by its name.
        has_failed: Whether a measurement failed, other than for time.
    """

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self.left_out: dict[str, str] = {}
        self.has_failed = False
        self._console = Console(stderr=True)

    def attempt(self, name: str, measurement: Callable[[], dict[str, Any]]) -> Any:
        """Return what a measurement found, or None if it failed."""
        start = time.monotonic()
        if self._console.is_terminal:
            self._console.print(f"{name} …", end="\r")
        try:
            return measurement()
        except OutOfTimeError:
            self.left_out[name] = "there was no time left"
        except MeasureError as error:
            self._console.print(str(error), markup=False)
            self.left_out[name] = "it failed"
            self.has_failed = True
        finally:
            outcome = self.left_out.get(name, "measured")
            self._console.print(f"{name}: {outcome}, {time.monotonic() - start:.0f} s")


def main(options: Options) -> int:
    """Measure, print, save; return the exit status."""
    if options.names or not (options.cases() or options.with_host()):
        print(*[case.name for case in all_cases(options.full)], HOST, sep="\n")
        return 0 if options.names else 2
    measurements = Measurements()
    results = run(options, measurements)
    console = Console() if sys.stdout.isatty() else Console(width=NARROWEST)
    console.print(for_terminal(results))
    file = options.file(results["machine"])
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(results, indent=1) + "\n")
        if file.resolve().parent == RESULTS:
            PAGE.write_text(page_with_results(PAGE.read_text()))
    return int(measurements.has_failed)


def run(options: Options, measurements: Measurements) -> dict[str, Any]:
    """Measure all that is chosen, and return it as plain data."""
    start = time.monotonic()
    cases = options.cases()
    peers = installed_peers(cases, measurements)
    loop = {"loop_seconds": 0.0} if options.quick else {}
    host = None
    with tempfile.TemporaryDirectory() as cache:
        tools = Tools(cache, peers, start + 60.0 * options.minutes, **loop)
        if options.with_host():
            host = measurements.attempt(HOST, lambda: measure_host(tools))
        for case in cases:
            if case.against not in measurements.left_out:
                row = measurements.attempt(case.name, lambda case=case: measure(case, tools))
                measurements.rows += [] if row is None else [row]
    found = [*measurements.rows, *([] if host is None else [host])]
    return {
        "machine": found[0]["device"] if found else "unknown",
        "versions": versions(),
        "minutes": (time.monotonic() - start) / 60.0,
        "rows": sorted(measurements.rows, key=lambda row: place(Case(**row["case"]))),
        "host": host,
        "left_out": measurements.left_out,
    }


def installed_peers(cases: Sequence[Case], measurements: Measurements) -> dict[str, Path]:
    """Return the Pythons of the peers that some case is compared with."""
    pythons = {}
    for name in {case.against for case in cases} - {None, PLAIN_FORM}:
        try:
            pythons[name] = python_of(str(name))
        except PeerError as error:
            measurements.left_out[str(name)] = f"it cannot be installed here ({error})"
    return pythons


def versions() -> dict[str, str]:
    """Return the versions of what has a part in the results."""
    found = {name: importlib.metadata.version(name) for name in PACKAGES}
    return {"Python": platform.python_version(), **found}


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options, description=__doc__)))
