"""Folders of steps: complete or absent, whatever ends the process that writes them."""

import contextlib
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from nnx_ppo.algorithms._disk import reach_the_disk, sync

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
    found: dict[int, Path] = {}
    for path in sorted(directory.iterdir()):  # replaced ones first, and only where nothing follows
        match = _STEP.fullmatch(path.name.removeprefix(_REPLACED))
        if match and (path / METADATA).is_file():
            found[int(match[1])] = path
    return {step: found[step] for step in sorted(found)}


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
        metric: Name of the metric; its value at the checkpoint's own step counts.
        mode: Whether higher or lower is better. Of equals the later one is returned.
    """
    ranked = ranking(directory, metric, mode)
    return ranked[0] if ranked else None


def ranking(directory: str | Path, metric: str, mode: Literal["max", "min"]) -> list[Path]:
    """Return the checkpoints that have a metric, the best first and of equals the latest.

    Raises:
        ValueError: `mode` is neither `"max"` nor `"min"`.
    """
    if mode not in ("max", "min"):
        raise ValueError(f"mode={mode!r} must be 'max' or 'min'.")
    values: dict[Path, float] = {}
    for path in reversed(checkpoints_in(directory).values()):
        value = metrics_of(path).get(metric)
        if isinstance(value, int | float):
            values[path] = value
    return sorted(values, key=lambda path: values[path], reverse=mode == "max")


def metrics_of(checkpoint: Path) -> dict[str, Any]:
    """Return the metrics that were stored beside a checkpoint, as far as they can be read."""
    try:
        found = json.loads((checkpoint / METRICS).read_text())
    except (FileNotFoundError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


@contextlib.contextmanager
def written_whole(final: Path) -> Iterator[Path]:
    """Give an empty folder to write into, which then takes its place at once.

    If `final` exists, it is replaced. When an exception leaves, nothing has changed.

    Args:
        final: Where the folder is to be.
    """
    clear_leftovers(final.parent, final.name)
    writing = final.with_name(f"{_WRITING}{final.name}")
    replaced = final.with_name(f"{_REPLACED}{final.name}")
    writing.mkdir(parents=True)
    try:
        yield writing
        reach_the_disk(writing)
        if final.exists():
            final.rename(replaced)
        try:
            writing.rename(final)
        except BaseException:
            if replaced.exists():
                replaced.rename(final)
            raise
    except BaseException:
        shutil.rmtree(writing, ignore_errors=True)
        raise
    sync(final.parent)
    if replaced.exists():
        delete_whole(replaced)


def clear_leftovers(directory: Path, name: str = "*") -> None:
    """Remove what killed processes left behind, and put back what they were about to replace.

    Only who writes to the directory may do so.

    Args:
        directory: Where to look.
        name: The folder to look for; all if not given.
    """
    for replaced in directory.glob(f"{_REPLACED}{name}"):
        final = directory / replaced.name.removeprefix(_REPLACED)
        if final.exists():
            delete_whole(replaced)
        else:
            replaced.rename(final)
    for prefix in (_WRITING, _DELETED):
        for path in directory.glob(f"{prefix}{name}"):
            shutil.rmtree(path, ignore_errors=True)


def delete_whole(folder: Path) -> None:
    """Delete a folder so that nobody sees a part of it."""
    deleted = folder.with_name(f"{_DELETED}{folder.name.removeprefix(_REPLACED)}")
    shutil.rmtree(deleted, ignore_errors=True)
    folder.rename(deleted)
    shutil.rmtree(deleted, ignore_errors=True)
