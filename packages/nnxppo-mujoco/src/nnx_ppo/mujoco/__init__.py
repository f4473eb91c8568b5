"""MuJoCo Playground environments for nnxppo.

Importing this package is cheap: Playground itself, which takes seconds, is imported by the first
call that needs it.
"""

from nnx_ppo.mujoco.assets import AssetsMissingError
from nnx_ppo.mujoco.environments import PlaygroundEnvironments, load
from nnx_ppo.mujoco.presets import PRESETS, preset_from_brax
from nnx_ppo.mujoco.wrappers import ActionRepeatWrapper

__all__ = [
    "PRESETS",
    "ActionRepeatWrapper",
    "AssetsMissingError",
    "PlaygroundEnvironments",
    "load",
    "preset_from_brax",
]
