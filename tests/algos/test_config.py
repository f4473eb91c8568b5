"""Configurations: every rule by name, before anything compiles."""

import dataclasses
from typing import Any

import pytest

from nnx_ppo.algorithms import (
    DistillationConfig,
    EvalConfig,
    LoggingLevel,
    PPOConfig,
    TrainConfig,
    VideoConfig,
)


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        (PPOConfig, dict(n_envs=0), r"n_envs=0 must be a whole number of at least 1"),
        (PPOConfig, dict(n_envs=2.0), r"n_envs=2.0 must be a whole number"),
        (PPOConfig, dict(n_envs=True), r"n_envs=True must be a whole number"),
        (PPOConfig, dict(rollout_length=0), "rollout_length=0"),
        (PPOConfig, dict(total_steps=-1), "total_steps=-1 must be a whole number of at least 0"),
        (PPOConfig, dict(gae_lambda=1.5), "gae_lambda=1.5 must be a number from 0 up to 1"),
        (PPOConfig, dict(discounting_factor=-0.1), "discounting_factor=-0.1"),
        (PPOConfig, dict(discounting_factor=float("nan")), "discounting_factor=nan"),
        (PPOConfig, dict(clip_range=0.0), "clip_range=0.0 must be a finite number above 0"),
        (PPOConfig, dict(learning_rate=-1e-3), "learning_rate=-0.001"),
        (PPOConfig, dict(learning_rate="1e-3"), "learning_rate='1e-3'"),
        (PPOConfig, dict(final_learning_rate=-1.0), "final_learning_rate=-1.0 must be None or"),
        (PPOConfig, dict(n_epochs=0), "n_epochs=0"),
        (PPOConfig, dict(critic_loss_weight=-1.0), "critic_loss_weight=-1.0"),
        (PPOConfig, dict(gradient_clipping=0.0), "gradient_clipping=0.0 must be None or"),
        (PPOConfig, dict(weight_decay=-1.0), "weight_decay=-1.0 must be None or"),
        (PPOConfig, dict(normalize_advantages=1), "normalize_advantages=1 must be True or False"),
        (PPOConfig, dict(logging_level=1), "logging_level=1 must be a LoggingLevel"),
        (PPOConfig, dict(logging_percentiles=(101,)), r"logging_percentiles=\(101,\)"),
        (PPOConfig, dict(logging_percentiles=(5, 5)), "different whole numbers from 0 to 100"),
        (PPOConfig, dict(logging_percentiles=()), "non-empty"),
        (
            PPOConfig,
            dict(n_envs=10, n_minibatches=3),
            "n_envs=10 is not divisible by n_minibatches=3; use n_minibatches=1 or 2, or "
            "n_envs=9 or 12",
        ),
        (PPOConfig, dict(discounting_factor={"a": 2.0}), "or such a number for each reward head"),
        (PPOConfig, dict(discounting_factor={}), r"discounting_factor=\{\} must be"),
        (PPOConfig, dict(target_kl=0.0), "target_kl=0.0 must be None or a finite number above 0"),
        (PPOConfig, dict(advantages="whole"), "advantages='whole' must be one of 'minibatch'"),
        (
            PPOConfig,
            dict(learning_rate=lambda n: 0.1, final_learning_rate=0.0),
            "final_learning_rate=0.0 needs a number as learning_rate, got a schedule",
        ),
        (PPOConfig, dict(adaptive_kl=0.1, final_learning_rate=0.0), "adaptive_kl=0.1 changes the"),
        (PPOConfig, dict(adaptive_kl=0.1, target_kl=0.2), "target_kl=0.2 would leave out the very"),
        (
            PPOConfig,
            dict(adaptive_kl=0.1, learning_rate=0.1),
            "learning_rate=0.1 must lie from min_learning_rate=1e-05 to max_learning_rate=0.01",
        ),
        (
            PPOConfig,
            dict(adaptive_kl=0.1, n_epochs=1, n_minibatches=1),
            "adaptive_kl=0.1 has no effect with n_epochs=1 and n_minibatches=1",
        ),
        (PPOConfig, dict(target_kl=0.1, n_epochs=1, n_minibatches=1), "target_kl=0.1 has no eff"),
        (PPOConfig, dict(final_entropy_weight=0.0), "needs a number as entropy_weight to start"),
        (
            PPOConfig,
            dict(advantage_normalization="window"),
            'advantage_normalization="window" needs advantages="window"',
        ),
        (PPOConfig, dict(chunk_length=5), 'chunk_length=5 needs advantages="window"'),
        (PPOConfig, dict(remat_length=0), "remat_length=0 must be None or a whole number"),
        (
            PPOConfig,
            dict(remat_length=20),
            "remat_length=20 must be below rollout_length=20, or everything is computed twice and "
            "nothing is saved; use remat_length=4 or remat_length=None",
        ),
        (
            PPOConfig,
            dict(chunk_length=10, advantages="window", remat_length=10),
            "remat_length=10 must be below chunk_length=10.*; use remat_length=3 or",
        ),
        (DistillationConfig, dict(remat_length=21), "DistillationConfig: remat_length=21 must be"),
        (DistillationConfig, dict(rollout_length=1, remat_length=1), "; use remat_length=None"),
        (
            PPOConfig,
            dict(matmul_precision="bf16"),
            "matmul_precision='bf16' must be None or one of 'float32', 'tensorfloat32', 'bfloat16'",
        ),
        (DistillationConfig, dict(matmul_precision=16), "matmul_precision=16 must be None or one"),
        (
            PPOConfig,
            dict(chunk_length=6, advantages="window"),
            "rollout_length=20 is not divisible by chunk_length=6; use chunk_length=4 or 5",
        ),
        (PPOConfig, dict(burn_in=2), "burn_in=2 needs a chunk_length"),
        (DistillationConfig, dict(n_envs=10, n_minibatches=3), "DistillationConfig: n_envs=10"),
        (EvalConfig, dict(every_steps=0), "EvalConfig: every_steps=0"),
        (EvalConfig, dict(max_episode_length=0), "max_episode_length=0"),
        (VideoConfig, dict(episode_length=0), "VideoConfig: episode_length=0"),
        (TrainConfig, dict(seed=-1), "TrainConfig: seed=-1"),
        (TrainConfig, dict(seed=2**32), "seed=4294967296 must be a whole number from 0 to"),
        (TrainConfig, dict(ppo={"n_envs": 3}), "must be a PPOConfig"),
        (TrainConfig, dict(checkpoint_every_steps=0), "checkpoint_every_steps=0"),
    ],
)
def test_errors_name_field_value_and_rule(kind, fields, message):
    with pytest.raises(ValueError, match=message):
        kind(**fields)


def test_assignment_shows_how_to_change_a_copy():
    config: Any = PPOConfig()
    with pytest.raises(dataclasses.FrozenInstanceError, match=r"replace\(config, n_envs=3\)"):
        config.n_envs = 3
    assert dataclasses.replace(config, n_envs=8).n_envs == 8


def test_equal_configurations_have_the_same_hash():
    configs = [
        TrainConfig(
            ppo=PPOConfig(discounting_factor={"a": 0.9}), video=VideoConfig(render_kwargs={"x": []})
        )
        for _ in range(2)
    ]
    assert hash(configs[0]) == hash(configs[1]) and configs[0] == configs[1]
    assert configs[0] != TrainConfig()


def test_lists_become_tuples():
    levels: Any = [0, 50]
    assert PPOConfig(logging_percentiles=levels).logging_percentiles == (0, 50)


def test_logging_levels():
    assert LoggingLevel.ALL.value == 1007 and LoggingLevel.BASIC is LoggingLevel.LOSSES
    assert LoggingLevel.ROLLOUT_OBS not in LoggingLevel.ALL
