"""Overrides of an environment's settings."""

from typing import Any

import pytest

from nnx_ppo.mujoco._overrides import nearest, resolve_overrides

SETTINGS = {
    "episode_length": 1000,
    "ctrl_dt": 0.01,
    "vision": False,
    "impl": "warp",
    "naccdmax": None,
    "kick_times": [1.0, 3.0],
    "reward_config": {"sigma": 0.25, "scales": {"energy": -0.1, "pose": 0.5}},
}


def resolve(**overrides: Any) -> dict[str, Any]:
    return resolve_overrides("Walk", SETTINGS, overrides)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ({}, {}),
        ({"episode_length": 500}, {"episode_length": 500}),
        ({"reward_config.sigma": 1.5}, {"reward_config.sigma": 1.5}),
        ({"reward_config": {"sigma": 1.5}}, {"reward_config.sigma": 1.5}),
        ({"reward_config.scales": {"pose": 0.0}}, {"reward_config.scales.pose": 0.0}),
        ({"reward_config": {"scales.pose": 0.0}}, {"reward_config.scales.pose": 0.0}),
    ],
)
def test_dotted_and_nested_names_mean_the_same(
    overrides: dict[str, Any], expected: dict[str, Any]
) -> None:
    assert resolve(**overrides) == expected


def test_values_take_the_type_of_the_setting() -> None:
    found = resolve(ctrl_dt=1, kick_times=(2, 4), naccdmax=7)
    assert found == {"ctrl_dt": 1.0, "kick_times": [2, 4], "naccdmax": 7}
    assert type(found["ctrl_dt"]) is float
    assert type(found["kick_times"]) is list


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"episode_lenght": 5}, "episode_lenght=5: .*'Walk' has no.*Did you mean 'episode_length'"),
        ({"pose": 1.0}, "pose=1.0: .*Did you mean 'reward_config.scales.pose'"),
        ({"reward_config": {"scale": {"pose": 1.0}}}, "'reward_config.scales.pose'"),
        ({"zzz": 1}, "Known are: episode_length, ctrl_dt"),
        ({"episode_length.x": 1}, "no setting 'episode_length.x'.*'episode_length'"),
    ],
)
def test_unknown_names_are_answered_with_the_nearest(
    overrides: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        resolve(**overrides)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"episode_length": 5.5}, r"episode_length=5.5: .*expected int .*1000.*, got float"),
        ({"episode_length": True}, "expected int .*, got bool"),
        ({"ctrl_dt": "fast"}, "ctrl_dt='fast': .*expected float .*, got str"),
        ({"ctrl_dt": True}, "expected float .*, got bool"),
        ({"vision": 1}, "expected bool .*, got int"),
        ({"kick_times": 3.0}, "expected list .*, got float"),
        ({"reward_config": 3}, "reward_config=3: .*a group .*got int.*reward_config.scales.pose"),
    ],
)
def test_wrong_types_say_expected_and_got(overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        resolve(**overrides)


def test_nearest_lists_everything_where_nothing_is_near() -> None:
    assert nearest("CheetaRun", ["CheetahRun", "Fish"]) == "Did you mean 'CheetahRun'?"
    assert nearest("xyz", ["CheetahRun", "Fish"]) == "Known are: CheetahRun, Fish."
