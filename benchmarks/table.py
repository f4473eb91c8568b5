"""Results as tables, in a terminal and on the page of the docs."""

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from cases import PLAIN_FORM, Case
from rich.table import Table

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "benchmarks.md"
RESULTS = Path(__file__).parent / "results"
BEGIN, END = "<!-- results: begin -->\n", "<!-- results: end -->\n"

Results = Mapping[str, Any]
Cells = list[str]

COLUMNS = (
    "network",
    "environment",
    "envs",
    "steps/s",
    "compile s",
    "memory MB",
    "host ms",
    "rollout %",
    "gradient %",
    "gradient / floor",
    "against",
    "iteration ×",
    "gradient ×",
    "compile ×",
)


class Summary(NamedTuple):
    """What is shown of one form of a case; None where it was not measured.

    Attributes:
        steps_per_second: Environment steps per second of an iteration, of the median one.
        compile_seconds: Compiling it, without cache.
        peak_bytes: The most memory of the process or device.
        host_seconds: Seconds of an iteration for which the Python thread was busy.
        gradient_seconds: Seconds of the gradient phase alone.
        gradient_share: What part of an iteration these are, at most 1.
        floor_ratio: How many times as long they are as its matrix products take at least.
    """

    steps_per_second: float
    compile_seconds: float
    peak_bytes: int
    host_seconds: float
    gradient_seconds: float | None
    gradient_share: float | None
    floor_ratio: float | None


def summary(row: Mapping[str, Any], form: str) -> Summary:
    """Summarise one form, `ours` or `other`, of a measured case."""
    case, found, products = Case(**row["case"]), row[form], row["products"]
    iteration = statistics.median(found["iteration_seconds"])
    gradient = share = ratio = None
    if found["gradient_seconds"]:
        gradient = statistics.median(found["gradient_seconds"])
        share = min(gradient / iteration, 1.0)
        rate = statistics.median(products["flops_per_second"])
        ratio = gradient / (products["gradient_flops"] / rate)
    return Summary(
        steps_per_second=case.steps / iteration,
        compile_seconds=found["compile_seconds"],
        peak_bytes=found["peak_bytes"],
        host_seconds=statistics.median(found["host_seconds"]),
        gradient_seconds=gradient,
        gradient_share=share,
        floor_ratio=ratio,
    )


def ratios(row: Mapping[str, Any]) -> tuple[float, float | None, float] | None:
    """Return how many times as long the other form takes: iteration, gradient phase, compiling."""
    if row["other"] is None:
        return None
    ours, other = summary(row, "ours"), summary(row, "other")
    gradient = None
    if ours.gradient_seconds is not None and other.gradient_seconds is not None:
        gradient = other.gradient_seconds / ours.gradient_seconds
    return (
        ours.steps_per_second / other.steps_per_second,
        gradient,
        other.compile_seconds / ours.compile_seconds,
    )


def cells_of(rows: Sequence[Mapping[str, Any]]) -> list[Cells]:
    """Return the cells of the table, one list for each line."""
    lines = []
    for row in rows:
        case, times = Case(**row["case"]), ratios(row)
        lines.append([*_cells(case.network, case, summary(row, "ours")), *_against(case, times)])
        if row["other"] is not None and case.against != PLAIN_FORM:
            name = f"{case.network} of {case.against} {row['other']['version']}"
            lines.append([*_cells(name, case, summary(row, "other")), *_against(case, None)])
    return lines


def _cells(name: str, case: Case, found: Summary) -> Cells:
    share = found.gradient_share
    return [
        name,
        case.environment,
        str(case.n_envs),
        f"{_rounded(found.steps_per_second):,}",
        f"{found.compile_seconds:.1f}",
        f"{found.peak_bytes / 1e6:.0f}",
        f"{1e3 * found.host_seconds:.2f}",
        "" if share is None else f"{100 - round(100 * share)}",
        "" if share is None else f"{100 * share:.0f}",
        "" if found.floor_ratio is None else f"{found.floor_ratio:.2f}",
    ]


def _against(case: Case, times: tuple[float, float | None, float] | None) -> Cells:
    if times is None:
        return ["", "", "", ""]
    shown = ["" if time is None else f"{time:.2f}" for time in times]
    return [str(case.against), *shown]


def _rounded(number: float) -> int:
    """Return a number with three digits that count."""
    return int(float(f"{number:.3g}"))


def host_lines(host: Mapping[str, Any]) -> list[str]:
    """Return what is known of the training loop itself, a sentence each."""
    single, fused = (1e3 * statistics.median(host["host_seconds"][k]) for k in ("single", "fused"))
    return [
        f"`train_ppo` with a network of {host['leaves']} arrays: the host is busy for "
        f"{single:.2f} ms per iteration, and for {fused:.2f} ms with "
        f"`iterations_per_call={host['iterations_per_call']}`.",
        f"Programs compiled by a first call of `train_ppo`: {host['compilations']['first']}; by a "
        f"second one with an equal network: {host['compilations']['second']}.",
    ]


def notes(results: Results) -> list[str]:
    """Return what is to be said below the table, a sentence each."""
    versions = ", ".join(f"{name} {version}" for name, version in results["versions"].items())
    lines = host_lines(results["host"]) if results["host"] else []
    lines += [f"Not measured: {name}, {reason}." for name, reason in results["left_out"].items()]
    return [*lines, f"Measured in {results['minutes']:.0f} minutes with {versions}."]


def for_terminal(results: Results) -> Table:
    """Return the table for a terminal."""
    table = Table(
        title=results["machine"], caption="\n".join(notes(results)), caption_justify="left"
    )
    for number, column in enumerate(COLUMNS):
        table.add_column(column, justify="left" if number < 2 or column == "against" else "right")
    for line in cells_of(results["rows"]):
        table.add_row(*line)
    return table


def as_markdown(results: Results) -> str:
    """Return the results of a machine as a section of a page."""
    rules = ["---" if n < 2 or name == "against" else "---:" for n, name in enumerate(COLUMNS)]
    lines = [list(COLUMNS), rules, *cells_of(results["rows"])]
    table = "\n".join(f"| {' | '.join(line)} |".replace("|  |", "| |") for line in lines)
    below = "\n".join(f"- {note}" for note in notes(results))
    return f"### {results['machine']}\n\n{table}\n\n{below}\n"


def page_with_results(page: str, folder: Path = RESULTS) -> str:
    """Return a page whose part between the marks is made of all results in a folder.

    Raises:
        ValueError: The page lacks the marks.
    """
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"the page must hold the lines {BEGIN!r} and {END!r}.")
    found = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    sections = "".join(f"\n{as_markdown(results)}" for results in found)
    return f"{before}{begin}{sections}{end}{after}"
