"""`TensorBoardLogger`: metrics and videos for TensorBoard."""

import json
import os
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from nnx_ppo.algorithms._optional import optional_module
from nnx_ppo.algorithms.loggers._gif import encode_gif


class TensorBoardLogger:
    """Writes event files into the run folder: `tensorboard --logdir runs` shows all runs.

    Metrics become scalars, arrays become histograms, videos animated images, and the settings a
    text. Every logger writes a file of its own, so earlier ones stay as they are. In a folder that
    has some already, the first point also tells TensorBoard to hide what they hold from its step
    on, since those steps are taken anew.

    Args:
        run_dir: The run folder; made if it is missing.
        config: Settings of the run, as plain data.
        fps: Frames of a video per second; as each video says (`VideoData.fps`) if None.

    Raises:
        ModuleNotFoundError: The extra `nnxppo-algos[tensorboard]` is not installed.

    Example:
        >>> logger = TensorBoardLogger("runs/balance", {"seed": 17})  # doctest: +SKIP
        >>> logger.log({"losses/critic/mean": 0.5}, step=3840)  # doctest: +SKIP
        >>> logger.close()  # doctest: +SKIP
    """

    def __init__(
        self,
        run_dir: str | os.PathLike[str],
        config: Mapping[str, Any] | None = None,
        *,
        fps: float | None = None,
    ) -> None:
        self._tensorboard = optional_module("tensorboardX", "tensorboard", "The TensorBoard logger")
        self._images = optional_module("PIL.Image", "tensorboard", "The TensorBoard logger")
        self._proto = optional_module(
            "tensorboardX.proto.summary_pb2", "tensorboard", "The TensorBoard logger"
        )
        self._folder, self._config, self._fps = Path(run_dir), config, fps
        self._folder.mkdir(parents=True, exist_ok=True)
        self._open_writer: Any = None

    def log(self, metrics: Mapping[str, Any], step: int) -> None:
        """Record metrics at an environment step.

        Args:
            metrics: Numbers or arrays by name.
            step: Environment steps taken so far.
        """
        writer = self._writer(step)
        for name, value in metrics.items():
            array = np.asarray(value)
            if array.size == 1:
                writer.add_scalar(name, array.item(), step)
            else:
                writer.add_histogram(name, array, step)

    def video(self, data: Any) -> None:
        """Record a rendered episode, under the images.

        Args:
            data: Has `frames`, `(num_frames, height, width, 3)` uint8, `step` and `fps`, like
                `nnx_ppo.algorithms.config.VideoData`; 30 frames per second without `fps`.

        Raises:
            ValueError: `frames` has another shape or dtype.
        """
        frames = np.asarray(data.frames)
        fps = getattr(data, "fps", 30.0) if self._fps is None else self._fps
        gif = encode_gif(self._images, frames, fps)
        # tensorboardX encodes videos itself, but only with moviepy.
        summary = self._proto.Summary
        image = summary.Image(
            height=frames.shape[1], width=frames.shape[2], colorspace=3, encoded_image_string=gif
        )
        values = summary(value=[summary.Value(tag="eval_video", image=image)])
        self._writer(data.step).file_writer.add_summary(values, data.step)

    def close(self) -> None:
        """Write out what is left."""
        if self._open_writer is not None:
            self._open_writer.close()
            self._open_writer = None

    def _writer(self, step: int) -> Any:
        """Return the writer, opened at the first point: only then it is known what to hide."""
        if self._open_writer is None:
            earlier = any(self._folder.glob("events.out.tfevents.*"))
            self._open_writer = self._tensorboard.SummaryWriter(
                str(self._folder),
                purge_step=step if earlier else None,
                flush_secs=30,
                # A file name has only the second otherwise, and opening one empties it.
                filename_suffix=f".{uuid.uuid4().hex}",
            )
            if self._config is not None:
                text = json.dumps(self._config, indent=2, default=str)
                self._open_writer.add_text("config", f"```json\n{text}\n```", step)
        return self._open_writer
