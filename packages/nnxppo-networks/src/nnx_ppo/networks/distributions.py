"""Distributions of actions: what `DistributionSampler` draws from and evaluates.

Only what depends on the distribution stands here. Random streams, the replay, deterministic mode
and the entropy bonus are the sampler's.
"""

import abc
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from nnx_ppo.core import JaxDataclass


class Distribution(JaxDataclass, abc.ABC):
    """A distribution for each sample of a batch.

    Fields are arrays with the axes of the samples first, `(batch, …)` or `(time, batch, …)`.
    Methods must work with any number of such axes.

    A *raw* action is what is drawn, stored for the replay and evaluated. What the environment
    gets may be a function of it.

    Example:
        >>> standard = Normal(mean=jnp.zeros((5, 2)), std=jnp.ones((5, 2)))
        >>> raw = standard.sample(standard.noise(jax.random.key(0)))
        >>> raw.shape, standard.log_likelihood(raw).shape
        ((5, 2), (5,))
    """

    @abc.abstractmethod
    def noise(self, key: Key[Array, ""]) -> Any:
        """Draw, from one key, what makes `sample` random, and `entropy` where it is estimated."""

    @abc.abstractmethod
    def sample(self, noise: Any | None) -> Array:
        """Return a raw action for each sample: the mode, or for a Gaussian the mean, if None."""

    @abc.abstractmethod
    def log_likelihood(self, raw: Array) -> Float[Array, "*batch"]:
        """Return the log-likelihood of the action that a raw action stands for."""

    @abc.abstractmethod
    def entropy(self, noise: Any | None) -> Float[Array, "*batch"]:
        """Return the entropy in nats, differentiable in the distribution's parameters.

        Args:
            noise: What `noise` drew, None in deterministic mode; for estimates only.
        """

    def action(self, raw: Array) -> Array:
        """Return what the environment gets: the raw action, unless overridden."""
        return raw

    def metrics(self) -> dict[str | int, Any]:
        """Return what to log: nothing, unless overridden."""
        return {}


class Normal(Distribution):
    """Independent Gaussians.

    Attributes:
        mean: Means.
        std: Standard deviations, above 0.
    """

    mean: Float[Array, "*batch dim"]
    std: Float[Array, "*batch dim"]

    def noise(self, key: Key[Array, ""]) -> Array:
        """Draw standard normal noise."""
        return jax.random.normal(key, self.mean.shape)

    def sample(self, noise: Array | None) -> Array:
        """Return mean and scaled noise added up."""
        return self.mean if noise is None else self.mean + self.std * noise

    def log_likelihood(self, raw: Array) -> Float[Array, "*batch"]:
        """Return the log-density, summed over dimensions."""
        return jnp.sum(_normal_log_density(raw, self.mean, self.std), axis=-1)

    def entropy(self, noise: Any | None) -> Float[Array, "*batch"]:
        """Return the entropy, exactly."""
        del noise
        return jnp.sum(_normal_entropy(self.std), axis=-1)

    def metrics(self) -> dict[str | int, Any]:
        """Return mean and standard deviation."""
        return {"mu": self.mean, "sigma": self.std}


class TanhNormal(Distribution):
    """Independent Gaussians, squashed to (−1, 1) by tanh.

    The log-likelihood is that of the squashed action, with the Jacobian of tanh (appendix C of
    Haarnoja et al., 2018, arXiv:1801.01290) in the form that does not overflow,
    `log(1 - tanh(z)^2) = 2 (log 2 - z - softplus(-2 z))`.

    Attributes:
        mean: Means before squashing.
        std: Standard deviations before squashing, above 0.
    """

    mean: Float[Array, "*batch dim"]
    std: Float[Array, "*batch dim"]

    def noise(self, key: Key[Array, ""]) -> tuple[Array, Array]:
        """Draw standard normal noise, of the action and of the entropy's sample."""
        action_noise, entropy_noise = jax.random.normal(key, (2, *self.mean.shape))
        return action_noise, entropy_noise

    def sample(self, noise: tuple[Array, Array] | None) -> Array:
        """Return mean and scaled noise added up, before squashing."""
        return self.mean if noise is None else self.mean + self.std * noise[0]

    def log_likelihood(self, raw: Array) -> Float[Array, "*batch"]:
        """Return the log-density of `tanh(raw)`, summed over dimensions."""
        gaussian = _normal_log_density(raw, self.mean, self.std)
        return jnp.sum(gaussian - _log_jacobian(raw), axis=-1)

    def entropy(self, noise: tuple[Array, Array] | None) -> Float[Array, "*batch"]:
        """Return an unbiased estimate of the entropy, which has no closed form.

        It is the Gaussian's plus the log-Jacobian at one sample of its own; at the mean if None.
        """
        at = self.mean if noise is None else self.mean + self.std * noise[1]
        return jnp.sum(_normal_entropy(self.std) + _log_jacobian(at), axis=-1)

    def action(self, raw: Array) -> Array:
        """Squash a raw action."""
        return jnp.tanh(raw)

    def metrics(self) -> dict[str | int, Any]:
        """Return mean and standard deviation before squashing."""
        return {"mu": self.mean, "sigma": self.std}


