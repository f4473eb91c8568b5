"""Finds what other packages plug in: environments and loggers, through entry points."""

import difflib
from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from nnx_ppo.core import EnvironmentProvider, Logger

_ENVIRONMENTS = "nnx_ppo.environments"
_LOGGERS = "nnx_ppo.loggers"


def environment_providers() -> dict[str, EnvironmentProvider]:
    """Return the installed providers of environments by name, sorted.

    Raises:
        ImportError: A provider's package is broken; names the provider.
    """
    return {point.name: _load(point)() for point in _points(_ENVIRONMENTS)}


def find_environment(name: str) -> EnvironmentProvider:
    """Return the provider of an environment.

    Raises:
        ValueError: No provider has it; suggests the nearest names.
    """
    names: list[str] = []
    for provider in environment_providers().values():
        offered = list(provider.names())
        if name in offered:
            return provider
        names += offered
    by_lower = {known.lower(): known for known in names}
    near = [by_lower[n] for n in difflib.get_close_matches(name.lower(), by_lower, 3, 0.5)]
    guess = f"Did you mean {' or '.join(near)}? " if near else ""
    raise ValueError(
        f"No environment is called {name!r}. {guess}`nnxppo envs` lists those that are installed; "
        'MuJoCo Playground\'s come with pip install "nnxppo-algos[mujoco]".'
    )


def logger_factory(name: str) -> Callable[[str, Any], Logger]:
    """Return the callable `(run_dir, config) -> Logger` of a logger.

    Raises:
        ValueError: It is not installed; says which are, and the extra to install.
    """
    points = {point.name: point for point in _points(_LOGGERS)}
    if name not in points:
        installed = ", ".join(points) or "none"
        raise ValueError(
            f"No logger is called {name!r}; installed: {installed}. "
            f'Perhaps pip install "nnxppo-algos[{name}]" brings it.'
        )
    return _load(points[name])


def _points(group: str) -> list[EntryPoint]:
    return sorted(entry_points(group=group), key=lambda point: point.name)


def _load(point: EntryPoint) -> Any:
    try:
        return point.load()
    except Exception as error:
        error.add_note(f"while loading {point.name!r} ({point.value}) of {point.group}")
        raise
