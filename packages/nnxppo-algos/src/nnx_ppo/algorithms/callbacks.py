"""Ready-made callbacks for training."""

from collections.abc import Callable
from typing import Any

from nnx_ppo.algorithms.config import VideoData
from nnx_ppo.algorithms.discovery import logger_factory

__all__ = ["wandb_video_fn"]


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
