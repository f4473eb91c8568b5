"""Training that reports to W&B, offline; what the client wrote is read back."""

from pathlib import Path

import numpy as np
import pytest
from flax import nnx

from nnx_ppo.algorithms import PPOConfig, TrainConfig, VideoConfig, train_ppo
from nnx_ppo.algorithms._plain import to_plain
from nnx_ppo.algorithms.callbacks import wandb_video_fn
from nnx_ppo.algorithms.config import EvalConfig
from nnx_ppo.core.testing import FollowTarget
from nnx_ppo.networks import make_mlp_actor_critic
from nnx_ppo.wandb import WandbLogger, wandb_log_fn

from ..wandb.offline import read_offline_runs

CONFIG = TrainConfig(
    PPOConfig(n_envs=4, rollout_length=5, total_steps=60, n_epochs=1, n_minibatches=1),
    EvalConfig(every_steps=40, n_envs=2, max_episode_length=5),
    VideoConfig(enabled=True, every_steps=1000, episode_length=2),
)


class Drawn(FollowTarget):
    """Draws a grey picture for each state."""

    def render(self, trajectory):
        return [np.full((16, 16, 3), 128, np.uint8) for _ in trajectory]


def test_an_offline_run_reads_back_with_metrics_rising_steps_one_video_and_the_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.chdir(tmp_path)
    network = make_mlp_actor_critic(1, 1, [8], [8], nnx.Rngs(0))
    config = to_plain(CONFIG)

    logger = WandbLogger("run", config)
    log_fn, videos = wandb_log_fn(), wandb_video_fn(fps=10)

    def first_video(data):
        if data.step == 0:
            videos(data)

    train_ppo(Drawn(5), network, CONFIG, log_fn=log_fn, video_fn=first_video)
    logger.close()
    # The run is resumed from step 20 of its 60: what it logs anew is in W&B already.
    resumed = WandbLogger("run", config)
    with pytest.warns(RuntimeWarning, match="has points up to step 60 already"):
        for step in (20, 40, 60, 80):
            log_fn({"losses/critic/mean": 0.5}, step)
    resumed.close()

    first, second = read_offline_runs(tmp_path / "run")
    points = [*first.points, *second.points]
    steps = [point["total_steps"] for point in points]
    assert steps == sorted(steps) == [0, 0, 20, 40, 60, 60, 80]
    video, evaluated, learned = points[0], points[1], points[2]
    assert sum("eval_video" in point for point in points) == 1
    assert video["eval_video"]["_type"] == "video-file"
    (path,) = (tmp_path / "run").glob("wandb/offline-run-*/files/media/videos/*.mp4")
    assert path.stat().st_size == video["eval_video"]["size"]
    assert {"eval/episode_reward/mean", "eval/lifespan/p50"} <= set(evaluated)
    assert {"losses/actor/mean", "losses/critic/mean"} <= set(learned)
    assert all(np.isfinite(value) for point in points[1:] for value in point.values())
    assert ["eval/episode_reward/mean" in point for point in points[1:5]] == [
        True, False, True, True
    ]  # fmt: skip
    assert first.step_metrics["*"] == "total_steps"
    assert first.config == config and config["ppo"]["n_envs"] == 4
    assert (first.run_id, first.resumes, second.resumes) == (second.run_id, False, True)
