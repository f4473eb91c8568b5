"""Settings that train Playground's environments, as plain data."""

import math
from collections.abc import Mapping
from typing import Any

PRESETS: Mapping[str, Mapping[str, Any]] = {
    # For a few minutes on a CPU; Playground's own settings fill a GPU. Without clipped gradients
    # some seeds stay with a pole that spins, without the decay some leave the solution again.
    "CartpoleBalance": {
        "network": {
            "kind": "mlp",
            "actor_hidden": (64, 64),
            "critic_hidden": (128, 128),
            "activation": "relu",
            "entropy_weight": 1e-3,
            "min_std": 0.01,
            "normalize_obs": True,
        },
        "train": {
            "ppo": {
                "n_envs": 64,
                "rollout_length": 60,
                "total_steps": 1_500_000,
                "discounting_factor": 0.99,
                "learning_rate": 5e-4,
                "final_learning_rate": 0.0,
                "n_epochs": 8,
                "n_minibatches": 16,
                "gradient_clipping": 1.0,
            },
            "eval": {"every_steps": 150_000, "n_envs": 32, "max_episode_length": 1000},
            "checkpoint_every_steps": 150_000,  # so that each has an evaluation to be ranked by
        },
    },
}
"""Our own settings, by environment. They win over what Playground publishes."""

# What Brax uses where Playground's settings are silent (brax.training.agents.ppo, 0.14).
_BRAX_DEFAULTS: Mapping[str, Any] = {
    "clipping_epsilon": 0.3,
    "max_grad_norm": None,
    "num_eval_envs": 128,
}
_BRAX_NETWORK: Mapping[str, Any] = {
    "policy_hidden_layer_sizes": (32, 32, 32, 32),
    "value_hidden_layer_sizes": (256, 256, 256, 256, 256),
}
_BRAX_MIN_STD = 1e-3
_BRAX_CRITIC_WEIGHT = 0.5


def preset_from_brax(published: Mapping[str, Any]) -> dict[str, Any]:
    """Translate settings for Brax's PPO, as Playground publishes them, into ours.

    An iteration sees as many transitions, cut into as many minibatches, as in Brax. Brax gathers
    `batch_size * num_minibatches` windows of `unroll_length` steps from `num_envs` environments,
    one after the other; here the windows of one environment are joined to one long rollout.

    Brax counts physics steps, `action_repeat` of them to an action, and nnxppo actions; steps are
    divided by it.

    Left out is `reward_scaling`: it would scale every reported return too. Advantages are
    normalised, so it reaches the critic only, and there Adam undoes most of it. To have it, wrap
    the environment in `nnx_ppo.core.RewardScalingWrapper`. Left out as well are the choice of
    observation keys for actor and critic, which our network settings cannot say, and the number
    of hard resets per evaluation, which is an economy of Brax's.

    Args:
        published: What `brax_ppo_config` of `mujoco_playground.config` returns, as a mapping.

    Returns:
        A mapping with `"network"` and `"train"`.
    """
    brax = {**_BRAX_DEFAULTS, **published}
    layers = {**_BRAX_NETWORK, **brax.get("network_factory", {})}
    repeat = brax["action_repeat"]
    windows = brax["batch_size"] * brax["num_minibatches"] // brax["num_envs"]
    total_steps = brax["num_timesteps"] // repeat
    return {
        "network": {
            "kind": "mlp",
            "actor_hidden": tuple(layers["policy_hidden_layer_sizes"]),
            "critic_hidden": tuple(layers["value_hidden_layer_sizes"]),
            "entropy_weight": brax["entropy_cost"],
            "min_std": _BRAX_MIN_STD,
            "normalize_obs": brax["normalize_observations"],
        },
        "train": {
            "ppo": {
                "n_envs": brax["num_envs"],
                "rollout_length": brax["unroll_length"] * windows,
                "total_steps": total_steps,
                "discounting_factor": brax["discounting"],
                "clip_range": brax["clipping_epsilon"],
                "learning_rate": brax["learning_rate"],
                "n_epochs": brax["num_updates_per_batch"],
                "n_minibatches": brax["num_minibatches"],
                "critic_loss_weight": _BRAX_CRITIC_WEIGHT,
                "gradient_clipping": brax["max_grad_norm"],
            },
            "eval": {
                "every_steps": total_steps // brax["num_evals"],
                "n_envs": brax["num_eval_envs"],
                "max_episode_length": math.ceil(brax["episode_length"] / repeat),
            },
            "checkpoint_every_steps": total_steps // brax["num_evals"],
        },
    }
