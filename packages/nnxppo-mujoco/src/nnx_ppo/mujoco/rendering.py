"""Draws the states of MuJoCo environments."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from nnx_ppo.core import Wrapper
from nnx_ppo.mujoco._gl import no_context_message

# Of a state's data, what decides how it looks. Contacts and the like follow from these.
_DRAWN = ("qpos", "qvel", "time", "mocap_pos", "mocap_quat", "xfrc_applied")
_FREE_CAMERA = -1


class RenderWrapper(Wrapper):
    """Draws MuJoCo states without a display, for videos of training.

    `load` applies it. It takes the place of Playground's own `render`, which prints a progress bar
    of its own, cannot draw larger than the model's offscreen buffer, and looks from afar by
    default.

    Args:
        env: An environment with MuJoCo's model as `mj_model`, whose states have `data` with the
            fields of MuJoCo's data.

    Raises:
        TypeError: The environment has no `mj_model`.
    """

    def __init__(self, env: Any) -> None:
        super().__init__(env)
        if not hasattr(env, "mj_model"):
            raise TypeError(
                f"env={type(env).__name__}: expected an environment of MuJoCo, with its model as "
                "the attribute mj_model."
            )

    def render(
        self,
        trajectory: Sequence[Any],
        *,
        height: int = 240,
        width: int = 320,
        camera: str | int | None = None,
        scene_option: Any = None,
        modify_scene_fns: Sequence[Callable[[Any], None]] | None = None,
    ) -> list[np.ndarray]:
        """Draw one image for each state.

        Args:
            trajectory: States; of their `data` the positions, velocities, time, motion-capture
                bodies and applied forces are read, so a list of `SlimState` suffices.
            height: Height of the images in pixels.
            width: Width of the images in pixels.
            camera: Name or number of one of the model's cameras, or -1 for a free one that sees
                the whole model. None is the model's first camera, or the free one where it has
                none.
            scene_option: What to draw, a `mujoco.MjvOption`.
            modify_scene_fns: One function for each state, called with the `mujoco.MjvScene`
                before it is drawn, for example to add a marker.

        Returns:
            Images `(height, width, 3)`, uint8, as many as states.

        Raises:
            ValueError: A size below 1, a camera that the model does not have, or not as many
                functions as states.
            TypeError: `trajectory` is no sequence of states of MuJoCo.
            RuntimeError: OpenGL does not start; says what is missing.
        """
        if height < 1 or width < 1:
            raise ValueError(f"height={height}, width={width}: expected at least 1 pixel each.")
        model = self.env.mj_model
        number = camera_number(model, camera)
        _check_trajectory(trajectory, modify_scene_fns)
        mujoco = _mujoco()
        data = mujoco.MjData(model)
        frames = []
        with _renderer(model, height, width) as renderer:
            for index, state in enumerate(trajectory):
                for field in _DRAWN:
                    setattr(data, field, np.asarray(getattr(state.data, field)))
                mujoco.mj_forward(model, data)
                renderer.update_scene(data, camera=number, scene_option=scene_option)
                if modify_scene_fns is not None:
                    modify_scene_fns[index](renderer.scene)
                frames.append(renderer.render())
        return frames


def camera_number(model: Any, camera: str | int | None) -> int:
    """Return the number of a camera; arguments as in `RenderWrapper.render`.

    Args:
        model: A `mujoco.MjModel`.
        camera: Which camera.

    Raises:
        ValueError: The model has no such camera.
    """
    names = [model.camera(number).name for number in range(model.ncam)]
    if camera is None:
        return 0 if names else _FREE_CAMERA
    if isinstance(camera, str) and camera in names:
        return names.index(camera)
    if isinstance(camera, int) and _FREE_CAMERA <= camera < len(names):
        return camera
    known = ", ".join(f"{number} {name!r}" for number, name in enumerate(names)) or "none"
    raise ValueError(
        f"camera={camera!r}: the model has no such camera. Its cameras are: {known}. -1 is a free "
        "camera that sees the whole model."
    )


def _check_trajectory(trajectory: Sequence[Any], functions: Sequence[Any] | None) -> None:
    """Raise if these cannot be drawn."""
    for state in trajectory:
        if not hasattr(getattr(state, "data", None), "qpos"):
            raise TypeError(
                "trajectory: expected a list of states whose `data` holds qpos and the other "
                f"fields of MuJoCo's data, got one that holds a {type(state).__name__}. For one "
                "state pass a list of one."
            )
    if functions is not None and len(functions) != len(trajectory):
        raise ValueError(
            f"modify_scene_fns: expected one function for each of the {len(trajectory)} states, "
            f"got {len(functions)}."
        )


@contextmanager
def _renderer(model: Any, height: int, width: int) -> Iterator[Any]:
    """Open a renderer for images of a size; close it afterwards.

    Raises:
        RuntimeError: OpenGL does not start.
    """
    # The buffer is only a limit on the size of images, which models leave at 640 x 480.
    screen = model.vis.global_
    screen.offheight, screen.offwidth = max(screen.offheight, height), max(screen.offwidth, width)
    try:
        renderer = _mujoco().Renderer(model, height, width)
    except Exception as error:  # each way to draw fails in its own way
        raise RuntimeError(no_context_message(error)) from error
    with renderer:
        yield renderer


def _mujoco() -> Any:
    """Import MuJoCo where it is first needed."""
    import mujoco  # noqa: PLC0415  (takes a second, and importing this package is cheap)

    return mujoco
