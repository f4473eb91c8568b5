"""The vocabulary of the contract: what modules return."""

import dataclasses
from typing import Any, TypeAlias, TypeVar, dataclass_transform

import jax
from jaxtyping import Array, Float, PyTree

ModuleState: TypeAlias = Any
"""Carry of a module: any pytree whose leaves have a leading batch axis."""

# Not `Self`: the run-time checks of our tests decorate methods, where it has no meaning.
_Dataclass = TypeVar("_Dataclass", bound="JaxDataclass")

ACTIVATION_KEY = "__activation__"
"""Reserved key under which a recorded activation travels in a module's metrics."""


@dataclass_transform(frozen_default=True, field_specifiers=(dataclasses.field,))
class JaxDataclass:
    """Base of frozen dataclasses that are pytrees.

    A subclass is a dataclass without a decorator. Every field is a child of the pytree, except
    those made with `dataclasses.field(metadata={"static": True})`, which must be hashable and
    become part of its structure.

    Example:
        >>> class Pair(JaxDataclass):
        ...     left: jax.Array
        ...     right: jax.Array
        >>> jax.tree.map(lambda leaf: leaf + 1, Pair(1, 2)).replace(left=0)
        Pair(left=0, right=3)
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        # Arrays have no truth value, so generated equality could only raise.
        dataclasses.dataclass(frozen=True, eq=False)(cls)
        _register(cls)

    def replace(self: _Dataclass, **changes: Any) -> _Dataclass:
        """Return a copy with some fields changed."""
        return dataclasses.replace(self, **changes)  # pyright: ignore[reportArgumentType]


def _register(cls: type) -> None:
    """Register a dataclass as a pytree whose leaves may be anything.

    JAX rebuilds trees with placeholders for leaves, so children are set without running
    `__init__`, which a type checker may guard.
    """
    static = [f.name for f in dataclasses.fields(cls) if f.metadata.get("static", False)]
    data = [f.name for f in dataclasses.fields(cls) if f.name not in static]

    def flatten_with_keys(node: Any) -> tuple[list[tuple[Any, Any]], tuple[Any, ...]]:
        children = [(jax.tree_util.GetAttrKey(name), getattr(node, name)) for name in data]
        return children, tuple(getattr(node, name) for name in static)

    def flatten(node: Any) -> tuple[list[Any], tuple[Any, ...]]:
        return [getattr(node, name) for name in data], tuple(getattr(node, n) for n in static)

    def unflatten(aux: tuple[Any, ...], children: Any) -> Any:
        node = object.__new__(cls)
        for name, value in zip((*data, *static), (*children, *aux), strict=True):
            object.__setattr__(node, name, value)
        return node

    jax.tree_util.register_pytree_with_keys(cls, flatten_with_keys, unflatten, flatten)


class StatefulModuleOutput(JaxDataclass):
    """What a `StatefulModule` returns for one step of a batch.

    Attributes:
        next_state: The carry for the next step; same tree, shapes and dtypes as the one passed in.
        output: The forward output, any pytree with leaves `(batch, *feature)`.
        regularization_loss: Loss of each sample, `(batch,)`, or a scalar that holds for each.
            Never a sum over the batch: its weight must not depend on the number of environments.
        metrics: Values to log, keyed by name, or by position where a `Sequential` collects them.
        rollout_extras: What the module needs to see again when the step is replayed.
    """

    next_state: PyTree
    output: Any
    regularization_loss: Float[Array, "*batch"]
    metrics: dict[str | int, Any]
    rollout_extras: Any = None


class PPONetworkOutput(JaxDataclass):
    """What PPO reads from a network, made by `PPOAdapter`.

    Attributes:
        actions: Actions to send to the environment, a tree with leaves `(*time, batch, *feature)`.
        loglikelihoods: Log-likelihood of each action head's action.
        value_estimates: Value of each reward head, a tree with leaves `(*time, batch)`.
    """

    actions: Any
    loglikelihoods: PyTree[Float[Array, "*time batch"]]
    value_estimates: Any


class UnrollOutput(JaxDataclass):
    """What a module returns for a whole window of steps.

    Attributes:
        next_state: The carry after the last step and its resets, leaves `(batch, …)`.
        output: The forward outputs, leaves `(time, batch, *feature)`.
        regularization_loss: Loss of each sample at each step.
    """

    next_state: PyTree
    output: Any
    regularization_loss: Float[Array, "time batch"]