class Categorical(Distribution):
    """One of n choices; an action is its index, int32.

    Attributes:
        log_probabilities: As `masked_log_probabilities` returns them.
    """

    log_probabilities: Float[Array, "*batch n"]

    def noise(self, key: Key[Array, ""]) -> Array:
        """Draw standard Gumbel noise."""
        return jax.random.gumbel(key, self.log_probabilities.shape)

    def sample(self, noise: Array | None) -> Int[Array, "*batch"]:
        """Return the choice whose log-probability plus Gumbel noise is largest.

        That is a draw from the distribution (Maddison et al., 2014, arXiv:1411.0030, section 2).
        """
        scores = self.log_probabilities if noise is None else self.log_probabilities + noise
        return jnp.argmax(scores, axis=-1).astype(jnp.int32)

    def log_likelihood(self, raw: Int[Array, "*batch"]) -> Float[Array, "*batch"]:
        """Return the log-probability of a choice, −∞ for one that is not allowed."""
        picked = jnp.take_along_axis(self.log_probabilities, raw[..., None], axis=-1)
        return jnp.squeeze(picked, axis=-1)

    def entropy(self, noise: Any | None) -> Float[Array, "*batch"]:
        """Return the entropy, exactly; choices of probability 0 add 0."""
        del noise
        # Neither the product 0 * -inf nor its gradient may be formed.
        finite = jnp.where(jnp.isneginf(self.log_probabilities), 0.0, self.log_probabilities)
        return -jnp.sum(jnp.exp(self.log_probabilities) * finite, axis=-1)

    def metrics(self) -> dict[str | int, Any]:
        """Return the probabilities and the entropy."""
        return {"probabilities": jnp.exp(self.log_probabilities), "entropy": self.entropy(None)}


class MultiCategorical(Distribution):
    """Several independent choices; an action holds their indices, int32, on its last axis.

    Attributes:
        parts: One distribution for each choice.
    """

    parts: tuple[Categorical, ...]

    def noise(self, key: Key[Array, ""]) -> list[Array]:
        """Draw standard Gumbel noise for each part, all at once."""
        shapes = [part.log_probabilities.shape for part in self.parts]
        ends = list(itertools.accumulate(shape[-1] for shape in shapes))
        noise = jax.random.gumbel(key, (*shapes[0][:-1], ends[-1]))
        return jnp.split(noise, ends[:-1], axis=-1)

    def sample(self, noise: list[Array] | None) -> Int[Array, "*batch parts"]:
        """Return the choice of each part."""
        noises = noise or [None] * len(self.parts)
        drawn = [part.sample(own) for part, own in zip(self.parts, noises, strict=True)]
        return jnp.stack(drawn, axis=-1)

    def log_likelihood(self, raw: Int[Array, "*batch parts"]) -> Float[Array, "*batch"]:
        """Return the log-probability of the choices together: the sum over parts."""
        return _total(part.log_likelihood(raw[..., i]) for i, part in enumerate(self.parts))

    def entropy(self, noise: Any | None) -> Float[Array, "*batch"]:
        """Return the entropy, exactly: the sum over parts."""
        return _total(part.entropy(noise) for part in self.parts)

    def metrics(self) -> dict[str | int, Any]:
        """Return the probabilities of all parts side by side, and the entropy."""
        log_probabilities = [part.log_probabilities for part in self.parts]
        probabilities = jnp.exp(jnp.concatenate(log_probabilities, axis=-1))
        return {"probabilities": probabilities, "entropy": self.entropy(None)}


def masked_log_probabilities(
    logits: Float[Array, "*batch n"], mask: Bool[Array, "*batch n"] | None = None
) -> Float[Array, "*batch n"]:
    """Normalize logits over the choices that are allowed.

    Args:
        logits: Log-probabilities up to a constant. A choice with −∞ is not allowed either.
        mask: Which choices are allowed; None allows all.

    Returns:
        Log-probabilities, −∞ where not allowed. Where nothing is allowed, all choices are
        equally likely and no gradient flows.
    """
    allowed = ~jnp.isneginf(logits)
    if mask is not None:
        allowed &= mask
    logits = jnp.where(allowed, logits, -jnp.inf)
    logits = jnp.where(jnp.any(allowed, axis=-1, keepdims=True), logits, 0.0)
    return jax.nn.log_softmax(logits, axis=-1)


def _normal_log_density(raw: Array, mean: Array, std: Array) -> Array:
    return -0.5 * jnp.square((raw - mean) / std) - jnp.log(std) - 0.5 * math.log(2 * math.pi)


def _normal_entropy(std: Array) -> Array:
    return jnp.log(std) + 0.5 * math.log(2 * math.pi * math.e)


def _log_jacobian(raw: Array) -> Array:
    """Return log(d tanh(z) / dz), exact also where tanh is flat."""
    return 2.0 * (math.log(2.0) - raw - jax.nn.softplus(-2.0 * raw))


def _total(terms: Any) -> Array:
    return sum(terms, start=jnp.zeros(()))
