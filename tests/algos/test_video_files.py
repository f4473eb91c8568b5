"""Videos as files: every frame, in its own size, complete or not there."""

import subprocess

import imageio_ffmpeg
import numpy as np
import pytest

from nnx_ppo.algorithms import VideoData, video_files
from nnx_ppo.algorithms.callbacks import mp4_video_fn
from nnx_ppo.algorithms.rendering import frame_rate
from nnx_ppo.algorithms.video_files import write_mp4
from nnx_ppo.core.testing import Endless


def decoded(path, height, width):
    """The frames of a video, as the decoder gives them."""
    command = [imageio_ffmpeg.get_ffmpeg_exe(), "-loglevel", "error", "-i", path]
    command += ["-fps_mode", "passthrough", "-f", "rawvideo", "-pix_fmt", "rgb24", "-"]
    raw = subprocess.run(command, capture_output=True, check=True).stdout
    return np.frombuffer(raw, np.uint8).reshape(-1, height, width, 3)


def grey(levels, height=32, width=48):
    return np.stack([np.full((height, width, 3), level, np.uint8) for level in levels])


def test_every_frame_arrives_in_order_and_time(tmp_path):
    path = tmp_path / "new" / "steps.mp4"
    levels = [0, 60, 120, 180, 240]
    write_mp4(path, list(grey(levels)), fps=12.5)
    assert imageio_ffmpeg.count_frames_and_secs(path) == (5, 0.4)  # 5 / 12.5
    seen = decoded(path, 32, 48).mean((1, 2, 3))
    np.testing.assert_allclose(seen, levels, atol=3)  # compression
    assert [file.name for file in path.parent.iterdir()] == ["steps.mp4"]


def test_odd_sizes_are_filled_up_and_not_scaled(tmp_path):
    """33 x 47: left half black, right half white; the border stays where it is."""
    frames = grey([0, 0], 33, 47)
    frames[:, :, 24:] = 255
    write_mp4(tmp_path / "odd.mp4", frames)
    video = decoded(tmp_path / "odd.mp4", 34, 48)
    assert video.shape == (2, 34, 48, 3)
    assert video[:, :, :22].max() < 30 and video[:, :, 26:].min() > 225


def test_rates_that_are_no_decimal_fractions(tmp_path):
    write_mp4(tmp_path / "third.mp4", grey([9] * 3), fps=1 / 3)
    assert imageio_ffmpeg.count_frames_and_secs(tmp_path / "third.mp4") == (3, 9.0)


@pytest.mark.parametrize(
    ("frames", "text"),
    [
        (np.zeros((2, 4, 4, 3)), "float64.*255"),
        (np.zeros((4, 4, 3), np.uint8), r"got uint8 \(4, 4, 3\)"),
        (np.zeros((2, 4, 4, 4), np.uint8), r"got uint8 \(2, 4, 4, 4\)"),
        (np.zeros((0, 4, 4, 3), np.uint8), "at least one"),
    ],
)
def test_what_is_no_video_is_refused(tmp_path, frames, text):
    with pytest.raises(ValueError, match=f"frames: expected uint8 images.*{text}"):
        write_mp4(tmp_path / "x.mp4", frames)
    assert not list(tmp_path.iterdir())


def test_path_and_rate_are_checked(tmp_path):
    with pytest.raises(ValueError, match=r"x.gif' must end in '.mp4'"):
        write_mp4(tmp_path / "x.gif", grey([0]))
    with pytest.raises(ValueError, match="fps=0 must be a positive number"):
        write_mp4(tmp_path / "x.mp4", grey([0]), fps=0)


def test_a_failure_says_why_and_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "x.mp4"
    path.write_text("old")
    monkeypatch.setattr(video_files, "_CODEC", ["-c:v", "no_such_codec"])
    with pytest.raises(RuntimeError, match="1 frames of 48 x 32: .*no_such_codec"):
        write_mp4(path, grey([0]))
    assert [file.name for file in tmp_path.iterdir()] == ["x.mp4"]
    assert path.read_text() == "old"


def test_a_video_fn_names_files_by_step(tmp_path):
    video_fn = mp4_video_fn(tmp_path / "videos", fps=4)
    for step in (0, 1_500_000):
        video_fn(VideoData(grey([0, 255]), step, 1.0, 1))
    names = sorted(path.name for path in (tmp_path / "videos").iterdir())
    assert names == ["step_0000000000.mp4", "step_0001500000.mp4"]
    assert imageio_ffmpeg.count_frames_and_secs(tmp_path / "videos" / names[1]) == (2, 0.5)


def test_the_frame_rate_follows_the_step_of_the_simulation(monkeypatch):
    env = Endless()
    assert frame_rate(env) == 30.0
    monkeypatch.setattr(env, "dt", 0.02, raising=False)
    assert frame_rate(env) == 50.0
