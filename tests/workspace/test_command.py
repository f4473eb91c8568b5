"""From the command line to a file that shows what was learned, on MuJoCo."""

import subprocess

import imageio_ffmpeg
import numpy as np
import pytest

from nnx_ppo.algorithms.cli import main

pytestmark = pytest.mark.physics


def test_train_on_cartpole_and_render_the_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    small = ["--ppo.n-envs=2", "--ppo.rollout-length=5", "--ppo.n-minibatches=1"]
    small += ["--ppo.n-epochs=1", "--ppo.total-steps=20", "--eval.no-enabled"]
    small += ["--network.actor-hidden=8", "--network.critic-hidden=8"]
    assert main(["train", "CartpoleBalance", *small, "--overrides", "impl", "jax"]) == 0
    (run,) = (tmp_path / "runs").iterdir()
    assert f"run folder: runs/{run.name}" in capsys.readouterr().out

    assert main(["render", str(run), "--steps=11", "--height=48", "--width=64"]) == 0
    path = run / "videos" / "step_0000000020_seed_0.mp4"
    frames, seconds = imageio_ffmpeg.count_frames_and_secs(path)
    assert frames == 12 and seconds == pytest.approx(0.12)  # 11 steps of 10 ms, 12 states
    read = [imageio_ffmpeg.get_ffmpeg_exe(), "-loglevel", "error", "-i", path, "-f", "rawvideo"]
    raw = subprocess.run([*read, "-pix_fmt", "rgb24", "-"], capture_output=True, check=True).stdout
    video = np.frombuffer(raw, np.uint8).reshape(12, 48, 64, 3)
    assert all(frame.std() > 10 for frame in video)  # a picture, not one colour
    assert 20 < video.mean() < 235
