"""From training on MuJoCo to a file that shows it."""

import subprocess

import imageio_ffmpeg
import numpy as np
import pytest
from flax import nnx

from nnx_ppo.algorithms import EvalConfig, PPOConfig, TrainConfig, VideoConfig, train_ppo
from nnx_ppo.algorithms.callbacks import mp4_video_fn
from nnx_ppo.algorithms.rendering import frame_rate
from nnx_ppo.mujoco import load
from nnx_ppo.networks import make_mlp_actor_critic

pytestmark = pytest.mark.physics


def test_an_episode_on_cartpole_becomes_a_video(tmp_path):
    env = load("CartpoleBalance")
    network = make_mlp_actor_critic(env.observation_size, env.action_size, [8], [8], nnx.Rngs(0))
    config = TrainConfig(
        ppo=PPOConfig(n_envs=1, rollout_length=1, n_minibatches=1, total_steps=0),
        eval=EvalConfig(enabled=False),
        video=VideoConfig(
            enabled=True, episode_length=9, render_kwargs={"height": 63, "width": 85}
        ),
    )
    seen = []
    write = mp4_video_fn(tmp_path, frame_rate(env))
    train_ppo(env, network, config, video_fn=lambda data: (seen.append(data), write(data))[1])

    (path,) = tmp_path.iterdir()
    assert path.name == "step_0000000000.mp4"
    assert imageio_ffmpeg.count_frames_and_secs(path) == (10, 0.1)  # 9 steps of 10 ms, 10 states
    command = [imageio_ffmpeg.get_ffmpeg_exe(), "-loglevel", "error", "-i", path, "-f", "rawvideo"]
    raw = subprocess.run([*command, "-pix_fmt", "rgb24", "-"], capture_output=True, check=True)
    video = np.frombuffer(raw.stdout, np.uint8).reshape(10, 64, 86, 3)  # even sizes
    assert all(frame.std() > 10 for frame in video)  # a picture, not one colour
    np.testing.assert_allclose(
        video[:, :63, :85].mean((1, 2, 3)), seen[0].frames.mean((1, 2, 3)), atol=3
    )
    assert (seen[0].frames[0] != seen[0].frames[-1]).any()  # something moves
