"""A training state under way: flat arrays, and one compiled program that iterates on them."""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Hashable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from nnx_ppo.algorithms._functional import (
    Blueprint,
    merge_modules,
    split_modules,
    strongly_typed,
)
from nnx_ppo.algorithms.programs import TracedEnvironment
from nnx_ppo.core import StatefulModule


@dataclasses.dataclass(frozen=True)
class Algorithm:
    """What distinguishes one algorithm from another.

    Attributes:
        iteration: `(state, *arguments) -> (state, metrics)`, traced once. It may hold the
            environment and whatever `key` tells apart, but no arrays.
        key: Name of the algorithm, and all that `iteration` depends on beside the environment and
            the structure of the state. Programs are found again by it.
        network_field: Field of the state that holds the network that learns.
        steps_per_iteration: Environment steps of one iteration.
        arguments: Trees of arrays that iterations read and never change. They are handed over, and
            not compiled in as constants.
    """

    iteration: Callable[..., tuple[Any, dict[str, Any]]]
    key: tuple[Hashable, ...]
    network_field: str
    steps_per_iteration: int
    arguments: tuple[Any, ...] = ()


class Call(NamedTuple):
    """Iterations that have been handed to the device, and may still be under way.

    Attributes:
        n_iterations: How many.
        table: Their metrics, one row for each, and rows that mean nothing.
        names: Names of the columns.
        begun: When it was handed over, by `time.perf_counter`.
    """

    n_iterations: int
    table: Float[Array, "capacity names"]
    names: list[str]
    begun: float

    def is_ready(self) -> bool:
        """Whether the iterations have ended."""
        return self.table.is_ready()  # pyright: ignore[reportAttributeAccessIssue]

    def rows(self) -> list[dict[str, Any]]:
        """Wait for the iterations; return the metrics of each as Python floats."""
        table = np.asarray(self.table)[: self.n_iterations].tolist()
        return [dict(zip(self.names, row, strict=True)) for row in table]


class CompiledRun:
    """A training state as flat arrays, and the compiled iterations on them.

    The network's arrays are kept by whoever holds the network, so they are not donated to the
    next call; all others are copies of our own, and are.

    Args:
        algorithm: What to iterate.
        state: The state to start from. Nothing that it holds is deleted; its network is the
            caller's, and is updated in place.
        env: Keeps the program.
        capacity: Iterations of one call, at most.

    Attributes:
        networks: The caller's network, as up to date as the last `sync` left it.
        layout: How the arrays make a state.
        network: The network's arrays after all iterations so far.
    """

    def __init__(
        self, algorithm: Algorithm, state: Any, env: TracedEnvironment, capacity: int
    ) -> None:
        self.layout, leaves, self.network = _laid_out(state, algorithm.network_field)
        self.networks: StatefulModule = getattr(state, algorithm.network_field)
        self._variables = _Variables(self.networks)
        self._leaves = [jnp.array(leaf, copy=True) for leaf in leaves]
        self._arguments = algorithm.arguments
        self._iterations, self._names = env.program(
            lambda: _compile(algorithm, self.layout, capacity),
            *algorithm.key,
            self.layout.key,
            capacity,
        )

    def advance(self, n_iterations: int) -> Call:
        """Hand iterations to the device, and return without waiting for them."""
        begun = time.perf_counter()
        self.network, self._leaves, table = self._iterations(
            self.network, self._leaves, np.int32(n_iterations), *self._arguments
        )
        return Call(n_iterations, table, self._names, begun)

    def sync(self) -> None:
        """Bring the caller's network up to date."""
        self._variables.write(self.network)

    @contextlib.contextmanager
    def lent(self) -> Iterator[None]:
        """Lend the caller's network, up to date, to a callback; go on with what it wrote."""
        self.sync()
        yield
        self.network = self._variables.read(self.network)

    def state(self) -> Any:
        """Return a training state that later iterations neither change nor delete."""
        return self.layout.state(self.network, [leaf.copy() for leaf in self._leaves])

    def final_state(self) -> Any:
        """Return the training state with the caller's own network."""
        self.sync()
        return self.state().replace(**{self.layout.network_field: self.networks})


