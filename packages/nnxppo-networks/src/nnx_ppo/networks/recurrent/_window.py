"""What a recurrence is, and how it runs over a window: `Recurrence`, `states_over_window`."""

import abc
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool

from nnx_ppo.core import ModuleState, StatefulModule, fold_time, reset_where


class Recurrence(StatefulModule):
    """A module whose carry goes from step to step by one product with recurrent weights.

        total  = _merge(drive, _recur(_output(state)))
        state' = _update(state, total)

    with a drive that does not depend on the carry. All four take any number of leading axes; only
    `_recur` brings units together, the others treat each unit on its own.
    """

    @abc.abstractmethod
    def _output(self, state: ModuleState) -> Array:
        """Return what the units put out, which is also what they send to each other."""

    @abc.abstractmethod
    def _recur(self, sent: Array) -> Array:
        """Return the product of the recurrent weights and what was sent."""

    def _merge(self, drive: Array, recurrent: Array) -> Array:
        """Bring drive and recurrent product together; linear in both."""
        return drive + recurrent

    @abc.abstractmethod
    def _update(self, state: ModuleState, total: Array) -> ModuleState:
        """Return the next state."""

    def _total(self, sent: Array, drive: Array) -> Array:
        """Return what `_update` makes the next state of."""
        return self._merge(drive, self._recur(sent))


def states_over_window(
    layer: Recurrence, state: ModuleState, drives: Array, done: Bool[Array, "time batch"]
) -> ModuleState:
    """Run a window of steps.

    Differentiated as it stands, the scan would sum up the gradient of the recurrent weights from
    one small product for each step. Its derivative is given here instead: both scans, forward and
    back, leave the recurrent weights alone, and their gradient is one product over the window.

    It can be differentiated in both modes and to any order; the saving is in the first order.

    Args:
        layer: The recurrence.
        state: The state before the first step, floating leaves `(batch, …)`.
        drives: The drive of each step, `(time, batch, …)`.
        done: Where an episode ended; the next step starts from the state of a reset.

    Returns:
        The states that the steps lead to, before resets; leaves `(time, batch, …)`.
    """
    graphdef, variables = nnx.split(layer)
    return _states(graphdef, variables, state, drives, done)


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _states(
    graphdef: Any, variables: Any, state: ModuleState, drives: Array, done: Array
) -> ModuleState:
    layer = nnx.merge(graphdef, variables, copy=True)

    def step(state: ModuleState, inputs: tuple[Array, Array]) -> tuple[ModuleState, ModuleState]:
        drive, ended = inputs
        after = layer._update(state, layer._total(layer._output(state), drive))
        return reset_where(layer, ended, after), after

    return jax.lax.scan(step, state, (drives, done))[1]


@_states.defjvp
def _states_jvp(
    graphdef: Any, primals: tuple[Any, ...], tangents: tuple[Any, ...]
) -> tuple[ModuleState, ModuleState]:
    """Scan twice: for the states and the slopes of each step, and for the tangents.

    The tangent of a product `R r` is `R dr + dR r`. Of the two, `R dr` is known only step by step;
    `dR r` is known once the states are, and joins the tangent of the drive for all steps at once.
    """
    variables, state, drives, done = primals
    d_variables, d_state, d_drives, _ = tangents
    merge = partial(nnx.merge, graphdef, copy=True)
    layer = merge(variables)

    def update(variables: Any, state: ModuleState, total: Array) -> ModuleState:
        return merge(variables)._update(state, total)

    # Of the slopes, what is cheap to compute again has no place in memory for each step.
    update = jax.checkpoint(update, policy=_is_costly, prevent_cse=False)

    def step(state: ModuleState, inputs: tuple[Array, Array]) -> tuple[ModuleState, Any]:
        drive, ended = inputs
        sent, output_slope = jax.linearize(layer._output, state)
        after, update_slope = jax.linearize(update, variables, state, layer._total(sent, drive))
        return reset_where(layer, ended, after), (after, sent, output_slope, update_slope)

    _, (states, sent, *slopes) = jax.lax.scan(step, state, (drives, done))

    fold, unfold = fold_time(done.shape)
    _, d_products = jax.jvp(
        lambda variables: merge(variables)._recur(fold(sent)), (variables,), (d_variables,)
    )
    d_totals = layer._merge(d_drives, unfold(d_products))
    no_drive, no_state = jax.tree.map(jnp.zeros_like, (drives[0], state))

    # Without the checkpoint, what is known before the tangents would get a scan of its own.
    @partial(jax.checkpoint, prevent_cse=False)
    def d_step(d_state: ModuleState, inputs: Any) -> tuple[ModuleState, ModuleState]:
        (output_slope, update_slope), d_total, ended = inputs
        d_sent = output_slope(d_state)
        d_total += jax.jvp(lambda sent: layer._total(sent, no_drive), (d_sent,), (d_sent,))[1]
        d_after = update_slope(d_variables, d_state, d_total)
        _, d_next = jax.jvp(
            lambda variables, after: reset_where(merge(variables), ended, after),
            (variables, no_state),  # only the tangent is used, and a reset is linear in the state
            (d_variables, d_after),
        )
        return d_next, d_after

    _, d_states = jax.lax.scan(d_step, d_state, (slopes, d_totals, done))
    return states, d_states


def _is_costly(primitive: Any, *_: Any, **__: Any) -> bool:
    """Whether to store what an operation gives; of a split, only the parts that are needed."""
    return primitive.name in _COSTLY


_COSTLY = {"cos", "erf", "exp", "exp2", "expm1", "log", "log1p", "logistic", "pow", "sin", "tanh"}
_COSTLY |= {"split"}
