"""Environments by name, and their list."""

import ast
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from rich.console import Console

from nnx_ppo.algorithms.discovery import environment_providers, find_environment
from nnx_ppo.core import RLEnv


@dataclasses.dataclass(frozen=True)
class ListEnvironments:
    """List the environments that are installed."""


def prepare_list(command: ListEnvironments, console: Console) -> Callable[[], None]:
    """Return a function that prints the names of all environments, by provider."""
    del command
    providers = environment_providers()

    def print_names() -> None:
        for provider, environments in providers.items():
            for name in environments.names():
                console.print(f"{provider:12} {name}", highlight=False)

    return print_names


def load_environment(name: str, overrides: Mapping[str, str]) -> RLEnv:
    """Return an environment.

    Args:
        name: Its name.
        overrides: Its settings as text; what is a Python literal is read as one.

    Raises:
        ValueError: There is no such environment, or no such setting.
    """
    return find_environment(name).load(name, **literals(overrides))


def as_text(overrides: Mapping[str, Any]) -> dict[str, str]:
    """Return settings of an environment as the text that `load_environment` reads."""
    return {k: value if isinstance(value, str) else repr(value) for k, value in overrides.items()}


def literals(overrides: Mapping[str, str]) -> dict[str, Any]:
    """Return settings of an environment as `load_environment` reads them."""
    return {setting: _literal(text) for setting, text in overrides.items()}


def _literal(text: str) -> Any:
    """Read a Python literal; anything else is a string."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
