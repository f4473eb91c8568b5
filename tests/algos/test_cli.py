"""The command `nnxppo`, on analytic environments."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import types

import imageio_ffmpeg
import jax
import numpy as np
import pytest

from nnx_ppo.algorithms import best_checkpoint, latest_checkpoint
from nnx_ppo.algorithms.cli import main, training
from nnx_ppo.algorithms.cli.evaluate import _table
from nnx_ppo.algorithms.cli.network_config import NetworkConfig
from nnx_ppo.algorithms.cli.run_config import (
    RunConfig,
    apply_settings,
    as_record,
    preset_run,
    read_settings,
)
from nnx_ppo.algorithms.cli.run_folder import RunFolder, new_run_folder
from nnx_ppo.algorithms.compiled_run import CompiledRun
from nnx_ppo.algorithms.discovery import find_environment, logger_factory
from nnx_ppo.algorithms.policies import load_policy
from nnx_ppo.core.testing import FollowTarget

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


SHORT = ["FollowTarget", "--overrides", "length", "3", "--checkpoint-every-steps=40", *SMALL]


def lines(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def step_of(checkpoint):
    """The step of a checkpoint's folder."""
    assert checkpoint is not None
    return int(checkpoint.name.removeprefix("step_"))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder of a run of 80 steps, with episodes of 3; tests must not write to it."""
    folder = tmp_path_factory.mktemp("runs") / "whole"
    with jax.numpy_rank_promotion("raise"):
        assert main(["train", *SHORT, "--ppo.total-steps=80", f"--out={folder}"]) == 0
    return folder


@pytest.fixture
def drawn(monkeypatch):
    """FollowTarget with a `render` that draws the age of an episode as brightness."""

    def render(self, trajectory, *, width=4, height=2, camera=None):
        if camera is not None:
            raise ValueError(f"camera={camera!r}: there is none")
        ages = [60 * int(state.info["age"]) for state in trajectory]
        return [np.full((height, width, 3), age, np.uint8) for age in ages]

    monkeypatch.setattr(FollowTarget, "render", render, raising=False)
    monkeypatch.setattr(FollowTarget, "dt", 0.5, raising=False)


def evaluation(capsys, *arguments):
    """What `nnxppo eval … --json` prints."""
    capsys.readouterr()
    assert main(["eval", *map(str, arguments), "--n-envs=4", "--json"]) == 0
    return json.loads(capsys.readouterr().out)


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


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGUSR1])
def test_interrupting_keeps_the_results_so_far(tmp_path, capsys, monkeypatch, number):
    """A signal during an iteration ends training after it, with an evaluation."""
    folder = tmp_path / "run"
    advance = CompiledRun.advance

    def interrupted(run, n_iterations):
        os.kill(os.getpid(), number)
        return advance(run, n_iterations)

    monkeypatch.setattr(CompiledRun, "advance", interrupted)
    before = signal.getsignal(number)
    options = [f"--out={folder}", "--ppo.total-steps=100000000", "--eval.every-steps=100000000"]
    assert main(["train", "FollowTarget", *options, *SMALL]) == 0
    assert signal.getsignal(number) is before
    steps = lines(folder)
    assert "eval/episode_reward/mean" in steps[-1] and steps[-1]["step"] == 40
    out = capsys.readouterr().out
    assert "stopping after this iteration" in out and "final evaluation return" in out
    assert f"to go on: nnxppo train --resume {folder}" in out
    assert step_of(latest_checkpoint(folder / "checkpoints")) == steps[-1]["step"]


def test_a_terminated_run_saves_and_exits_cleanly(tmp_path):
    """What a cluster does to a job whose time is up."""
    folder = tmp_path / "run"
    command = "import sys; from nnx_ppo.algorithms.cli import main; sys.exit(main())"
    options = ["--ppo.total-steps=100000000", "--eval.every-steps=100000000", f"--out={folder}"]
    cache = jax.config.jax_compilation_cache_dir  # pyright: ignore[reportAttributeAccessIssue]
    process = subprocess.Popen(
        [sys.executable, "-c", command, "train", "FollowTarget", *SMALL, *options],
        env={
            **os.environ,
            "JAX_COMPILATION_CACHE_DIR": str(cache),
            "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
        },
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        metrics = folder / "metrics.jsonl"
        while process.poll() is None:
            if metrics.exists() and metrics.read_text().count("\n") > 2:
                break
            time.sleep(0.05)
        process.terminate()
        out, _ = process.communicate(timeout=300)
    assert process.returncode == 0
    assert "SIGTERM: stopping after this iteration" in out
    assert f"to go on: nnxppo train --resume {folder}" in out
    step = lines(folder)[-1]["step"]
    assert step_of(latest_checkpoint(folder / "checkpoints")) == step
    assert load_policy(folder / "policy").step == step


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
    assert "see nnxppo train --help" in printed and "dummy" not in printed
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


def test_settings_come_back_from_the_run_folder(tmp_path):
    ppo = {"logging_level": ["LOSSES", "WEIGHTS"], "discounting_factor": {"a": 0.5}}
    ppo |= {"logging_percentiles": [5, 95]}
    train = {"ppo": ppo, "video": {"render_kwargs": {"height": 3}}}
    run = apply_settings(RunConfig("X", {"length": "3"}, loggers=("wandb",)), {"train": train})
    folder = RunFolder(tmp_path, as_record(run))
    assert read_settings(tmp_path) == run
    folder.close()


def test_a_missing_logger_names_the_extra():
    with pytest.raises(ValueError, match=r"nnxppo-algos\[papyrus\]"):
        logger_factory("papyrus")


def test_an_unknown_setting_of_an_environment_names_those_there_are(capsys):
    assert main(["train", "FollowTarget", "--overrides", "foo", "3"]) == 2
    assert "no setting 'foo'; it has length, max_len" in capsys.readouterr().err


def test_find_environment_returns_its_provider():
    assert "FollowTarget" in find_environment("FollowTarget").names()


def test_videos_go_to_the_run_folder_and_the_loggers(tmp_path, capsys, monkeypatch):
    folder = tmp_path / "run"
    arguments = ["train", "FollowTarget", "--ppo.total-steps=40", f"--out={folder}", *SMALL]
    arguments += ["--video.enabled", "--video.episode-length=2"]
    assert main(arguments) == 2
    assert "FollowTarget has no method render" in capsys.readouterr().err

    frame = np.zeros((2, 2, 3), np.uint8)
    monkeypatch.setattr(
        FollowTarget, "render", lambda self, trajectory: [frame for _ in trajectory], raising=False
    )
    monkeypatch.setattr(FollowTarget, "dt", 0.5, raising=False)
    seen = []
    logger = types.SimpleNamespace(
        log=lambda metrics, step: None, video=seen.append, close=lambda: None
    )
    monkeypatch.setattr(training, "logger_factory", lambda name: lambda run_dir, config: logger)
    assert main([*arguments, "--loggers", "gallery"]) == 0
    assert [(data.step, data.frames.shape) for data in seen] == [
        (0, (3, 2, 2, 3)),
        (40, (3, 2, 2, 3)),
    ]
    videos = sorted((folder / "videos").iterdir())
    assert [path.name for path in videos] == ["step_0000000000.mp4", "step_0000000040.mp4"]
    for path in videos:  # 3 frames at 2 per second: real time
        assert imageio_ffmpeg.count_frames_and_secs(path) == (3, 1.5)


def test_a_run_that_goes_on_is_the_run_that_was_never_interrupted(whole, tmp_path, capsys):
    folder = tmp_path / "run"
    assert main(["train", *SHORT, "--ppo.total-steps=40", f"--out={folder}"]) == 0
    resume = ["train", "--resume", str(folder)]
    assert main([*resume, "--ppo.total-steps=80"]) == 0
    assert [line["step"] for line in lines(folder)] == [0, 40, 40, 80]
    assert lines(folder)[-1] == lines(whole)[-1]
    assert json.loads((folder / "config.json").read_text())["overrides"] == {"length": "3"}
    assert load_policy(folder / "policy").overrides == {"length": 3}

    # Done: with the settings that it went on with, there is nothing left to do.
    capsys.readouterr()
    assert main(resume) == 0
    done = "is complete: it has taken 80 steps, and --ppo.total-steps is 80; raise that"
    assert done in capsys.readouterr().out
    assert main([*resume, "--loggers", "papyrus"]) == 2
    assert "nnxppo-algos[papyrus]" in capsys.readouterr().err
    assert len(lines(folder)) == 4

    # Another number of environments, and other settings of theirs beside the old ones.
    more = ["--ppo.n-envs=4", "--ppo.total-steps=100", "--overrides", "max_len", "2"]
    assert main([*resume, *more]) == 0
    assert "4 fresh environments take the place of the 8" in capsys.readouterr().out
    assert lines(folder)[-1]["step"] == 100 and lines(folder)[-1]["eval/lifespan/p50"] == 2.0
    stored = json.loads((folder / "config.json").read_text())["overrides"]
    assert stored == {"length": "3", "max_len": "2"}


def test_a_run_that_was_killed_before_its_first_checkpoint_starts_again(whole, tmp_path):
    shutil.copy(whole / "config.json", tmp_path)
    assert main(["train", f"--resume={tmp_path}"]) == 0
    assert lines(tmp_path) == lines(whole)


def test_what_cannot_go_on(whole, capsys):
    for arguments, words in (
        (["train", "RememberCue", "--resume", str(whole)], "has env 'FollowTarget'"),
        (["train", "--resume", str(whole), "--out=elsewhere"], "leave --out elsewhere out"),
        (["distill", "--resume", str(whole)], f"nnxppo train --resume {whole}"),
        (
            ["train", "--resume", str(whole), "--network.actor-hidden=9"],
            "has network.actor-hidden (8,), so it cannot go on with (9,)",
        ),
        (
            ["train", "--resume", str(whole), "--network.activation=tanh"],
            "has network.activation 'swish', so it cannot go on with 'tanh'",
        ),
    ):
        assert main(arguments) == 2
        assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments", [["eval"], ["render"], ["distill"], ["train", "--resume"], ["distill", "--resume"]]
)
def test_a_missing_run_folder_lists_those_there_are(whole, arguments, capsys):
    assert main([*arguments, str(whole.parent / "hole")]) == 2
    error = capsys.readouterr().err
    assert f"{whole.parent}/hole is no run folder: it is not there." in error.replace("\n", " ")
    assert f"Runs in {whole.parent}/: whole." in error


def test_other_runs_that_cannot_be_read(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    tmp_path = tmp_path / "mine" / "run"
    tmp_path.mkdir(parents=True)
    assert main(["eval", str(tmp_path)]) == 2
    assert "it has no config.json. No run is near" in capsys.readouterr().err
    (tmp_path / "config.json").write_text('{"env": "FollowT')
    assert main(["eval", str(tmp_path)]) == 2
    assert "config.json is damaged" in capsys.readouterr().err
    # As earlier versions of the command left them: no weights.
    (tmp_path / "config.json").write_text('{"env": "FollowTarget", "train": {"seed": 3}}')
    assert main(["eval", str(tmp_path)]) == 2
    assert "has no checkpoint" in capsys.readouterr().err


def test_a_damaged_checkpoint_names_the_others(whole, tmp_path, capsys):
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    metadata = folder / "checkpoints" / "step_0000000080" / "metadata.pkl"
    metadata.write_bytes(metadata.read_bytes()[:-9])
    for arguments, cure in (
        (["eval", str(folder)], "choose another by --checkpoint STEP"),
        (["train", f"--resume={folder}", "--ppo.total-steps=120"], "remove it to go on from the"),
    ):
        assert main(arguments) == 2
        error = capsys.readouterr().err
        assert cure in error and "There are also step_0000000000, step_0000000040." in error


def test_the_table_of_eval_keeps_names_and_digits():
    rows = {"episode_reward": {"mean": 1234.5, "std": 0.25, "p50": 7.0}, "lifespan": {"mean": 3.0}}
    columns = ["mean", "std", "p50"]
    assert _table(rows, columns, None) == [
        "                mean   std  p50",
        "episode_reward  1234  0.25    7",
        "lifespan           3           ",
    ]
    for width in (10, 30):
        assert _table(rows, columns, width) == [
            "                mean   std",
            "episode_reward  1234  0.25",
            "lifespan           3      ",
            "no room for p50; --json has all",
        ]


def test_eval_shows_what_a_run_has_learned(whole, capsys):
    found = evaluation(capsys, whole)
    assert found["env"] == "FollowTarget" and found["step"] == 80 and found["n_envs"] == 4
    assert found["eval/lifespan/mean"] == 3.0 and found["eval/lifespan/p50"] == 3.0
    # Each step earns 1 minus the error that the environment reports.
    reward, error = found["eval/episode_reward/mean"], found["eval/env/error/mean"]
    assert reward == pytest.approx(3 * (1 - error), rel=1e-5)
    assert {k: v for k, v in evaluation(capsys, whole / "policy").items() if k != "run"} == {
        k: v for k, v in found.items() if k != "run"
    }
    earlier = evaluation(capsys, whole, "--checkpoint=0", "--overrides", "length", "2")
    assert earlier["step"] == 0 and earlier["eval/lifespan/mean"] == 2.0
    best = step_of(best_checkpoint(whole / "checkpoints"))
    assert evaluation(capsys, whole, "--checkpoint=best")["step"] == best

    assert main(["eval", str(whole), "--n-envs=4", "--percentiles", "50"]) == 0
    out = capsys.readouterr().out
    (row,) = (line for line in out.splitlines() if "lifespan" in line)
    assert row.replace("│", "").split() == ["lifespan", "3", "0", "3"]
    assert "after 80 steps" in out

    for option, words in (
        ("--checkpoint=41", "step_0000000000, step_0000000040, step_0000000080"),
        ("--checkpoint=newest", "must be latest, best or a step"),
        ("--env=RememberCue", "failed on the environment's observations"),
    ):
        assert main(["eval", str(whole), option]) == 2
        assert words in capsys.readouterr().err
    assert main(["eval", str(whole / "policy"), "--checkpoint=best"]) == 2
    assert "has no checkpoints" in capsys.readouterr().err


def test_render_films_a_run(whole, drawn, tmp_path, capsys):
    path = tmp_path / "film.mp4"
    assert main(["render", str(whole), f"--out={path}", "--steps=5", "--width=6"]) == 0
    # Five steps have six states; a step lasts half a second.
    assert f"{path}: 6 frames, 3.00 s at 2 per second" in capsys.readouterr().out.replace("\n", "")
    assert imageio_ffmpeg.count_frames_and_secs(path) == (6, 3.0)
    read = [imageio_ffmpeg.get_ffmpeg_exe(), "-loglevel", "error", "-i", path, "-f", "rawvideo"]
    raw = subprocess.run([*read, "-pix_fmt", "rgb24", "-"], capture_output=True, check=True).stdout
    frames = np.frombuffer(raw, np.uint8).reshape(6, 2, 6, 3)
    assert np.round(frames.mean((1, 2, 3)) / 60).tolist() == [0, 1, 2, 0, 1, 2]  # 3-step episodes

    for options, words in (
        (["--camera=side"], "FollowTarget cannot be rendered: camera='side': there is none"),
        (["--camera=3", "--steps=5"], "camera=3: there is none"),
        (["--camera=1.7"], "camera='1.7': there is none"),
        ([f"--out={whole}/config.json/x.mp4"], "Not a directory; choose another file with --out"),
        (["--env=Endless"], "Endless cannot be rendered: Endless has no method render"),
    ):
        assert main(["render", str(whole), f"--out={path}", *options]) == 2
        assert words in capsys.readouterr().err


def test_render_says_which_options_an_environment_takes(whole, monkeypatch, capsys):
    monkeypatch.setattr(FollowTarget, "render", lambda self, trajectory: [], raising=False)
    assert main(["render", str(whole), "--width=6"]) == 2
    assert "unexpected keyword argument 'width'" in capsys.readouterr().err


def test_distill_trains_a_student_of_a_run(whole, tmp_path, capsys):
    folder = tmp_path / "student"
    options = ["--network.kind=lstm", "--network.lstm-features=4", "--distillation.total-steps=40"]
    assert main(["distill", str(whole), f"--out={folder}", *options]) == 0
    stored = json.loads((folder / "config.json").read_text())
    assert stored["command"] == "distill" and stored["env"] == "FollowTarget"
    # The settings of the teacher's run were the defaults.
    assert stored["train"]["distillation"]["n_envs"] == 8
    assert stored["network"]["actor_hidden"] == [8] and stored["overrides"] == {"length": "3"}
    assert "losses/distillation_nll/mean" in lines(folder)[-1]
    teacher, kept = load_policy(whole / "policy"), load_policy(folder / "teacher")
    for policy in (teacher, kept):
        policy.reset()
    assert kept.step == 80 and teacher(np.ones(1)) == kept(np.ones(1))

    assert main(["distill", f"--resume={folder}", "--distillation.total-steps=80"]) == 0
    assert [line["step"] for line in lines(folder)] == [0, 40, 40, 80]
    found = evaluation(capsys, folder)
    assert found["step"] == 80 and found["eval/lifespan/mean"] == 3.0


def test_schedules_are_numbers_on_the_command_line(capsys):
    with pytest.raises(SystemExit):
        main(["train", "FollowTarget", "--ppo.learning-rate=cosine"])
    assert "learning-rate" in capsys.readouterr().err
