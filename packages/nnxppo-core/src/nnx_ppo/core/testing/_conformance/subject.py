"""The module under test as data: every rule starts from the same state, on copies of its own."""

import dataclasses
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from nnx_ppo.core import StatefulModule, StatefulModuleOutput, reset_where
from nnx_ppo.core.testing._conformance.comparison import is_key

Mode: TypeAlias = Literal["train", "eval"]

TIME, BATCH = 6, 3
# Ends at the first step, in the middle and at the last one; twice in one environment.
DONE = np.array([[(t + 2 * b) % 5 == 2 for b in range(BATCH)] for t in range(TIME)])
_NUDGE = 0.05


@dataclasses.dataclass(frozen=True, eq=False)
class Subject:
    """A module to judge, and what to feed it.

    Attributes:
        module: A copy of the user's module, its parameters nudged off zero. Never run.
        xs: Inputs, leaves `(TIME, BATCH, …)`.
        tolerance: For floating-point values that were computed in two ways.
        memo: Results that more than one rule looks at, once they were computed.
    """

    module: StatefulModule
    xs: Any
    tolerance: float
    memo: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def name(self) -> str:
        """Name of the module's class."""
        return type(self.module).__name__

    @property
    def x(self) -> Any:
        """Inputs of the first step."""
        return self.input_at(0)

    def input_at(self, time: int) -> Any:
        """Return the inputs of one step."""
        return jax.tree.map(lambda leaf: leaf[time], self.xs)

    def live(self, mode: Mode = "train") -> StatefulModule:
        """Return a fresh copy of the module."""
        copy = nnx.clone(self.module)
        copy.train() if mode == "train" else copy.eval()
        return copy

    def split(self, mode: Mode = "train") -> tuple[Callable[[Any], StatefulModule], Any]:
        """Return a function that makes a live module of its variables, and the variables."""
        graphdef, variables = nnx.split(self.live(mode))
        return lambda values: nnx.merge(graphdef, values, copy=True), variables

    def carry(self) -> Any:
        """Return the carry at the start of an episode."""
        return self.live().initialize_state(BATCH)

    @cached_property
    def rollout(self) -> "Rollout":
        """A window in train mode, as data collection runs it."""
        start = self.carry()
        return Rollout(start, self._window(self.split()[1], start, (self.xs, DONE, None)))

    def replay(self, xs: Any) -> "Rollout":
        """Run a window from the rollout's start and extras, and from other random streams."""
        start, stored = self.rollout.start, self.rollout.outputs.rollout_extras
        return Rollout(start, self._window(self.moved_variables(), start, (xs, DONE, stored)))

    def moved_variables(self, mode: Mode = "train") -> Any:
        """Return the module's variables with all random streams further on."""
        moved = self.live(mode)
        for _, node in nnx.iter_graph(moved):
            if isinstance(node, nnx.RngCount):
                node[...] = node[...] + jnp.asarray(17, node[...].dtype)
        return nnx.state(moved)

    @cached_property
    def _window(self) -> Callable[[Any, Any, Any], StatefulModuleOutput]:
        """Scan a window with resets, as the rollout does."""
        merge, _ = self.split()

        def step(loop: Any, inputs: Any) -> Any:
            values, carry = loop
            x, ended, stored = inputs
            live = merge(values)
            out = live(carry, x, stored)
            return (nnx.state(live), reset_where(live, ended, out.next_state)), out

        @jax.jit
        def window(variables: Any, start: Any, inputs: Any) -> Any:
            return jax.lax.scan(step, (variables, start), inputs)[1]

        return window

    @cached_property
    def used_carry(self) -> Any:
        """A carry in the middle of an episode, in which every environment is another."""
        return jax.tree.map(lambda leaf: leaf[1], self.rollout.outputs.next_state)

    def other_inputs(self) -> Any:
        """Return other inputs of the same kind: those of the window in another order."""
        return jax.tree.map(lambda leaf: jnp.roll(leaf, (1, 1), (0, 1)), self.xs)

    def modules(self) -> Iterator[tuple[str, StatefulModule]]:
        """Yield the module and all stateful modules inside it, with their paths."""
        yield from stateful_modules(self.module)

    @property
    def is_container(self) -> bool:
        """Whether there are stateful modules inside."""
        return sum(1 for _ in self.modules()) > 1


@dataclasses.dataclass(frozen=True)
class Rollout:
    """A window: the carry before it, and what every step returned, leaves `(TIME, BATCH, …)`."""

    start: Any
    outputs: StatefulModuleOutput


def make_subject(
    module: StatefulModule,
    sample_input: Any,
    draw_input: Callable[[jax.Array], Any] | None,
    seed: int,
    tolerance: float,
) -> Subject:
    """Copy the module, nudge its parameters, draw inputs."""
    rng = np.random.default_rng(seed)
    copy = nnx.clone(module)
    for _, node in nnx.iter_graph(copy):
        if isinstance(node, nnx.Param) and jnp.issubdtype(node[...].dtype, jnp.floating):
            nudge = _NUDGE * rng.normal(size=node[...].shape)
            node[...] = node[...] + jnp.asarray(nudge, node[...].dtype)
    if draw_input is None:
        xs = jax.tree.map(lambda leaf: _draw_like(rng, leaf), sample_input)
    else:
        keys = jax.random.split(jax.random.key(seed), (TIME, BATCH))
        xs = jax.vmap(jax.vmap(draw_input))(keys)
    return Subject(copy, xs, tolerance)


def path_name(path: tuple[Any, ...]) -> str:
    """Return a path in a module as one writes it: `.layers[0].kernel`."""
    parts = (f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return "self" + "".join(parts)


def stateful_modules(module: nnx.Module) -> list[tuple[str, StatefulModule]]:
    """Return all stateful modules in a module, itself first, with their paths."""
    found = [(p, node) for p, node in nnx.iter_graph(module) if isinstance(node, StatefulModule)]
    found.sort(key=lambda item: len(item[0]))
    return [(path_name(path), node) for path, node in found]


def _draw_like(rng: np.random.Generator, leaf: Any) -> jax.Array:
    """Draw inputs of the kind of one sample's leaf, `(TIME, BATCH, …)`."""
    if is_key(leaf):
        return jax.random.split(jax.random.key(0), (TIME, BATCH, *jnp.shape(leaf)))
    shape, dtype = (TIME, BATCH, *jnp.shape(leaf)), jnp.result_type(leaf)
    if dtype == jnp.bool_:
        return jnp.asarray(rng.integers(0, 2, shape), dtype)
    if jnp.issubdtype(dtype, jnp.integer):
        highest = int(jnp.max(jnp.asarray(leaf), initial=0))
        return jnp.asarray(rng.integers(0, highest + 1, shape), dtype)
    return jnp.asarray(rng.normal(size=shape), dtype)
