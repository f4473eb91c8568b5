"""Encodes frames as H.264 in an mp4 file, which browsers play."""

import io
import subprocess
import tempfile
from pathlib import Path

import imageio_ffmpeg
import numpy as np

_CODEC = ("-c:v", "libx264", "-pix_fmt", "yuv420p", "-movflags", "+faststart")


def encode_mp4(frames: np.ndarray, fps: int | float) -> io.BytesIO:
    """Return frames as an mp4 file.

    Args:
        frames: `(num_frames, height, width, 3)`, uint8, at least one. The codec needs even sizes:
            an odd one gets its last row or column twice.
        fps: Frames per second.

    Raises:
        ValueError: `frames` has another shape or dtype.
        RuntimeError: The encoder failed; shows what it said.
    """
    if frames.ndim != 4 or frames.shape[-1] != 3 or not frames.size or frames.dtype != np.uint8:
        raise ValueError(
            "frames: expected a uint8 array (num_frames, height, width, 3) with at least one "
            f"frame, got {frames.dtype} {frames.shape}."
        )
    _, height, width, _ = frames.shape
    pixels = np.pad(frames, ((0, 0), (0, height % 2), (0, width % 2), (0, 0)), mode="edge")
    size = f"{pixels.shape[2]}x{pixels.shape[1]}"
    raw = ("-f", "rawvideo", "-pix_fmt", "rgb24", "-video_size", size, "-framerate", str(fps))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "video.mp4"  # a pipe would not do: the header is written last
        done = subprocess.run(
            [imageio_ffmpeg.get_ffmpeg_exe(), "-loglevel", "error", *raw, "-i", "-", *_CODEC, path],
            input=pixels.tobytes(),
            capture_output=True,
            check=False,
            start_new_session=True,  # Ctrl-C is for the training
        )
        if done.returncode:
            raise RuntimeError(f"ffmpeg failed: {done.stderr.decode(errors='replace').strip()}")
        return io.BytesIO(path.read_bytes())
