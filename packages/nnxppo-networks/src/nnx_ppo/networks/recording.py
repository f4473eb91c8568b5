"""Recording activations: what each layer of a network puts out, for analysis.

The output of a layer is its activation, and containers already hand up what their children report
as metrics. So a network is recorded by a copy of it in which each layer also reports its output,
and no layer has to know about it.
"""

import warnings
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeAlias, runtime_checkable

import jax
from flax import nnx
from jaxtyping import Array, Bool, PyTree

from nnx_ppo.core import (
    ACTIVATION_KEY,
    ModuleState,
    StatefulModule,
    StatefulModuleOutput,
    UnrollOutput,
)
from nnx_ppo.networks._checks import check_module

Path: TypeAlias = tuple[Any, ...]


@runtime_checkable
class RecordsItself(Protocol):
    """A module with activations that are not the outputs of modules in it.

    While `record_activations` is set, it reports them in its metrics under `ACTIVATION_KEY`.
    `PopulationGraph` is one; the modules inside of it, another graph among them, are not recorded.
    """

    record_activations: bool


class Recorder(StatefulModule):
    """Runs a module unchanged, and adds its output to its metrics under `ACTIVATION_KEY`.

    Any other attribute is that of the wrapped module, to read and, unless private, to write.

    Args:
        wrapped: The module.

    Raises:
        TypeError: `wrapped` is not a `StatefulModule`.

    Example:
        >>> import jax.numpy as jnp
        >>> from nnx_ppo.networks import Flattener
        >>> out = Recorder(Flattener())((), jnp.ones((2, 3)))
        >>> out.metrics[ACTIVATION_KEY].shape
        (2, 3)
    """

    def __init__(self, wrapped: StatefulModule) -> None:
        self.wrapped = check_module(wrapped, "Recorder: wrapped")

    def __getattr__(self, name: str) -> Any:
        # Reached for what a Recorder lacks; these are flax's own questions.
        if name.startswith(("__", "_pytree__")) or name == "wrapped":
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.wrapped, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_") or name == "wrapped":
            super().__setattr__(name, value)
        else:  # train() and eval() set `deterministic`
            setattr(self.wrapped, name, value)

    def __call__(
        self, module_state: ModuleState, obs: Any, rollout_extras: Any = None
    ) -> StatefulModuleOutput:
        """Run the module for one step and report its output; see `StatefulModule.__call__`."""
        out = self.wrapped(module_state, obs, rollout_extras)
        # JAX cannot sort integer keys, which a Sequential has, among strings.
        metrics = {str(name): value for name, value in out.metrics.items()}
        return out.replace(metrics={**metrics, ACTIVATION_KEY: out.output})

    def initialize_state(self, batch_size: int) -> ModuleState:
        """Return the module's carry."""
        return self.wrapped.initialize_state(batch_size)

    def reset_state(self, prev_state: ModuleState) -> ModuleState:
        """Return the module's reset carry."""
        return self.wrapped.reset_state(prev_state)

    def update_statistics(self, rollout_extras: Any) -> None:
        """Hand the rollout's extras to the module."""
        self.wrapped.update_statistics(rollout_extras)

    def unroll(
        self,
        state: ModuleState,
        xs: PyTree,
        done: Bool[Array, "time batch"],
        rollout_extras: Any = None,
    ) -> UnrollOutput:
        """Run the module for a window, which reports no metrics and so records nothing."""
        return self.wrapped.unroll(state, xs, done, rollout_extras)


