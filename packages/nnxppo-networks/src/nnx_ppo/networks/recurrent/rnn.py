"""`RNN`."""

from collections.abc import Callable

from flax import nnx
from jaxtyping import Array

from nnx_ppo.networks.recurrent._base import RecurrentLayer


class RNN(RecurrentLayer):
    """The plain recurrent layer (Elman, 1990), with the parameters of `nnx.SimpleCell`.

    Its carry is `h' = activation(W x + b + R h)`, `(batch, hidden_features)`, which is also the
    output. For units with time constants see `LeakyRNN`.

    Args:
        in_features: Number of input features.
        hidden_features: Number of hidden units, which is the size of the output.
        rngs: Draws the initial parameters.
        activation: Applied to the sum.
        kernel_init: Initializer of the input weights; None is flax's.
        recurrent_kernel_init: Initializer of the recurrent weights; None is flax's.
        bias_init: Initializer of the biases; None is flax's.
        trainable_initial_state: Learn the carry at the start of an episode, from zeros;
            otherwise it stays zero.

    Raises:
        TypeError: A size is not an integer.
        ValueError: A size is below 1.

    Example:
        >>> import jax.numpy as jnp
        >>> rnn = RNN(3, 4, nnx.Rngs(0), activation=nnx.relu)
        >>> rnn(rnn.initialize_state(2), jnp.ones((2, 3))).output.shape
        (2, 4)
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        rngs: nnx.Rngs,
        *,
        activation: Callable[[Array], Array] = nnx.tanh,
        kernel_init: Callable[..., Array] | None = None,
        recurrent_kernel_init: Callable[..., Array] | None = None,
        bias_init: Callable[..., Array] | None = None,
        trainable_initial_state: bool = False,
    ) -> None:
        super().__init__(in_features, hidden_features, trainable_initial_state)
        self.cell = self._make_cell(
            nnx.SimpleCell,
            rngs,
            activation_fn=activation,
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

    def _update(self, state: Array, total: Array) -> Array:
        del state
        return self.cell.activation_fn(total)
