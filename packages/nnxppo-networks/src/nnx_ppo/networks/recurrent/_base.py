"""What the ready-made recurrent layers have in common: `RecurrentLayer`."""

import abc
from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float

from nnx_ppo.core import (
    ModuleState,
    StatefulModuleOutput,
    UnrollOutput,
    fold_time,
    reset_where,
)
from nnx_ppo.networks._checks import check_size
from nnx_ppo.networks.recurrent._window import Recurrence, states_over_window

Cell = TypeVar("Cell", bound=nnx.RNNCellBase)


class RecurrentLayer(Recurrence):
    """A recurrence whose drive is a projection of the input.

    `unroll` projects the inputs of the whole window at once, and scans only the recurrence. A
    subclass gives the parts of a step, and how parts make a carry.

    Args:
        in_features: Number of input features.
        hidden_features: Number of units.
        trainable_initial_state: Learn the carry at the start of an episode, from zeros, in
            a parameter `initial_<name>` for each part of the carry.

    Raises:
        TypeError: A size is not an integer.
        ValueError: A size is below 1.
    """

    carry_parts: ClassVar[tuple[str, ...]] = ("h",)

    def __init__(
        self, in_features: int, hidden_features: int, trainable_initial_state: bool
    ) -> None:
        name = type(self).__name__
        self.in_features = check_size(in_features, f"{name}: in_features")
        self.hidden_features = check_size(hidden_features, f"{name}: hidden_features")
        self.trainable_initial_state = trainable_initial_state
        if trainable_initial_state:
            for part in self.carry_parts:
                setattr(self, f"initial_{part}", nnx.Param(jnp.zeros(self.hidden_features)))

    def _make_cell(self, kind: Callable[..., Cell], rngs: nnx.Rngs, **options: Any) -> Cell:
        """Make a cell of flax; for options that are None its defaults are left alone."""
        named = {name: value for name, value in options.items() if value is not None}
        return kind(self.in_features, self.hidden_features, rngs=rngs, **named)

    @abc.abstractmethod
    def _project(self, x: Array) -> Array:
        """Return the input's part in the update, for any number of leading axes."""

    def _join(self, parts: tuple[Array, ...]) -> ModuleState:
        """Make a carry of its parts, given in the order of `carry_parts`."""
        (h,) = parts
        return h

    def __call__(
        self, state: ModuleState, x: Float[Array, "*batch features"], rollout_extras: Any = None
    ) -> StatefulModuleOutput:
        """Run one step.

        Args:
            state: The carry, leaves `(batch, …)`.
            x: The input, `(batch, in_features)`.
            rollout_extras: Ignored.

        Raises:
            ValueError: `x` has not `in_features` features.
        """
        del rollout_extras
        self._check_input(x)
        next_state = self._update(state, self._total(self._output(state), self._project(x)))
        return StatefulModuleOutput(next_state, self._output(next_state), jnp.zeros(()), {})

    def initialize_state(self, batch_size: int) -> ModuleState:
        """Return the carry at the start of an episode, leaves `(batch_size, …)`."""
        return self._start((batch_size,))

    def reset_state(self, prev_state: ModuleState) -> ModuleState:
        """Return the carry at the start of an episode, in the shape of `prev_state`."""
        return self._start(jax.tree.leaves(prev_state)[0].shape[:-1])

    def unroll(
        self,
        state: ModuleState,
        xs: Float[Array, "time batch features"],
        done: Bool[Array, "time batch"],
        rollout_extras: Any = None,
    ) -> UnrollOutput:
        """Run a window of steps.

        Inputs are projected, and the gradients of all weights formed, for the window at once; only
        the recurrence is scanned, where each step needs the one before.
        """
        del rollout_extras
        self._check_input(xs)
        return self._unroll_drives(state, self._project_window(xs), done)

    def _project_window(self, xs: Array) -> Array:
        # On two axes: to XLA, a product of arrays with three costs transposes.
        fold, unfold = fold_time(xs.shape[:2])
        return unfold(self._project(fold(xs)))

    def _unroll_drives(self, state: ModuleState, drives: Array, done: Array) -> UnrollOutput:
        states = states_over_window(self, state, drives, done)
        last = jax.tree.map(lambda leaf: leaf[-1], states)
        return UnrollOutput(
            reset_where(self, done[-1], last), self._output(states), jnp.zeros(done.shape)
        )

    def _start(self, leading: tuple[int, ...]) -> ModuleState:
        """Return the carry at the start of an episode, for any leading axes."""
        shape = (*leading, self.hidden_features)
        return self._join(tuple(self._initial(part, shape) for part in self.carry_parts))

    def _initial(self, part: str, shape: tuple[int, ...]) -> Array:
        if not self.trainable_initial_state:
            return jnp.zeros(shape)
        # A carry has one dtype, also where parameters are kept in another.
        start = getattr(self, f"initial_{part}")[...].astype(jnp.zeros(()).dtype)
        return jnp.broadcast_to(start, shape)

    def _check_input(self, x: Array) -> None:
        if x.shape[-1:] != (self.in_features,):
            raise ValueError(
                f"{type(self).__name__}: x must have in_features={self.in_features} features on "
                f"its last axis, got shape {x.shape}; give in_features the width of the layer "
                "before."
            )
