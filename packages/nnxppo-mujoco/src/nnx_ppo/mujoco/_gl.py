"""Chooses how MuJoCo draws."""

import ctypes
import importlib
import os
import sys

_DISPLAYS = ("DISPLAY", "WAYLAND_DISPLAY")
_CURE = (
    "To draw without a display, MuJoCo needs EGL: install it (Debian, Ubuntu: apt-get install "
    "libegl1 libgl1, whose Mesa draws on the CPU; NVIDIA's driver brings its own), and set "
    "MUJOCO_GL=egl before Python starts."
)


def choose_backend() -> None:
    """Have MuJoCo draw by EGL, which needs no display, where there is none.

    The choice is the environment variable `MUJOCO_GL`; what the user has set there holds. Nothing
    is changed where EGL is not installed, since then MuJoCo could not be imported at all.
    """
    headless = sys.platform == "linux" and not any(map(os.environ.get, _DISPLAYS))
    if (
        headless
        and "MUJOCO_GL" not in os.environ
        and _loads("libEGL.so.1")
        and _loads("libGL.so.1")
    ):
        os.environ["MUJOCO_GL"] = "egl"
        _have_mujoco_choose_again()


def no_context_message(error: Exception) -> str:
    """Return what to tell the user whose MuJoCo could not open an OpenGL context."""
    backend = os.environ.get("MUJOCO_GL")
    chosen = f"MUJOCO_GL={backend}" if backend else "MUJOCO_GL is not set, so it used a display"
    return f"MuJoCo could not start OpenGL ({chosen}): {type(error).__name__}: {error} {_CURE}"


def _have_mujoco_choose_again() -> None:
    """Have MuJoCo read the variable, if it was imported before us, which is when it does."""
    renderer = getattr(sys.modules.get("mujoco"), "Renderer", None)
    module = getattr(sys.modules.get(getattr(renderer, "__module__", "")), "gl_context", None)
    if module is not None:
        importlib.reload(module)


def _loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True
