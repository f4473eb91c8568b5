"""What the library asks of environments, of who provides them, and of loggers."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from jaxtyping import Array, Shaped


@runtime_checkable
class EnvState(Protocol):
    """State of one environment, as MuJoCo Playground defines it.

    Fields are read-only here, so that frozen dataclasses fit. A state must be a dataclass: the
    wrappers make changed copies of it.
    """

    @property
    def obs(self) -> Any:
        """Observation, any pytree of arrays."""
        ...

    @property
    def done(self) -> Shaped[Array, "..."]:
        """Whether the episode has ended, as a boolean or as 0 and 1."""
        ...

    @property
    def reward(self) -> Any:
        """Reward of the last step: a scalar, or a tree of named scalars."""
        ...

    @property
    def info(self) -> dict[str, Any]:
        """Further state. `"truncation"` or `"truncated"` flags the end by time limit."""
        ...

    @property
    def metrics(self) -> dict[str, Any]:
        """Scalars to log."""
        ...


@runtime_checkable
class RLEnv(Protocol):
    """An environment, written for a single instance; the library vmaps it.

    An environment that has an attribute `action_size` (an int, or a tree of ints for trees of
    actions) gets networks checked against it before training. Environments whose action is one
    integer, a scalar, have none.
    """

    def reset(self, rng: Any) -> Any:
        """Return the `EnvState` at the start of a new episode, drawn from the key `rng`."""
        ...

    def step(self, state: Any, action: Any) -> Any:
        """Return the next `EnvState`."""
        ...


# The next two are not checkable at run time: wrappers forward attributes by `__getattr__`, and
# since Python 3.12 `isinstance` does not see those. Ask with `getattr(env, "render", None)`.
class RenderableEnv(Protocol):
    """What an `RLEnv` that can draw its states has besides."""

    def render(self, trajectory: Sequence[Any], **kwargs: Any) -> Sequence[Any]:
        """Return one `(height, width, 3)` uint8 image per state."""
        ...


class StaggeredEnv(Protocol):
    """What an `RLEnv` has besides whose very first episodes can be given different ages.

    Without this, environments that end by time limit all end at the same step, for ever.
    """

    def stagger(self, state: Any, rng: Any) -> Any:
        """Return batched first states with episode ages spread by the key `rng`."""
        ...


@runtime_checkable
class EnvironmentProvider(Protocol):
    """Source of named environments, found through the entry points `nnx_ppo.environments`."""

    def names(self) -> Sequence[str]:
        """Return the names that `load` accepts."""
        ...

    def load(self, name: str, **overrides: Any) -> Any:
        """Return the environment `name`, ready to train: time limits are applied."""
        ...

    def preset(self, name: str) -> Mapping[str, Any]:
        """Return settings known to train `name`, as plain data; empty if none are known."""
        ...


@runtime_checkable
class Logger(Protocol):
    """Receiver of metrics and videos, found through the entry points `nnx_ppo.loggers`.

    The entry point is a callable `(run_dir: str, config: Mapping[str, Any]) -> Logger`.
    """

    def log(self, metrics: Mapping[str, Any], step: int) -> None:
        """Record metrics at an environment step."""
        ...

    def video(self, data: Any) -> None:
        """Record a rendered episode (a `VideoData`)."""
        ...

    def close(self) -> None:
        """Flush and end."""
        ...
