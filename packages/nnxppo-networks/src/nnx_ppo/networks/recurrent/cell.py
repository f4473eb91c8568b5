"""`Recurrent`: a layer of any flax cell."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool

from nnx_ppo.core import (
    ModuleState,
    StatefulModule,
    StatefulModuleOutput,
    UnrollOutput,
    check_same_carry,
    unroll_stepwise,
)
from nnx_ppo.networks._checks import check_size, check_sizes
from nnx_ppo.networks._foreign import call_unchanged, copy_of, describe, find
from nnx_ppo.networks.recurrent._twins import has_twin, unroll_as_twin

# Their `rngs`, kept on request, only draw carries; here carries are never drawn.
_FLAX_CELLS = (nnx.LSTMCell, nnx.OptimizedLSTMCell, nnx.GRUCell, nnx.SimpleCell)


class InitialCarry(nnx.Variable):
    """What a carry starts from: kept in checkpoints, never trained."""


class Recurrent(StatefulModule):
    """A layer of any flax cell, `nnx.RNNCellBase`.

    The carry is the cell's own; that of flax's LSTM cells is `(c, h)`, the reverse of `LSTM`'s.
    It starts, and starts again after each episode, from what `cell.initialize_carry` returned when
    the layer was made: the same for each environment and each episode.

    Over a window, flax's own cells run as `LSTM`, `GRU` and `RNN` do, which is faster than step by
    step; other cells, classes derived from flax's among them, go step by step.

    Args:
        cell: The cell. If it is one of flax's and was made with `keep_rngs=True`, the stream that
            it kept for drawing carries is taken away from it.
        input_shape: Shape of one input sample, or its number of features; None is the cell's
            `in_features`.
        trainable_initial_state: Learn the carry at the start of an episode, beginning with the
            cell's own.

    Attributes:
        cell: The cell.
        initial_carry: The starting values, one variable without a batch axis for each leaf of the
            carry, in the order of `jax.tree.leaves`: `nnx.Param` for floating leaves if they are
            trained, otherwise `InitialCarry`.

    Raises:
        TypeError: `cell` is not an instance of `nnx.RNNCellBase`, or its forward pass draws noise
            or writes variables.
        ValueError: The shape of its input is unknown, its initial carry is random or has no batch
            axis, or a step changes the tree, shape or dtype of its carry.

    Example:
        >>> cell = nnx.OptimizedLSTMCell(3, 4, rngs=nnx.Rngs(0))
        >>> layer = Recurrent(cell, trainable_initial_state=True)
        >>> out = layer(layer.initialize_state(2), jnp.ones((2, 3)))
        >>> out.output.shape, [leaf.shape for leaf in layer.initial_carry]
        ((2, 4), [(4,), (4,)])
    """

    def __init__(
        self,
        cell: nnx.RNNCellBase,
        *,
        input_shape: int | Sequence[int] | None = None,
        trainable_initial_state: bool = False,
    ) -> None:
        self.cell = _checked_cell(cell)
        self.input_shape = _checked_shape(input_shape, cell)
        self.trainable_initial_state = trainable_initial_state
        # Two samples, so that an axis of that size is the batch axis.
        with jax.ensure_compile_time_eval():  # values, also where parameters are only shapes
            carry = self._cell_carry(2)
            _check_initial(carry, self._cell_carry(2, seed=1))
        _check_step(cell, carry, jax.ShapeDtypeStruct((2, *self.input_shape), jnp.float32))
        self.initial_carry = nnx.List(
            _variable(leaf[0], trainable_initial_state) for leaf in jax.tree.leaves(carry)
        )

    def __call__(
        self, state: ModuleState, x: Array, rollout_extras: Any = None
    ) -> StatefulModuleOutput:
        """Run one step.

        Args:
            state: The cell's carry, leaves `(batch, …)`.
            x: The input, `(batch, *input_shape)`.
            rollout_extras: Ignored.

        Raises:
            ValueError: `x` has not the shape `input_shape` after the batch axis.
        """
        del rollout_extras
        self._check_input(x, "batch")
        next_state, output = self.cell(state, x)
        return StatefulModuleOutput(next_state, output, jnp.zeros(()), {})

    def initialize_state(self, batch_size: int) -> ModuleState:
        """Return the carry at the start of an episode, leaves `(batch_size, …)`."""
        return self._start(jax.eval_shape(lambda: self._cell_carry(batch_size)))

    def reset_state(self, prev_state: ModuleState) -> ModuleState:
        """Return the carry at the start of an episode, in the shape of `prev_state`."""
        return self._start(prev_state)

    def unroll(
        self,
        state: ModuleState,
        xs: Array,
        done: Bool[Array, "time batch"],
        rollout_extras: Any = None,
    ) -> UnrollOutput:
        """Run a window of steps; one of flax's own cells as `LSTM`, `GRU` and `RNN` do it."""
        if not has_twin(self.cell):
            return unroll_stepwise(self, state, xs, done, rollout_extras)
        self._check_input(xs, "time, batch")
        return unroll_as_twin(self, self.cell, state, xs, done)

    def _check_input(self, x: Array, axes: str) -> None:
        if x.shape[axes.count(",") + 1 :] != self.input_shape:
            raise ValueError(
                f"Recurrent: x must have the shape ({axes}, "
                f"{', '.join(map(str, self.input_shape))}), got {x.shape}; make the cell for the "
                "width of the layer before."
            )

    def _start(self, like: ModuleState) -> ModuleState:
        leaves, tree = jax.tree.flatten(like)
        return tree.unflatten(
            jnp.broadcast_to(value[...].astype(leaf.dtype), leaf.shape)
            for value, leaf in zip(self.initial_carry, leaves, strict=True)
        )

    def _cell_carry(self, batch_size: int, seed: int = 0) -> ModuleState:
        shape = (batch_size, *self.input_shape)
        carry = self.cell.initialize_carry(shape, rngs=nnx.Rngs(seed))
        return jax.tree.map(jnp.asarray, carry)


