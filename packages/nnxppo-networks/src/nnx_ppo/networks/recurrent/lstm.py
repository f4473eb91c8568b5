"""`LSTM`."""

from collections.abc import Callable
from typing import ClassVar, TypeAlias

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from nnx_ppo.networks.recurrent._base import RecurrentLayer

Carry: TypeAlias = tuple[Float[Array, "*batch hidden"], Float[Array, "*batch hidden"]]
"""Hidden and cell state, in this order; flax's own order is the reverse."""


class LSTM(RecurrentLayer):
    """Long short-term memory (Hochreiter and Schmidhuber, 1997), with flax's parameters.

    The carry is `(h, c)`: the hidden state, which is also the output, and the cell state, each
    `(batch, hidden_features)`.

    Args:
        in_features: Number of input features.
        hidden_features: Number of hidden units, which is the size of the output.
        rngs: Draws the initial parameters.
        gate_fn: Activation of the gates.
        activation_fn: Activation of the candidate and of the cell state.
        kernel_init: Initializer of the input weights; None is flax's.
        recurrent_kernel_init: Initializer of the recurrent weights; None is flax's.
        bias_init: Initializer of the biases; None is flax's.
        use_optimized: Keep the weights of the four gates in one matrix
            (`nnx.OptimizedLSTMCell`), which is faster up to about 2048 units.
        trainable_initial_state: Learn the carry at the start of an episode, from zeros;
            otherwise it stays zero.

    Raises:
        TypeError: A size is not an integer.
        ValueError: A size is below 1.

    Example:
        >>> lstm = LSTM(in_features=3, hidden_features=4, rngs=nnx.Rngs(0))
        >>> out = lstm(lstm.initialize_state(2), jnp.ones((2, 3)))
        >>> out.output.shape, bool((out.next_state[0] == out.output).all())
        ((2, 4), True)
    """

    carry_parts: ClassVar[tuple[str, ...]] = ("h", "c")
    initial_h: nnx.Param
    initial_c: nnx.Param

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        rngs: nnx.Rngs,
        *,
        gate_fn: Callable[[Array], Array] = nnx.sigmoid,
        activation_fn: Callable[[Array], Array] = nnx.tanh,
        kernel_init: Callable[..., Array] | None = None,
        recurrent_kernel_init: Callable[..., Array] | None = None,
        bias_init: Callable[..., Array] | None = None,
        use_optimized: bool = True,
        trainable_initial_state: bool = False,
    ) -> None:
        super().__init__(in_features, hidden_features, trainable_initial_state)
        self.cell = self._make_cell(
            nnx.OptimizedLSTMCell if use_optimized else nnx.LSTMCell,
            rngs,
            gate_fn=gate_fn,
            activation_fn=activation_fn,
            kernel_init=kernel_init,
            recurrent_kernel_init=recurrent_kernel_init,
            bias_init=bias_init,
        )

    def _project(self, x: Array) -> Array:
        cell = self.cell
        if isinstance(cell, nnx.OptimizedLSTMCell):
            return cell.dense_i(x)
        gates = (cell.ii, cell.if_, cell.ig, cell.io)
        return jnp.concatenate([gate(x) for gate in gates], axis=-1)

    def _output(self, state: Carry) -> Array:
        return state[0]

    def _recur(self, sent: Array) -> Array:
        cell = self.cell
        if isinstance(cell, nnx.OptimizedLSTMCell):
            return cell.dense_h(sent)
        gates = (cell.hi, cell.hf, cell.hg, cell.ho)
        return jnp.concatenate([gate(sent) for gate in gates], axis=-1)

    def _update(self, state: Carry, total: Array) -> Carry:
        gate, activation = self.cell.gate_fn, self.cell.activation_fn
        i, f, g, o = jnp.split(total, 4, axis=-1)
        c = gate(f) * state[1] + gate(i) * activation(g)
        return gate(o) * activation(c), c

    def _join(self, parts: tuple[Array, ...]) -> Carry:
        h, c = parts
        return h, c
