"""`describe`: a table of a network's modules, made without running it."""

import dataclasses
import io
from collections.abc import Iterator, Mapping
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from nnx_ppo.core import StatefulModule
from nnx_ppo.networks._checks import check_module
from nnx_ppo.networks._probe import BATCH, Chain, joined, outputs_of, places, summary
from nnx_ppo.networks.graph import PopulationGraph

_OUTPUT_WIDTH = 60


@dataclasses.dataclass(frozen=True)
class ModuleRow:
    """What `describe` found out about one module.

    Attributes:
        path: Its place, named as in metrics and recorded activations; empty for the network.
        type_name: Name of its class.
        parameters: Number of trained numbers, those of the modules in it included.
        carry_size: Number of array elements of its carry, per environment, likewise.
        output: Its output for one sample, a tree of `jax.ShapeDtypeStruct` without batch axis;
            None if no sample was given, or if the module was not called.
        shared_with: The path at which the same module is listed first, or None. What is inside of
            it is listed there only.
    """

    path: str
    type_name: str
    parameters: int
    carry_size: int
    output: Any = None
    shared_with: str | None = None


@dataclasses.dataclass(frozen=True)
class Description:
    """What `describe` returns: print it, or show it with rich.

    Attributes:
        rows: One for each module, the network itself first.
        with_outputs: Whether a sample was given.
        notes: Remarks below the table.
    """

    rows: tuple[ModuleRow, ...]
    with_outputs: bool
    notes: tuple[str, ...] = ()

    @property
    def parameters(self) -> int:
        """Number of trained numbers; a shared one counts once."""
        return self.rows[0].parameters

    @property
    def carry_size(self) -> int:
        """Number of array elements of the carry, per environment."""
        return self.rows[0].carry_size

    def __rich__(self) -> RenderableType:
        table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, collapse_padding=True)
        table.add_column("module")
        table.add_column("type")
        if self.with_outputs:
            table.add_column("output", overflow="fold", max_width=_OUTPUT_WIDTH)
        table.add_column("parameters", justify="right")
        table.add_column("carry", justify="right")
        for row in self.rows:
            # Text, for rich would take the brackets of a shape for markup.
            table.add_row(*(Text(cell) for cell in self._cells(row)))
        return Group(table, *(Text(note) for note in ("", *self.notes) if self.notes))

    def __str__(self) -> str:
        console = Console(file=io.StringIO(), width=1000, color_system=None)
        with console.capture() as capture:
            console.print(self)
        return "\n".join(line.rstrip() for line in capture.get().rstrip().split("\n"))

    def _cells(self, row: ModuleRow) -> Iterator[str]:
        shared = row.shared_with is not None
        yield row.path or "(network)"
        yield f"{row.type_name}, same as {row.shared_with}" if shared else row.type_name
        if self.with_outputs:
            yield "not called" if row.output is None else summary(row.output)
        yield f"({row.parameters:,})" if shared else f"{row.parameters:,}"
        yield f"{row.carry_size:,}"


def describe(network: StatefulModule, sample_input: Any = None) -> Description:
    """List a network's modules: their outputs, parameters and carries.

    Nothing is computed or compiled, only traced, and nothing changes in the network.

    Args:
        network: The network.
        sample_input: One input without batch axis, e.g. the observation that `env.reset` returns:
            a tree of arrays, of numbers, or of `jax.ShapeDtypeStruct`. Without it, outputs are
            left out.

    Returns:
        The description; `print` shows it as a table.

    Raises:
        TypeError: `network` is not a `StatefulModule`, or `sample_input` has a leaf that is no
            array or number.
        ValueError: A module cannot take what it is given; the message names it.

    Example:
        >>> from nnx_ppo.networks import Dense, LSTM, Sequential
        >>> rngs = nnx.Rngs(0)
        >>> net = Sequential([LSTM(3, 8, rngs), Dense(8, 2, rngs)])
        >>> print(describe(net, jnp.zeros(3)))
        module     type        output  parameters  carry
        ────────────────────────────────────────────────
        (network)  Sequential  (2,)           402     16
        0          LSTM        (8,)           384     16
        1          Dense       (2,)            18      0
    """
    check_module(network, "describe: network")
    _check_sample(sample_input)
    graphdef, variables = nnx.split(network)
    rows: list[ModuleRow] = []

    def trace(variables: Any, sample: Any) -> None:
        live = nnx.merge(graphdef, variables, copy=True)
        outputs = {} if sample is None else outputs_of(live, sample)
        rows.extend(_rows(live, outputs))

    jax.eval_shape(trace, variables, sample_input)
    return Description(tuple(rows), sample_input is not None, tuple(_notes(network)))


def _rows(network: StatefulModule, outputs: Mapping[Chain, list[Any]]) -> Iterator[ModuleRow]:
    for place in places(network):
        calls = outputs.get(place.chain, [])
        params = jax.tree.leaves(nnx.state(place.module, nnx.Param))
        carry = jax.tree.leaves(place.module.initialize_state(BATCH))
        yield ModuleRow(
            path=joined(place.path),
            type_name=type(place.module).__name__,
            parameters=sum(prod(jnp.shape(leaf)) for leaf in params),
            carry_size=sum(prod(jnp.shape(leaf)[1:]) for leaf in carry),
            # A module that one parent has in several places is called in their order.
            output=calls.pop(0) if calls else None,
            shared_with=None if place.shared_with is None else joined(place.shared_with),
        )


def _notes(network: StatefulModule) -> Iterator[str]:
    for place in places(network):
        graph = place.module
        if isinstance(graph, PopulationGraph) and place.shared_with is None:
            populations = ", ".join(f"{p.name} ({p.size})" for p in graph.populations)
            name = f"The graph at {joined(place.path)!r}" if place.path else "The graph"
            yield f"{name} has the populations {populations}."
            yield "Its to_mermaid() and to_dot() draw it."


def _check_sample(sample: Any) -> None:
    for path, leaf in jax.tree_util.tree_leaves_with_path(sample):
        if not hasattr(leaf, "dtype") and not isinstance(leaf, int | float | complex):
            raise TypeError(
                f"describe: sample_input{jax.tree_util.keystr(path)} must be an array or a number, "
                f"got {type(leaf).__name__}; pass one observation, e.g. env.reset(key).obs."
            )
