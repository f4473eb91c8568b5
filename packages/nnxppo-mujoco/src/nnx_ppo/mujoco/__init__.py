"""MuJoCo Playground environments for nnxppo.

Importing this package is cheap: Playground itself, which takes seconds, is imported by the first
call that needs it. One thing happens at once: on Linux without a display, the environment
variable `MUJOCO_GL` is set to `egl` unless it has a value, so that MuJoCo can draw.
"""

from nnx_ppo.mujoco._gl import choose_backend
from nnx_ppo.mujoco.assets import AssetsMissingError
from nnx_ppo.mujoco.environments import PlaygroundEnvironments, load
from nnx_ppo.mujoco.presets import PRESETS, preset_from_brax
from nnx_ppo.mujoco.rendering import RenderWrapper
from nnx_ppo.mujoco.wrappers import ActionRepeatWrapper

choose_backend()

__all__ = [
    "PRESETS",
    "ActionRepeatWrapper",
    "AssetsMissingError",
    "PlaygroundEnvironments",
    "RenderWrapper",
    "load",
    "preset_from_brax",
]
