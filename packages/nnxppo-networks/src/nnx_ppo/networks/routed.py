"""The one loop of all containers: `RoutedModule`.

A container differs from another only in what each child is given and what becomes of their
outputs. It says so in `_route`; everything else (carries, rollout extras, metrics, losses,
statistics, the step-wise and the windowed form) is written here once.
"""

import abc
from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, PyTree

from nnx_ppo.core import (
    ModuleState,
    StatefulModule,
    StatefulModuleOutput,
    UnrollOutput,
    unroll_stepwise,
)

Name: TypeAlias = str | int
"""How a container calls a child: its name, or its position in a `Sequential`."""


class Runner(abc.ABC):
    """Runs children by name, and collects what they return beside their output.

    Attributes:
        leading_axes: Number of axes before the features: 1 (`batch`) or 2 (`time, batch`).
    """

    leading_axes: int

    def __init__(
        self,
        children: Mapping[Name, StatefulModule],
        states: Mapping[Name, ModuleState],
        extras: Mapping[Name, Any],
    ) -> None:
        self.children = children
        self.states = states
        self.extras = extras
        self.next_states: dict[Name, ModuleState] = {}
        self.loss: Array = jnp.zeros(())

    def __call__(self, name: Name, x: Any) -> Any:
        """Run one child, once, on `x`, and return its output."""
        if name in self.next_states:
            raise RuntimeError(f"Child {name!r} was run twice in one call; its carry is ambiguous.")
        return self._run(name, x)

    def collect(self, values: Mapping[Name, Any]) -> dict[Name, Any]:
        """Return one value for each child, in the order of the children."""
        missing = [name for name in self.children if name not in values]
        if missing:
            raise RuntimeError(f"Children {missing} were not run; _route must run each once.")
        return {name: values[name] for name in self.children}

    def _add(self, name: Name, next_state: ModuleState, loss: Any) -> None:
        if jnp.ndim(loss) > self.leading_axes:
            raise ValueError(
                f"Child {name!r} ({type(self.children[name]).__name__}) returned "
                f"regularization_loss of shape {jnp.shape(loss)}; expected one value per sample, "
                "(batch,), or a scalar. Sum it over the feature axes."
            )
        self.next_states[name] = next_state
        self.loss = self.loss + loss

    @abc.abstractmethod
    def _run(self, name: Name, x: Any) -> Any: ...


class StepRunner(Runner):
    """Runs children for one step, by calling them."""

    leading_axes = 1

    def __init__(
        self,
        children: Mapping[Name, StatefulModule],
        states: Mapping[Name, ModuleState],
        extras: Mapping[Name, Any],
    ) -> None:
        super().__init__(children, states, extras)
        self.metrics: dict[Name, Any] = {}
        self.emitted: dict[Name, Any] = {}

    def _run(self, name: Name, x: Any) -> Any:
        out = self.children[name](self.states[name], x, self.extras[name])
        self._add(name, out.next_state, out.regularization_loss)
        self.emitted[name] = out.rollout_extras
        if out.metrics:
            self.metrics[name] = out.metrics
        return out.output


class WindowRunner(Runner):
    """Runs children for a whole window, by unrolling them one after the other."""

    leading_axes = 2

    def __init__(
        self,
        children: Mapping[Name, StatefulModule],
        states: Mapping[Name, ModuleState],
        extras: Mapping[Name, Any],
        done: Array,
    ) -> None:
        super().__init__(children, states, extras)
        self.done = done
        self.loss = jnp.zeros(done.shape)

    def _run(self, name: Name, x: Any) -> Any:
        out = self.children[name].unroll(self.states[name], x, self.done, self.extras[name])
        self._add(name, out.next_state, out.regularization_loss)
        return out.output


