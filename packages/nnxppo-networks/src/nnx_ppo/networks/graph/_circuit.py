"""What flows through a graph: one step, and a whole window."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool

from nnx_ppo.core import (
    ModuleState,
    StatefulModule,
    StatefulModuleOutput,
    UnrollOutput,
    unroll_stepwise,
)
from nnx_ppo.networks._history import Window, clear, new_history, push, read
from nnx_ppo.networks.graph._plan import Group
from nnx_ppo.networks.graph._spec import Connection, Population
from nnx_ppo.networks.routed import (
    Name,
    RoutedModule,
    Runner,
    WindowRunner,
    share_random_stream,
)

_HALVES = ("connections", "history")


class Circuit(RoutedModule):
    """Populations and the connections among them: a view of a graph, or of a part of it.

    The input has one array `(batch, size)` for each population, which is added to what its
    connections bring; the output has their activations. The carry holds those of the
    transforms, and the latest activations of each population that is read with a delay.

    Args:
        populations: The populations.
        connections: The connections among them, by name.
        groups: Names of the populations in the order of computation; those that lie on a common
            loop are in one group.
    """

    def __init__(
        self,
        populations: Iterable[Population],
        connections: Mapping[str, Connection],
        groups: tuple[Group, ...],
    ) -> None:
        self.populations = nnx.List(populations)
        self.connections = nnx.Dict(connections)
        self.names = tuple(connections)
        self.groups = groups

    def _edges(self) -> dict[str, Connection]:
        return {name: self.connections[name] for name in self.names}

    def _nodes(self) -> dict[str, Population]:
        return {population.name: population for population in self.populations}

    def _children(self) -> Mapping[Name, StatefulModule]:
        return {name: connection.transform for name, connection in self._edges().items()}

    def _route(self, x: Any, run: Runner) -> dict[str, Array]:
        external, delayed = x
        nodes, edges, activations = self._nodes(), self._edges(), {}

        def source(name: str) -> Array:
            return delayed[name] if name in delayed else activations[edges[name].src]

        for population in (name for group in self.groups for name in group):
            total = _sum_into(population, external[population], edges, run, source)
            activations[population] = nodes[population].activate(total)
        return activations

    def __call__(
        self, state: ModuleState, x: Any, rollout_extras: Any = None
    ) -> StatefulModuleOutput:
        """Run one step.

        Args:
            state: A dict with the carries of the transforms and the histories.
            x: Input of each population by name, `(batch, size)`.
            rollout_extras: None, or a dict with the extras of the transforms.
        """
        carries, histories = _halves(state, "state")
        extras, _ = _halves(rollout_extras, "rollout_extras")
        delayed = {
            name: read(histories[edge.src], edge.delay)
            for name, edge in self._edges().items()
            if edge.delay
        }
        out = super().__call__(carries, (x, delayed), extras)
        histories = {name: push(past, out.output[name]) for name, past in histories.items()}
        return out.replace(
            next_state=_joined(out.next_state, histories),
            rollout_extras=_joined(out.rollout_extras, None),
        )

    def unroll(
        self,
        state: ModuleState,
        xs: Any,
        done: Bool[Array, "time batch"],
        rollout_extras: Any = None,
    ) -> UnrollOutput:
        """Run a window, group by group.

        A connection into a group from outside reads activations that are known for the whole
        window, so its transform is unrolled over all of it. Only connections within a group,
        whose populations need each other's last steps, go step by step.
        """
        if share_random_stream(self._children().values()):
            return unroll_stepwise(self, state, xs, done, rollout_extras)
        carries, histories = _halves(state, "state")
        extras, _ = _halves(rollout_extras, "rollout_extras")
        run = WindowRunner(
            self._children(), self._unpack(carries, "state"), self._unpack_extras(extras), done
        )
        nodes, edges, activations, windows = self._nodes(), self._edges(), {}, {}

        def source(name: str) -> Array:
            edge = edges[name]
            return windows[edge.src].read(edge.delay) if edge.delay else activations[edge.src]

        for group in self.groups:
            inner = {name: e for name, e in edges.items() if e.src in group and e.dst in group}
            outer = {name: edge for name, edge in edges.items() if name not in inner}
            external = {name: _sum_into(name, xs[name], outer, run, source) for name in group}
            if inner:
                part = Circuit([nodes[name] for name in group], inner, (group,))
                activations |= part._unroll_loop(external, histories, run)
            else:
                activations |= {name: nodes[name].activate(x) for name, x in external.items()}
            for name in group:
                if name in histories:
                    windows[name] = Window(histories[name], activations[name], done)
        histories = {name: windows[name].next_history() for name in histories}
        next_state = _joined(run.collect(run.next_states), histories)
        return UnrollOutput(next_state, activations, run.loss)

    def _unroll_loop(
        self, xs: Any, histories: Mapping[str, Any], run: WindowRunner
    ) -> dict[str, Array]:
        """Run this part of a graph step by step, for the unrolling of the whole."""
        own = {edge.src for edge in self._edges().values() if edge.delay}
        state = _joined(
            {name: run.states[name] for name in self.names},
            {name: past for name, past in histories.items() if name in own},
        )
        extras = _joined({name: run.extras[name] for name in self.names}, None)
        out = unroll_stepwise(self, state, xs, run.done, extras)
        run.next_states |= out.next_state["connections"]
        run.loss = run.loss + out.regularization_loss
        return out.output

    def initialize_state(self, batch_size: int) -> ModuleState:
        """Return the carries of the transforms, and histories of zeros."""
        dtype = jnp.zeros(()).dtype
        history = {
            name: new_history(jax.ShapeDtypeStruct((node.size,), dtype), batch_size, length)
            for name, node in self._nodes().items()
            if (length := self._longest_delay(name))
        }
        return _joined(super().initialize_state(batch_size), history)

    def _longest_delay(self, name: str) -> int:
        return max((edge.delay for edge in self._edges().values() if edge.src == name), default=0)

    def reset_state(self, prev_state: ModuleState) -> ModuleState:
        """Return the reset carries of the transforms, and histories of zeros."""
        carries, histories = _halves(prev_state, "prev_state")
        histories = {name: clear(past) for name, past in histories.items()}
        return _joined(super().reset_state(carries), histories)

    def update_statistics(self, rollout_extras: Any) -> None:
        """Give each transform its part of the rollout's extras."""
        super().update_statistics(_halves(rollout_extras, "rollout_extras")[0])


def _sum_into(
    population: str,
    external: Array,
    edges: Mapping[str, Connection],
    run: Runner,
    source: Callable[[str], Array],
) -> Array:
    """Add to a population's input what those of `edges` that end there bring."""
    total = external
    for name, edge in edges.items():
        if edge.dst == population:
            total = total + run(name, source(name))
    return total


def _joined(connections: Any, history: Any) -> dict[str, Any]:
    """Return a carry, or rollout extras; the inverse of `_halves`."""
    return dict(zip(_HALVES, (connections, history), strict=True))


def _halves(tree: Any, argument: str) -> tuple[Any, Any]:
    """Return what a carry, or rollout extras, has for the connections and for the histories.

    Raises:
        ValueError: `tree` is neither None nor a dict of the two.
    """
    if tree is None:
        return None, None
    if isinstance(tree, Mapping) and tree.keys() == set(_HALVES):
        connections, history = (tree[name] for name in _HALVES)
        return connections, history
    found = list(tree) if isinstance(tree, Mapping) else type(tree).__name__
    raise ValueError(
        f"PopulationGraph: {argument} must be a dict with the entries {list(_HALVES)}, got "
        f"{found}; pass what initialize_state or the call before returned."
    )
