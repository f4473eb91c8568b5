"""The tables of metrics in the docs say exactly what there is, flag by flag."""

import dataclasses
import math
import re
from pathlib import Path

import jax
import numpy as np
import optax
import pytest

from nnx_ppo.algorithms import (
    DistillationConfig,
    DistillationState,
    DistillationTrainConfig,
    EvalConfig,
    LoggingLevel,
    PPOConfig,
    TrainConfig,
    TrainingState,
    VideoConfig,
    eval_rollout,
    imitation,
    iteration,
    new_distillation_state,
    new_training_state,
    train_distillation,
    train_ppo,
)
from nnx_ppo.algorithms._functional import merge_modules, split_modules
from nnx_ppo.core.testing import FollowTarget

from ..algos.helpers import mlp_network

DOCS = Path(__file__).parents[2] / "docs"
EVERYTHING = LoggingLevel.ALL | LoggingLevel.ROLLOUT_OBS
FLAGS = [LoggingLevel.NONE, *EVERYTHING]
PERCENTILES = [None, (5, 50)]
ROW = re.compile(r"^\| *(.*?) *\| *(.*?) *\| *(.*) *\|$")
# What the environment and the network of these tests report.
NAMES = {"env/NAME": ["env/error"], "net/PATH": ["net/1/action/2/mu", "net/1/action/2/sigma"]}


class Drawn(FollowTarget):
    """Can be filmed."""

    def render(self, trajectory):
        return [np.zeros((2, 2, 3), np.uint8) for _ in trajectory]


def table(page, heading):
    """The rows `(flag, names, text)` of the table under a heading; a flag holds until the next."""
    text = (DOCS / page).read_text().partition(f"\n## {heading}\n")[2]
    rows, flag = [], ""
    for line in text.splitlines():
        if line.startswith("## "):
            break
        match = ROW.match(line.replace("\\|", "¦"))
        if match and not match[1].startswith("---") and match[1] not in ("flag", "chosen by"):
            flag = match[1] or flag
            rows.append((flag, re.findall(r"`([^`]+)`", match[2]), match[3]))
        elif rows and not match:
            break
    assert rows
    return rows


def endings(name, percentiles):
    parts = ("mean", "std") if percentiles is None else [f"p{level}" for level in percentiles]
    return {f"{name}/{part}" for part in parts}


def of_rows(rows, level, percentiles):
    """The metrics that the rows of a table promise for a logging level."""
    flags = {f"`{member.name}`" for member in level} | {"always"}
    found = set()
    for flag, names, text in rows:
        if flag in flags:
            for name in names:
                for full in NAMES.get(name, [name]):
                    alone = "no ending" in text or name == "total_steps"
                    found |= {full} if alone else endings(full, percentiles)
    return found


def of_ppo(level, percentiles):
    return of_rows(table("metrics.md", "Training"), level, percentiles)


def of_distillation(level, percentiles):
    rows = table("reference/distillation.md", "Metrics")
    as_for_ppo = [row for row in rows if row[1] == [] and "PPO" not in row[2]]
    flags = re.findall(r"`(\w+)`", as_for_ppo[0][0])
    assert "THROUGHPUT" in flags
    for flag in flags:
        rows += [row for row in table("metrics.md", "Training") if row[0] == f"`{flag}`"]
    return of_rows(rows, level, percentiles)


def of_evaluation(level, percentiles):
    rows = [
        (flag, [name for name in names if name != "eval/episode_reward/HEAD"], text)
        for flag, names, text in table("metrics.md", "Evaluation")
    ]
    found = {"eval/episode_reward/mean", "eval/episode_reward/std"}
    for flag, names, text in rows:
        names = [name for name in names if not name.endswith(("/mean", "/std"))]
        plain = [name.removeprefix("eval/") for name in names]
        inner = of_rows([(flag, plain, text)], level, percentiles)
        found |= {f"eval/{name}" for name in inner}
    return found


def ppo_config(level, percentiles):
    """All that adds metrics is on."""
    return PPOConfig(
        n_envs=4,
        rollout_length=2,
        total_steps=16,
        n_epochs=1,
        n_minibatches=2,
        target_kl=100.0,
        final_learning_rate=0.0,
        logging_level=level,
        logging_percentiles=percentiles,
    )


