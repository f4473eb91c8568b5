"""Presets, and the translation of Brax's settings."""

from typing import Any

import pytest

from nnx_ppo.mujoco import PRESETS, preset_from_brax

BRAX: dict[str, Any] = {
    "num_timesteps": 60_000_000,
    "num_evals": 10,
    "reward_scaling": 10.0,
    "episode_length": 1000,
    "normalize_observations": True,
    "action_repeat": 1,
    "unroll_length": 30,
    "num_minibatches": 32,
    "num_updates_per_batch": 16,
    "discounting": 0.995,
    "learning_rate": 1e-3,
    "entropy_cost": 1e-2,
    "num_envs": 2048,
    "batch_size": 1024,
    "num_resets_per_eval": 10,
}


def test_cartpole_preset() -> None:
    assert PRESETS["CartpoleBalance"]["train"]["ppo"]["total_steps"] == 1_500_000
    assert PRESETS["CartpoleBalance"]["network"]["actor_hidden"] == (64, 64)


def test_an_iteration_holds_as_many_transitions_and_minibatches_as_in_brax() -> None:
    ppo = preset_from_brax(BRAX)["train"]["ppo"]
    # 1024 · 32 windows from 2048 environments are 16 windows each: 16 · 30 = 480 steps.
    assert (ppo["n_envs"], ppo["rollout_length"], ppo["n_minibatches"]) == (2048, 480, 32)
    # A minibatch: 1024 windows · 30 steps = 30,720 = 2048 / 32 environments · 480 steps.
    assert ppo["n_envs"] // ppo["n_minibatches"] * ppo["rollout_length"] == 1024 * 30


def test_what_brax_leaves_to_its_defaults() -> None:
    preset = preset_from_brax(BRAX)
    ppo = preset["train"]["ppo"]
    assert (ppo["clip_range"], ppo["gradient_clipping"]) == (0.3, None)
    assert preset["network"]["actor_hidden"] == (32, 32, 32, 32)
    assert preset["train"]["eval"] == {
        "every_steps": 6_000_000,
        "n_envs": 128,
        "max_episode_length": 1000,
    }


def test_what_is_published_wins_over_the_defaults() -> None:
    published = BRAX | {
        "clipping_epsilon": 0.2,
        "max_grad_norm": 1.0,
        "num_eval_envs": 32,
        "network_factory": {"policy_hidden_layer_sizes": [512, 256], "policy_obs_key": "state"},
    }
    preset = preset_from_brax(published)
    ppo = preset["train"]["ppo"]
    assert (ppo["clip_range"], ppo["gradient_clipping"]) == (0.2, 1.0)
    assert preset["train"]["eval"]["n_envs"] == 32
    assert preset["network"]["actor_hidden"] == (512, 256)
    assert preset["network"]["critic_hidden"] == (256,) * 5


def test_steps_are_counted_in_actions() -> None:
    train = preset_from_brax(BRAX | {"action_repeat": 3})["train"]
    # 60,000,000 physics steps / 3 to an action; 1000 / 3 = 333.3, so the 334th action ends it.
    assert train["ppo"]["total_steps"] == 20_000_000
    assert train["eval"] == {"every_steps": 2_000_000, "n_envs": 128, "max_episode_length": 334}


@pytest.mark.parametrize("preset", [PRESETS["CartpoleBalance"], preset_from_brax(BRAX)])
def test_presets_use_only_known_fields(preset: dict[str, Any]) -> None:
    assert set(preset) == {"network", "train"}
    assert set(preset["network"]) <= {
        "kind",
        "activation",
        "actor_hidden",
        "critic_hidden",
        "entropy_weight",
        "min_std",
        "normalize_obs",
    }
    assert set(preset["train"]) == {"ppo", "eval", "checkpoint_every_steps"}
    assert set(preset["train"]["ppo"]) <= {
        "n_envs",
        "rollout_length",
        "final_learning_rate",
        "total_steps",
        "gae_lambda",
        "discounting_factor",
        "clip_range",
        "learning_rate",
        "normalize_advantages",
        "combine_advantages",
        "n_epochs",
        "n_minibatches",
        "critic_loss_weight",
        "gradient_clipping",
        "weight_decay",
    }
    assert set(preset["train"]["eval"]) <= {"every_steps", "n_envs", "max_episode_length"}
