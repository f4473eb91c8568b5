"""`nnxppo render`."""

import contextlib
import dataclasses
import inspect
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import jax
import numpy as np
import tyro
from flax import nnx
from rich.console import Console

from nnx_ppo.algorithms._validation import check_fields, frozen_config, integer, number, optional
from nnx_ppo.algorithms.cli.acting import Acting, load_acting
from nnx_ppo.algorithms.cli.errors import InputError, writing
from nnx_ppo.algorithms.cli.run_folder import VIDEOS
from nnx_ppo.algorithms.config import VideoConfig
from nnx_ppo.algorithms.rendering import (
    eval_rollout_for_render_scan,
    frame_rate,
    unstack_trajectory,
)
from nnx_ppo.algorithms.video_files import write_mp4

_CURE = "choose another file with --out"


@frozen_config
class Render:
    """Film the policy of a run, without noise, as an mp4 file.

    Attributes:
        run: The run folder, or the folder of a policy.
        out: The file; videos/step_STEP_seed_SEED.mp4 in the run folder if not given.
        checkpoint: Which checkpoint: latest, best, or its step.
        steps: Steps to show; where an episode ends before, the next one follows. As in the
            training's videos if not given.
        seed: Seed of the episodes.
        width: Width in pixels; the environment's own if not given.
        height: Height in pixels.
        camera: Name or number of a camera.
        fps: Frames per second; the speed of the simulation if not given.
        env: Name of another environment to act in.
        overrides: Settings of the environment, as pairs of name and value, beside the run's.
    """

    run: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="RUN")]
    out: str | None = None
    checkpoint: str = "latest"
    steps: int | None = None
    seed: int = 0
    width: int | None = None
    height: int | None = None
    camera: str | None = None
    fps: float | None = None
    env: str | None = None
    overrides: dict[str, str] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        rules = {
            "steps": optional(integer(1)),
            "seed": integer(0, 2**32 - 1),
            "width": optional(integer(1)),
            "height": optional(integer(1)),
            "fps": optional(number(0.0, open_low=True)),
        }
        check_fields(self, rules)
        if self.out is not None and not self.out.endswith(".mp4"):
            raise ValueError(f"Render: out={self.out!r} must end in '.mp4'.")


def prepare_render(command: Render, console: Console) -> Callable[[], None]:
    """Load what is to be shown, and return a function that films it."""
    acting = load_acting(command.run, command.checkpoint, command.env, command.overrides)
    video = VideoConfig() if acting.settings is None else acting.settings.train.video
    draw = _drawing(acting, {**video.render_kwargs, **_options(command)})
    steps = video.episode_length if command.steps is None else command.steps
    fps = frame_rate(acting.env) if command.fps is None else command.fps
    name = f"step_{acting.step or 0:010d}_seed_{command.seed}.mp4"
    path = Path(command.out or Path(command.run) / VIDEOS / name)
    nearest = next(folder for folder in path.parents if folder.exists())
    with writing(path, _CURE), tempfile.TemporaryFile(dir=nearest):
        pass  # not only after all frames are drawn

    def film() -> None:
        with Console(stderr=True).status(f"{steps} steps of {acting.env_name}") as status:
            trajectory, total = _trajectory(acting, steps, command.seed)
            status.update(f"drawing {len(trajectory)} frames")
            frames = np.stack(draw(trajectory))
            status.update(f"writing {path}")
            with writing(path, _CURE):
                write_mp4(path, frames, fps)
        console.print(
            f"{path}: {len(frames)} frames, {len(frames) / fps:.2f} s at {fps:g} per second; first "
            f"episode's return {total:.1f}",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )

    return film


def _options(command: Render) -> dict[str, Any]:
    """Return the arguments for `render` that were given."""
    camera: Any = command.camera
    with contextlib.suppress(ValueError, TypeError):  # a name, or none given
        camera = int(camera)
    given = {"width": command.width, "height": command.height, "camera": camera}
    return {name: value for name, value in given.items() if value is not None}


def _drawing(acting: Acting, options: dict[str, Any]) -> Callable[[Any], Any]:
    """Return a function that draws a trajectory.

    Raises:
        ValueError: The environment draws nothing, or not with these options.
    """
    render = getattr(acting.env, "render", None)
    if not callable(render):
        raise ValueError(
            f"{acting.env_name} cannot be rendered: {type(acting.env).__name__} has no method "
            "render(trajectory, **options)."
        )
    try:
        inspect.signature(render).bind([], **options)
    except TypeError as error:
        raise ValueError(
            f"{acting.env_name} cannot be rendered with {options}: {error}. Its method is "
            f"render{inspect.signature(render)}."
        ) from None

    def draw(trajectory: Any) -> Any:
        try:
            return render(trajectory, **options)
        except (ValueError, RuntimeError) as error:  # no such camera, no OpenGL: each with its cure
            raise InputError(f"{acting.env_name} cannot be rendered: {error}") from error

    return draw


def _trajectory(acting: Acting, steps: int, seed: int) -> tuple[list[Any], float]:
    """Return the states to draw, and the return of the first episode."""
    graphdef, variables = nnx.split(acting.networks)

    @jax.jit
    def run(variables: Any, key: jax.Array) -> Any:
        networks = nnx.merge(graphdef, variables, copy=True)
        return eval_rollout_for_render_scan(acting.env, networks, steps, key)

    states, final, total = run(variables, jax.random.key(seed))
    return unstack_trajectory(states, final, steps), float(total)
