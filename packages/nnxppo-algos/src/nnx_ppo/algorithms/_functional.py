"""How networks cross JAX transforms, and are queried without leaving a trace."""

import dataclasses
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import PyTree

from nnx_ppo.core import JaxDataclass, StatefulModule

State = TypeVar("State", bound=JaxDataclass)


def clone_keys(tree: PyTree) -> Any:
    """Mark the random keys in a tree as intentionally used a second time."""

    def clone(leaf: Any) -> Any:
        is_key = isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        return jax.random.clone(leaf) if is_key else leaf

    return jax.tree.map(clone, tree)


def strongly_typed(tree: PyTree) -> Any:
    """Return a tree whose arrays have lost the mark of coming from Python numbers.

    Environments mix such weak types with others; a state that came back from a step with other
    weak types than it had after the reset would be compiled for again.
    """

    def strong(leaf: Any) -> Any:
        weak = isinstance(leaf, jax.Array) and leaf.aval.weak_type
        return jax.lax.convert_element_type(leaf, leaf.dtype) if weak else leaf

    return jax.tree.map(strong, tree)


def functional_copy(networks: StatefulModule) -> StatefulModule:
    """Return a copy whose random streams go their own way, from the same keys."""
    graphdef, variables = nnx.split(networks)
    return nnx.merge(graphdef, clone_keys(variables), copy=True)


def query_values(networks: StatefulModule, state: PyTree, obs: PyTree) -> Any:
    """Return the value estimates for observations, advancing neither memory nor streams.

    Args:
        networks: The network; its output must be a `PPONetworkOutput`.
        state: The carry under which to ask, leaves `(batch, …)`.
        obs: The observations, leaves `(batch, *feature)`.

    Returns:
        The value estimates, a tree with leaves `(batch,)`.
    """
    return functional_copy(networks)(clone_keys(state), obs).output.value_estimates


@dataclasses.dataclass(frozen=True)
class Blueprint:
    """The static half of a training state whose modules have been split off.

    Attributes:
        modules: The graph definition of each field that holds an NNX object.
    """

    modules: dict[str, Any]


def split_modules(state: JaxDataclass) -> tuple[Blueprint, dict[str, Any]]:
    """Split a training state into its static structure and a dict of plain pytrees by field."""
    graphdefs, data = {}, {}
    for field in dataclasses.fields(state):  # pyright: ignore[reportArgumentType]
        value = getattr(state, field.name)
        if isinstance(value, nnx.Pytree):
            graphdefs[field.name], value = nnx.split(value)
        data[field.name] = value
    return Blueprint(graphdefs), data


def merge_modules(kind: type[State], blueprint: Blueprint, data: dict[str, Any]) -> State:
    """Rebuild a training state, with NNX objects of its own."""
    modules = {
        name: nnx.merge(graphdef, data[name], copy=True)
        for name, graphdef in blueprint.modules.items()
    }
    return kind(**{**data, **modules})
