"""`AdaptiveLIF`: integrate-and-fire neurons whose threshold rises with each spike."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from nnx_ppo.core import JaxDataclass, StatefulModule, StatefulModuleOutput


class NeuronState(JaxDataclass):
    """Carry of `AdaptiveLIF`.

    Attributes:
        potential: Membrane potentials, `(batch, size)`, in units of the resting threshold.
        adaptation: Traces of past spikes, `(batch, size)`.
    """

    potential: jax.Array
    adaptation: jax.Array


@jax.custom_jvp
def spike(distance: jax.Array) -> jax.Array:
    """Return 1 where a potential is above its threshold, 0 elsewhere.

    The derivative of this step is 0 almost everywhere. In its place stands the triangle
    `0.3 · max(0, 1 − |distance|)` of Bellec et al. (2018), arXiv:1803.09574, eq. 4.

    Args:
        distance: Potential minus threshold, in units of the resting threshold.
    """
    return (distance > 0.0).astype(distance.dtype)


@spike.defjvp
def _spike_jvp(primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[Any, Any]:
    (distance,), (tangent,) = primals, tangents
    return spike(distance), 0.3 * jnp.maximum(0.0, 1.0 - jnp.abs(distance)) * tangent


class AdaptiveLIF(StatefulModule):
    """Leaky integrate-and-fire neurons with adaptive thresholds; spikes come out.

    The potential `v` leaks and sums up the input current `x`. Where it exceeds the threshold
    there is a spike `z`, which takes 1 off the potential and adds 1 to the trace `a`, which
    raises the threshold. The trace decays slowly, and is what the neuron remembers:

        v ← exp(−1 / τ_v) · v + x
        z = 1 where v > 1 + strength · a, else 0
        v ← v − z
        a ← exp(−1 / τ_a) · a + z

    This is the ALIF neuron of Bellec et al. (2018), arXiv:1803.09574, except that the potential
    is reset right after the spike. Gradients pass through `z` by the surrogate of `spike`; none
    passes through the reset.

    The layer has one input for each neuron. Put a dense layer in front of it for weights, and one
    behind it to read the spikes out.

    Args:
        size: Number of neurons.
        membrane_steps: Initial τ_v in steps, of all neurons or of each. Trained, stays positive.
        adaptation_steps: Initial τ_a, likewise.
        strength: How far one spike raises the threshold, 0 or more.
        spike_cost: Weight of the loss, the share of neurons that spike.

    Raises:
        ValueError: A time constant is not positive and finite, their number is not `size`, or
            `strength` or `spike_cost` is negative.

    Example:
        >>> neurons = AdaptiveLIF(size=3)
        >>> out = neurons(neurons.initialize_state(batch_size=2), 2.0 * jnp.ones((2, 3)))
        >>> out.output[0].tolist(), out.next_state.potential[0].tolist()
        ([1.0, 1.0, 1.0], [1.0, 1.0, 1.0])
    """

    def __init__(
        self,
        size: int,
        *,
        membrane_steps: float | Sequence[float] = 10.0,
        adaptation_steps: float | Sequence[float] = 100.0,
        strength: float = 1.0,
        spike_cost: float = 0.0,
    ) -> None:
        self.size = size
        self.strength = _non_negative(strength, "strength")
        self.spike_cost = _non_negative(spike_cost, "spike_cost")
        # Logarithms may take any value in training; the time constants stay positive.
        self.log_membrane_steps = nnx.Param(_logarithms(membrane_steps, "membrane_steps", size))
        self.log_adaptation_steps = nnx.Param(
            _logarithms(adaptation_steps, "adaptation_steps", size)
        )

    def __call__(
        self, module_state: NeuronState, obs: jax.Array, rollout_extras: Any = None
    ) -> StatefulModuleOutput:
        """Run one step.

        Args:
            module_state: The carry, leaves `(batch, size)`.
            obs: Input currents, `(batch, size)`.
            rollout_extras: Ignored: nothing is drawn here.

        Returns:
            Spikes, 0 or 1, `(batch, size)`; the loss, `(batch,)`, if there is a `spike_cost`.

        Raises:
            ValueError: There is not one current for each neuron.
        """
        del rollout_extras
        if obs.shape[-1:] != (self.size,):
            raise ValueError(
                f"AdaptiveLIF takes one current for each of its size={self.size} neurons, "
                f"(batch, {self.size}), got {obs.shape}; put a dense layer in front of it."
            )
        potential = _decay(self.log_membrane_steps) * module_state.potential + obs
        spikes = spike(potential - (1.0 + self.strength * module_state.adaptation))
        next_state = NeuronState(
            potential=potential - jax.lax.stop_gradient(spikes),
            adaptation=_decay(self.log_adaptation_steps) * module_state.adaptation + spikes,
        )
        loss = self.spike_cost * spikes.mean(axis=-1) if self.spike_cost else jnp.zeros(())
        return StatefulModuleOutput(next_state, spikes, loss, metrics={"spikes": spikes})

    def initialize_state(self, batch_size: int) -> NeuronState:
        """Return neurons at rest: zeros."""
        zeros = jnp.zeros((batch_size, self.size))
        return NeuronState(potential=zeros, adaptation=zeros)

    def reset_state(self, prev_state: NeuronState) -> NeuronState:
        """Return neurons at rest, in the shape of `prev_state`."""
        return jax.tree.map(jnp.zeros_like, prev_state)


def _decay(log_steps: nnx.Param) -> jax.Array:
    """Return what is left after a step, `(1, size)`."""
    return jnp.exp(-jnp.exp(-log_steps[...]))[None]


def _logarithms(steps: float | Sequence[float], name: str, size: int) -> jax.Array:
    given = [steps] * size if isinstance(steps, int | float) else list(steps)
    if len(given) != size:
        raise ValueError(f"AdaptiveLIF: {name} has {len(given)} values for size={size} neurons.")
    for value in given:
        if not (value > 0.0 and math.isfinite(value)):
            raise ValueError(f"AdaptiveLIF: {name} must be positive and finite, got {value}.")
    return jnp.log(jnp.asarray(given, jnp.float32))


def _non_negative(value: float, name: str) -> float:
    if value < 0.0:
        raise ValueError(f"AdaptiveLIF: {name} must be 0 or more, got {value}.")
    return value
