"""Folders of steps: complete or absent, whatever ends the process that writes them."""

import contextlib
import json
import math
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

METADATA = "metadata.pkl"
METRICS = "metrics.json"

_STEP = re.compile(r"step_(\d{10,})")
# Names that are no step's, so that nobody takes what is under way for a checkpoint.
_WRITING = ".writing-"
_REPLACED = ".replaced-"
_DELETED = ".deleted-"


def step_name(step: int) -> str:
    """Return the name of a step's folder."""
    return f"step_{step:010d}"


def checkpoints_in(directory: str | Path) -> dict[int, Path]:
    """Return the complete checkpoints of a directory by step, in rising order."""
    directory = Path(directory)
    if not directory.is_dir():
        return {}
    _finish_replacements(directory)
    steps = {int(m[1]): p for p in directory.iterdir() if (m := _STEP.fullmatch(p.name))}
    return {step: steps[step] for step in sorted(steps) if (steps[step] / METADATA).is_file()}


def latest_checkpoint(directory: str | Path) -> Path | None:
    """Return the checkpoint of the highest step, None where there is none.

    Args:
        directory: The directory that `make_checkpoint_fn` was given.

    Example:
        >>> latest_checkpoint("runs/none-yet") is None
        True
    """
    return next(reversed(checkpoints_in(directory).values()), None)


def best_checkpoint(
    directory: str | Path,
    metric: str = "eval/episode_reward/mean",
    mode: Literal["max", "min"] = "max",
) -> Path | None:
    """Return the checkpoint with the best value of a metric, None where none has it.

    Args:
        directory: The directory that `make_checkpoint_fn` was given.
        metric: Name of the metric; its last value when the checkpoint was written counts.
        mode: Whether higher or lower is better. Of equals the later one is returned.
    """
    ranked = ranking(directory, metric, mode)
    return ranked[0] if ranked else None


def ranking(directory: str | Path, metric: str, mode: Literal["max", "min"]) -> list[Path]:
    """Return the checkpoints that have a metric, the best first and of equals the latest."""
    values = {path: _metric(path, metric) for path in reversed(checkpoints_in(directory).values())}
    known = [path for path, value in values.items() if math.isfinite(value)]
    return sorted(known, key=lambda path: values[path], reverse=mode == "max")


def _metric(checkpoint: Path, metric: str) -> float:
    """Return a metric that was stored beside a checkpoint, NaN where there is none."""
    try:
        value = json.loads((checkpoint / METRICS).read_text()).get(metric)
    except FileNotFoundError:
        return math.nan
    return math.nan if value is None else float(value)


@contextlib.contextmanager
def written_whole(final: Path) -> Iterator[Path]:
    """Give an empty folder to write into, which then takes its place at once.

    If `final` exists, it is replaced. When an exception leaves, nothing has changed.

    Args:
        final: Where the folder is to be.
    """
    writing = final.with_name(f"{_WRITING}{final.name}")
    shutil.rmtree(writing, ignore_errors=True)  # of a process that was killed
    writing.mkdir(parents=True)
    try:
        yield writing
        _reach_the_disk(writing)
        replaced = final.with_name(f"{_REPLACED}{final.name}")
        if final.exists():
            final.rename(replaced)
        writing.rename(final)
        _sync(final.parent)
        shutil.rmtree(replaced, ignore_errors=True)
    except BaseException:
        shutil.rmtree(writing, ignore_errors=True)
        raise


def delete_whole(folder: Path) -> None:
    """Delete a folder so that nobody sees a part of it."""
    deleted = folder.with_name(f"{_DELETED}{folder.name}")
    shutil.rmtree(deleted, ignore_errors=True)
    folder.rename(deleted)
    shutil.rmtree(deleted, ignore_errors=True)


def _finish_replacements(directory: Path) -> None:
    """Put back a folder whose replacement was cut short between two renames."""
    for replaced in directory.glob(f"{_REPLACED}*"):
        final = directory / replaced.name.removeprefix(_REPLACED)
        if not final.exists():
            with contextlib.suppress(OSError):  # another process was faster, or may not write here
                replaced.rename(final)


def _reach_the_disk(folder: Path) -> None:
    """Wait until all files of a folder are on the disk."""
    for parent, _, files in os.walk(folder):
        for name in files:
            _sync(Path(parent, name))
        _sync(Path(parent))


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
