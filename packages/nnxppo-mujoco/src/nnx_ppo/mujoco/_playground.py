"""All that touches MuJoCo Playground. Importing this takes seconds."""

import math
from collections.abc import Mapping
from typing import Any

import jax
from mujoco_playground import dm_control_suite, locomotion, manipulation, registry
from mujoco_playground.config import (
    dm_control_suite_params,
    locomotion_params,
    manipulation_params,
)

from nnx_ppo.core import EpisodeWrapper
from nnx_ppo.mujoco._overrides import nearest, resolve_overrides
from nnx_ppo.mujoco.assets import require_menagerie
from nnx_ppo.mujoco.rendering import RenderWrapper
from nnx_ppo.mujoco.wrappers import ActionRepeatWrapper

# Each suite of environments, and the training settings that Playground publishes for it.
_SUITES = (
    (dm_control_suite, dm_control_suite_params),
    (locomotion, locomotion_params),
    (manipulation, manipulation_params),
)
_SUITES_WITH_ROBOTS = (locomotion, manipulation)
_IMPLS = ("jax", "warp")


def environment_names() -> tuple[str, ...]:
    """Return the names of all environments, those the user registered too."""
    return tuple(name for suite, _ in _SUITES for name in suite.ALL_ENVS)


def load_environment(name: str, overrides: Mapping[str, Any]) -> Any:
    """Load an environment and apply what its settings say but Playground's `step` leaves out."""
    require_known(name)
    config = registry.get_default_config(name)
    changes = resolve_overrides(name, config.to_dict(), overrides)
    if "impl" in config:
        _check_impl(changes.setdefault("impl", default_impl()))
    config.update_from_flattened_dict(changes)
    if any(name in suite.ALL_ENVS for suite in _SUITES_WITH_ROBOTS):
        menagerie = registry.mjx_env
        require_menagerie(name, str(menagerie.MENAGERIE_PATH), menagerie.MENAGERIE_COMMIT_SHA)
    env = registry.load(name, config=config)
    # An environment that draws in a way of its own goes on to do so.
    if getattr(type(env), "render", None) is registry.mjx_env.MjxEnv.render:
        env = RenderWrapper(env)
    # Read after loading: some environments change their own settings.
    settings: Mapping[str, Any] = config.to_dict()
    return _with_time_limit(env, settings.get("action_repeat", 1), settings.get("episode_length"))


def published_settings(name: str) -> Mapping[str, Any]:
    """Return Playground's settings for Brax's PPO; empty if it publishes none."""
    require_known(name)
    params = next(params for suite, params in _SUITES if name in suite.ALL_ENVS)
    try:
        return params.brax_ppo_config(name).to_dict()
    # How Playground says that it has none; the other where the user registered an environment
    # without an episode_length, which these settings are made from.
    except (ValueError, AttributeError):
        return {}


def default_impl() -> str:
    """Return the physics back end for JAX's first device."""
    return "warp" if jax.devices()[0].platform == "gpu" and _cuda_for_warp() else "jax"


def require_known(name: str) -> None:
    """Raise if there is no environment `name`."""
    names = environment_names()
    if name not in names:
        raise ValueError(f"MuJoCo Playground has no environment {name!r}. {nearest(name, names)}")


def _check_impl(impl: str) -> None:
    if impl not in _IMPLS:
        raise ValueError(
            f"impl={impl!r}: expected the name of a physics back end, 'jax' or 'warp'. Leave it "
            "out to have it chosen for the device."
        )


def _cuda_for_warp() -> bool:
    """Whether JAX's GPUs are CUDA devices that Warp can use too."""
    try:
        jax.devices("cuda")
        import warp  # noqa: PLC0415  (an optional part of MJX, which only GPUs need)
    except (ImportError, RuntimeError):  # RuntimeError: JAX has no CUDA devices
        return False
    return warp.is_cuda_available()


def _with_time_limit(env: Any, action_repeat: int, episode_length: int | None) -> Any:
    if action_repeat > 1:
        env = ActionRepeatWrapper(env, action_repeat)
    if episode_length is None:
        return env
    return EpisodeWrapper(env, math.ceil(episode_length / action_repeat))