def with_recording(net: StatefulModule) -> StatefulModule:
    """Return a copy of a network that reports the output of each of its layers.

    A layer is a module without modules of the contract in it; containers are not recorded, since
    their outputs are made of their children's. Modules that record themselves, such as
    `PopulationGraph`, are switched on instead. Activations travel with the metrics: they come out
    where containers pass their children's metrics on, as ours do. `extract_activations` picks
    them out.

    The copy shares parameters and statistics with `net`, so it follows later training. Its random
    streams are its own and start where those of `net` stand: it draws what `net` would draw, and
    `net` does not notice. It is in the mode (`train()`, `eval()`) that `net` is in.

    Args:
        net: The network, which is left as it is.

    Returns:
        The copy; `net` itself, with a warning, if it has a `Recorder` in it already.

    Raises:
        TypeError: `net` is not a `StatefulModule`.
        ValueError: The network cannot be rebuilt: it keeps modules in tuples, or refers to itself.

    Example:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> from nnx_ppo.networks import make_mlp_actor_critic
        >>> net = make_mlp_actor_critic(3, 2, [8], [8], nnx.Rngs(0))
        >>> recorded = with_recording(net)
        >>> out = recorded(recorded.initialize_state(4), jnp.ones((4, 3)))
        >>> activations = extract_activations(out.metrics)
        >>> activations[1]["action"][0].shape, activations[1]["value"][1].shape
        ((4, 8), (4, 1))
    """
    check_module(net, "with_recording: net")
    modules = {p: m for p, m in nnx.iter_modules(net) if isinstance(m, StatefulModule)}
    if any(isinstance(module, Recorder) for module in modules.values()):
        warnings.warn("with_recording: net records already and is returned as it is.", stacklevel=2)
        return net
    layers = {path for path in modules if _is_layer(path, modules)}

    def rebuild(path: Path, node: Any) -> Any:
        if path not in layers or not isinstance(node, StatefulModule):
            return node
        if not isinstance(node, RecordsItself):
            return Recorder(node)
        node.record_activations = True
        return node

    graphdef, streams, shared = nnx.split(net, nnx.RngState, ...)
    # Mapping over a tree makes its variables anew; merging takes those it is given.
    streams = jax.tree.map(lambda leaf: leaf, streams)
    return rebuilt(nnx.merge(graphdef, streams, shared), rebuild, "with_recording")


def rebuilt(net: StatefulModule, change: Callable[[Path, Any], Any], caller: str) -> StatefulModule:
    """Return a copy of a network with some of its nodes replaced, from the inside out.

    Args:
        net: The network; the copy shares its variables.
        change: Gets the path and the copy of each node and variable, and returns what takes its
            place. What is found in several places is asked for once, by its first path.
        caller: Name of the function that the user called, for the message.

    Raises:
        ValueError: Flax cannot rebuild the network.
    """
    try:
        return nnx.recursive_map(change, net)
    except ValueError as error:
        raise ValueError(
            f"{caller} cannot rebuild the network ({error}); keep modules as attributes, in an "
            "nnx.List or in an nnx.Dict, and without references to their parents."
        ) from error


def _is_layer(path: Path, modules: Mapping[Path, StatefulModule]) -> bool:
    """Whether a module is recorded: no container, and not inside of one that records itself."""
    above = [path[:length] for length in range(len(path)) if path[:length] in modules]
    if any(isinstance(modules[outer], RecordsItself) for outer in above):
        return False
    if isinstance(modules[path], RecordsItself):
        return True
    inner = (module for _, module in nnx.iter_modules(modules[path]) if module is not modules[path])
    return not any(isinstance(module, StatefulModule) for module in inner)


def extract_activations(metrics: Any) -> Any:
    """Pick the recorded activations out of the metrics of a network's output.

    Args:
        metrics: `out.metrics` of a network made by `with_recording`, of one step or stacked.

    Returns:
        Nested dicts as the containers name their children, with an activation in the place of
        each recorded module; everything else is dropped. For a network of a single layer its
        activation; None if there is none.
    """
    if isinstance(metrics, list | tuple):
        metrics = dict(enumerate(metrics))
    if not isinstance(metrics, Mapping):
        return None
    if ACTIVATION_KEY in metrics:
        return metrics[ACTIVATION_KEY]
    parts = {name: extract_activations(inner) for name, inner in metrics.items()}
    return {name: part for name, part in parts.items() if part is not None} or None
