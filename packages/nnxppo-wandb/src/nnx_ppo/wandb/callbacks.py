"""Ready-made callbacks for training, for the W&B run that is active when they are called."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from nnx_ppo.wandb.logger import WandbLogger


def wandb_log_fn() -> Callable[[Mapping[str, Any], int], None]:
    """Return a `log_fn` for `train_ppo` that sends metrics to the active W&B run.

    Example:
        >>> import wandb
        >>> with wandb.init(project="balance"):  # doctest: +SKIP
        ...     train_ppo(env, network, log_fn=wandb_log_fn(), video_fn=wandb_video_fn())
    """

    def log_metrics(metrics: Mapping[str, Any], step: int) -> None:
        WandbLogger.attach().log(metrics, step)

    return log_metrics


def wandb_video_fn(key: str = "eval_video", fps: int | float = 30) -> Callable[[Any], None]:
    """Return a `video_fn` for `train_ppo` that sends videos to the active W&B run.

    Args:
        key: Name of the videos in W&B.
        fps: Frames per second.
    """

    def log_video(data: Any) -> None:
        WandbLogger.attach(key=key, fps=fps).video(data)

    return log_video


def wandb_checkpoint_fn(
    checkpoint_fn: Callable[[Any, int], None], directory: str | os.PathLike[str]
) -> "CheckpointUploads":
    """Return a `checkpoint_fn` that saves checkpoints and uploads them to the active W&B run.

    Each becomes a version of the artifact `checkpoint-<run id>`, of type `checkpoint`, with the
    alias `step-N`; the newest has the alias `latest`. A checkpoint that is written in the
    background is uploaded with one of the next, or at the end of training.

    Args:
        checkpoint_fn: Saves, such as `make_checkpoint_fn(directory, config)`.
        directory: The directory that it saves `step_XXXXXXXXXX` in.

    Example:
        >>> save = wandb_checkpoint_fn(make_checkpoint_fn("ckpt"), "ckpt")  # doctest: +SKIP
        >>> train_ppo(env, network, checkpoint_fn=save)  # doctest: +SKIP
    """
    return CheckpointUploads(checkpoint_fn, Path(directory))


class CheckpointUploads:
    """What `wandb_checkpoint_fn` returns: saves by another callback, and uploads.

    Args:
        checkpoint_fn: Saves; if it has `observe` or `wait`, they are called as well.
        directory: The directory that it saves in.
    """

    def __init__(self, checkpoint_fn: Callable[[Any, int], None], directory: Path) -> None:
        self._save, self._directory = checkpoint_fn, directory
        self._logger: WandbLogger | None = None
        self._missing: list[Path] = []

    def __call__(self, training_state: Any, step: int) -> None:
        """Save a checkpoint, and upload it and those before it that have become complete.

        Raises:
            RuntimeError: No run is active at the first checkpoint.
        """
        if self._logger is None:  # kept: a run that ends before the training does must not end it
            self._logger = WandbLogger.attach()
        self._save(training_state, step)
        self._missing.append(self._directory / f"step_{step:010d}")
        self._upload(self._logger)

    def observe(self, metrics: Mapping[str, Any], step: int) -> None:
        """Pass metrics on, which may decide what is kept."""
        observe = getattr(self._save, "observe", None)
        if observe is not None:
            observe(metrics, step)

    def wait(self) -> None:
        """Wait until all checkpoints are written, and upload those that are missing."""
        wait = getattr(self._save, "wait", None)
        if wait is not None:
            wait()
        if self._logger is not None:
            self._upload(self._logger)

    def _upload(self, logger: WandbLogger) -> None:
        complete = [folder for folder in self._missing if folder.is_dir()]
        self._missing = [folder for folder in self._missing if folder not in complete]
        for folder in complete:
            logger.checkpoint(folder)
