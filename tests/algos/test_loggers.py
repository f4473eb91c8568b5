"""The JSON-lines and TensorBoard loggers: what they write is read back."""

import importlib.metadata
import io
import json
import math
import struct
import sys
import types
import warnings
from pathlib import Path
from unittest import mock

import jax.numpy as jnp
import numpy as np
import pytest

from nnx_ppo.algorithms import TrainResult
from nnx_ppo.algorithms.cli import main, training
from nnx_ppo.algorithms.config import VideoData
from nnx_ppo.algorithms.discovery import logger_factory
from nnx_ppo.algorithms.loggers import JsonLinesLogger, TensorBoardLogger, read_metrics
from nnx_ppo.core import Logger


def logged(logger, *points):
    """Log points and close."""
    assert isinstance(logger, Logger)
    for step, metrics in points:
        logger.log(metrics, step)
    logger.close()


@pytest.mark.parametrize(
    ("name", "kind"), [("jsonl", JsonLinesLogger), ("tensorboard", TensorBoardLogger)]
)
def test_loggers_are_found_by_name(name, kind):
    assert logger_factory(name) is kind
    (entry,) = importlib.metadata.entry_points(group="nnx_ppo.loggers", name=name)
    assert entry.dist is not None and entry.dist.name == "nnxppo-algos"


class TestJsonLines:
    def test_every_line_is_json(self, tmp_path):
        values = {
            "nan": float("nan"), "inf": np.float32("-inf"), "count": np.int64(3), "ok": np.True_,
            "array": jnp.asarray([1.0, jnp.nan]), "text": "a\nb", "nothing": None,
        }  # fmt: skip
        logged(JsonLinesLogger(str(tmp_path / "new"), {"seed": 1}), (7, values))

        def refuse(word):
            raise AssertionError(f"{word} is no JSON")

        (line,) = (tmp_path / "new" / "metrics.jsonl").read_text().splitlines()
        assert json.loads(line, parse_constant=refuse) == {
            "step": 7, "nan": None, "inf": None, "count": 3, "ok": True, "array": [1.0, None],
            "text": "a\nb", "nothing": None,
        }  # fmt: skip
        (row,) = read_metrics(tmp_path / "new")
        assert math.isnan(row["nan"]) and row["count"] == 3

    def test_a_resume_appends_and_what_it_takes_anew_is_read_once(self, tmp_path):
        first = [(0, {"eval": 1}), (10, {"loss": 1}), (20, {"loss": 2}), (30, {"loss": 3})]
        logged(JsonLinesLogger(tmp_path), *first)
        path = tmp_path / "metrics.jsonl"
        path.write_text(path.read_text() + '{"step": 40, "lo')  # killed while it wrote
        # Resumed from 10 with windows twice as long: step 20 does not come again.
        logged(JsonLinesLogger(tmp_path), (10, {"eval": 5}), (30, {"loss": 6}))

        lines = path.read_text().splitlines()
        assert len(lines) == 7 and json.loads(lines[5]) == {"step": 10, "eval": 5}
        expected = [
            {"step": 0, "eval": 1}, {"step": 10, "loss": 1, "eval": 5}, {"step": 30, "loss": 6}
        ]  # fmt: skip
        assert read_metrics(tmp_path) == read_metrics(path) == expected

    def test_videos_are_not_kept(self, tmp_path):
        logger = JsonLinesLogger(tmp_path)
        logger.video(VideoData(np.zeros((1, 2, 2, 3), np.uint8), 0, 0.0, 1))
        logger.close()
        assert read_metrics(tmp_path) == []
        with pytest.raises(FileNotFoundError):
            read_metrics(tmp_path / "other")


def events(folder: Path):
    """The events of a folder's files, oldest file first, read record by record."""
    event_pb2 = pytest.importorskip("tensorboardX.proto.event_pb2")
    found = []
    for path in sorted(folder.glob("events.out.tfevents.*"), key=lambda p: p.stat().st_mtime_ns):
        data = path.read_bytes()
        while data:  # the length, its checksum, the event, its checksum
            (length,) = struct.unpack_from("<Q", data)
            found.append(event_pb2.Event.FromString(data[12 : 12 + length]))
            data = data[16 + length :]
    return found


def values(folder: Path):
    return [(value.tag, event) for event in events(folder) for value in event.summary.value]


