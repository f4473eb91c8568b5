"""`GRU`."""

from collections.abc import Callable

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array

from nnx_ppo.networks.recurrent._base import RecurrentLayer


class GRU(RecurrentLayer):
    """Gated recurrent units (Cho et al., 2014, arXiv:1406.1078), with flax's parameters.

    As in `nnx.GRUCell`, the reset gate acts on the product of recurrent weights and hidden state,
    not on the hidden state, and biases belong to the input only:

        r, z = gate_fn(W_r x + b_r + R_r h), gate_fn(W_z x + b_z + R_z h)
        n    = activation_fn(W_n x + b_n + r * (R_n h))
        h'   = (1 - z) * n + z * h

    The carry is `h'`, `(batch, hidden_features)`, which is also the output.

    Args:
        in_features: Number of input features.
        hidden_features: Number of hidden units, which is the size of the output.
        rngs: Draws the initial parameters.
        gate_fn: Activation of the reset gate `r` and the update gate `z`.
        activation_fn: Activation of the candidate `n`.
        kernel_init: Initializer of the input weights; None is flax's.
        recurrent_kernel_init: Initializer of the recurrent weights; None is flax's.
        bias_init: Initializer of the biases; None is flax's.
        trainable_initial_state: Learn the carry at the start of an episode, from zeros;
            otherwise it stays zero.

    Raises:
        TypeError: A size is not an integer.
        ValueError: A size is below 1.

    Example:
        >>> gru = GRU(in_features=3, hidden_features=4, rngs=nnx.Rngs(0))
        >>> out = gru(gru.initialize_state(2), jnp.ones((2, 3)))
        >>> out.output.shape, bool((out.next_state == out.output).all())
        ((2, 4), True)
    """

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
        trainable_initial_state: bool = False,
    ) -> None:
        super().__init__(in_features, hidden_features, trainable_initial_state)
        self.cell = self._make_cell(
            nnx.GRUCell,
            rngs,
            gate_fn=gate_fn,
            activation_fn=activation_fn,
            kernel_init=kernel_init,
            recurrent_kernel_init=recurrent_kernel_init,
            bias_init=bias_init,
        )

    def _project(self, x: Array) -> Array:
        return self.cell.dense_i(x)

    def _output(self, state: Array) -> Array:
        return state

    def _recur(self, sent: Array) -> Array:
        return self.cell.dense_h(sent)

    def _merge(self, drive: Array, recurrent: Array) -> Array:
        """Add the two for the gates `r` and `z`, and put them side by side for `n`."""
        gates = 2 * (drive.shape[-1] // 3)
        added = drive[..., :gates] + recurrent[..., :gates]
        return jnp.concatenate([added, drive[..., gates:], recurrent[..., gates:]], axis=-1)

    def _update(self, state: Array, total: Array) -> Array:
        r, z, input_n, recurrent_n = jnp.split(total, 4, axis=-1)
        r, z = self.cell.gate_fn(r), self.cell.gate_fn(z)
        n = self.cell.activation_fn(input_n + r * recurrent_n)
        return (1.0 - z) * n + z * state
