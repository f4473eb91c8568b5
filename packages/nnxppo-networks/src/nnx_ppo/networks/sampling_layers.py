"""Action samplers: from distribution parameters to an action and its log-likelihood.

A sampler stores the action before squashing in `rollout_extras`, because the replay needs the
likelihood of the action that was taken, under weights that have changed since.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from nnx_ppo.networks._checks import at_least_float32
from nnx_ppo.networks._sampling import ActionSampler, DistributionSampler, EntropyWeight
from nnx_ppo.networks.discrete_samplers import CategoricalSampler, MultiCategoricalSampler
from nnx_ppo.networks.distributions import Normal, TanhNormal

__all__ = [
    "ActionSampler",
    "CategoricalSampler",
    "DistributionSampler",
    "EntropyWeight",
    "MultiCategoricalSampler",
    "NormalSampler",
    "NormalTanhSampler",
]


class _GaussianSampler(DistributionSampler):
    """Base of the samplers with mean and standard deviation; see `NormalTanhSampler`."""

    def __init__(
        self,
        rng: nnx.Rngs,
        entropy_weight: float,
        min_std: float = 1e-3,
        std_scale: float = 1.0,
        *,
        free_std: Sequence[float] | None = None,
    ) -> None:
        if not (min_std >= 0 and std_scale > 0):
            raise ValueError(
                f"{type(self).__name__}: expected min_std >= 0 and std_scale > 0, got "
                f"min_std={min_std!r}, std_scale={std_scale!r}."
            )
        super().__init__(rng, entropy_weight)
        self.min_std = min_std
        self.std_scale = std_scale
        self.free_std = None if free_std is None else nnx.Param(self._spreads(free_std))

    def _spreads(self, stds: Any) -> Float[Array, " dim"]:
        """Return what softplus, `min_std` and `std_scale` turn into these deviations."""
        if not isinstance(stds, Sequence) or isinstance(stds, str):
            raise TypeError(
                f"{type(self).__name__}: free_std must be a list with one initial standard "
                f"deviation for each action dimension, got {stds!r}; write free_std=[0.5] * 3 for "
                "three dimensions."
            )
        least = self.min_std * self.std_scale
        if not stds or not all(least < std < math.inf for std in stds):
            raise ValueError(
                f"{type(self).__name__}: free_std needs one number above min_std * std_scale = "
                f"{least} for each action dimension, got {list(stds)!r}; raise it or lower min_std."
            )
        positive = [std / self.std_scale - self.min_std for std in stds]
        return jnp.asarray([y + math.log(-math.expm1(-y)) for y in positive], jnp.float32)

    def _mean_and_std(self, inputs: Array) -> tuple[Array, Array]:
        inputs = at_least_float32(inputs)
        if self.free_std is not None:
            spread = self.free_std[...]
            self._check_means(inputs, len(spread))
            return inputs, jnp.broadcast_to(self._std(spread), inputs.shape)
        if inputs.shape[-1] % 2 or not inputs.shape[-1]:
            raise ValueError(
                f"{type(self).__name__}: mean_and_std holds means and deviations side by side and "
                f"needs an even last axis, got shape {inputs.shape}; make the layer before it "
                "2 * action_size wide."
            )
        mean, spread = jnp.split(inputs, 2, axis=-1)
        return mean, self._std(spread)

    def _std(self, spread: Array) -> Array:
        return (jax.nn.softplus(spread) + self.min_std) * self.std_scale

    def _check_means(self, inputs: Array, number: int) -> None:
        if inputs.shape[-1] != number:
            raise ValueError(
                f"{type(self).__name__}: with free_std the input holds the means alone, one for "
                f"each of {number} dimensions, got shape {inputs.shape}; make the layer before it "
                f"{number} wide."
            )


class NormalTanhSampler(_GaussianSampler):
    """A diagonal Gaussian, squashed to (−1, 1) by tanh.

    The first half of the input is the mean of the raw action `z`, the second half makes its
    standard deviation, `std_scale * (softplus(second half) + min_std)`. The log-likelihood is
    that of the squashed action `tanh(z)`. Its entropy has no closed form and is estimated, see
    `TanhNormal`; the estimate depends on the parameters, while no gradient flows through the
    action. In deterministic mode the action and the sample of the entropy are the mean.

    Args:
        rng: See `DistributionSampler`.
        entropy_weight: See `DistributionSampler`.
        min_std: Added to the standard deviation before scaling.
        std_scale: Factor of the standard deviation.
        free_std: Initial standard deviation of each action dimension. If given, deviations do not
            depend on the input, which is then the mean alone, `(batch, action_dim)`: they are
            parameters of the sampler, kept before softplus in `sampler.free_std`, and the
            deviation is made from them in the same way.

    Raises:
        TypeError: `rng` is not an `nnx.Rngs`, or `free_std` no sequence.
        ValueError: `rng` has no suitable stream, or a number is out of range.

    Example:
        >>> sampler = NormalTanhSampler(nnx.Rngs(0), entropy_weight=1e-2)
        >>> out = sampler((), jnp.zeros((5, 6)))
        >>> out.output["action"].shape, out.output["log_likelihood"].shape
        ((5, 3), (5,))
        >>> free = NormalTanhSampler(nnx.Rngs(0), entropy_weight=1e-2, free_std=[0.5] * 3)
        >>> print(free((), jnp.zeros((1, 3))).metrics["sigma"])
        [[0.5 0.5 0.5]]
    """

    def _distribution(self, inputs: Float[Array, "*batch features"]) -> TanhNormal:
        return TanhNormal(*self._mean_and_std(inputs))


class NormalSampler(_GaussianSampler):
    """A diagonal Gaussian, not squashed: actions are unbounded, and the entropy is exact.

    For environments that clip actions by themselves or take any real number.

    Args:
        rng: See `DistributionSampler`.
        entropy_weight: See `DistributionSampler`.
        min_std: See `NormalTanhSampler`.
        std_scale: See `NormalTanhSampler`.
        free_std: See `NormalTanhSampler`.

    Raises:
        TypeError: `rng` is not an `nnx.Rngs`, or `free_std` no sequence.
        ValueError: `rng` has no suitable stream, or a number is out of range.

    Example:
        >>> sampler = NormalSampler(nnx.Rngs(0), entropy_weight=1e-2)
        >>> out = sampler((), jnp.zeros((5, 6)))
        >>> out.output["action"].shape, out.output["log_likelihood"].shape
        ((5, 3), (5,))
    """

    def _distribution(self, inputs: Float[Array, "*batch features"]) -> Normal:
        return Normal(*self._mean_and_std(inputs))
