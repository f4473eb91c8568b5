"""Configurations as plain data."""

import dataclasses
import enum
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np


def to_plain(value: Any) -> Any:
    """Return a configuration as dicts, lists, strings and numbers.

    Dataclasses become dicts, flags the names of their members. What else there may be, such as a
    schedule, becomes a description that only people can read.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = dataclasses.fields(value)
        return {field.name: to_plain(getattr(value, field.name)) for field in fields}
    if isinstance(value, enum.Flag):
        return [member.name for member in value]
    if isinstance(value, enum.Enum):
        return value.name
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Mapping):
        return {str(key): to_plain(entry) for key, entry in value.items()}
    if isinstance(value, Sequence):
        return [to_plain(entry) for entry in value]
    name = getattr(value, "__qualname__", None)
    return f"{value.__module__}.{name}" if name else repr(value)
