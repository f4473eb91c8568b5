"""The W&B logger, offline."""

import dataclasses
import enum
import importlib.metadata
import io
import pathlib
import types
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import wandb
from PIL import Image

from nnx_ppo.core import Logger
from nnx_ppo.wandb import WandbLogger
from nnx_ppo.wandb._gif import encode_gif


class Level(enum.Flag):
    LOSSES = 1


def video_data(step: int, num_frames: int = 3) -> Any:
    frames = np.zeros((num_frames, 8, 12, 3), np.uint8)
    frames[1:, :, :6] = 255
    return types.SimpleNamespace(
        frames=frames, step=step, episode_reward=9.5, episode_length=num_frames
    )


@dataclasses.dataclass
class Spied:
    """What a finished run was told, and where its files are."""

    folder: pathlib.Path
    rows: list[dict[str, Any]]
    step_metrics: dict[str, Any]
    config: dict[str, Any]
    files: pathlib.Path


def spy(patch: pytest.MonkeyPatch) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Note what is logged and defined, and let it go on to W&B."""
    rows: list[dict[str, Any]] = []
    step_metrics: dict[str, Any] = {}
    log, define = wandb.Run.log, wandb.Run.define_metric

    def noted_log(run: wandb.Run, data: dict[str, Any], **options: Any) -> None:
        assert options == {}  # above all no `step`, which W&B would want to rise
        rows.append(data)
        log(run, data)

    def noted_define(run: wandb.Run, name: str, step_metric: Any = None) -> Any:
        step_metrics[name] = step_metric
        return define(run, name, step_metric)

    patch.setattr(wandb.Run, "log", noted_log)
    patch.setattr(wandb.Run, "define_metric", noted_define)
    return rows, step_metrics


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Spied]:
    """A finished run, offline."""
    folder = tmp_path_factory.mktemp("runs") / "new"
    config = {"seed": 17, "ppo": {"percentiles": (0, 50), "level": Level.LOSSES, "decay": None}}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WANDB_MODE", "offline")
        patch.setenv("WANDB_SILENT", "true")
        rows, step_metrics = spy(patch)
        logger = WandbLogger(str(folder), config)
        assert isinstance(logger, Logger)
        logger.log({"losses/actor/mean": np.float32(0.5), "total_steps": np.int64(100)}, 100)
        logger.video(video_data(step=100))
        logger.log({"losses/actor/mean": np.asarray([0.25]), "grads": np.arange(3)}, 200)
        logger.log({"losses/actor/mean": float("nan")}, 50)
        attached = WandbLogger.attach(key="second_video", fps=10)
        attached.video(video_data(step=300))
        attached.close()
        active = wandb.run
        assert active is not None
        found = Spied(folder, rows, step_metrics, dict(active.config), pathlib.Path(active.dir))
        logger.close()
        logger.close()
        assert wandb.run is None
        yield found


def test_all_files_are_in_the_run_dir(run: Spied) -> None:
    assert len(list(run.folder.glob("wandb/offline-run-*/run-*.wandb"))) == 1
    assert run.files.is_relative_to(run.folder)


def test_rows_carry_environment_steps_in_the_order_they_came(run: Spied) -> None:
    assert [row["total_steps"] for row in run.rows] == [100, 100, 200, 50, 300]


def test_metrics_are_drawn_over_environment_steps(run: Spied) -> None:
    assert run.step_metrics == {"total_steps": None, "*": "total_steps"}


def test_scalars_are_numbers_and_arrays_stay(run: Spied) -> None:
    values = [run.rows[index]["losses/actor/mean"] for index in (0, 2, 3)]
    assert values[:2] == [0.5, 0.25]
    assert np.isnan(values[2])
    assert {type(value) for value in values} == {float}
    assert run.rows[2]["grads"].tolist() == [0, 1, 2]


def test_config_is_plain(run: Spied) -> None:
    assert run.config["seed"] == 17
    assert run.config["ppo"] == {"percentiles": [0, 50], "level": "Level.LOSSES", "decay": None}


def test_videos_are_kept_under_their_key(run: Spied) -> None:
    assert set(run.rows[1]) == {"eval_video", "total_steps"}
    assert set(run.rows[4]) == {"second_video", "total_steps"}
    paths = sorted(run.files.glob("media/videos/*.gif"))
    assert [path.name.split("_video_")[0] for path in paths] == ["eval", "second"]
    with Image.open(paths[0]) as image:
        assert (image.format, image.size) == ("GIF", (12, 8))


def test_a_run_that_is_active_is_used_and_left_open(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wandb, "run", None)  # a disabled run stays the active one for ever
    with wandb.init(dir=tmp_path, mode="disabled") as run:
        logger = WandbLogger(str(tmp_path), {"seed": 1})
        logger.log({"a": 1.0}, 1)
        logger.close()
        assert wandb.run is run
        assert run.config["seed"] == 1


def test_attaching_needs_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wandb, "run", None)
    with pytest.raises(RuntimeError, match=r"No W&B run is active. Call wandb.init\(\)"):
        WandbLogger.attach()


def test_is_found_by_its_entry_point() -> None:
    (entry,) = importlib.metadata.entry_points(group="nnx_ppo.loggers", name="wandb")
    assert entry.load() is WandbLogger


def test_the_third_party_package_is_not_shadowed() -> None:
    assert "nnx_ppo" not in pathlib.Path(wandb.__file__).parts


class TestGif:
    def test_frames_come_back(self) -> None:
        gif = encode_gif(video_data(step=0, num_frames=4).frames, fps=20)
        with Image.open(gif) as image:
            assert (image.format, image.size) == ("GIF", (12, 8))
            assert image.info["duration"] == 50  # milliseconds
            assert np.asarray(image.convert("RGB")).max() == 0
            image.seek(1)
            frame = np.asarray(image.convert("RGB"))
            assert (frame[:, :6] == 255).all()
            assert (frame[:, 6:] == 0).all()

    @pytest.mark.parametrize(
        ("frames", "got"),
        [
            (np.zeros((3, 8, 12, 3)), r"float64 \(3, 8, 12, 3\)"),
            (np.zeros((8, 12, 3), np.uint8), r"uint8 \(8, 12, 3\)"),
            (np.zeros((3, 3, 8, 12), np.uint8), r"uint8 \(3, 3, 8, 12\)"),
            (np.zeros((0, 8, 12, 3), np.uint8), r"uint8 \(0, 8, 12, 3\)"),
        ],
    )
    def test_other_arrays_are_refused(self, frames: np.ndarray, got: str) -> None:
        with pytest.raises(ValueError, match=rf"\(num_frames, height, width, 3\).*got {got}"):
            encode_gif(frames, fps=20)

    def test_result_is_readable_from_its_start(self) -> None:
        gif = encode_gif(np.zeros((1, 2, 2, 3), np.uint8), fps=20)
        assert isinstance(gif, io.BytesIO)
        assert gif.read(3) == b"GIF"
