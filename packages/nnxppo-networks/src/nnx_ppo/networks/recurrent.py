"""Recurrent layers."""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float

from nnx_ppo.core import StatefulModule, StatefulModuleOutput, UnrollOutput, reset_where
from nnx_ppo.networks._checks import check_size

Carry: TypeAlias = tuple[Float[Array, "*batch hidden"], Float[Array, "*batch hidden"]]
"""Hidden and cell state, in this order; flax's own order is the reverse."""


class LSTM(StatefulModule):
    """Long short-term memory (Hochreiter and Schmidhuber, 1997), by flax's cells.

    The carry is `(h, c)`: the hidden state, which is also the output, and the cell state.

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

    Example:
        >>> lstm = LSTM(in_features=3, hidden_features=4, rngs=nnx.Rngs(0))
        >>> out = lstm(lstm.initialize_state(2), jnp.ones((2, 3)))
        >>> out.output.shape, bool((out.next_state[0] == out.output).all())
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
        use_optimized: bool = True,
        trainable_initial_state: bool = False,
    ) -> None:
        self.in_features = check_size(in_features, "LSTM: in_features")
        self.hidden_features = check_size(hidden_features, "LSTM: hidden_features")
        initializers: dict[str, Any] = {
            "kernel_init": kernel_init,
            "recurrent_kernel_init": recurrent_kernel_init,
            "bias_init": bias_init,
        }
        self.cell = (nnx.OptimizedLSTMCell if use_optimized else nnx.LSTMCell)(
            self.in_features,
            self.hidden_features,
            gate_fn=gate_fn,
            activation_fn=activation_fn,
            rngs=rngs,
            **{name: init for name, init in initializers.items() if init is not None},
        )
        self.trainable_initial_state = trainable_initial_state
        if trainable_initial_state:
            self.initial_h = nnx.Param(jnp.zeros(self.hidden_features))
            self.initial_c = nnx.Param(jnp.zeros(self.hidden_features))

    def __call__(
        self, state: Carry, x: Float[Array, "*batch features"], rollout_extras: Any = None
    ) -> StatefulModuleOutput:
        """Run one step.

        Args:
            state: The carry `(h, c)`, each `(batch, hidden_features)`.
            x: The input, `(batch, in_features)`.
            rollout_extras: Ignored.

        Raises:
            ValueError: `x` has not `in_features` features.
        """
        del rollout_extras
        self._check_input(x)
        h, c = state
        (c, h), output = self.cell((c, h), x)
        return StatefulModuleOutput((h, c), output, jnp.zeros(()), {})

    def initialize_state(self, batch_size: int) -> Carry:
        """Return the carry at the start of an episode, each `(batch_size, hidden_features)`."""
        return self._initial((batch_size, self.hidden_features))

    def reset_state(self, prev_state: Carry) -> Carry:
        """Return the carry at the start of an episode, in the shape of `prev_state`."""
        return self._initial(prev_state[0].shape)

    def unroll(
        self,
        state: Carry,
        xs: Float[Array, "time batch features"],
        done: Bool[Array, "time batch"],
        rollout_extras: Any = None,
    ) -> UnrollOutput:
        """Run a window of steps, with the input's part of the gates computed for all at once.

        Only the recurrent part is scanned, where each step needs the one before.
        """
        del rollout_extras
        self._check_input(xs)
        from_input, recurrent = _gate_weights(self.cell)

        def step(carry: Carry, inputs: tuple[Array, Array]) -> tuple[Carry, Array]:
            gates, ended = inputs
            h, c = carry
            h, c = self._update(gates + _affine(h, *recurrent), c)
            return reset_where(self, ended, (h, c)), h

        next_state, outputs = jax.lax.scan(step, state, (_affine(xs, *from_input), done))
        return UnrollOutput(next_state, outputs, jnp.zeros(done.shape))

    def _update(self, gates: Array, c: Array) -> Carry:
        """Return the next carry from the pre-activations of the gates, in flax's order."""
        i, f, g, o = jnp.split(gates, 4, axis=-1)
        c = self.cell.gate_fn(f) * c + self.cell.gate_fn(i) * self.cell.activation_fn(g)
        return self.cell.gate_fn(o) * self.cell.activation_fn(c), c

    def _initial(self, shape: tuple[int, ...]) -> Carry:
        if not self.trainable_initial_state:
            return jnp.zeros(shape), jnp.zeros(shape)
        h, c = (jnp.broadcast_to(v[...], shape) for v in (self.initial_h, self.initial_c))
        return h, c

    def _check_input(self, x: Array) -> None:
        if x.shape[-1:] != (self.in_features,):
            raise ValueError(
                f"LSTM: x must have in_features={self.in_features} features on its last axis, got "
                f"shape {x.shape}; give in_features the width of the layer before."
            )


Affine: TypeAlias = tuple[Array, Array | None]


def _gate_weights(cell: nnx.LSTMCell | nnx.OptimizedLSTMCell) -> tuple[Affine, Affine]:
    """Return kernel and bias of all four gates, for the input and for the hidden state."""
    if isinstance(cell, nnx.LSTMCell):
        return (
            _joined([cell.ii, cell.if_, cell.ig, cell.io]),
            _joined([cell.hi, cell.hf, cell.hg, cell.ho]),
        )
    return _joined([cell.dense_i]), _joined([cell.dense_h])


def _joined(layers: Sequence[nnx.Linear]) -> Affine:
    """Return several linear layers on the same input as one, outputs side by side."""
    kernel = jnp.concatenate([layer.kernel[...] for layer in layers], axis=-1)
    biases = [layer.bias[...] for layer in layers if layer.bias is not None]
    return kernel, jnp.concatenate(biases) if biases else None


def _affine(x: Array, kernel: Array, bias: Array | None) -> Array:
    y = x @ kernel
    return y if bias is None else y + jnp.expand_dims(bias, range(y.ndim - 1))
