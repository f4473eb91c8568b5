"""Watching the modules of a network while it is traced: who returns what, and who complains."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from flax import nnx

from nnx_ppo.core import StatefulModule, StatefulModuleOutput
from nnx_ppo.networks.graph import PopulationGraph
from nnx_ppo.networks.recording import Path, Recorder, rebuilt
from nnx_ppo.networks.routed import RoutedModule

BATCH = 2
_MOST_ENTRIES = 6

Chain: TypeAlias = tuple[Path, ...]
"""Which call it is: the modules being called, from the network inwards, by attribute path."""


@dataclasses.dataclass(frozen=True)
class Place:
    """A module at one of its places in a network.

    Attributes:
        path: Where it is, as metrics name it: by name in one of our containers, by attribute in
            others; empty for the network.
        chain: The modules from the network to this one.
        module: The module.
        shared_with: The path at which it was met first, or None.
    """

    path: Path
    chain: Chain
    module: StatefulModule
    shared_with: Path | None


def places(network: StatefulModule) -> Iterator[Place]:
    """Yield all modules, parents first; what is inside of a shared one comes once."""
    attributes = {id(module): path for path, module in nnx.iter_modules(network)}
    first: dict[int, Path] = {}

    def visit(path: Path, chain: Chain, module: StatefulModule) -> Iterator[Place]:
        chain = (*chain, attributes[id(module)])
        yield Place(path, chain, module, first.get(id(module)))
        if id(module) not in first:
            first[id(module)] = path
            for name, child in _children(module).items():
                yield from visit((*path, *name), chain, child)

    return visit((), (), network)


def _children(module: StatefulModule) -> Mapping[Path, StatefulModule]:
    """Return the modules right below a module."""
    if isinstance(module, RoutedModule):
        return {(name,): child for name, child in module._children().items()}
    if isinstance(module, PopulationGraph):
        return {(name,): child for name, child in module.transforms().items()}
    below = {
        path: inner
        for path, inner in nnx.iter_modules(module)
        if isinstance(inner, StatefulModule) and inner is not module
    }
    return {
        path: inner
        for path, inner in below.items()
        if not any(path[:length] in below for length in range(len(path)))
    }


def joined(path: Path) -> str:
    """Return a path as text."""
    return "/".join(map(str, path))


def outputs_of(network: StatefulModule, sample: Any) -> dict[Chain, list[Any]]:
    """Call a network and return what each call of a module returned, as `abstract` of one sample.

    Args:
        network: A copy to run, inside of a trace.
        sample: One input without batch axis.

    Raises:
        ValueError: A module raised an error; the message names the module.
    """
    calls = _Calls(network)

    def change(path: Path, node: Any) -> Any:
        return _Probe(node, path, calls) if isinstance(node, StatefulModule) else node

    batch = jax.tree.map(lambda leaf: jnp.stack([leaf] * BATCH), sample)
    rebuilt(network, change, "describe")(network.initialize_state(BATCH), batch)
    return calls.outputs


class _Misfit(ValueError):
    """The error of a module, with the module named; raised by the innermost one."""


class _Calls:
    """The calls of a network's modules."""

    def __init__(self, network: StatefulModule) -> None:
        self.names: dict[Path, str] = {}
        for place in places(network):
            name = f"{type(place.module).__name__} at {joined(place.path)!r}"
            self.names.setdefault(place.chain[-1], name if place.path else "the network")
        self.chain: Chain = ()
        self.outputs: dict[Chain, list[Any]] = {}

    def run(
        self, module: Path, x: Any, call: Callable[[], StatefulModuleOutput]
    ) -> StatefulModuleOutput:
        """Make a call of a module with the input `x`, and note what it returns."""
        before, self.chain = self.chain, (*self.chain, module)
        try:
            out = call()
        except _Misfit:
            raise
        except Exception as error:
            raise _Misfit(
                f"describe: {self.names[module]} cannot take an input of shape "
                f"{summary(abstract(x))}: {type(error).__name__}: {error} (sample_input is one "
                f"sample without batch axis; the batch has {BATCH} of it.)"
            ) from error
        self.outputs.setdefault(self.chain, []).append(abstract(out.output, 1))
        self.chain = before
        return out


class _Probe(Recorder):
    """Runs a module in view of `_Calls`."""

    def __init__(self, wrapped: StatefulModule, path: Path, calls: _Calls) -> None:
        super().__init__(wrapped)
        # Private, for other names are set in the module.
        self._path = path
        self._calls = calls

    def __call__(
        self, module_state: Any, obs: Any, rollout_extras: Any = None
    ) -> StatefulModuleOutput:
        return self._calls.run(
            self._path, obs, lambda: self.wrapped(module_state, obs, rollout_extras)
        )


def abstract(tree: Any, axes: int = 0) -> Any:
    """Return shapes and dtypes, as `jax.ShapeDtypeStruct`, without the first axes."""

    def one(leaf: Any) -> jax.ShapeDtypeStruct:
        leaf = jnp.asarray(leaf)
        return jax.ShapeDtypeStruct(leaf.shape[axes:], leaf.dtype)

    return jax.tree.map(one, tree)


def summary(tree: Any) -> str:
    """Return an abstract tree in a few words; dtypes are told unless float32."""
    if tree is None:
        return "None"
    if isinstance(tree, jax.ShapeDtypeStruct):
        return f"{'' if tree.dtype == jnp.float32 else tree.dtype}{tree.shape}"
    if dataclasses.is_dataclass(tree):
        fields = {field.name: getattr(tree, field.name) for field in dataclasses.fields(tree)}
        return f"{type(tree).__name__}({_entries(fields)})"
    if isinstance(tree, Mapping):
        return f"{{{_entries(tree)}}}"
    if isinstance(tree, list | tuple):
        inside = ", ".join(map(summary, tree))
        return f"[{inside}]" if isinstance(tree, list) else f"({inside})"
    return f"{type(tree).__name__} of {len(jax.tree.leaves(tree))} arrays"


def _entries(parts: Mapping[Any, Any]) -> str:
    shown = [f"{key}: {summary(value)}" for key, value in list(parts.items())[:_MOST_ENTRIES]]
    more = len(parts) - len(shown)
    return ", ".join([*shown, f"{more} more"] if more else shown)
