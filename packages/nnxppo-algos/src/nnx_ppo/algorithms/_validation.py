"""Rules for configuration fields, and errors that say how to mend a broken one."""

import dataclasses
import math
import numbers
from collections.abc import Callable, Mapping
from typing import Any, NoReturn, TypeVar, dataclass_transform, no_type_check

from jax.core import Tracer

Class = TypeVar("Class", bound=type)


@dataclasses.dataclass(frozen=True)
class Rule:
    """What a field must satisfy.

    Attributes:
        holds: Whether a value satisfies the rule.
        text: The rule, to go after "must be".
    """

    holds: Callable[[Any], bool]
    text: str


def integer(minimum: int, maximum: int | None = None) -> Rule:
    """A whole number from `minimum` up, or up to `maximum`."""

    def holds(value: Any) -> bool:
        return _is_integer(value) and minimum <= value and (maximum is None or value <= maximum)

    limits = f"of at least {minimum}" if maximum is None else f"from {minimum} to {maximum}"
    return Rule(holds, f"a whole number {limits}")


def number(low: float = -math.inf, high: float = math.inf, *, open_low: bool = False) -> Rule:
    """A finite number from `low` (excluded if `open_low`) to `high`."""

    def holds(value: Any) -> bool:
        return _is_number(value) and low <= value <= high and not (open_low and value == low)

    if high == math.inf:
        return Rule(holds, f"a finite number {'above' if open_low else 'of at least'} {low:g}")
    return Rule(holds, f"a number {'above' if open_low else 'from'} {low:g} up to {high:g}")


def optional(rule: Rule) -> Rule:
    """None, or what another rule asks."""
    return Rule(lambda v: v is None or rule.holds(v), f"None or {rule.text}")


def instance(kind: type, text: str) -> Rule:
    """An object of a class."""
    return Rule(lambda v: isinstance(v, kind), text)


def one_of(*choices: str) -> Rule:
    """One of some strings."""
    return Rule(lambda v: v in choices, f"one of {', '.join(map(repr, choices))}")


def sizes() -> Rule:
    """A tuple of sizes."""

    def holds(value: Any) -> bool:
        return isinstance(value, tuple) and all(_is_integer(v) and v >= 1 for v in value)

    return Rule(holds, "a tuple of whole numbers of at least 1")


def percentiles() -> Rule:
    """None, or numbers from 0 to 100 without repeats."""

    def holds(value: Any) -> bool:
        if value is None:
            return True
        if not isinstance(value, tuple) or not value or len(set(value)) != len(value):
            return False
        return all(_is_integer(v) and 0 <= v <= 100 for v in value)

    return Rule(holds, "None or a non-empty tuple of different whole numbers from 0 to 100")


def check_fields(config: Any, rules: Mapping[str, Rule]) -> None:
    """Raise if a field of a configuration breaks its rule.

    Values that JAX is tracing cannot be looked at and are let through.

    Raises:
        ValueError: Names the field, its value and the rule.
    """
    for name, rule in rules.items():
        value = getattr(config, name)
        if not isinstance(value, Tracer) and not rule.holds(value):
            raise ValueError(f"{type(config).__name__}: {name}={value!r} must be {rule.text}.")


def check_minibatches(config: Any) -> None:
    """Raise if the environments cannot be dealt out evenly to the minibatches.

    Raises:
        ValueError: Names both fields and the nearest values that fit.
    """
    envs, parts = config.n_envs, config.n_minibatches
    if envs % parts == 0:
        return
    divisors = [d for d in range(1, envs + 1) if envs % d == 0]
    near = sorted(sorted(divisors, key=lambda d: (abs(d - parts), d))[:2])
    multiples = [m for m in (envs - envs % parts, envs - envs % parts + parts) if m > 0]
    raise ValueError(
        f"{type(config).__name__}: n_envs={envs} is not divisible by n_minibatches={parts}; "
        f"use n_minibatches={_either(near)}, or n_envs={_either(multiples)}."
    )


@dataclass_transform(frozen_default=True, field_specifiers=(dataclasses.field,))
def frozen_config(cls: Class) -> Class:
    """Make a frozen dataclass whose assignment error shows how to make a changed copy."""
    cls = dataclasses.dataclass(frozen=True)(cls)
    # Wrong types get our own message, and traced values are let in: checkers stay out.
    no_type_check(cls.__init__)

    def refuse(self: Any, name: str, value: Any) -> NoReturn:
        raise dataclasses.FrozenInstanceError(
            f"{cls.__name__} is frozen, so {name} cannot be assigned; make a changed copy: "
            f"config = dataclasses.replace(config, {name}={value!r})"
        )

    cls.__setattr__ = refuse  # pyright: ignore[reportAttributeAccessIssue]
    return cls


def tuples_for_lists(config: Any, *names: str) -> None:
    """Turn lists in some fields into tuples."""
    for name in names:
        value = getattr(config, name)
        if isinstance(value, list):
            object.__setattr__(config, name, tuple(value))


def _is_integer(value: Any) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool) and math.isfinite(value)


def _either(values: list[int]) -> str:
    return " or ".join(str(value) for value in values)
