"""Rules for configuration fields, and errors that say how to mend a broken one."""

import dataclasses
import math
import numbers
from collections.abc import Callable, Mapping
from typing import Any, NoReturn, TypeVar, dataclass_transform, no_type_check

import jax
import jax.numpy as jnp
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


def number_or_schedule(rule: Rule) -> Rule:
    """A function, or a number that another rule allows."""
    return Rule(lambda v: callable(v) or rule.holds(v), f"{rule.text}, or a schedule")


def number_or_mapping(rule: Rule) -> Rule:
    """A number that another rule allows, or a non-empty mapping of names to such numbers."""

    def holds(value: Any) -> bool:
        if not isinstance(value, Mapping):
            return rule.holds(value)
        names_fit = all(isinstance(name, str) for name in value)
        return bool(value) and names_fit and all(map(allowed, value.values()))

    def allowed(value: Any) -> bool:
        return isinstance(value, Tracer) or rule.holds(value)

    return Rule(holds, f"{rule.text}, or such a number for each reward head by its name")


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
    multiples = [m for m in (envs - envs % parts, envs - envs % parts + parts) if m > 0]
    raise ValueError(
        f"{type(config).__name__}: n_envs={envs} is not divisible by n_minibatches={parts}; "
        f"use n_minibatches={_near_divisors(envs, parts)}, or n_envs={_either(multiples)}."
    )


def check_schedules(config: Any) -> None:
    """Raise if fields that follow the run, or the divergence, contradict each other.

    Raises:
        ValueError: Names the fields and the fix.
    """
    kind, rate = type(config).__name__, config.learning_rate
    adaptive, final = config.adaptive_kl, config.final_learning_rate
    if callable(rate) and final is not None:
        raise ValueError(
            f"{kind}: final_learning_rate={final} needs a number as learning_rate, got a schedule; "
            "let the schedule end there and set final_learning_rate=None."
        )
    _check_divergence_is_used(config)
    if adaptive is not None:
        if callable(rate) or final is not None:
            raise ValueError(
                f"{kind}: adaptive_kl={adaptive} changes the learning rate by itself; set it to "
                "None, or learning_rate to a number and final_learning_rate to None."
            )
        if config.target_kl is not None:
            raise ValueError(
                f"{kind}: target_kl={config.target_kl} would leave out the very updates from which "
                f"adaptive_kl={adaptive} learns that the rate is too high; set one of them to None."
            )
        low, high = config.min_learning_rate, config.max_learning_rate
        if not low <= rate <= high:
            raise ValueError(
                f"{kind}: with adaptive_kl, learning_rate={rate} must lie from min_learning_rate="
                f"{low} to max_learning_rate={high}; change one of them."
            )
    final, weight = config.final_entropy_weight, config.entropy_weight
    if final is not None and (weight is None or callable(weight)):
        have = "None" if weight is None else "a schedule"
        raise ValueError(
            f"{kind}: final_entropy_weight={final} needs a number as entropy_weight to start from, "
            f"got {have}; set entropy_weight to the first weight, or final_entropy_weight=None."
        )


def _check_divergence_is_used(config: Any) -> None:
    """Raise if there is only one update, before which the policy cannot have moved."""
    if config.n_epochs * config.n_minibatches > 1:
        return
    for name in ("adaptive_kl", "target_kl"):
        value = getattr(config, name)
        if value is not None:
            raise ValueError(
                f"{type(config).__name__}: {name}={value} has no effect with n_epochs=1 and "
                "n_minibatches=1: the policy moves from the second update of an iteration on. "
                f"Raise one of them, or set {name}=None."
            )


def check_windows(config: Any) -> None:
    """Raise if windows cannot be cut, or their advantages not be treated, as is asked for.

    Raises:
        ValueError: Names the fields and values that fit.
    """
    length, window = config.chunk_length, config.rollout_length
    kind = type(config).__name__
    if config.advantage_normalization == "window" and config.advantages != "window":
        raise ValueError(
            f'{kind}: advantage_normalization="window" needs advantages="window", got '
            f"advantages={config.advantages!r}: those of a minibatch are known with it only."
        )
    if length is None:
        if config.burn_in:
            raise ValueError(
                f"{kind}: burn_in={config.burn_in} needs a chunk_length: steps are burnt in before "
                f"chunks, and the whole window starts from its own carry. Set chunk_length="
                f"{_near_divisors(window, max(window // 2, 1))}, or burn_in=0."
            )
        return
    if window % length:
        raise ValueError(
            f"{kind}: rollout_length={window} is not divisible by chunk_length={length}; use "
            f"chunk_length={_near_divisors(window, length)}."
        )
    if config.advantages != "window":
        raise ValueError(
            f'{kind}: chunk_length={length} needs advantages="window", since the advantages of a '
            f"chunk depend on what follows it; got advantages={config.advantages!r}."
        )


def check_remat(config: Any, chunk_length: int | None = None) -> None:
    """Raise if the segments that are to be recomputed are all that is replayed.

    Args:
        config: Has `remat_length` and `rollout_length`.
        chunk_length: Steps that are replayed at a time, if not the whole window.

    Raises:
        ValueError: Names the fields and values that fit.
    """
    segment = config.remat_length
    name, length = "chunk_length", chunk_length
    if length is None:
        name, length = "rollout_length", config.rollout_length
    if segment is None or segment < length:
        return
    # Carries between segments and activations within one are balanced near the square root.
    fit = f"remat_length={round(math.sqrt(length))} or " if length > 1 else ""
    raise ValueError(
        f"{type(config).__name__}: remat_length={segment} must be below {name}={length}, or "
        f"everything is computed twice and nothing is saved; use {fit}remat_length=None."
    )


def check_schedule(name: str, value: Any, count: Any) -> None:
    """Raise if a schedule does not give one number for a traced count. Numbers pass.

    Args:
        name: What the user calls it.
        value: The schedule, or a number.
        count: The dtype of its argument.

    Raises:
        ValueError: It gives something else.
    """
    if not callable(value):
        return
    try:
        found = jax.eval_shape(value, jax.ShapeDtypeStruct((), count))
    except Exception as error:
        error.add_note(
            f"{name} is a schedule, called with a traced {jnp.dtype(count).name} inside the "
            "compiled iteration. Write it with jax.numpy, or take one of optax."
        )
        raise
    if getattr(found, "shape", None) != () or not jnp.issubdtype(found.dtype, jnp.number):
        raise ValueError(
            f"{name} is a schedule and must return one number for each count, got {found}."
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

    def hashed(self: Any) -> int:
        values = (getattr(self, field.name) for field in dataclasses.fields(self))
        return hash(tuple(frozenset(v) if isinstance(v, dict) else v for v in values))

    cls.__setattr__ = refuse  # pyright: ignore[reportAttributeAccessIssue]
    # Of dicts only the names are hashed, since their values may have no hash.
    cls.__hash__ = hashed  # pyright: ignore[reportAttributeAccessIssue]
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


def _near_divisors(number: int, wanted: int) -> str:
    """Return the one or two divisors of a number that are nearest to what was wanted."""
    divisors = [d for d in range(1, number + 1) if number % d == 0]
    return _either(sorted(sorted(divisors, key=lambda d: (abs(d - wanted), d))[:2]))


def _either(values: list[int]) -> str:
    return " or ".join(str(value) for value in values)
