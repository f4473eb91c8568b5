"""Who fits the protocols."""

from typing import Any

import jax
import pytest

from nnx_ppo.core import (
    EnvironmentProvider,
    EnvState,
    EpisodeWrapper,
    Logger,
    RenderableEnv,
    RewardScalingWrapper,
    RLEnv,
    StaggeredEnv,
)
from nnx_ppo.core.testing import AnalyticEnvironments, Endless


class Renders(Endless):
    def render(self, trajectory: Any, **kwargs: Any) -> Any:
        return [None for _ in trajectory]


class Prints:
    def log(self, metrics: Any, step: int) -> None: ...

    def video(self, data: Any) -> None: ...

    def close(self) -> None: ...


@pytest.mark.parametrize(
    ("value", "protocol"),
    [
        (Endless(), RLEnv),
        (Endless().reset(jax.random.key(0)), EnvState),
        (EpisodeWrapper(Endless(), 3), RLEnv),
        (AnalyticEnvironments(), EnvironmentProvider),
        (Prints(), Logger),
    ],
)
def test_fits(value: Any, protocol: Any) -> None:
    assert isinstance(value, protocol)


@pytest.mark.parametrize(
    ("value", "protocol"),
    [
        (object(), RLEnv),
        (object(), EnvState),
        (Endless(), EnvironmentProvider),
        (Endless(), Logger),
    ],
)
def test_does_not_fit(value: Any, protocol: Any) -> None:
    assert not isinstance(value, protocol)


@pytest.mark.parametrize("protocol", [RenderableEnv, StaggeredEnv])
def test_what_wrappers_forward_is_not_asked_by_isinstance(protocol: Any) -> None:
    # Since Python 3.12 the answer would be no for every wrapped environment.
    with pytest.raises(TypeError, match="runtime_checkable"):
        isinstance(EpisodeWrapper(Renders(), 3), protocol)


def test_what_wrappers_forward_is_found_by_name() -> None:
    wrapped = RewardScalingWrapper(EpisodeWrapper(Renders(), 3), 2.0)
    assert wrapped.render([1, 2]) == [None, None]
    assert callable(wrapped.stagger)
    bare = RewardScalingWrapper(Endless(), 2.0)
    assert getattr(bare, "render", None) is None
    assert getattr(bare, "stagger", None) is None
