"""Writes images as video files."""

import os
import subprocess
import tempfile
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path

import imageio_ffmpeg
import numpy as np

_CODEC = ["-c:v", "libx264", "-pix_fmt", "yuv420p", "-movflags", "+faststart"]


def write_mp4(
    path: str | os.PathLike[str], frames: np.ndarray | Sequence[np.ndarray], fps: float | int = 30
) -> None:
    """Write images to an mp4 file, which is complete or not there.

    The video is H.264 with 4:2:0 chroma, which every player and browser shows. That format needs
    even sizes: an odd one gets its last row or column twice. Nothing is scaled.

    Args:
        path: The file, ending in `.mp4`; replaced if it is there. Its folder is made if missing.
        frames: Images `(time, height, width, 3)`, uint8, at least one. Each becomes one frame.
        fps: Frames per second.

    Raises:
        ValueError: `path` has another ending, `frames` another shape or dtype, or `fps` is no
            positive number.
        RuntimeError: The encoder failed; shows what it said.

    Example:
        >>> frames = np.zeros((2, 4, 6, 3), np.uint8)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     write_mp4(Path(folder, "black.mp4"), frames, fps=10)
        ...     os.listdir(folder)
        ['black.mp4']
    """
    path = Path(path)
    if path.suffix != ".mp4":
        raise ValueError(f"path={str(path)!r} must end in '.mp4'.")
    if not 0 < fps < float("inf"):
        raise ValueError(f"fps={fps!r} must be a positive number of frames per second.")
    pixels = _even_sized(_checked(frames))
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".") as scratch:
        part = Path(scratch) / path.name
        _encode(part, pixels, fps)
        os.replace(part, path)


def _checked(frames: np.ndarray | Sequence[np.ndarray]) -> np.ndarray:
    """Return the images as one array."""
    pixels = np.asarray(frames)
    if pixels.dtype != np.uint8 or pixels.ndim != 4 or pixels.shape[-1] != 3 or not pixels.size:
        raise ValueError(
            "frames: expected uint8 images (time, height, width, 3), at least one, got "
            f"{pixels.dtype} {pixels.shape}. Brightness from 0 to 1 becomes uint8 by "
            "(255 * frames).astype(np.uint8)."
        )
    return pixels


def _even_sized(pixels: np.ndarray) -> np.ndarray:
    """Return images whose height and width are even."""
    _, height, width, _ = pixels.shape
    return np.pad(pixels, ((0, 0), (0, height % 2), (0, width % 2), (0, 0)), mode="edge")


def _encode(path: Path, pixels: np.ndarray, fps: float | int) -> None:
    """Run the encoder; it gets the raw pixels on its standard input."""
    _, height, width, _ = pixels.shape
    raw = ["-f", "rawvideo", "-pix_fmt", "rgb24", "-video_size", f"{width}x{height}"]
    rate = ["-framerate", str(Fraction(float(fps)).limit_denominator(1_000_000))]
    command = ["-loglevel", "error", *raw, *rate, "-i", "-", *_CODEC, str(path)]
    # Imageio's own writer forks, which JAX's threads do not bear. In a session of its own the
    # encoder does not get the Ctrl-C that asks training to stop.
    done = subprocess.run(
        [imageio_ffmpeg.get_ffmpeg_exe(), *command],
        input=np.ascontiguousarray(pixels).reshape(-1).data,
        capture_output=True,
        start_new_session=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(
            f"The encoder failed with exit code {done.returncode} on {len(pixels)} frames of "
            f"{width} x {height}: {done.stderr.decode(errors='replace').strip()}"
        )
