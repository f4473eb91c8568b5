"""The W&B logger, offline: the real client writes, and its files are read back."""

import enum
import importlib.metadata
import json
import pathlib
import subprocess
import time
import types
import warnings
from collections.abc import Iterator
from typing import Any

import imageio_ffmpeg
import numpy as np
import pytest
import wandb
from wandb.errors import CommError

from nnx_ppo.core import Logger
from nnx_ppo.wandb import WandbLogger, _points, wandb_checkpoint_fn, wandb_log_fn, wandb_video_fn
from nnx_ppo.wandb._mp4 import encode_mp4

from .offline import OfflineRun, read_offline_runs

CONFIG = {"seed": 17, "ppo": {"percentiles": (0, 50), "decay": None}}


class Level(enum.Flag):
    LOSSES = 1


def video_data(step: int, num_frames: int = 3) -> Any:
    frames = np.zeros((num_frames, 16, 24, 3), np.uint8)
    frames[1:, :, :12] = 255
    return types.SimpleNamespace(
        frames=frames, step=step, episode_reward=9.5, episode_length=num_frames, fps=30.0
    )


def ignore(*args: Any, **options: Any) -> None:
    """Stands in for methods of a run that do not matter."""


@pytest.fixture(autouse=True)
def offline(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No network, and no files outside of the tests' folders."""
    with pytest.MonkeyPatch.context() as patch:
        go_offline(patch, tmp_path_factory.mktemp("data"))
        yield


def go_offline(patch: pytest.MonkeyPatch, data: pathlib.Path) -> None:
    for name, value in {
        "WANDB_MODE": "offline",
        "WANDB_SILENT": "true",
        "WANDB_DATA_DIR": str(data),
        "WANDB_CACHE_DIR": str(data),
    }.items():
        patch.setenv(name, value)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The folder of a run that was killed after step 300, and resumed from step 200."""
    folder = tmp_path_factory.mktemp("runs") / "balance"
    with pytest.MonkeyPatch.context() as patch:
        go_offline(patch, tmp_path_factory.mktemp("data"))
        logger = WandbLogger(str(folder), {**CONFIG, "level": Level.LOSSES})
        assert isinstance(logger, Logger)
        logger.log({"losses/actor/mean": np.float32(0.5), "total_steps": np.int64(100)}, 100)
        logger.video(video_data(step=100))
        wandb_log_fn()({"losses/actor/mean": np.asarray([0.25]), "grads": np.arange(3)}, 200)
        save_checkpoints(folder / "checkpoints")
        wandb_video_fn(key="second_video", fps=10)(video_data(step=300))
        with pytest.warns(RuntimeWarning, match=r"has points up to step 300 already.*from 50 on"):
            logger.log({"losses/actor/mean": 1.0}, 50)
        logger.log({"losses/actor/mean": float("nan")}, 300)
        logger.close()
        logger.close()
        assert wandb.run is None

        time.sleep(1.1)  # the client names its offline files by the second
        resumed = WandbLogger(str(folder), CONFIG)
        with pytest.warns(RuntimeWarning, match="up to step 300 already"):
            resumed.log({"losses/actor/mean": 0.25}, 200)
        resumed.log({"losses/actor/mean": 0.125}, 400)
        resumed.close()
    return folder


def save_checkpoints(directory: pathlib.Path) -> None:
    """Save at steps 200 and 250, each of which is complete only later."""

    class Slow:
        written = 0

        def __call__(self, training_state: Any, step: int) -> None:
            self.wait()
            self.written = step

        def wait(self) -> None:
            folder = directory / f"step_{self.written:010d}"
            if self.written:
                folder.mkdir(parents=True)
                (folder / "metadata.pkl").write_text(str(self.written))

        def observe(self, metrics: Any, step: int) -> None:
            assert (metrics, step) == ({"a": 1}, 250)

    save = wandb_checkpoint_fn(Slow(), directory)
    save(None, 200)
    save.observe({"a": 1}, 250)
    save(None, 250)
    assert len(list(directory.iterdir())) == 1
    save.wait()


@pytest.fixture(scope="module")
def runs(folder: pathlib.Path) -> list[OfflineRun]:
    return read_offline_runs(folder)


def test_steps_never_fall_across_metrics_videos_and_a_resume(runs: list[OfflineRun]) -> None:
    steps = [[point["total_steps"] for point in run.points] for run in runs]
    assert steps == [[100, 100, 200, 300, 300], [400]]
    assert all(run.step_metrics == {"total_steps": "", "*": "total_steps"} for run in runs)


def test_scalars_are_numbers_and_arrays_stay(runs: list[OfflineRun]) -> None:
    points = runs[0].points
    assert points[0]["losses/actor/mean"] == 0.5
    assert points[2]["losses/actor/mean"] == 0.25
    assert points[2]["grads"] == [0, 1, 2]
    assert np.isnan(points[4]["losses/actor/mean"])


def test_config_is_plain(runs: list[OfflineRun]) -> None:
    assert runs[0].config == {
        "seed": 17, "ppo": {"percentiles": [0, 50], "decay": None}, "level": "Level.LOSSES"
    }  # fmt: skip


def test_videos_are_mp4_under_their_key(folder: pathlib.Path, runs: list[OfflineRun]) -> None:
    assert set(runs[0].points[1]) == {"eval_video", "total_steps"}
    assert runs[0].points[1]["eval_video"]["caption"] == "step 100: reward 9.5 in 3 steps"
    assert set(runs[0].points[3]) == {"second_video", "total_steps"}
    paths = sorted(folder.glob("wandb/offline-run-*/files/media/videos/*.mp4"))
    assert [path.name.split("_video_")[0] for path in paths] == ["eval", "second"]
    assert [frames_and_seconds(path) for path in paths] == [(3, 0.1), (3, 0.3)]


def test_checkpoints_are_artifacts(runs: list[OfflineRun]) -> None:
    name = f"checkpoint-{runs[0].run_id}"
    assert runs[0].artifacts == [
        (name, "checkpoint", ["latest", "step-200"], {"step": 200}),
        (name, "checkpoint", ["latest", "step-250"], {"step": 250}),
    ]


def test_a_resume_goes_on_with_the_run_of_the_folder(
    folder: pathlib.Path, runs: list[OfflineRun]
) -> None:
    assert runs[0].run_id == runs[1].run_id
    assert [run.resumes for run in runs] == [False, True]
    remembered = json.loads((folder / "wandb_run.json").read_text())
    assert remembered["id"] == runs[0].run_id
    assert (remembered["total_steps"], remembered["ended"]) == (400, True)


@pytest.mark.parametrize(("on_server", "logged"), [(None, [200, 300, 400]), (250, [300, 400])])
def test_what_a_killed_client_may_not_have_sent_is_logged_again(
    on_server: int | None,
    logged: list[int],
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    unchecked: None,
) -> None:
    """Killed after step 300, and resumed from 200; the server, if any, has what it says."""
    steps: list[int] = []
    run = types.SimpleNamespace(
        id="killed", project="p", entity=None, summary={}, define_metric=ignore, finish=ignore,
        config=types.SimpleNamespace(update=ignore), log=lambda v: steps.append(v["total_steps"]),
    )  # fmt: skip
    monkeypatch.setattr(wandb, "init", lambda **options: run)
    monkeypatch.setattr(_points, "_POINTS", {})
    logger = WandbLogger(str(tmp_path), {})
    for step in (100, 200, 300):
        logger.log({"a": step}, step)

    steps.clear()
    monkeypatch.setattr(_points, "_POINTS", {})  # as in a new process
    run.summary = {} if on_server is None else {"total_steps": on_server}
    with pytest.warns(RuntimeWarning) as caught:
        logger = WandbLogger(str(tmp_path), {})
        for step in (200, 300, 400):
            logger.log({"a": step}, step)
    assert steps == logged
    assert "run killed was cut off" in str(caught[0].message)
    assert len(caught) == (1 if on_server is None else 2)
    logger.close()

    # It has ended in order: now what was logged is there.
    steps.clear()
    monkeypatch.setattr(_points, "_POINTS", {})
    logger = WandbLogger(str(tmp_path), {})
    logger.log({"a": 400}, 400)
    with pytest.warns(RuntimeWarning, match="That is right for a training that goes on"):
        logger.log({"a": 300}, 300)
    assert steps == [400]


def test_a_run_that_the_server_resumed_goes_on_after_its_last_point(
    monkeypatch: pytest.MonkeyPatch, unchecked: None
) -> None:
    logged: list[dict[str, Any]] = []
    run = types.SimpleNamespace(
        id="on-server", summary={"total_steps": 500}, define_metric=ignore, log=logged.append
    )
    monkeypatch.setattr(wandb, "run", run)
    with pytest.warns(RuntimeWarning, match="up to step 500"):
        wandb_log_fn()({"a": 1.0}, 499)
    wandb_log_fn()({"a": 2.0}, 500)
    assert logged == [{"a": 2.0, "total_steps": 500}]


def test_a_failing_client_warns_once(monkeypatch: pytest.MonkeyPatch, unchecked: None) -> None:
    def fail(*args: Any, **options: Any) -> None:
        raise ConnectionError("no route to host")

    names = ("log", "log_artifact", "define_metric", "finish")
    monkeypatch.setattr(
        wandb, "run", types.SimpleNamespace(id="cut-off", summary={}, **dict.fromkeys(names, fail))
    )
    with pytest.warns(RuntimeWarning, match="W&B raised ConnectionError: no route to host"):
        logger = WandbLogger.attach()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        logger.log({"a": 1.0}, 1)
        logger.video(video_data(step=2))
        wandb_log_fn()({"a": 1.0}, 3)


def test_without_a_server_the_run_is_kept_offline(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, unchecked: None
) -> None:
    modes: list[str | None] = []
    run = types.SimpleNamespace(
        id="kept", project="p", entity=None, summary={}, define_metric=ignore, finish=ignore,
        config=types.SimpleNamespace(update=ignore),
    )  # fmt: skip

    def init(mode: str | None = None, **options: Any) -> Any:
        modes.append(mode)
        if mode is None:
            raise CommError("timed out")
        return run

    monkeypatch.setattr(wandb, "init", init)
    with pytest.warns(RuntimeWarning, match=r"cannot be reached \(timed out\).*wandb sync"):
        WandbLogger(str(tmp_path), {}).close()
    assert modes == [None, "offline"]


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


def test_what_is_missing_is_said(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, unchecked: None
) -> None:
    monkeypatch.setattr(wandb, "run", None)
    with pytest.raises(RuntimeError, match=r"No W&B run is active. Call wandb.init\(\)"):
        WandbLogger.attach()
    # Before anything is saved, so that it comes up at the start.
    save = wandb_checkpoint_fn(lambda training_state, step: pytest.fail("saved"), tmp_path)
    with pytest.raises(RuntimeError, match="No W&B run is active"):
        save(None, 0)

    run = types.SimpleNamespace(id="x", summary={}, define_metric=ignore)
    monkeypatch.setattr(wandb, "run", run)
    with pytest.raises(FileNotFoundError, match="step_0000000001'.*no such checkpoint"):
        WandbLogger.attach().checkpoint(tmp_path / "step_0000000001")
    with pytest.raises(ValueError, match="should be called step_XXXXXXXXXX"):
        WandbLogger.attach().checkpoint(tmp_path)


def test_is_found_by_its_entry_point() -> None:
    (entry,) = importlib.metadata.entry_points(group="nnx_ppo.loggers", name="wandb")
    assert entry.load() is WandbLogger


def test_the_third_party_package_is_not_shadowed() -> None:
    assert "nnx_ppo" not in pathlib.Path(wandb.__file__).parts


def frames_and_seconds(path: pathlib.Path) -> tuple[int | None, float | None]:
    return imageio_ffmpeg.count_frames_and_secs(str(path))


class TestMp4:
    def test_frames_come_back(self, tmp_path: pathlib.Path) -> None:
        path = tmp_path / "video.mp4"
        odd = np.zeros((4, 15, 23, 3), np.uint8)
        odd[1:, :, :12] = 255
        path.write_bytes(encode_mp4(odd, fps=20).read())
        ffmpeg = [imageio_ffmpeg.get_ffmpeg_exe(), "-loglevel", "error", "-i", path]
        raw = subprocess.check_output([*ffmpeg, "-f", "rawvideo", "-pix_fmt", "rgb24", "-"])
        frames = np.frombuffer(raw, np.uint8).reshape(4, 16, 24, 3)  # the codec's sizes are even
        assert frames[0].max() < 16
        assert frames[3][:, :10].min() > 200 and frames[3][:, 14:].max() < 50
        assert frames_and_seconds(path) == (4, 0.2)

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
            encode_mp4(frames, fps=20)

    def test_what_the_encoder_says_is_shown(self) -> None:
        with pytest.raises(RuntimeError, match="ffmpeg failed: .*framerate"):
            encode_mp4(np.zeros((1, 2, 2, 3), np.uint8), fps=-1)
