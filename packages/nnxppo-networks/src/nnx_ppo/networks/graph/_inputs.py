"""What a graph reads from outside."""

from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from nnx_ppo.core import ModuleState
from nnx_ppo.networks.graph._spec import Population


def read_inputs(
    populations: Iterable[Population],
    obs: Any,
    state: ModuleState,
    lead: tuple[int, ...] | None = None,
) -> dict[str, Array]:
    """Return what each population gets from outside, zeros for those that are no input.

    Args:
        populations: The populations.
        obs: A mapping with an array `(*lead, size)` for each input population.
        state: The graph's carry, leaves `(batch, …)`.
        lead: `(time, batch)`; None is `(batch,)`, as the first array of `state` or `obs` has it.

    Raises:
        ValueError: `obs` lacks an entry, or one has another shape, or there is no array at all.
    """
    populations = list(populations)
    entries = {p.name: _entry(obs, p) for p in populations if p.input_from is not None}
    lead = _batch_shape((state, entries, obs)) if lead is None else lead
    return {
        population.name: _as_floats(entries[population.name], population, lead)
        if population.name in entries
        else jnp.zeros((*lead, population.size))
        for population in populations
    }


def _entry(obs: Any, population: Population) -> Any:
    key = population.input_from
    if isinstance(obs, Mapping) and key in obs:
        return obs[key]
    found = f"the keys {sorted(map(str, obs))}" if isinstance(obs, Mapping) else type(obs).__name__
    raise ValueError(
        f"PopulationGraph: obs must be a mapping with the key {key!r}, which population "
        f"{population.name!r} reads, got {found}; a Filter before the graph renames entries."
    )


def _batch_shape(tree: Any) -> tuple[int, ...]:
    leaves = jax.tree.leaves(tree)
    if not leaves:
        raise ValueError(
            "PopulationGraph: the number of environments is unknown, since neither state nor obs "
            "has an array; pass an observation, even if no population reads it."
        )
    return jnp.shape(leaves[0])[:1]


def _as_floats(
    value: Any, population: Population, lead: tuple[int, ...]
) -> Float[Array, "*batch size"]:
    want, have = (*lead, population.size), getattr(value, "shape", None)
    if have != want:
        found = f"shape {have}" if have is not None else type(value).__name__
        raise ValueError(
            f"PopulationGraph: obs[{population.input_from!r}] must have shape {want}, since "
            f"population {population.name!r} has size {population.size}, got {found}."
        )
    value = jnp.asarray(value)
    return value.astype(jnp.result_type(value.dtype, float))
