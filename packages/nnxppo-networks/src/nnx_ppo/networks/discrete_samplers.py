"""Samplers of actions that are choices, from logits."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array

from nnx_ppo.networks._checks import at_least_float32, check_sizes
from nnx_ppo.networks._sampling import DistributionSampler
from nnx_ppo.networks.distributions import (
    Categorical,
    MultiCategorical,
    masked_log_probabilities,
)


class CategoricalSampler(DistributionSampler):
    """One of n choices. The action is its index, int32, of shape `(batch,)`.

    The input is `(batch, n)` logits, or a mapping `{"logits": ..., "mask": ...}` with a boolean
    `(batch, n)` mask of the choices that are allowed. Others have probability 0, add nothing to
    the entropy and get no gradient. A sample with nothing allowed has all choices equally likely,
    and no gradient: its log-likelihood stays finite.

    The entropy is exact. In deterministic mode the action is the likeliest choice, the first of
    them where several are.

    Args:
        rng: See `DistributionSampler`.
        entropy_weight: See `DistributionSampler`.

    Raises:
        TypeError: `rng` is not an `nnx.Rngs`.
        ValueError: `rng` has no suitable stream.

    Example:
        >>> sampler = CategoricalSampler(nnx.Rngs(0), entropy_weight=1e-2)
        >>> out = sampler((), jnp.zeros((5, 3))).output
        >>> out["action"].shape, out["log_likelihood"].shape
        ((5,), (5,))
        >>> mask = jnp.array([[False, False, True]])
        >>> print(sampler((), {"logits": jnp.zeros((1, 3)), "mask": mask}).output["action"])
        [2]
    """

    def _distribution(self, inputs: Any) -> Categorical:
        logits, mask = _logits_and_mask("CategoricalSampler", inputs)
        return Categorical(masked_log_probabilities(logits, mask))


class MultiCategoricalSampler(DistributionSampler):
    """Several choices at once, independent given the input.

    The input is as that of `CategoricalSampler`, logits and mask of all choices side by side:
    `(batch, sum(sizes))`. The action holds one index for each choice, int32, of shape
    `(batch, len(sizes))`; log-likelihood and entropy are sums over the choices.

    Args:
        rng: See `DistributionSampler`.
        sizes: Of how many each choice is.
        entropy_weight: See `DistributionSampler`.

    Raises:
        TypeError: `rng` is not an `nnx.Rngs`, or `sizes` no sequence of integers.
        ValueError: `rng` has no suitable stream, `sizes` is empty, or a size is below 1.

    Example:
        >>> sampler = MultiCategoricalSampler(nnx.Rngs(0), sizes=[3, 2], entropy_weight=1e-2)
        >>> out = sampler((), jnp.zeros((7, 5))).output
        >>> out["action"].shape, out["log_likelihood"].shape
        ((7, 2), (7,))
    """

    def __init__(self, rng: nnx.Rngs, sizes: Sequence[int], entropy_weight: float) -> None:
        self.sizes = tuple(check_sizes(sizes, "MultiCategoricalSampler: sizes"))
        if not self.sizes:
            raise ValueError(
                "MultiCategoricalSampler: sizes is empty; write sizes=[3, 2] for a choice of 3 "
                "and one of 2."
            )
        super().__init__(rng, entropy_weight)

    def _distribution(self, inputs: Any) -> MultiCategorical:
        logits, mask = _logits_and_mask("MultiCategoricalSampler", inputs)
        if logits.shape[-1] != sum(self.sizes):
            raise ValueError(
                f"MultiCategoricalSampler: the logits need sum(sizes) = {sum(self.sizes)} on their "
                f"last axis, got shape {logits.shape}; make the layer before it that wide."
            )
        ends = [sum(self.sizes[:i]) for i in range(1, len(self.sizes))]
        heads = jnp.split(logits, ends, axis=-1)
        masks = [None] * len(heads) if mask is None else jnp.split(mask, ends, axis=-1)
        pairs = zip(heads, masks, strict=True)
        return MultiCategorical(tuple(Categorical(masked_log_probabilities(*p)) for p in pairs))


def _logits_and_mask(owner: str, inputs: Any) -> tuple[Array, Array | None]:
    """Take a sampler's input apart.

    Raises:
        TypeError: The mask is not boolean.
        ValueError: Logits are missing, of no width, or the mask has another shape.
    """
    logits, mask = inputs, None
    if isinstance(inputs, Mapping):
        if not {"logits"} <= inputs.keys() <= {"logits", "mask"}:
            raise ValueError(
                f"{owner}: the input must be logits, or a mapping with the keys 'logits' and "
                f"'mask', got the keys {list(inputs)}; select them with a Filter before it."
            )
        logits, mask = inputs["logits"], inputs.get("mask")
    logits = at_least_float32(jnp.asarray(logits))
    if not logits.ndim or not logits.shape[-1]:
        raise ValueError(
            f"{owner}: the logits must have one value for each choice on their last axis, got "
            f"shape {logits.shape}."
        )
    if mask is None:
        return logits, None
    mask = jnp.asarray(mask)
    if mask.dtype != bool:
        raise TypeError(
            f"{owner}: mask must be boolean, true where a choice is allowed, got {mask.dtype}; "
            "write mask != 0."
        )
    if mask.shape != logits.shape:
        raise ValueError(
            f"{owner}: mask must have the shape of the logits, {logits.shape}, got {mask.shape}."
        )
    return logits, mask