class TestTensorBoard:
    @pytest.fixture(autouse=True)
    def installed(self):
        pytest.importorskip("tensorboardX")

    def test_scalars_histograms_and_settings(self, tmp_path):
        points = [
            (10, {"losses/critic": np.float32(0.5), "total_steps": 10}),
            (20, {"losses/critic": float("nan"), "grads": np.arange(4.0)}),
        ]
        logged(TensorBoardLogger(str(tmp_path / "new"), {"seed": 17}), *points)
        found = values(tmp_path / "new")
        scalars = [
            (tag, event.step, event.summary.value[0].simple_value)
            for tag, event in found
            if event.summary.value[0].HasField("simple_value")
        ]
        assert scalars[:2] == [("losses/critic", 10, 0.5), ("total_steps", 10, 10.0)]
        assert scalars[2][:2] == ("losses/critic", 20) and math.isnan(scalars[2][2])
        (grads,) = (event.summary.value[0] for tag, event in found if tag == "grads")
        assert (grads.histo.num, grads.histo.sum) == (4, 6.0)
        tag, settings = found[0]
        assert tag == "config/text_summary"
        assert '"seed": 17' in settings.summary.value[0].tensor.string_val[0].decode()

    def test_a_video_is_an_animated_image(self, tmp_path):
        image_module = pytest.importorskip("PIL.Image")
        frames = np.zeros((3, 8, 12, 3), np.uint8)
        frames[1, :, :6] = 255
        logger = TensorBoardLogger(str(tmp_path))
        logger.video(VideoData(frames, 30, 1.0, 3, fps=20.0))
        logger.close()
        ((tag, event),) = values(tmp_path)
        assert (tag, event.step) == ("eval_video", 30)
        image = image_module.open(io.BytesIO(event.summary.value[0].image.encoded_image_string))
        assert (image.format, image.size, image.n_frames) == ("GIF", (12, 8), 3)
        assert image.info["duration"] == 50  # milliseconds
        image.seek(1)
        second = np.asarray(image.convert("RGB"))
        assert (second[:, :6] == 255).all() and (second[:, 6:] == 0).all()

        with pytest.raises(ValueError, match=r"height, width, 3\).*got float64 \(3, 8, 12, 3\)"):
            logger.video(VideoData(frames / 255, 30, 1.0, 3))

    def test_a_resume_hides_what_it_takes_anew_and_deletes_nothing(self, tmp_path):
        logged(TensorBoardLogger(str(tmp_path)), (10, {"loss": 1.0}), (20, {"loss": 2.0}))
        before = {path: path.read_bytes() for path in tmp_path.iterdir()}
        logged(TensorBoardLogger(str(tmp_path)), (10, {"loss": 3.0}))
        assert len(list(tmp_path.iterdir())) == 2
        assert all(path.read_bytes() == data for path, data in before.items())
        starts = [event.step for event in events(tmp_path) if event.HasField("session_log")]
        assert starts == [10]  # for TensorBoard: drop what earlier files have from step 10 on

    def test_the_extra_is_named_at_the_start(self, tmp_path, monkeypatch):
        monkeypatch.setitem(sys.modules, "tensorboardX", None)
        with pytest.raises(ModuleNotFoundError, match=r'pip install "nnxppo-algos\[tensorboard\]"'):
            TensorBoardLogger(str(tmp_path / "run"), types.MappingProxyType({}))
        assert not (tmp_path / "run").exists()


