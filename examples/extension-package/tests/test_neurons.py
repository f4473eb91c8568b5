"""`AdaptiveLIF` keeps the contract, and spikes when it should."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nnx_ppo.core.testing import check_module
from spiking_memory import AdaptiveLIF, NeuronState, spike

HALVING = 1.0 / np.log(2.0)  # the time constant, in steps, of what halves at each step


def strong_currents(key):
    return 2.0 * jax.random.normal(key, (3,))


@pytest.mark.parametrize("options", [{}, {"spike_cost": 0.1}])
def test_the_contract_is_kept(options):
    # Currents so strong that the six steps of the kit hold enough spikes for every gradient.
    check_module(AdaptiveLIF(size=3, **options), None, draw_input=strong_currents)


def test_a_window_with_the_end_of_an_episode():
    neuron = AdaptiveLIF(1, membrane_steps=HALVING, adaptation_steps=HALVING)
    done = jnp.zeros((4, 1), bool).at[2].set(True)
    out = neuron.unroll(neuron.initialize_state(1), jnp.full((4, 1, 1), 1.5), done)
    # step  v before reset     threshold  z  v        a
    # 0     1.5                1          1  0.5      1
    # 1     0.25 + 1.5 = 1.75  2          0  1.75     0.5
    # 2     0.875 + 1.5        1.5        1  1.375    1.25, then the episode ends: both 0
    # 3     1.5                1          1  0.5      1
    np.testing.assert_array_equal(out.output[:, 0, 0], [1.0, 0.0, 1.0, 1.0])
    np.testing.assert_allclose(out.next_state.potential, [[0.5]], rtol=1e-6)
    np.testing.assert_allclose(out.next_state.adaptation, [[1.0]], rtol=1e-6)


def test_the_gradient_through_two_steps():
    neuron = AdaptiveLIF(1, membrane_steps=HALVING, adaptation_steps=HALVING)

    def second_spike(first_current):
        first = neuron(neuron.initialize_state(1), first_current[None, None])
        return neuron(first.next_state, jnp.full((1, 1), 1.5)).output[0, 0]

    # v − threshold is 1.5 − 1 = 0.5 at the first step, where the surrogate is 0.3 · 0.5 = 0.15,
    # and 1.75 − 2 = −0.25 at the second, where it is 0.3 · 0.75 = 0.225. The first current moves
    # the second potential by 0.5, and the second threshold by 0.15:
    # 0.225 · (0.5 − 0.15) = 0.07875.
    slope = jax.grad(second_spike)(jnp.asarray(1.5))
    np.testing.assert_allclose(slope, 0.07875, rtol=1e-5)


def test_the_loss_is_the_share_of_neurons_that_spike():
    neurons = AdaptiveLIF(4, spike_cost=0.1)
    currents = jnp.array([[2.0, 2.0, 2.0, 0.0], [0.0, 0.0, 0.0, 0.0]])
    # 0.1 · 3 / 4 for the first environment, 0 for the second.
    loss = neurons(neurons.initialize_state(2), currents).regularization_loss
    np.testing.assert_allclose(loss, [0.075, 0.0], rtol=1e-6)


def test_adaptation_raises_the_threshold():
    # The trace of one spike, 1: the threshold is 1 + 3 · 1 = 4 or 1 + 2 · 1 = 3, the potential 3.5.
    state = NeuronState(potential=jnp.zeros((1, 1)), adaptation=jnp.ones((1, 1)))
    current = jnp.full((1, 1), 3.5)
    assert AdaptiveLIF(1, strength=3.0)(state, current).output[0, 0] == 0.0
    assert AdaptiveLIF(1, strength=2.0)(state, current).output[0, 0] == 1.0


def test_the_surrogate_is_a_triangle():
    slopes = jax.vmap(jax.grad(spike))(jnp.array([-1.5, -0.5, 0.0, 0.5, 1.5]))
    np.testing.assert_allclose(slopes, [0.0, 0.15, 0.3, 0.15, 0.0], rtol=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"membrane_steps": 0.0}, "membrane_steps must be positive and finite, got 0.0"),
        ({"adaptation_steps": [5.0]}, "adaptation_steps has 1 values for size=2"),
        ({"strength": -1.0}, "strength must be 0 or more"),
        ({"spike_cost": -1.0}, "spike_cost must be 0 or more"),
    ],
)
def test_mistakes_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        AdaptiveLIF(2, **options)


def test_a_wrong_number_of_currents_is_named():
    neurons = AdaptiveLIF(2)
    with pytest.raises(ValueError, match=r"\(batch, 2\), got \(1, 3\); put a dense layer"):
        neurons(neurons.initialize_state(1), jnp.zeros((1, 3)))
