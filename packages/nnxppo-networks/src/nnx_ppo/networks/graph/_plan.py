"""In which order the populations of a graph are computed, and what a valid graph is."""

from collections.abc import Collection, Iterable, Mapping
from graphlib import CycleError, TopologicalSorter
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from flax import nnx

from nnx_ppo.core import StatefulModule
from nnx_ppo.networks.graph._spec import Connection, Population

Group: TypeAlias = tuple[str, ...]
"""Names of populations that lie on a common loop, or of one that lies on none."""

# Any number will do to try shapes out; 1 would hide an axis that was lost or added.
_BATCH = 2


def plan(
    populations: Collection[Population], connections: Mapping[str, Connection]
) -> tuple[Group, ...]:
    """Check a graph, and return the names of its populations in the order of computation.

    They come in groups: populations that lie on a common loop through delays form one, each
    other population is one by itself. No group reads a later one, at any delay.

    Raises:
        ValueError: The graph has no populations or no outputs, connections without delay form
            a cycle, or a transform or activation returns another shape than it must.
    """
    if not populations:
        raise ValueError("PopulationGraph has no populations; call add_population first.")
    if all(population.output_to is None for population in populations):
        raise ValueError(
            "PopulationGraph has no outputs, so nothing would leave it; add a population with "
            "add_output."
        )
    by_name = {population.name: population for population in populations}
    order = _order_within_step(by_name, connections.values())
    for population in populations:
        _check_activation(population)
    for name, connection in connections.items():
        _check_transform(name, connection, by_name[connection.src], by_name[connection.dst])
    return _group(order, connections.values())


def _order_within_step(names: Iterable[str], connections: Iterable[Connection]) -> list[str]:
    """Return the populations such that each comes after those it reads without delay."""
    sources: dict[str, list[str]] = {name: [] for name in names}
    for connection in connections:
        if connection.delay == 0:
            sources[connection.dst].append(connection.src)
    try:
        return list(TopologicalSorter(sources).static_order())
    except CycleError as error:
        *cycle, _ = error.args[1]
        start = cycle.index(min(cycle, key=list(sources).index))
        path = [*cycle[start:], *cycle[: start + 1]]
        raise ValueError(
            f"PopulationGraph: the connections without delay form the cycle {' -> '.join(path)}, "
            "in which no population can be computed first; give one of them delay=1."
        ) from None


def _group(order: Iterable[str], connections: Collection[Connection]) -> tuple[Group, ...]:
    """Return the strongly connected components, in topological order."""
    targets: dict[str, set[str]] = {name: set() for name in order}
    for connection in connections:
        targets[connection.src].add(connection.dst)
    downstream = {name: _reachable(name, targets) for name in targets}
    group_of = {
        name: tuple(x for x in targets if x in downstream[name] and name in downstream[x])
        or (name,)  # on no loop
        for name in targets
    }
    # Lists, whose order is the same in every process; sets of strings have none.
    sources: dict[Group, list[Group]] = {group: [] for group in group_of.values()}
    for connection in connections:
        src, dst = group_of[connection.src], group_of[connection.dst]
        if src != dst:
            sources[dst].append(src)
    return tuple(TopologicalSorter(sources).static_order())


def _reachable(start: str, targets: Mapping[str, set[str]]) -> set[str]:
    """Return the nodes at the end of some path from `start`, of one step or more."""
    found: set[str] = set()
    frontier = {start}
    while frontier:
        frontier = set().union(*(targets[name] for name in frontier)) - found
        found |= frontier
    return found


def _check_activation(population: Population) -> None:
    x = jax.ShapeDtypeStruct((_BATCH, population.size), jnp.float32)
    where = f"PopulationGraph: the activation of {population.name!r} must act on each unit and"
    try:
        found = jax.eval_shape(population.activate, x)
    except Exception as error:
        raise ValueError(f"{where} fails on {_describe(x)}: {error}") from error
    if not _is_float_array(found, x.shape):
        raise ValueError(f"{where} return {_describe(x)}, got {_describe(found)}.")


def _check_transform(name: str, connection: Connection, src: Population, dst: Population) -> None:
    """Run a transform on shapes alone, and compare what comes out with the target's size."""
    kind = type(connection.transform).__name__
    where = (
        f"PopulationGraph: connection {name!r} needs a transform from {src.name!r} of size "
        f"{src.size} to {dst.name!r} of size {dst.size}"
    )
    x = jax.ShapeDtypeStruct((_BATCH, src.size), jnp.float32)
    try:
        found = _output_shape(connection.transform, x)
    except Exception as error:
        raise ValueError(f"{where}; {kind} fails on an input {_describe(x)}: {error}") from error
    if not _is_float_array(found, (_BATCH, dst.size)):
        raise ValueError(f"{where}, got {kind}, which makes {_describe(found)} of {_describe(x)}.")


def _output_shape(module: StatefulModule, x: jax.ShapeDtypeStruct) -> Any:
    """Return the shape of a module's output, leaving its random streams alone."""
    graphdef, variables = nnx.split(module)

    def call(variables: Any, x: jax.Array) -> Any:
        live = nnx.merge(graphdef, variables, copy=True)
        return live(live.initialize_state(_BATCH), x).output

    return jax.eval_shape(call, variables, x)


def _is_float_array(value: Any, shape: tuple[int, ...]) -> bool:
    return (
        isinstance(value, jax.ShapeDtypeStruct)
        and value.shape == shape
        and jnp.issubdtype(value.dtype, jnp.floating)
    )


def _describe(value: Any) -> str:
    if not isinstance(value, jax.ShapeDtypeStruct):
        return f"a {type(value).__name__}"
    sizes = ("batch", *value.shape[1:]) if value.shape[:1] == (_BATCH,) else value.shape
    return f"{value.dtype}[{', '.join(map(str, sizes))}]"
