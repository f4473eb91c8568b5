"""Ready-made callbacks for training."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nnx_ppo.algorithms.config import VideoData
from nnx_ppo.algorithms.discovery import logger_factory
from nnx_ppo.algorithms.video_files import write_mp4

__all__ = ["mp4_video_fn", "wandb_video_fn"]


def mp4_video_fn(
    folder: str | os.PathLike[str], fps: float | int = 30
) -> Callable[[VideoData], None]:
    """Return a `video_fn` for `train_ppo` that writes each video to a file of its own.

    Args:
        folder: Where to write `step_XXXXXXXXXX.mp4`, ten digits of the environment step, so that
            names sort by step. Made if missing.
        fps: Frames per second; `1 / env.dt` plays at the speed of the simulation.

    Example:
        >>> import tempfile
        >>> import numpy as np
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     video_fn = mp4_video_fn(folder)
        ...     video_fn(VideoData(np.zeros((1, 4, 4, 3), np.uint8), 512, 0.0, 1))
        ...     os.listdir(folder)
        ['step_0000000512.mp4']
    """

    def write_video(data: VideoData) -> None:
        write_mp4(Path(folder) / f"step_{data.step:010d}.mp4", data.frames, fps)

    return write_video


def wandb_video_fn(key: str = "eval_video", fps: int = 30) -> Callable[[VideoData], None]:
    """Return a `video_fn` for `train_ppo` that sends videos to the active W&B run.

    Args:
        key: Name of the videos in W&B.
        fps: Frames per second.

    Raises:
        ValueError: The package nnxppo-wandb is not installed; names the extra that brings it.
    """
    logger: Any = logger_factory("wandb")

    def log_video(data: VideoData) -> None:
        logger.attach(key=key, fps=fps).video(data)

    return log_video
