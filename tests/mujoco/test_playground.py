"""Playground environments, loaded ready to train."""

import contextlib
import importlib.metadata
import types
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nnx_ppo.core import EnvironmentProvider, EnvState, RLEnv
from nnx_ppo.core.testing import FollowTarget
from nnx_ppo.mujoco import AssetsMissingError, PlaygroundEnvironments, load

pytestmark = [
    pytest.mark.physics,
    # mujoco_playground imports brax, which imports the retired JAXopt.
    pytest.mark.filterwarnings("ignore:JAXopt:DeprecationWarning"),
]

NAMES = ("CartpoleBalance", "CheetahRun", "PendulumSwingup")
LIMIT = 2


@pytest.fixture(scope="module", autouse=True)
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A folder where MuJoCo may leave its log."""
    with contextlib.chdir(tmp_path_factory.mktemp("mujoco")):
        yield


@pytest.fixture(scope="module", params=NAMES)
def env(request: pytest.FixtureRequest) -> Any:
    return load(request.param, episode_length=LIMIT)


@pytest.fixture(scope="module")
def cartpole() -> Any:
    return load("CartpoleBalance", episode_length=LIMIT)


@pytest.fixture
def heavy(cartpole: Any) -> types.ModuleType:
    """The module that imports Playground; imported by loading an environment."""
    return importlib.import_module("nnx_ppo.mujoco._playground")


def leaf_types(tree: Any) -> list[Any]:
    return [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(tree)]


# The fastest to compile; CheetahRun takes a minute.
@pytest.mark.parametrize("env", ["PendulumSwingup"], indirect=True)
def test_jitted_episode_ends_by_time_limit(env: Any) -> None:
    step = jax.jit(env.step)
    state = jax.jit(env.reset)(jax.random.key(0))
    assert isinstance(state, EnvState)
    action = jnp.zeros(env.action_size)
    ends = []
    for _ in range(LIMIT):
        state = step(state, action)
        ends.append((bool(state.done), bool(state.info["truncated"])))
    assert ends == [(False, False), (True, True)]
    assert np.isfinite(state.obs).all()
    assert np.isfinite(state.reward)


def test_states_keep_structure_and_dtypes(env: Any) -> None:
    # Weak types do change: of `data.time` in CheetahRun, of `reward` in PendulumSwingup.
    first = jax.eval_shape(env.reset, jax.random.key(0))
    second = jax.eval_shape(env.step, first, jnp.zeros(env.action_size))
    assert jax.tree.structure(first) == jax.tree.structure(second)
    assert leaf_types(first) == leaf_types(second)


def test_environments_fit_the_protocols(cartpole: Any) -> None:
    assert cartpole.observation_size == 5
    assert cartpole.dt == 0.01
    assert callable(cartpole.stagger)
    assert callable(cartpole.render)
    assert isinstance(cartpole, RLEnv)


def test_a_step_leaves_the_callers_dicts_alone(cartpole: Any) -> None:
    state = jax.eval_shape(cartpole.reset, jax.random.key(0))

    def traced(state: Any) -> Any:
        info, metrics = dict(state.info), dict(state.metrics)
        cartpole.step(state, jnp.zeros(1))
        assert all(state.info[key] is value for key, value in info.items())
        assert all(state.metrics[key] is value for key, value in metrics.items())
        return state.obs

    jax.eval_shape(traced, state)


def test_time_limit_comes_from_the_settings(heavy: types.ModuleType) -> None:
    assert load("CartpoleBalance").max_len == 1000
    assert load("CartpoleBalance", episode_length=7).max_len == 7
    # 7 physics steps at 3 to an action: the third action passes the limit.
    assert load("CartpoleBalance", episode_length=7, action_repeat=3).max_len == 3


@pytest.mark.parametrize("name", NAMES)
def test_repeated_steps_keep_structure_and_dtypes(name: str) -> None:
    env = load(name, action_repeat=2)
    assert env.env.action_repeat == 2
    first = jax.eval_shape(env.reset, jax.random.key(0))
    second = jax.eval_shape(env.step, first, jnp.zeros(env.action_size))
    assert leaf_types(first) == leaf_types(second)


class TestBackEnd:
    def test_cpu_gets_jax(self, cartpole: Any) -> None:
        assert cartpole.mjx_model.impl.value == "jax"

    @pytest.mark.parametrize(
        ("platform", "cuda", "expected"),
        [("gpu", True, "warp"), ("gpu", False, "jax"), ("cpu", True, "jax"), ("tpu", True, "jax")],
    )
    def test_cuda_gets_warp_where_warp_can_use_it(
        self,
        platform: str,
        cuda: bool,
        expected: str,
        heavy: types.ModuleType,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        device = types.SimpleNamespace(platform=platform)
        monkeypatch.setattr(jax, "devices", lambda *_: [device])
        monkeypatch.setattr("warp.is_cuda_available", lambda: cuda)
        assert heavy.default_impl() == expected

    def test_gpu_without_cuda_gets_jax(
        self, heavy: types.ModuleType, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def devices(backend: str | None = None) -> list[Any]:
            if backend == "cuda":
                raise RuntimeError("Unknown backend cuda")
            return [types.SimpleNamespace(platform="gpu")]

        monkeypatch.setattr(jax, "devices", devices)
        assert heavy.default_impl() == "jax"

    def test_users_choice_wins(
        self, heavy: types.ModuleType, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(heavy, "default_impl", lambda: "warp")
        assert load("CartpoleBalance", impl="jax").mjx_model.impl.value == "jax"

    def test_unknown_choice_is_refused(self) -> None:
        with pytest.raises(ValueError, match="impl='wrap': expected .* 'jax' or 'warp'"):
            load("CartpoleBalance", impl="wrap")


class TestErrors:
    def test_unknown_environment(self) -> None:
        with pytest.raises(ValueError, match="no environment 'CartpolBalance'. .*'CartpoleBala"):
            load("CartpolBalance")

    def test_unknown_setting(self) -> None:
        with pytest.raises(ValueError, match="episode_lenght=5.*'episode_length'"):
            load("CartpoleBalance", episode_lenght=5)

    def test_wrong_type(self) -> None:
        with pytest.raises(TypeError, match="episode_length=0.5.*expected int.*got float"):
            load("CartpoleBalance", episode_length=0.5)


class TestRobots:
    @pytest.fixture(autouse=True)
    def folder(
        self, heavy: types.ModuleType, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
    ) -> Any:
        """An empty place for the robot models, and no way to download them."""

        def refuse(*args: Any) -> None:
            raise AssertionError(f"Playground would download: {args}")

        folder = tmp_path / "mujoco_menagerie"
        monkeypatch.setattr(heavy.registry.mjx_env, "MENAGERIE_PATH", folder)
        monkeypatch.setattr(heavy.registry.mjx_env, "_clone_with_progress", refuse)
        return folder

    @pytest.mark.parametrize("name", ["Go1JoystickFlatTerrain", "AlohaHandOver"])
    def test_missing_models_are_named(
        self, name: str, folder: Any, heavy: types.ModuleType
    ) -> None:
        with pytest.raises(AssetsMissingError) as caught:
            load(name)
        for part in (name, str(folder), heavy.registry.mjx_env.MENAGERIE_COMMIT_SHA):
            assert part in str(caught.value)
        assert isinstance(caught.value, FileNotFoundError)

    def test_settings_are_checked_first(self) -> None:
        with pytest.raises(ValueError, match="'reward_config.tracking_sigma'"):
            load("Go1JoystickFlatTerrain", tracking_sigma=1.0)

    def test_with_models_in_place_playground_loads(
        self, folder: Any, heavy: types.ModuleType, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        folder.mkdir()
        env = FollowTarget()
        monkeypatch.setitem(heavy.manipulation._envs, "PandaRobotiqPushCube", lambda **_: env)
        loaded = load("PandaRobotiqPushCube")
        assert loaded.max_len == 750  # 3000 physics steps, 4 to an action
        assert loaded.env.action_repeat == 4
        assert loaded.env.env is env


class TestRegisteredByTheUser:
    @pytest.fixture(autouse=True)
    def registered(
        self, heavy: types.ModuleType, monkeypatch: pytest.MonkeyPatch
    ) -> Iterator[None]:
        suite = heavy.dm_control_suite
        empty_config = type(heavy.registry.get_default_config("CartpoleBalance"))
        with monkeypatch.context() as patch:
            patch.setattr(suite, "_envs", dict(suite._envs))
            patch.setattr(suite, "_cfgs", dict(suite._cfgs))
            suite.register_environment("Mine", lambda **_: FollowTarget(), empty_config)
            yield

    def test_without_settings_there_is_no_limit_and_no_back_end(self) -> None:
        assert isinstance(load("Mine"), FollowTarget)

    def test_it_is_known_and_has_no_preset(self) -> None:
        provider = PlaygroundEnvironments()
        assert "Mine" in provider.names()
        assert provider.preset("Mine") == {}


class TestProvider:
    def test_is_found_by_its_entry_point(self) -> None:
        (entry,) = importlib.metadata.entry_points(group="nnx_ppo.environments", name="mujoco")
        assert entry.load() is PlaygroundEnvironments
        assert isinstance(PlaygroundEnvironments(), EnvironmentProvider)

    def test_names_cover_all_suites(self) -> None:
        names = PlaygroundEnvironments().names()
        assert len(names) == len(set(names))
        assert {*NAMES, "Go1JoystickFlatTerrain", "AlohaHandOver"} <= set(names)

    def test_loads(self) -> None:
        assert PlaygroundEnvironments().load("CartpoleBalance", episode_length=3).max_len == 3

    def test_preset_is_ours_or_playgrounds(self) -> None:
        provider = PlaygroundEnvironments()
        assert provider.preset("CartpoleBalance")["train"]["ppo"]["n_envs"] == 64
        cheetah = provider.preset("CheetahRun")["train"]["ppo"]
        assert (cheetah["n_envs"], cheetah["total_steps"]) == (2048, 60_000_000)
        assert provider.preset("FingerSpin")["train"]["ppo"]["discounting_factor"] == 0.95

    def test_all_presets_divide_into_minibatches(self) -> None:
        provider = PlaygroundEnvironments()
        for name in provider.names():
            ppo = provider.preset(name)["train"]["ppo"]
            assert ppo["n_envs"] % ppo["n_minibatches"] == 0, name

    def test_preset_of_unknown_environment(self) -> None:
        with pytest.raises(ValueError, match="'CheetahRun'"):
            PlaygroundEnvironments().preset("CheetaRun")
