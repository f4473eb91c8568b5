"""Real pixels: MuJoCo draws states without a display."""

import ctypes
import os
import sys
import types
from typing import Any

import mujoco
import numpy as np
import pytest

from nnx_ppo.core.testing import FollowTarget
from nnx_ppo.mujoco import RenderWrapper, _gl, load

pytestmark = pytest.mark.physics

SIZE = {"height": 48, "width": 64}


@pytest.fixture(scope="module")
def cartpole() -> Any:
    return load("CartpoleBalance")


def standing(cart: float, pole: float = 0.0) -> Any:
    """A state of the cart-pole with what `SlimData` has: where the cart is, how the pole leans."""
    data = types.SimpleNamespace(
        qpos=np.array([cart, pole], np.float32),
        qvel=np.zeros(2, np.float32),
        time=np.float32(0.5),
        mocap_pos=np.zeros((0, 3)),
        mocap_quat=np.zeros((0, 4)),
        xfrc_applied=np.zeros((3, 6)),
    )
    return types.SimpleNamespace(data=data)


def orange(image: np.ndarray) -> np.ndarray:
    """Where cart and pole are; all else in the scene is blue or grey."""
    red, _, blue = np.moveaxis(image.astype(int), -1, 0)
    return red > blue + 20


def centre(image: np.ndarray) -> float:
    """The mean column of cart and pole."""
    return float(np.nonzero(orange(image))[1].mean())


def test_images_show_the_states(cartpole: Any) -> None:
    frames = cartpole.render([standing(-0.5), standing(0.0), standing(0.5)], **SIZE)
    assert [(frame.shape, frame.dtype) for frame in frames] == [((48, 64, 3), np.uint8)] * 3
    assert all(frame.std() > 10 for frame in frames)  # a picture, not one colour
    left, middle, right = map(centre, frames)
    # The first camera looks along the normal of the cart's plane, at its middle.
    assert left + 5 < middle < right - 5
    assert abs(middle - 31.5) < 1.5 and abs(left + right - 63) < 3


def test_cameras_have_names_numbers_and_a_default(cartpole: Any) -> None:
    def drawn(camera: Any) -> np.ndarray:
        return cartpole.render([standing(0.5)], camera=camera, **SIZE)[0]

    np.testing.assert_array_equal(drawn(None), drawn("fixed"))
    np.testing.assert_array_equal(drawn(1), drawn("lookatcart"))
    assert abs(centre(drawn("lookatcart")) - 31.5) < 1.5 < centre(drawn("fixed")) - 31.5
    assert (drawn(-1) != drawn(0)).any()
    for camera in ("side", 2, -2):
        with pytest.raises(ValueError, match=f"camera={camera!r}.*0 'fixed', 1 'lookatcart'"):
            drawn(camera)


def test_scenes_can_be_changed_and_images_be_large(cartpole: Any) -> None:
    states = [standing(0.0)] * 2
    empty = [lambda scene: None, lambda scene: setattr(scene, "ngeom", 0)]
    full, bare = cartpole.render(states, height=500, width=700, modify_scene_fns=empty)
    assert full.shape == (500, 700, 3)  # the model's buffer is 640 wide and 480 high
    assert orange(full).any() and not orange(bare).any()
    with pytest.raises(ValueError, match="each of the 2 states, got 1"):
        cartpole.render(states, modify_scene_fns=empty[:1])
    with pytest.raises(ValueError, match="height=0"):
        cartpole.render(states, height=0)
    with pytest.raises(TypeError, match=r"list of states.*holds a ndarray"):
        cartpole.render([np.zeros(3)])
    with pytest.raises(TypeError, match="FollowTarget: expected an environment of MuJoCo"):
        RenderWrapper(FollowTarget())


def test_a_model_without_cameras_is_seen_by_the_free_one() -> None:
    sphere = "<mujoco><worldbody><geom size='1' rgba='1 0 0 1'/></worldbody></mujoco>"
    model = mujoco.MjModel.from_xml_string(sphere)  # pyright: ignore[reportAttributeAccessIssue]
    env = RenderWrapper(types.SimpleNamespace(mj_model=model))
    state = standing(0.0)
    state.data.qpos = state.data.qvel = np.zeros(0)
    state.data.xfrc_applied = np.zeros((1, 6))
    (image,) = env.render([state], height=48, width=64)
    red, _, blue = image[24, 32].astype(int)
    assert red > 2 * blue and not image[0, 0].any()
    with pytest.raises(ValueError, match="Its cameras are: none"):
        env.render([state], camera=0)


def test_a_repeated_action_lasts_longer() -> None:
    env = load("CartpoleBalance", action_repeat=3)
    assert env.dt == pytest.approx(0.03)
    assert env.render([standing(0.0)], **SIZE)[0].std() > 10


def test_the_display_and_the_users_choice_win(monkeypatch: pytest.MonkeyPatch) -> None:
    def chosen(**variables: str) -> str | None:
        for name in ("MUJOCO_GL", "DISPLAY", "WAYLAND_DISPLAY"):
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        _gl.choose_backend()
        return os.environ.get("MUJOCO_GL")

    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(ctypes, "CDLL", lambda name: None)
    assert chosen() == "egl"
    assert chosen(MUJOCO_GL="osmesa") == "osmesa"
    assert chosen(DISPLAY=":0") is None
    assert chosen(WAYLAND_DISPLAY="wayland-0") is None

    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert chosen() is None


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux draws by EGL")
def test_mujoco_may_be_imported_first(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MUJOCO_GL", "DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    module = sys.modules[mujoco.Renderer.__module__].gl_context
    monkeypatch.setattr(module, "GLContext", "for displays")  # what the import left there
    _gl.choose_backend()
    assert module.GLContext.__module__ == "mujoco.egl"


def test_the_cure_is_named_where_opengl_does_not_start(
    cartpole: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any) -> None:
        raise RuntimeError("gladLoadGL error")

    monkeypatch.setattr(mujoco, "Renderer", refuse)
    monkeypatch.setenv("MUJOCO_GL", "glfw")
    cure = r"MUJOCO_GL=glfw\): RuntimeError: gladLoadGL error.*apt-get install.*MUJOCO_GL=egl"
    with pytest.raises(RuntimeError, match=cure):
        cartpole.render([standing(0.0)])
