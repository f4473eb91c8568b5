"""Encodes frames as an animated GIF, the one kind of video that TensorBoard shows."""

import io
from typing import Any

import numpy as np


def encode_gif(image_module: Any, frames: np.ndarray, fps: float) -> bytes:
    """Return frames as a GIF that plays for ever.

    Args:
        image_module: `PIL.Image`.
        frames: `(num_frames, height, width, 3)`, uint8, at least one.
        fps: Frames per second; GIF rounds the time of a frame to hundredths of a second.

    Raises:
        ValueError: `frames` has another shape or dtype.
    """
    if frames.ndim != 4 or frames.shape[-1] != 3 or not len(frames) or frames.dtype != np.uint8:
        raise ValueError(
            "frames: expected a uint8 array (num_frames, height, width, 3) with at least one "
            f"frame, got {frames.dtype} {frames.shape}."
        )
    first, *rest = (image_module.fromarray(frame) for frame in frames)
    buffer = io.BytesIO()
    first.save(buffer, "GIF", save_all=True, append_images=rest, duration=round(1000 / fps), loop=0)
    return buffer.getvalue()