class RoutedModule(StatefulModule):
    """A module made of children: base of all containers.

    A subclass says which children it has (`_children`) and how data flows through them
    (`_route`). The carry, the rollout extras and the metrics have one entry for each child,
    by name in a dict; a subclass whose carry looks otherwise overrides `_pack` and `_unpack`.
    Children without metrics have no entry there.

    Example:
        >>> from nnx_ppo.networks import Dense
        >>> class Doubled(RoutedModule):
        ...     def __init__(self, inner):
        ...         self.inner = inner
        ...
        ...     def _children(self):
        ...         return {"inner": self.inner}
        ...
        ...     def _route(self, x, run):
        ...         return 2 * run("inner", x)
        >>> block = Doubled(Dense(4, 4, nnx.Rngs(0)))
        >>> block(block.initialize_state(2), jnp.ones((2, 4))).output.shape
        (2, 4)
    """

    @abc.abstractmethod
    def _children(self) -> Mapping[Name, StatefulModule]:
        """Return the children by name, in order."""

    @abc.abstractmethod
    def _route(self, x: Any, run: Runner) -> Any:
        """Return the output for the input `x`, running each child exactly once.

        Written for any number of leading axes: features are the trailing ones. Where their
        number is needed, it is `run.leading_axes`.

        Args:
            x: The input, leaves `(batch, *feature)` or `(time, batch, *feature)`.
            run: Call it with a child's name and the child's input to get the child's output.
        """

    def _pack(self, parts: dict[Name, Any]) -> Any:
        """Make the tree of a carry, or of rollout extras, from one entry for each child."""
        return parts

    def _unpack(self, tree: Any, argument: str) -> Mapping[Name, Any]:
        """Return the entry of each child; the inverse of `_pack`.

        Raises:
            ValueError: `tree` has not exactly one entry for each child.
        """
        parts = dict(enumerate(tree)) if isinstance(tree, list | tuple) else tree
        names = self._children().keys()
        if isinstance(parts, Mapping) and parts.keys() == names:
            return parts
        found = list(parts) if isinstance(parts, Mapping) else type(tree).__name__
        raise ValueError(
            f"{type(self).__name__}: {argument} must have one entry for each of {list(names)}, "
            f"got {found}; pass what initialize_state or the call before returned."
        )

    def _unpack_extras(self, rollout_extras: Any) -> Mapping[Name, Any]:
        if rollout_extras is None:
            return dict.fromkeys(self._children())
        return self._unpack(rollout_extras, "rollout_extras")

    def __call__(
        self, state: ModuleState, x: Any, rollout_extras: Any = None
    ) -> StatefulModuleOutput:
        """Run the children for one step; see `StatefulModule.__call__`."""
        children = self._children()
        run = StepRunner(
            children, self._unpack(state, "state"), self._unpack_extras(rollout_extras)
        )
        output = self._route(x, run)
        return StatefulModuleOutput(
            next_state=self._pack(run.collect(run.next_states)),
            output=output,
            regularization_loss=run.loss,
            metrics=run.metrics,
            rollout_extras=self._pack(run.collect(run.emitted)),
        )

    def unroll(
        self,
        state: ModuleState,
        xs: PyTree,
        done: Bool[Array, "time batch"],
        rollout_extras: Any = None,
    ) -> UnrollOutput:
        """Run the children for a window, each over all of it before the next one starts.

        Children feed forward in time only, so the order of time and children may be swapped.
        The exception are children that share a random stream, whose draws would be dealt out
        in another order: then it goes step by step.
        """
        children = self._children()
        if share_random_stream(children.values()):
            return unroll_stepwise(self, state, xs, done, rollout_extras)
        run = WindowRunner(
            children, self._unpack(state, "state"), self._unpack_extras(rollout_extras), done
        )
        output = self._route(xs, run)
        return UnrollOutput(self._pack(run.collect(run.next_states)), output, run.loss)

    def initialize_state(self, batch_size: int) -> ModuleState:
        """Return the carries of all children."""
        children = self._children().items()
        return self._pack({name: child.initialize_state(batch_size) for name, child in children})

    def reset_state(self, prev_state: ModuleState) -> ModuleState:
        """Return the reset carries of all children."""
        states = self._unpack(prev_state, "prev_state")
        children = self._children().items()
        return self._pack({name: child.reset_state(states[name]) for name, child in children})

    def update_statistics(self, rollout_extras: Any) -> None:
        """Give each child its part of the rollout's extras."""
        extras = self._unpack_extras(rollout_extras)
        for name, child in self._children().items():
            child.update_statistics(extras[name])


def share_random_stream(modules: Iterable[nnx.Module]) -> bool:
    """Whether some random stream is reachable from two of the modules."""
    seen: set[int] = set()
    for module in modules:
        own = {id(node) for _, node in nnx.iter_graph(module) if isinstance(node, nnx.RngState)}
        if seen & own:
            return True
        seen |= own
    return False