def _variable(value: Array, trainable: bool) -> nnx.Variable:
    # astype drops weak types, which a carry must not have.
    kind = nnx.Param if trainable and jnp.issubdtype(value.dtype, jnp.floating) else InitialCarry
    return kind(value.astype(value.dtype))


def _checked_cell(cell: Any) -> nnx.RNNCellBase:
    """Return `cell` if it is a cell without noise, without the stream that it may have kept."""
    if not isinstance(cell, nnx.RNNCellBase):
        raise TypeError(f"Recurrent: cell must be an nnx.RNNCellBase, got {_cure(cell)}")
    if isinstance(cell, _FLAX_CELLS) and isinstance(cell.rngs, nnx.RngStream):
        cell.rngs = nnx.data(None)
    if find(cell, nnx.RngState) is not None:
        raise TypeError(
            f"Recurrent: cell, a {type(cell).__name__}, holds a random stream, whose noise the "
            "replay would not repeat. Remove it, put Lift(nnx.Dropout(...)) before or after the "
            "layer, or write a StatefulModule with one key for each environment in its carry."
        )
    return cell


def _cure(cell: Any) -> str:
    """Return what was passed instead of a cell, and what to do."""
    if isinstance(cell, type):
        cure = "make an instance of it."
    elif isinstance(cell, nnx.RNN):
        cure = "pass its cell, Recurrent(rnn.cell): time is ours to run over."
    elif isinstance(cell, StatefulModule):
        cure = "it has a carry of its own; use it directly."
    elif isinstance(cell, nnx.Module):
        cure = "if it has no carry, use Lift; otherwise derive it from nnx.RNNCellBase."
    else:
        cure = "write Recurrent(nnx.GRUCell(in_features, hidden_features, rngs=rngs))."
    return f"{describe(cell)}: {cure}"


def _checked_shape(input_shape: Any, cell: Any) -> tuple[int, ...]:
    if input_shape is None:
        if not hasattr(cell, "in_features"):
            raise ValueError(
                f"Recurrent: input_shape must be given, as {type(cell).__name__} has no attribute "
                "in_features; pass the shape of one input sample."
            )
        return (check_size(cell.in_features, "Recurrent: cell.in_features"),)
    if isinstance(input_shape, Sequence):
        return tuple(check_sizes(input_shape, "Recurrent: input_shape"))
    return (check_size(input_shape, "Recurrent: input_shape"),)


def _check_initial(carry: ModuleState, redrawn: ModuleState) -> None:
    """Raise unless an initial carry for two samples is the same whatever the seed."""
    leaves = jax.tree.leaves(carry)
    if any(leaf.shape[:1] != (2,) for leaf in leaves):
        raise ValueError(
            "Recurrent: cell.initialize_carry must return leaves with the batch axes of its "
            f"input_shape, got {jax.tree.map(jnp.shape, carry)} for a batch of 2."
        )
    try:
        same = all(
            np.array_equal(leaf, np.broadcast_to(other[:1], leaf.shape))
            for leaf, other in zip(leaves, jax.tree.leaves(redrawn), strict=True)
        )
    except jax.errors.TracerArrayConversionError:
        return  # made of parameters that have no values yet
    if not same:
        raise ValueError(
            "Recurrent: cell.initialize_carry draws at random, but each episode must start from "
            "the same carry. Make the cell with a constant carry_init, e.g. "
            "nnx.initializers.zeros, and learn the rest with trainable_initial_state=True."
        )


def _check_step(cell: nnx.RNNCellBase, carry: ModuleState, x: jax.ShapeDtypeStruct) -> None:
    """Raise unless a step keeps the carry's form, and writes no variable."""

    def step(carry: ModuleState, x: Array) -> ModuleState:
        return call_unchanged("Recurrent: cell", copy_of(cell), carry, x)[0]

    check_same_carry("Recurrent: cell.__call__", carry, jax.eval_shape(step, carry, x))
