"""`WandbLogger`: metrics and videos to Weights & Biases."""

import enum
import os
from collections.abc import Mapping
from typing import Any

import numpy as np
import wandb

from nnx_ppo.wandb._gif import encode_gif

STEP = "total_steps"
"""The metric that all others are drawn over."""


class WandbLogger:
    """Logs to a W&B run, drawn over environment steps.

    W&B counts its own step, one for each call, and drops what comes with a step that has passed:
    this logger never sets it. Environment steps are logged as the metric `total_steps`, which W&B
    is told to draw all others over. So videos and metrics may come in any order, and training
    that goes on from an older checkpoint is logged too.

    W&B's environment variables hold: `WANDB_PROJECT`, `WANDB_NAME`, and `WANDB_MODE=offline`,
    which needs no network. Where a run is active already it is used, and left open by `close`.

    Args:
        run_dir: Folder for W&B's files; made if it is missing.
        config: Settings of the run.

    Example:
        >>> logger = WandbLogger("runs/balance", {"seed": 17})  # doctest: +SKIP
        >>> logger.log({"losses/critic/mean": 0.5}, step=3840)  # doctest: +SKIP
        >>> logger.close()  # doctest: +SKIP
    """

    def __init__(self, run_dir: str, config: Mapping[str, Any]) -> None:
        os.makedirs(run_dir, exist_ok=True)
        self._owned = wandb.run is None
        run = wandb.init(dir=run_dir) if wandb.run is None else wandb.run
        run.config.update(_plain(config), allow_val_change=True)
        self._use(run)

    @classmethod
    def attach(cls, *, key: str = "eval_video", fps: int = 30) -> "WandbLogger":
        """Return a logger for the run that is active, which stays open when it is closed.

        Args:
            key: Name of the videos.
            fps: Frames of a video per second.

        Raises:
            RuntimeError: No run is active.
        """
        if wandb.run is None:
            raise RuntimeError(
                "No W&B run is active. Call wandb.init() before logging to it, or let "
                "WandbLogger(run_dir, config) start a run."
            )
        logger = cls.__new__(cls)
        logger._owned = False
        logger._use(wandb.run, key, fps)
        return logger

    def _use(self, run: wandb.Run, key: str = "eval_video", fps: int = 30) -> None:
        self._run, self._key, self._fps = run, key, fps
        run.define_metric(STEP)
        run.define_metric("*", step_metric=STEP)

    def log(self, metrics: Mapping[str, Any], step: int) -> None:
        """Record metrics at an environment step.

        Args:
            metrics: Scalars by name. W&B draws arrays as histograms.
            step: Environment steps taken so far.
        """
        self._run.log({**{name: _value(value) for name, value in metrics.items()}, STEP: step})

    def video(self, data: Any) -> None:
        """Record a rendered episode, as an animated GIF.

        Args:
            data: Has `frames`, `(num_frames, height, width, 3)` uint8, `step`, `episode_reward`
                and `episode_length`, like `nnx_ppo.algorithms.config.VideoData`.

        Raises:
            ValueError: `frames` has another shape or dtype.
        """
        caption = (
            f"step {data.step}: reward {data.episode_reward:.4g} in {data.episode_length} steps"
        )
        gif = encode_gif(np.asarray(data.frames), self._fps)
        video = wandb.Video(gif, caption=caption, format="gif")
        self._run.log({self._key: video, STEP: data.step})

    def close(self) -> None:
        """Write out what is left, and end the run if this logger started it."""
        if self._owned:
            self._run.finish()
            self._owned = False


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
