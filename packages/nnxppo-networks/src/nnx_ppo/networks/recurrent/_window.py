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

    def _total(self, state: ModuleState, drive: Array) -> Array:
        """Return what `_update` makes the next state of."""
        return self._merge(drive, self._recur(self._output(state)))


def states_over_window(
    layer: Recurrence, state: ModuleState, drives: Array, done: Bool[Array, "time batch"]
) -> ModuleState:
    """Run a window of steps.

    Differentiated as it stands, the scan would sum up the gradient of the recurrent weights from
    one small product for each step. Its derivative is given here instead: both scans, forward and
    back, leave the recurrent weights alone, and their gradient is one product over the window.
    What else a step computes is cheap: it is computed again on the way back rather than stored.

    It can be differentiated in both modes and to any order; the saving is in the first.

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
    graphdef: Any,
    variables: Any,
    state: ModuleState,
    drives: Array,
    done: Array,
) -> ModuleState:
    return _scan(graphdef, variables, state, drives, done)[0]


@_states.defjvp
def _states_jvp(
    graphdef: Any, primals: tuple[Any, ...], tangents: tuple[Any, ...]
) -> tuple[ModuleState, ModuleState]:
    """Linearize the steps, the recurrent product apart from the rest of them.

    The tangent of a product `R r` is `R dr + dR r`. Of these, `R dr` goes from step to step, and
    `dR r` is known once the states are: it is added to the tangent of the drive, for all steps at
    once.
    """
    variables, state, drives, done = primals
    d_variables, d_state, d_drives, _ = tangents
    states, totals = _scan(graphdef, variables, state, drives, done)
    before = _states_before(graphdef, variables, state, states, done)
    layer = nnx.merge(graphdef, variables, copy=True)
    fold, unfold = fold_time(done.shape)
    sent = fold(layer._output(before))

    def products(variables: Any) -> Array:
        return unfold(nnx.merge(graphdef, variables, copy=True)._recur(sent))

    d_products = jax.jvp(products, (variables,), (d_variables,))[1]
    d_totals = layer._merge(d_drives, d_products)
    still = jnp.zeros_like(drives[0])

    def step(d_state: ModuleState, inputs: Any) -> tuple[ModuleState, ModuleState]:
        state, total, d_total, ended = inputs
        d_total += jax.jvp(lambda state: layer._total(state, still), (state,), (d_state,))[1]
        return jax.jvp(
            partial(_next, graphdef, ended),
            (variables, state, total),
            (d_variables, d_state, d_total),
        )[1]

    # The checkpoint keeps the slopes of a step from being stored: they come of what `step` gets.
    step = jax.checkpoint(step, prevent_cse=False)
    _, d_states = jax.lax.scan(step, d_state, (before, totals, d_totals, done))
    return states, d_states


def _scan(
    graphdef: Any,
    variables: Any,
    state: ModuleState,
    drives: Array,
    done: Array,
) -> tuple[ModuleState, Array]:
    """Return the states after each step, before resets, and what they were made of."""
    layer = nnx.merge(graphdef, variables, copy=True)

    def step(state: ModuleState, inputs: tuple[Array, Array]) -> tuple[ModuleState, Any]:
        drive, ended = inputs
        total = layer._total(state, drive)
        state, after = _next(graphdef, ended, variables, state, total)
        return state, (after, total)

    return jax.lax.scan(step, state, (drives, done))[1]


def _next(
    graphdef: Any,
    ended: Array,
    variables: Any,
    state: ModuleState,
    total: Array,
) -> tuple[ModuleState, ModuleState]:
    """Return the next state, with and without resets."""
    layer = nnx.merge(graphdef, variables, copy=True)
    after = layer._update(state, total)
    return reset_where(layer, ended, after), after


def _states_before(
    graphdef: Any,
    variables: Any,
    state: ModuleState,
    states: ModuleState,
    done: Array,
) -> ModuleState:
    """Return the states that the steps started from, leaves `(time, batch, …)`."""
    later = reset_where(nnx.merge(graphdef, variables, copy=True), done, states)
    return jax.tree.map(lambda first, rest: jnp.concatenate([first[None], rest[:-1]]), state, later)
