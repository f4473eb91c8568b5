"""Dense and LSTM: values by hand, carries, initialization and messages."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from nnx_ppo.networks import LSTM, Dense

CONSTANT = nnx.initializers.constant


def test_dense_by_hand() -> None:
    # relu(1 * 2 + 3 * 2 - 5) = relu(3) = 3; relu(-1 * 2 + 0 * 2 - 5) = relu(-7) = 0
    dense = Dense(2, 1, nnx.Rngs(0), nnx.relu, kernel_init=CONSTANT(2.0), bias_init=CONSTANT(-5.0))
    out = dense((), jnp.array([[1.0, 3.0], [-1.0, 0.0]]))
    np.testing.assert_array_equal(out.output, [[3.0], [0.0]])
    assert (out.next_state, out.metrics, out.rollout_extras) == ((), {}, None)
    assert float(out.regularization_loss) == 0.0


def test_dense_passes_keywords_on() -> None:
    assert Dense(2, 1, nnx.Rngs(0), use_bias=False).linear.bias is None


def lstm(**kwargs):
    """An LSTM of one unit: weights 1, recurrent weights 2, biases 0.5."""
    return LSTM(
        1,
        1,
        nnx.Rngs(0),
        kernel_init=CONSTANT(1.0),
        recurrent_kernel_init=CONSTANT(2.0),
        bias_init=CONSTANT(0.5),
        **kwargs,
    )


@pytest.mark.parametrize("use_optimized", [True, False])
def test_lstm_by_hand_and_the_order_of_its_carry(use_optimized) -> None:
    # x = 0.3, h = 0.1, c = -0.2: every pre-activation is 0.3 + 2 * 0.1 + 0.5 = 1.
    # Gates: sigmoid(1) = 0.731059, candidate tanh(1) = 0.761594.
    # c' = 0.731059 * -0.2 + 0.731059 * 0.761594 = 0.410558
    # h' = 0.731059 * tanh(0.410558) = 0.731059 * 0.388946 = 0.284342
    state = (jnp.array([[0.1]]), jnp.array([[-0.2]]))
    out = lstm(use_optimized=use_optimized)(state, jnp.array([[0.3]]))
    hidden, cell = out.next_state
    np.testing.assert_allclose(cell, [[0.410558]], rtol=1e-5)
    np.testing.assert_allclose(hidden, [[0.284342]], rtol=1e-5)
    np.testing.assert_array_equal(hidden, out.output)


def test_lstm_activations_can_be_chosen() -> None:
    # gate 1, activation the identity: c' = c + pre-activation = -0.2 + 1, h' = c'
    module = lstm(gate_fn=jnp.ones_like, activation_fn=lambda x: x)
    state = (jnp.array([[0.1]]), jnp.array([[-0.2]]))
    done = jnp.zeros((1, 1), bool)
    np.testing.assert_allclose(module(state, jnp.array([[0.3]])).output, [[0.8]], rtol=1e-6)
    unrolled = module.unroll(state, jnp.array([[[0.3]]]), done)
    np.testing.assert_allclose(unrolled.output, [[[0.8]]], rtol=1e-6)


def test_lstm_starts_from_zero_or_from_what_it_learned() -> None:
    plain, trained = lstm(), lstm(trainable_initial_state=True)
    for module in (plain, trained):
        for leaf in module.initialize_state(3):
            np.testing.assert_array_equal(leaf, np.zeros((3, 1)))
    trained.initial_h[...] = jnp.array([0.5])
    trained.initial_c[...] = jnp.array([-0.5])
    hidden, cell = trained.reset_state(plain.initialize_state(2))
    np.testing.assert_array_equal(hidden, [[0.5], [0.5]])
    np.testing.assert_array_equal(cell, [[-0.5], [-0.5]])
    assert trained.reset_state((jnp.zeros(1), jnp.zeros(1)))[0].shape == (1,)
    names = {path[0] for path, _ in nnx.to_flat_state(nnx.state(trained, nnx.Param))}
    assert names == {"cell", "initial_h", "initial_c"}


def test_lstm_initializers_default_to_flax() -> None:
    module = LSTM(2, 3, nnx.Rngs(0))
    cell: Any = module.cell
    recurrent = cell.dense_h.kernel[...]
    np.testing.assert_allclose(recurrent @ recurrent.T, np.eye(3), atol=1e-5)  # orthogonal
    np.testing.assert_array_equal(cell.dense_h.bias[...], np.zeros(12))
    assert cell.dense_i.kernel.shape == (2, 12)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("layer", [Dense, LSTM])
def test_messages(layer) -> None:
    name = layer.__name__
    with pytest.raises(ValueError, match=f"{name}: in_features must be at least 1, got 0"):
        layer(0, 2, nnx.Rngs(0))
    with pytest.raises(TypeError, match=rf"{name}: .*features must be an integer, got 2.5"):
        layer(1, 2.5, nnx.Rngs(0))
    module: Any = Dense(2, 1, nnx.Rngs(0)) if layer is Dense else lstm()
    width = module.in_features
    with pytest.raises(ValueError, match=rf"in_features={width} .*, got shape \(4, 7\); give"):
        module(module.initialize_state(4), jnp.ones((4, 7)))
