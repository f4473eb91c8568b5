"""`WandbLogger`: metrics, videos and checkpoints to Weights & Biases."""

import enum
import os
import re
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import wandb
from wandb.errors import AuthenticationError, CommError

from nnx_ppo.wandb._mp4 import encode_mp4
from nnx_ppo.wandb._points import STEP, Points, RunFile, points_of

_STEP_FOLDER = re.compile(r"step_(\d+)")


class WandbLogger:
    """Logs to a W&B run, drawn over environment steps.

    Points never go backwards: all loggers of a run share one record of its last step, and a point
    before that is left out, with a warning. What W&B raises becomes a warning too, the first time;
    training goes on.

    The run folder remembers the W&B run in `wandb_run.json`. A logger that is made for the folder
    again, by a training that is resumed, goes on with the same run, after the last point that is
    known to be there: by the server, or because the last training ended in order. Offline, after
    one that was killed, nothing is known, and the points since the checkpoint are logged again.

    W&B's environment variables hold: `WANDB_PROJECT`, `WANDB_NAME`, and `WANDB_MODE=offline`,
    which needs no network. Where the server cannot be reached at the start, the run is kept
    offline, with a warning. Where a run is active already it is used, and left open by `close`.

    Args:
        run_dir: The run folder, for W&B's files too; made if it is missing.
        config: Settings of the run.

    Raises:
        wandb.errors.UsageError: W&B has no key to log in with; it says how to get one.

    Example:
        >>> logger = WandbLogger("runs/balance", {"seed": 17})  # doctest: +SKIP
        >>> logger.log({"losses/critic/mean": 0.5}, step=3840)  # doctest: +SKIP
        >>> logger.close()  # doctest: +SKIP
    """

    def __init__(self, run_dir: str, config: Mapping[str, Any]) -> None:
        file = RunFile(run_dir)
        before = file.read()
        self._owned = wandb.run is None
        run = _started_run(run_dir, before) if wandb.run is None else wandb.run
        goes_on = before.get("id") == run.id
        self._use(run, last=before[STEP] if goes_on else -1)
        if goes_on and not before.get("ended"):
            warnings.warn(
                f"The last training of the W&B run {run.id} was cut off. Points that W&B's client "
                f"had not sent or written by then are missing if they are older than the "
                "checkpoint; later ones are logged again.",
                RuntimeWarning,
                stacklevel=2,
            )
        self._file: RunFile | None = file
        file.write(run, self._points.last, ended=False)
        self._points.attempt(run.config.update, _plain(config), allow_val_change=True)

    @classmethod
    def attach(cls, *, key: str = "eval_video", fps: int | float | None = None) -> "WandbLogger":
        """Return a logger for the run that is active, which stays open when it is closed.

        Args:
            key: Name of the videos.
            fps: Frames of a video per second; as each video says (`VideoData.fps`) if None.

        Raises:
            RuntimeError: No run is active.
        """
        if wandb.run is None:
            raise RuntimeError(
                "No W&B run is active. Call wandb.init() before logging to it, or let "
                "WandbLogger(run_dir, config) start a run."
            )
        logger = cls.__new__(cls)
        logger._owned, logger._file = False, None
        logger._use(wandb.run, key, fps)
        return logger

    def _use(
        self,
        run: wandb.Run,
        key: str = "eval_video",
        fps: int | float | None = None,
        last: int = -1,
    ) -> None:
        self._points: Points = points_of(run, last)
        self._key, self._fps = key, fps

    def log(self, metrics: Mapping[str, Any], step: int) -> None:
        """Record metrics at an environment step.

        Args:
            metrics: Scalars by name; W&B draws long arrays as histograms.
            step: Environment steps taken so far.
        """
        self._points.log({name: _value(value) for name, value in metrics.items()}, step)

    def video(self, data: Any) -> None:
        """Record a rendered episode, as mp4.

        Args:
            data: Has `frames`, `(num_frames, height, width, 3)` uint8, `step`, `episode_reward`,
                `episode_length` and `fps`, like `nnx_ppo.algorithms.config.VideoData`; 30 frames
                per second without `fps`.

        Raises:
            ValueError: `frames` has another shape or dtype.
        """
        caption = (
            f"step {data.step}: reward {data.episode_reward:.4g} in {data.episode_length} steps"
        )
        fps = getattr(data, "fps", 30.0) if self._fps is None else self._fps
        mp4 = encode_mp4(np.asarray(data.frames), fps)
        video = wandb.Video(mp4, caption=caption, format="mp4")
        self._points.log({self._key: video}, data.step)

    def checkpoint(
        self, folder: str | os.PathLike[str], aliases: Sequence[str] = ("latest",)
    ) -> None:
        """Upload a checkpoint as an artifact of type `checkpoint`.

        W&B copies the files before it uploads them in the background, so the folder may be
        deleted afterwards.

        Args:
            folder: A complete checkpoint, `step_XXXXXXXXXX`.
            aliases: Names of this version of the artifact, besides `step-N`.

        Raises:
            FileNotFoundError: There is no such folder.
            ValueError: The folder has another name.
        """
        folder = Path(folder)
        if not folder.is_dir():
            raise FileNotFoundError(f"folder={str(folder)!r}: there is no such checkpoint.")
        match = _STEP_FOLDER.fullmatch(folder.name)
        if match is None:
            raise ValueError(f"folder={str(folder)!r} should be called step_XXXXXXXXXX.")
        self._points.attempt(self._upload, folder, int(match[1]), aliases)

    def _upload(self, folder: Path, step: int, aliases: Sequence[str]) -> None:
        run = self._points.run
        artifact = wandb.Artifact(f"checkpoint-{run.id}", "checkpoint", metadata={"step": step})
        artifact.add_dir(str(folder))
        run.log_artifact(artifact, aliases=[*aliases, f"step-{step}"])

    def close(self) -> None:
        """Write out what is left, and end the run if this logger started it."""
        run, ended = self._points.run, True
        if self._owned:
            self._owned = False
            ended = self._points.attempt(run.finish)
        if self._file is not None and ended:
            self._file.write(run, self._points.last, ended=True)
        self._file = None


def _started_run(run_dir: str, before: Mapping[str, Any]) -> wandb.Run:
    """Start a run, or go on with that of the folder; offline if the server cannot be reached."""
    # Absolute: the process that writes keeps the working directory it was started in.
    options: dict[str, Any] = {"dir": os.path.abspath(run_dir)}
    if before:
        options |= {name: before[name] or None for name in ("id", "project", "entity")}
        options["resume"] = "allow"
    try:
        return wandb.init(**options)
    except AuthenticationError:
        raise
    except CommError as error:
        warnings.warn(
            f"W&B cannot be reached ({error}). The run is kept offline in {run_dir}; upload it "
            "with `wandb sync`.",
            RuntimeWarning,
            stacklevel=3,
        )
        return wandb.init(**options, mode="offline")


def _value(value: Any) -> Any:
    """Return a scalar as a Python number, and anything else as an array."""
    array = np.asarray(value)
    return array.item() if array.size == 1 else array


def _plain(value: Any) -> Any:
    """Return settings as what W&B can store: containers, numbers and text."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if value is None or (isinstance(value, bool | int | float | str) and not _is_enum(value)):
        return value
    return str(value)


def _is_enum(value: Any) -> bool:
    return isinstance(value, enum.Enum)
