"""`PopulationGraph`: populations of units that are wired freely, with delays."""

from collections.abc import Callable, Mapping
from typing import Any

from flax import nnx
from jaxtyping import Array, Bool, PyTree

from nnx_ppo.core import (
    ACTIVATION_KEY,
    ModuleState,
    StatefulModule,
    StatefulModuleOutput,
    UnrollOutput,
)
from nnx_ppo.networks._checks import check_size
from nnx_ppo.networks.feedforward import Dense
from nnx_ppo.networks.graph import _diagrams
from nnx_ppo.networks.graph._circuit import Circuit
from nnx_ppo.networks.graph._inputs import read_inputs
from nnx_ppo.networks.graph._plan import Group, plan
from nnx_ppo.networks.graph._spec import Connection, Population


class PopulationGraph(StatefulModule):
    """Populations of units, and connections among them that may loop and take time.

    First the graph is described, by `add_population`, `add_input`, `add_output` and `connect`;
    then `finalize` checks and freezes it. From then on it is a module as any other. Its input is
    a mapping of arrays, its output a dict of them.

    At each step every population adds up what its connections bring and, if it is an input
    population, its part of the observation; its activation function makes its activation of the
    sum, once. A connection applies its transform to the activation that its source has in this
    step (`delay=0`), or had `delay` steps ago (zeros in the first steps of an episode).

    The carry is `{"connections": {...}, "history": {...}}`: the carries of the transforms by
    name of the connection, and one circular buffer of the latest activations for each population
    that is read with a delay, as long as the longest delay. The rollout extras have the same two
    entries; there is nothing to replay of a history, so that one is None. Losses of the transforms
    are added up for each sample; their metrics stay apart, by name of the connection.

    A connection's name is `a->b`, or `a->b@3` with a delay of 3. Further connections of the same
    populations and delay get `#2`, `#3` and so on at the end.

    Args:
        rngs: Draws the initial parameters of the default transforms. Not kept after `finalize`.

    Attributes:
        populations: The populations, in the order they were added.
        connections: The connections by name, an `nnx.Dict`.
        connection_names: Their names, in the order they were added.
        record_activations: Whether the metrics show the activation of every population by name,
            under `ACTIVATION_KEY`.

    Raises:
        TypeError: `rngs` is not an `nnx.Rngs`.

    Example:
        >>> import numpy as np
        >>> graph = PopulationGraph(nnx.Rngs(0))
        >>> graph.add_input("eye", 3, input_from="vision")
        >>> graph.add_population("cortex", 8, activation=nnx.tanh)
        >>> graph.add_output("hand", 2)
        >>> graph.connect("eye", "cortex")
        >>> graph.connect("cortex", "cortex", delay=1)
        >>> graph.connect("cortex", "hand", delay=2)
        >>> graph.finalize()
        >>> out = graph(graph.initialize_state(5), {"vision": np.ones((5, 3))})
        >>> out.output["hand"].shape, out.next_state["history"]["cortex"]["buffer"].shape
        ((5, 2), (5, 2, 8))
    """

    def __init__(self, rngs: nnx.Rngs) -> None:
        if not isinstance(rngs, nnx.Rngs):
            raise TypeError(
                f"PopulationGraph: rngs must be an nnx.Rngs, got {type(rngs).__name__}; write "
                "nnx.Rngs(0)."
            )
        self.rngs: nnx.Rngs | None = rngs
        # A list: in an nnx.Dict a population called "items" would hide its method.
        self.populations = nnx.List([])
        self.connections = nnx.Dict({})
        self.connection_names: tuple[str, ...] = ()
        self.groups: tuple[Group, ...] | None = None
        self.record_activations = False

    def add_population(
        self, name: str, size: int, *, activation: Callable[[Array], Array] | None = None
    ) -> None:
        """Add a population that is neither input nor output.

        Args:
            name: A name that no other population has.
            size: Number of units.
            activation: Transfer function, applied to each unit's summed input; None is the
                identity.

        Raises:
            TypeError: An argument has the wrong type.
            ValueError: The name is taken or empty, or `size` is below 1.
            RuntimeError: The graph is finalized.
        """
        self._add(Population(name, size, activation, None, None))

    def add_input(
        self,
        name: str,
        size: int,
        *,
        input_from: str,
        activation: Callable[[Array], Array] | None = None,
    ) -> None:
        """Add a population that reads from the observation.

        Several populations may read the same entry.

        Args:
            name: A name that no other population has.
            size: Number of units.
            input_from: Key of the entry, an array `(batch, size)`. It is added to what
                connections bring. Integers and booleans are converted to floats.
            activation: As for `add_population`.

        Raises:
            TypeError: An argument has the wrong type.
            ValueError: The name is taken or empty, or `size` is below 1.
            RuntimeError: The graph is finalized.
        """
        if input_from is None:
            raise TypeError(
                f"PopulationGraph: input {name!r} needs the key of an observation as input_from, "
                "got None; use add_population for a population without one."
            )
        self._add(Population(name, size, activation, input_from, None))

    def add_output(
        self,
        name: str,
        size: int,
        *,
        output_to: str | None = None,
        activation: Callable[[Array], Array] | None = None,
    ) -> None:
        """Add a population whose activation is an entry of the graph's output.

        Args:
            name: A name that no other population has.
            size: Number of units.
            output_to: Key of the entry; None is `name`.
            activation: As for `add_population`.

        Raises:
            TypeError: An argument has the wrong type.
            ValueError: The name or the key is taken, `name` is empty, or `size` is below 1.
            RuntimeError: The graph is finalized.
        """
        self._check_open("add_output")
        key = name if output_to is None else output_to
        for other in self.populations:
            if other.output_to == key and other.name != name:
                raise ValueError(
                    f"PopulationGraph: output {name!r} would go to the key {key!r}, where "
                    f"{other.name!r} goes already; choose another output_to."
                )
        self._add(Population(name, size, activation, None, key))

    def connect(
        self,
        src: str,
        dst: str,
        *,
        transform: StatefulModule | None = None,
        delay: int = 0,
        reciprocal: bool = False,
    ) -> None:
        """Connect two populations, or one with itself.

        Args:
            src: Name of the population that is read.
            dst: Name of the population that receives.
            transform: Module from `(batch, src.size)` to `(batch, dst.size)`; None is a linear
                `Dense`. The same module may serve several connections, which then share
                parameters, each with a carry of its own.
            delay: 0 reads the source in the same step, `k` reads it `k` steps ago.
            reciprocal: Whether to connect `dst` to `src` as well, with the same delay and a
                default transform of its own.

        Raises:
            TypeError: `transform` is not a `StatefulModule`, or `delay` is not an integer.
            ValueError: A name is unknown, `delay` is negative, or `reciprocal` is set together
                with `transform` or for a connection of a population with itself.
            RuntimeError: The graph is finalized.
        """
        self._check_open("connect")
        source, target = self._named(src), self._named(dst)
        delay = check_size(delay, f"PopulationGraph: delay of {src!r} -> {dst!r}", least=0)
        if reciprocal:
            _check_reciprocal(src, dst, transform)
            self._connect(source, target, transform, delay)
            self._connect(target, source, None, delay)
        else:
            self._connect(source, target, transform, delay)

    def finalize(self) -> None:
        """Check the graph and freeze it. Transforms are tried on shapes alone.

        Raises:
            ValueError: There is no population or no output, connections without delay form a
                cycle, or a transform does not take its source's size to its target's.
            RuntimeError: The graph is finalized.
        """
        self._check_open("finalize")
        self.groups = plan(list(self.populations), self._edges())
        # A graph that kept its source of initial values would look as if it drew noise.
        self.rngs = None

    def __call__(
        self, state: ModuleState, obs: Any, rollout_extras: Any = None
    ) -> StatefulModuleOutput:
        """Run one step.

        Args:
            state: The carry, a dict with the entries `connections` and `history`.
            obs: A mapping with an array `(batch, size)` for each input; other entries are ignored.
            rollout_extras: None, or the extras of the rollout, as the carry.

        Returns:
            The output is a dict with an array `(batch, size)` for each output population.

        Raises:
            ValueError: `obs` lacks an entry, or one has not the size of its population.
            RuntimeError: The graph is not finalized.
        """
        circuit = self._circuit()
        inputs = read_inputs(self.populations, obs, state)
        out = circuit(state, inputs, rollout_extras)
        metrics = dict(out.metrics)
        if self.record_activations:
            metrics[ACTIVATION_KEY] = out.output
        return out.replace(output=self._outputs(out.output), metrics=metrics)

    def unroll(
        self,
        state: ModuleState,
        xs: PyTree,
        done: Bool[Array, "time batch"],
        rollout_extras: Any = None,
    ) -> UnrollOutput:
        """Run a window of steps; only populations on loops go step by step."""
        inputs = read_inputs(self.populations, xs, state, done.shape)
        out = self._circuit().unroll(state, inputs, done, rollout_extras)
        return out.replace(output=self._outputs(out.output))

    def initialize_state(self, batch_size: int) -> ModuleState:
        """Return the carries of the transforms, and histories of zeros."""
        return self._circuit().initialize_state(batch_size)

    def reset_state(self, prev_state: ModuleState) -> ModuleState:
        """Return the reset carries of the transforms, and histories of zeros."""
        return self._circuit().reset_state(prev_state)

    def update_statistics(self, rollout_extras: Any) -> None:
        """Give each transform its part of the rollout's extras."""
        self._circuit().update_statistics(rollout_extras)

    def to_mermaid(self) -> str:
        """Return the graph as a Mermaid flowchart, for a Markdown page."""
        return _diagrams.to_mermaid(list(self.populations), self._edges())

    def to_dot(self) -> str:
        """Return the graph in the DOT language of Graphviz."""
        return _diagrams.to_dot(list(self.populations), self._edges())

    def _add(self, population: Population) -> None:
        self._check_open("add a population")
        if population.name in self._names():
            raise ValueError(
                f"PopulationGraph: there is a population {population.name!r} already; choose "
                "another name."
            )
        self.populations.append(population)

    def _connect(
        self, source: Population, target: Population, transform: StatefulModule | None, delay: int
    ) -> None:
        if transform is None:
            assert self.rngs is not None  # the graph is open
            transform = Dense(source.size, target.size, self.rngs)
        name = base = f"{source.name}->{target.name}" + (f"@{delay}" if delay else "")
        number = 1
        while name in self.connection_names:
            number += 1
            name = f"{base}#{number}"
        self.connections[name] = Connection(source.name, target.name, transform, delay)
        self.connection_names = (*self.connection_names, name)

    def _names(self) -> list[str]:
        return [population.name for population in self.populations]

    def _named(self, name: str) -> Population:
        for population in self.populations:
            if population.name == name:
                return population
        raise ValueError(
            f"PopulationGraph: there is no population {name!r}, only {self._names()}; add it "
            "before you connect it."
        )

    def transforms(self) -> dict[str, StatefulModule]:
        """Return the transforms by name of the connection."""
        return {name: edge.transform for name, edge in self._edges().items()}

    def _edges(self) -> dict[str, Connection]:
        return {name: self.connections[name] for name in self.connection_names}

    def _check_open(self, what: str) -> None:
        if self.groups is not None:
            raise RuntimeError(
                f"PopulationGraph: cannot {what}: the graph is finalized; describe all of it "
                "before you call finalize()."
            )

    def _circuit(self) -> Circuit:
        if self.groups is None:
            raise RuntimeError(
                "PopulationGraph is not finalized; call finalize() once all populations and "
                "connections are there."
            )
        return Circuit(self.populations, self._edges(), self.groups)

    def _outputs(self, activations: Mapping[str, Array]) -> dict[str, Array]:
        outputs = [node for node in self.populations if node.output_to is not None]
        return {node.output_to: activations[node.name] for node in outputs}


def _check_reciprocal(src: str, dst: str, transform: StatefulModule | None) -> None:
    where = f"PopulationGraph: reciprocal=True between {src!r} and {dst!r}"
    if transform is not None:
        raise ValueError(
            f"{where} makes default transforms both ways, got a transform too; call connect twice "
            "to choose them."
        )
    if src == dst:
        raise ValueError(f"{where} is one connection, not two; leave reciprocal out.")