def distillation_config(level, percentiles):
    return DistillationConfig(
        n_envs=4,
        rollout_length=2,
        total_steps=16,
        n_epochs=1,
        n_minibatches=2,
        learning_rate=optax.constant_schedule(1e-3),
        logging_level=level,
        logging_percentiles=percentiles,
    )


def names_of(iterate, kind, state, arguments=()):
    """The metrics of an iteration, from shapes."""
    blueprint, data = split_modules(state)
    return set(jax.eval_shape(lambda data: iterate(merge_modules(kind, blueprint, data))[1], data))


WITHOUT_LOOP = ~LoggingLevel.THROUGHPUT


@pytest.mark.parametrize("percentiles", PERCENTILES)
def test_each_flag_of_ppo(percentiles):
    env = Drawn(length=3)
    state = new_training_state(env, mlp_network(), n_envs=4, seed=0)
    for flag in FLAGS:
        config = ppo_config(flag, percentiles)
        state = dataclasses.replace(state)
        found = names_of(lambda s, c=config: iteration.iterate(env, s, c), TrainingState, state)
        assert found == of_ppo(flag & WITHOUT_LOOP, percentiles), flag


@pytest.mark.parametrize("percentiles", PERCENTILES)
def test_each_flag_of_distillation(percentiles):
    env, teacher = Drawn(length=3), mlp_network(seed=1)
    state = new_distillation_state(env, teacher, mlp_network(), n_envs=4, seed=0)
    for flag in FLAGS:
        config = distillation_config(flag, percentiles)
        found = names_of(
            lambda s, c=config: imitation.iterate(env, teacher, s, c), DistillationState, state
        )
        assert found == of_distillation(flag & WITHOUT_LOOP, percentiles), flag


@pytest.mark.parametrize("percentiles", PERCENTILES)
def test_each_flag_of_evaluation(percentiles):
    env, network = Drawn(length=3), mlp_network()
    for flag in FLAGS:
        found = jax.eval_shape(
            lambda key, flag=flag: eval_rollout(env, network, 4, 5, key, percentiles, flag),
            jax.random.key(0),
        )
        assert set(found) == of_evaluation(flag, percentiles), flag


@pytest.mark.parametrize("percentiles", PERCENTILES)
@pytest.mark.parametrize("algorithm", ["ppo", "distillation"])
def test_everything_at_once_is_finite_and_exact(algorithm, percentiles):
    evaluation = EvalConfig(
        n_envs=4, max_episode_length=5, logging_level=EVERYTHING, logging_percentiles=percentiles
    )
    film = VideoConfig(enabled=True, episode_length=4)
    env, networks, logged = Drawn(length=3), mlp_network(), []
    callbacks = {
        "log_fn": lambda metrics, step: logged.append(metrics),
        "video_fn": lambda data: None,
    }
    if algorithm == "ppo":
        config = TrainConfig(ppo_config(EVERYTHING, percentiles), evaluation, film)
        train_ppo(env, networks, config, **callbacks)
        expected = of_ppo(EVERYTHING, percentiles)
    else:
        learning = distillation_config(EVERYTHING, percentiles)
        config = DistillationTrainConfig(learning, evaluation, film)
        train_distillation(env, mlp_network(seed=1), networks, config, **callbacks)
        expected = of_distillation(EVERYTHING, percentiles)
    last = logged[-1]
    assert set(last) == expected | of_evaluation(EVERYTHING, percentiles)
    assert all(math.isfinite(value) for value in last.values())
    # All episodes have three steps, so the return is 3 minus three times the average error.
    lives = [value for name, value in last.items() if name.startswith("eval/lifespan")]
    assert lives == ([3.0, 0.0] if percentiles is None else [3.0, 3.0])
    if percentiles is None:
        error = last["eval/env/error/mean"]
        assert last["eval/episode_reward/mean"] == pytest.approx(3.0 - 3.0 * error, abs=1e-5)
        assert last["losses/ratio_error"] < 1e-4
