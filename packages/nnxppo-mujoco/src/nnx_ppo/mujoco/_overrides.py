"""Checks a user's overrides of an environment's settings before Playground sees them."""

import difflib
from collections.abc import Mapping, Sequence
from typing import Any


def resolve_overrides(
    name: str, settings: Mapping[str, Any], overrides: Mapping[str, Any]
) -> dict[str, Any]:
    """Return overrides as dotted paths to single settings, each of the setting's own type.

    Args:
        name: The environment, for messages.
        settings: Its default settings, nested mappings of plain values.
        overrides: New values by name. Names may be dotted, and values may be mappings.

    Raises:
        ValueError: There is no such setting; the message names the nearest ones.
        TypeError: The value does not fit the setting.
    """
    known = _flatten(settings)
    resolved = {}
    for key, value in _flatten(overrides).items():
        if key not in known:
            _refuse_key(name, key, value, list(known))
        resolved[key] = _converted(name, key, value, known[key])
    return resolved


def nearest(word: str, options: Sequence[str]) -> str:
    """Return a sentence that names the options most like `word`, or all of them."""
    close = difflib.get_close_matches(word, options, n=3, cutoff=0.6)
    return _question(close) if close else _listing(options)


def _question(options: Sequence[str]) -> str:
    return f"Did you mean {' or '.join(map(repr, options))}?"


def _listing(options: Sequence[str]) -> str:
    return f"Known are: {', '.join(options)}."


def _flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Map dotted paths to leaves; an empty mapping is a leaf."""
    flat = {}
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            flat.update(_flatten(value, f"{prefix}{key}."))
        else:
            flat[prefix + key] = value
    return flat


def _refuse_key(name: str, key: str, value: Any, known: Sequence[str]) -> None:
    group = [path for path in known if path.startswith(key + ".")]
    if group:
        raise TypeError(
            f"{key}={value!r}: in the settings of {name!r} this is a group of settings, expected "
            f"a mapping of names to values, got {type(value).__name__}. {_listing(group)}"
        )
    leaf = key.rpartition(".")[2]
    same_leaf = [path for path in known if path.rpartition(".")[2] == leaf]
    hint = _question(same_leaf) if same_leaf else nearest(key, known)
    raise ValueError(f"{key}={value!r}: environment {name!r} has no setting {key!r}. {hint}")


def _converted(name: str, key: str, value: Any, default: Any) -> Any:
    """Return `value` as the type of `default`, if nothing is lost by it."""
    if default is None or value is None:
        return value
    if isinstance(default, list | tuple) and isinstance(value, list | tuple):
        return type(default)(value)
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if isinstance(default, float) and number:
        return float(value)
    if type(default) is not type(value):
        raise TypeError(
            f"{key}={value!r}: in the settings of {name!r} expected {type(default).__name__} "
            f"(the default is {default!r}), got {type(value).__name__}."
        )
    return value
