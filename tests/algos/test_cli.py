"""The command `nnxppo`, on analytic environments."""

import json
import os
import signal
import sys
import threading
import types

import numpy as np
import pytest

from nnx_ppo.algorithms.cli import main
from nnx_ppo.algorithms.cli.run_config import (
    NetworkConfig,
    RunConfig,
    apply_settings,
    preset_run,
    to_plain,
)
from nnx_ppo.algorithms.cli.run_folder import RunFolder, new_run_folder
from nnx_ppo.algorithms.discovery import find_environment, logger_factory
from nnx_ppo.core.testing import FollowTarget

command = sys.modules[main.__module__]  # the package has the function under the module's name

SMALL = [
    "--ppo.n-envs=8",
    "--ppo.rollout-length=5",
    "--ppo.n-epochs=1",
    "--ppo.n-minibatches=1",
    "--eval.n-envs=4",
    "--eval.max-episode-length=10",
    "--network.actor-hidden=8",
    "--network.critic-hidden=8",
]


def lines(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_train_leaves_a_run_folder_and_prints_the_result(tmp_path, capsys):
    folder = tmp_path / "run"
    arguments = ["train", "FollowTarget", "--ppo.total-steps=80", f"--out={folder}", *SMALL]
    arguments += ["--overrides", "length", "3", "--seed=5"]
    assert main(arguments) == 0
    config = json.loads((folder / "config.json").read_text())
    assert config["env"] == "FollowTarget" and config["train"]["seed"] == 5
    assert config["train"]["ppo"]["logging_level"] == ["LOSSES"]
    assert config["versions"]["nnxppo-core"]
    steps = lines(folder)
    assert [line["step"] for line in steps] == [0, 40, 80]
    # Episodes of 3 steps: the override arrived.
    assert steps[-1]["eval/lifespan/p50"] == 3.0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("FollowTarget: final evaluation return 3.0 ± ")
    assert "after 80 steps" in last

    assert main(arguments) == 2
    assert "holds a run already" in capsys.readouterr().err


def test_runs_that_start_together_get_folders_of_their_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folders = [new_run_folder("X", {"seed": seed}) for seed in range(3)]
    assert len({folder.path for folder in folders}) == 3
    for seed, folder in enumerate(folders):
        assert json.loads((folder.path / "config.json").read_text())["seed"] == seed
    with pytest.raises(FileExistsError, match="holds a run already"):
        RunFolder(folders[0].path, {})
    for folder in folders:
        folder.close()
    # A run that never reported anything does not keep the name.
    RunFolder(folders[0].path, {}).close()


def test_an_lstm_by_name(tmp_path):
    options = [f"--out={tmp_path}", "--ppo.total-steps=40", "--network.lstm-features=4"]
    assert main(["train", "RememberCue", *options, *SMALL]) == 0
    assert json.loads((tmp_path / "config.json").read_text())["network"]["kind"] == "lstm"


def test_interrupting_keeps_the_results_so_far(tmp_path, capsys):
    """Ctrl-C during training ends it after the iteration under way, with an evaluation."""
    folder = tmp_path / "run"
    done = threading.Event()

    def interrupt_once_training_runs():
        path = folder / "metrics.jsonl"
        while not done.wait(0.01):
            if path.exists() and path.read_text().count("\n") >= 2:
                os.kill(os.getpid(), signal.SIGINT)
                return

    thread = threading.Thread(target=interrupt_once_training_runs)
    before = signal.getsignal(signal.SIGINT)
    thread.start()
    try:
        options = [f"--out={folder}", "--ppo.total-steps=100000000", "--eval.every-steps=100000000"]
        assert main(["train", "FollowTarget", *options, *SMALL]) == 0
    finally:
        done.set()
        thread.join()
    assert signal.getsignal(signal.SIGINT) is before
    steps = lines(folder)
    assert "eval/episode_reward/mean" in steps[-1] and steps[-1]["step"] < 100_000_000
    out = capsys.readouterr().out
    assert "stopping after this iteration" in out and "final evaluation return" in out


def test_unknown_environments_suggest_near_ones(capsys):
    assert main(["train", "FolowTraget"]) == 2
    error = capsys.readouterr().err
    assert "'FolowTraget'" in error and "Did you mean FollowTarget" in error


def test_the_environment_comes_before_the_options(capsys):
    assert main(["train", "--seed=3", "RememberCue"]) == 2
    assert "nnxppo train ENV --seed=3" in capsys.readouterr().err


def test_a_missing_logger_leaves_no_run_folder(tmp_path, capsys):
    folder = tmp_path / "run"
    assert main(["train", "FollowTarget", f"--out={folder}", "--loggers", "papyrus"]) == 2
    assert "nnxppo-algos[papyrus]" in capsys.readouterr().err
    assert not folder.exists()


def test_network_settings_are_checked():
    for field, value in (("kind", "gru"), ("activation", "gelu"), ("lstm_features", 0)):
        with pytest.raises(ValueError, match=f"NetworkConfig: {field}={value!r} must be"):
            apply_settings(NetworkConfig(), {field: value})
    for field, value in (("actor_hidden", (0,)), ("normalize_obs", "no")):
        with pytest.raises(ValueError, match=f"NetworkConfig: {field}="):
            apply_settings(NetworkConfig(), {field: value})


def test_a_bad_config_is_refused_before_training(tmp_path, capsys):
    arguments = ["train", "FollowTarget", f"--out={tmp_path}/run", "--ppo.n-minibatches=3"]
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    printed = " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert "n_envs=256 is not divisible by n_minibatches=3" in printed
    assert not (tmp_path / "run").exists()


def test_envs_lists_what_is_installed(capsys):
    assert main(["envs"]) == 0
    out = capsys.readouterr().out
    assert "RememberCue" in out and "analytic" in out


def test_several_action_heads_need_python(capsys, tmp_path):
    assert main(["train", "TwoHands", f"--out={tmp_path}/run"]) == 2
    assert "call train_ppo" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_presets_become_defaults():
    run = preset_run("RememberCue")
    assert run.network.kind == "lstm" and run.train.ppo.rollout_length == 20
    with pytest.raises(ValueError, match="has no field 'n_env'"):
        apply_settings(RunConfig("x"), {"train": {"ppo": {"n_env": 3}}})


def test_to_plain_survives_json():
    plain = to_plain(preset_run("RememberCue"))
    assert json.loads(json.dumps(plain)) == plain


def test_a_missing_logger_names_the_extra():
    with pytest.raises(ValueError, match=r"nnxppo-algos\[papyrus\]"):
        logger_factory("papyrus")


def test_find_environment_returns_its_provider():
    assert "FollowTarget" in find_environment("FollowTarget").names()


def test_videos_go_to_the_loggers_and_need_one(tmp_path, capsys, monkeypatch):
    folder = tmp_path / "run"
    arguments = ["train", "FollowTarget", "--ppo.total-steps=40", f"--out={folder}", *SMALL]
    arguments += ["--video.enabled", "--video.episode-length=2"]
    assert main(arguments) == 2
    assert "FollowTarget has no method render" in capsys.readouterr().err

    frame = np.zeros((2, 2, 3), np.uint8)
    monkeypatch.setattr(
        FollowTarget, "render", lambda self, trajectory: [frame for _ in trajectory], raising=False
    )
    assert main(arguments) == 2
    assert "add --loggers" in capsys.readouterr().err
    assert not folder.exists()

    seen = []
    logger = types.SimpleNamespace(
        log=lambda metrics, step: None, video=seen.append, close=lambda: None
    )
    monkeypatch.setattr(command, "logger_factory", lambda name: lambda run_dir, config: logger)
    assert main([*arguments, "--loggers", "gallery"]) == 0
    assert [(data.step, data.frames.shape) for data in seen] == [
        (0, (3, 2, 2, 3)),
        (40, (3, 2, 2, 3)),
    ]
