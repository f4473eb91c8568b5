"""The folder that a run leaves behind: settings, metrics, videos, checkpoints, policy."""

import contextlib
import datetime
import itertools
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from nnx_ppo.algorithms._versions import installed_versions
from nnx_ppo.algorithms.callbacks import mp4_video_fn
from nnx_ppo.algorithms.cli.errors import writing
from nnx_ppo.algorithms.loggers.json_lines import JsonLinesLogger

CONFIG = "config.json"
CHECKPOINTS = "checkpoints"
POLICY = "policy"
TEACHER = "teacher"
VIDEOS = "videos"

_MOST_NAMED = 20


class RunFolder:
    """Writes a run's configuration, metrics and videos; a `Logger`.

    Args:
        path: The folder; made if it is not there.
        config: The configuration as plain data.
        resume: Whether the run that is there goes on, under a new configuration.

    Raises:
        FileExistsError: The folder holds a run already.
        InputError: The folder cannot be written.
    """

    def __init__(self, path: Path, config: Mapping[str, Any], *, resume: bool = False) -> None:
        device = jax.devices()[0].device_kind
        record = {**config, "versions": installed_versions(), "device": device}
        text = json.dumps(record, indent=2) + "\n"
        write = _replace if resume else _create
        cure = "a run goes on in its own folder" if resume else "choose another --out"
        try:
            with writing(path, cure):
                write(path / CONFIG, text)
                self._metrics = JsonLinesLogger(path)
        except _Taken:
            raise FileExistsError(
                f"The folder {path} holds a run already; choose another with --out, go on with it "
                f"by --resume {path}, or remove it."
            ) from None
        self.path = path
        self._new = not resume

    def log(self, metrics: Mapping[str, Any], step: int) -> None:
        """Append a line to `metrics.jsonl`."""
        self._metrics.log(metrics, step)

    def video(self, data: Any) -> None:
        """Write a video to a file of its own."""
        mp4_video_fn(self.path / VIDEOS, data.fps)(data)

    def close(self) -> None:
        """Close the file; take back a new folder that no results ever reached."""
        self._metrics.close()
        if self._new and not self._has_results():
            self._metrics.path.unlink()
            (self.path / CONFIG).unlink()
            shutil.rmtree(self.path / TEACHER, ignore_errors=True)
            for folder in (self.path / CHECKPOINTS, self.path):
                with contextlib.suppress(OSError):  # a logger may have put something into it
                    folder.rmdir()

    def _has_results(self) -> bool:
        checkpoints = self.path / CHECKPOINTS
        return (
            self._metrics.path.stat().st_size > 0
            or (self.path / VIDEOS).exists()
            or (checkpoints.exists() and any(checkpoints.iterdir()))
        )


def new_run_folder(env: str, config: Mapping[str, Any]) -> RunFolder:
    """Return a folder of its own for a run that starts now, also beside others that do.

    Args:
        env: Name of the environment.
        config: As for `RunFolder`.
    """
    name = f"{env}-{datetime.datetime.now():%Y%m%d-%H%M%S}"
    for number in itertools.count(1):
        try:
            path = Path("runs") / (name if number == 1 else f"{name}-{number}")
            return RunFolder(path, config)
        except FileExistsError:
            continue
    raise AssertionError("unreachable")


def is_run(path: Path) -> bool:
    """Whether a folder is that of a run."""
    return (path / CONFIG).is_file()


def read_config(path: Path) -> dict[str, Any]:
    """Return what is in a run's `config.json`.

    Raises:
        FileNotFoundError: There is no such run; says which there are.
        ValueError: The file is damaged.
    """
    try:
        record = json.loads((path / CONFIG).read_text())
    except (FileNotFoundError, NotADirectoryError):
        lack = f"it has no {CONFIG}" if path.exists() else "it is not there"
        raise FileNotFoundError(f"{path} is no run folder: {lack}. {_runs_near(path)}") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"{path / CONFIG} is damaged: {error}.") from None
    return record if isinstance(record, dict) else {}


class _Taken(Exception):
    """A folder holds a run already."""


def _create(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        # Made here or not at all: of two runs that start together only one gets the folder.
        with path.open("x") as file:
            file.write(text)
    except FileExistsError:
        raise _Taken from None


def _replace(path: Path, text: str) -> None:
    draft = path.with_name(f".{path.name}")
    draft.write_text(text)
    os.replace(draft, path)


def _runs_near(path: Path) -> str:
    """Say which runs there are in a folder, beside it, or where runs go by default."""
    for place in (path, path.parent, Path("runs")):
        configs = sorted(
            place.glob(f"*/{CONFIG}"), key=lambda file: file.stat().st_mtime, reverse=True
        )
        if configs:
            names = [config.parent.name for config in configs[:_MOST_NAMED]]
            more = len(configs) - len(names)
            return f"Runs in {place}/: {', '.join(names)}{f' and {more} more' if more else ''}."
    return "No run is near; `nnxppo train ENV` makes one."