class TestCommand:
    """`nnxppo train … --loggers NAME`, with a training that only logs one point."""

    @pytest.fixture(autouse=True)
    def trained(self, monkeypatch):
        def train(env, networks, config, *, log_fn, **others):
            log_fn({"losses/critic/mean": 0.5}, 40)
            return mock.Mock(spec=TrainResult, final_metrics={}, total_steps=40)

        monkeypatch.setattr("nnx_ppo.algorithms.cli.train.train_ppo", train)

    def test_points_reach_every_logger_once(self, tmp_path):
        pytest.importorskip("tensorboardX")
        arguments = ["train", "FollowTarget", f"--out={tmp_path}"]
        assert main([*arguments, "--loggers", "tensorboard", "jsonl"]) == 0
        assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 1
        assert "losses/critic/mean" in [tag for tag, _ in values(tmp_path)]

    def test_what_a_logger_changes_or_fails_at_is_its_own(self, tmp_path, monkeypatch, capsys):
        seen = []

        class Rude:
            def __init__(self, run_dir, config):
                """Take no notes."""

            def log(self, metrics, step):
                seen.append(dict(metrics))
                metrics.clear()

            video = log

            def close(self):
                raise OSError("no ink")

        monkeypatch.setattr(training, "logger_factory", lambda name: Rude)
        arguments = ["train", "FollowTarget", f"--out={tmp_path / 'a'}", "--loggers", "x", "y"]
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            assert main(arguments) == 0
        assert seen == [{"losses/critic/mean": 0.5}] * 2
        first, *_ = capsys.readouterr().err.splitlines()
        assert first.startswith("nnxppo: ") and first.endswith(
            ".close raised OSError: no ink. Its last points may be missing."
        )

        def fail(run_dir, config):
            raise LookupError("no pen")

        monkeypatch.setattr(training, "logger_factory", lambda name: fail)
        folder = tmp_path / "b"
        assert main(["train", "FollowTarget", f"--out={folder}", "--loggers", "x"]) == 2
        assert "logger x could not start: LookupError: no pen" in capsys.readouterr().err
        assert not folder.exists()
        assert main(["train", "FollowTarget", f"--out={folder}", "--loggers", "x", "x"]) == 2
        assert "--loggers x x names one twice" in capsys.readouterr().err

    def test_an_evaluation_before_the_last_step_is_not_called_final(
        self, tmp_path, monkeypatch, capsys
    ):
        metrics = {"eval/episode_reward/mean": 1.0, "eval/episode_reward/std": 0.5}

        def train(env, networks, config, **others):
            return mock.Mock(
                spec=TrainResult, final_metrics=metrics, eval_history=[{"step": 20}], total_steps=40
            )

        monkeypatch.setattr("nnx_ppo.algorithms.cli.train.train_ppo", train)
        assert main(["train", "FollowTarget", f"--out={tmp_path / 'run'}"]) == 0
        line = "evaluation at step 20 return 1.0 ± 0.5, stopped after 40 steps"
        assert line in capsys.readouterr().out

    def test_a_folder_that_cannot_be_written_is_said(self, tmp_path, capsys):
        path = tmp_path / "file"
        path.touch()
        for out in (path, path / "run"):
            assert main(["train", "FollowTarget", f"--out={out}"]) == 2
            error = capsys.readouterr().err
            assert f"Cannot write {out}: " in error and "choose another --out." in error

        run = tmp_path / "run"
        run.mkdir()
        (run / "config.json").write_text('{"env": "FollowTarget"}')
        (run / ".config.json").mkdir()  # where its draft is to go
        assert main(["train", f"--resume={run}"]) == 2
        assert f"Cannot write {run}: Is a directory" in capsys.readouterr().err

    def test_an_interrupted_command_says_how_to_go_on(self, tmp_path, monkeypatch, capsys):
        def train(env, networks, config, **others):
            (tmp_path / "a" / "checkpoints" / "step_0000000040").mkdir(parents=True)
            (tmp_path / "a" / "checkpoints" / "step_0000000040" / "metadata.pkl").touch()
            raise KeyboardInterrupt

        monkeypatch.setattr("nnx_ppo.algorithms.cli.train.train_ppo", train)
        assert main(["train", "FollowTarget", f"--out={tmp_path / 'a'}"]) == 130
        assert capsys.readouterr().err.splitlines() == [
            "nnxppo: interrupted", f"to go on: nnxppo train --resume {tmp_path / 'a'}"
        ]  # fmt: skip

        def interrupt(*arguments):
            raise KeyboardInterrupt

        monkeypatch.setattr("nnx_ppo.algorithms.cli.train.load_environment", interrupt)
        assert main(["train", "FollowTarget"]) == 130
        assert capsys.readouterr().err == "nnxppo: interrupted\n"

    def test_a_logger_without_its_package_is_refused_before_training(
        self, tmp_path, monkeypatch, capsys
    ):
        monkeypatch.setitem(sys.modules, "tensorboardX", None)
        arguments = ["train", "FollowTarget", f"--out={tmp_path / 'run'}"]
        assert main([*arguments, "--loggers", "tensorboard"]) == 2
        assert 'pip install "nnxppo-algos[tensorboard]"' in capsys.readouterr().err
        assert not (tmp_path / "run").exists()