@dataclasses.dataclass(frozen=True)
class Layout:
    """How flat lists of arrays make a training state; holds no array.

    Attributes:
        kind: Class of the state.
        network_field: Field of the network.
        blueprint: Its modules.
        network_tree: Tree of the network's variables.
        tree: Tree of everything else.
    """

    kind: type
    network_field: str
    blueprint: Blueprint
    network_tree: Any
    tree: Any

    @property
    def key(self) -> Hashable:
        """What tells this layout from others."""
        modules = tuple(self.blueprint.modules.items())
        return (self.kind, self.network_field, modules, self.network_tree, self.tree)

    def state(self, network: list[Array], leaves: list[Array]) -> Any:
        """Return a training state with modules of its own."""
        data = jax.tree.unflatten(self.tree, leaves)
        data[self.network_field] = jax.tree.unflatten(self.network_tree, network)
        return merge_modules(self.kind, self.blueprint, data)

    def networks(self, network: list[Array]) -> StatefulModule:
        """Return a live network."""
        variables = jax.tree.unflatten(self.network_tree, network)
        return nnx.merge(self.blueprint.modules[self.network_field], variables, copy=True)


def _laid_out(state: Any, network_field: str) -> tuple[Layout, list[Array], list[Array]]:
    """Return the layout of a state, its arrays, and those of its network."""
    blueprint, data = split_modules(state)
    network, network_tree = jax.tree.flatten(data.pop(network_field))
    leaves, tree = jax.tree.flatten(data)
    layout = Layout(type(state), network_field, blueprint, network_tree, tree)
    return layout, strongly_typed(leaves), strongly_typed(network)


def _compile(algorithm: Algorithm, layout: Layout, capacity: int) -> tuple[Callable, list[str]]:
    """Return a program that runs some iterations in one call, and the list of metric names.

    The program is `(network, leaves, n_iterations, *arguments) -> (network, leaves, table)`. How
    many iterations it runs is data: one call of three gives the same bits as three calls of one.
    The names are there once it has been traced.
    """
    names: list[str] = []

    @jax.jit
    def iteration(network: list[Array], leaves: list[Array], *arguments: Any) -> Any:
        state, metrics = algorithm.iteration(layout.state(network, leaves), *arguments)
        after, leaves, network = _laid_out(state, layout.network_field)
        if (after.tree, after.network_tree) != (layout.tree, layout.network_tree):
            raise ValueError(
                f"an iteration changed the state's tree: {layout.tree} to {after.tree}"
            )
        names[:] = metrics
        values = [jnp.asarray(value) for value in metrics.values()]
        dtype = jnp.result_type(jnp.float32, *(value.dtype for value in values))
        return network, leaves, jnp.stack([value.astype(dtype) for value in values])

    def iterations(
        network: list[Array], leaves: list[Array], n_iterations: Array, *arguments: Any
    ) -> Any:
        row = jax.eval_shape(iteration, network, leaves, *arguments)[-1]

        def step(number: Array, loop: Any) -> Any:
            network, leaves, table = loop
            network, leaves, row = iteration(network, leaves, *arguments)
            return network, leaves, table.at[number].set(row)

        table = jnp.zeros((capacity, *row.shape), row.dtype)
        return jax.lax.fori_loop(0, n_iterations, step, (network, leaves, table))

    return jax.jit(iterations, donate_argnums=1), names


class _Variables:
    """The variables of a module, in the order of the leaves that `nnx.split` makes of it.

    Walking a module takes milliseconds, so it is done once, and again if a variable was replaced
    by another.
    """

    def __init__(self, module: StatefulModule) -> None:
        self._module = module
        self._find()

    def write(self, leaves: list[Array]) -> None:
        """Set all variables."""
        self._find_replaced()
        for variable, value in zip(
            self._variables, jax.tree.unflatten(self._tree, leaves), strict=True
        ):
            variable.set_raw_value(value)

    def read(self, leaves: list[Array]) -> list[Array]:
        """Return what the variables hold now.

        Args:
            leaves: What was last written; it is returned for those that were left alone, and
                others are converted to its dtypes.
        """
        self._find_replaced()
        found = self._tree.flatten_up_to([v.get_raw_value() for v in self._variables])
        return [
            new if new is old else jnp.asarray(new, old.dtype)
            for new, old in zip(found, leaves, strict=True)
        ]

    def _find(self) -> None:
        nodes = dict(nnx.iter_graph(self._module))
        paths = [path for path, _ in nnx.to_flat_state(nnx.state(self._module))]
        self._variables: list[nnx.Variable] = [nodes[path] for path in paths]
        self._holders = [_holder(nodes[path[:-1]], path[-1]) for path in paths]
        self._tree = jax.tree.structure([v.get_raw_value() for v in self._variables])

    def _find_replaced(self) -> None:
        held = (holder[name] for holder, name in self._holders)
        if any(now is not known for now, known in zip(held, self._variables, strict=True)):
            self._find()


def _holder(node: Any, name: Any) -> tuple[Any, Any]:
    """Return what a node's attribute or item is kept in, and its key there."""
    return (vars(node), str(name)) if isinstance(node, nnx.Pytree) else (node, name)
