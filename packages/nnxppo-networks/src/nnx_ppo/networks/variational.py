"""Variational bottlenecks: a noisy latent vector that pays for the information it carries.

The noise shapes what the network does, so the replay must meet the rollout's noise again. It comes
from one key for each environment, which travels in the carry and is split at every step.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Key

from nnx_ppo.core import StatefulModule, StatefulModuleOutput, UnrollOutput, reset_where
from nnx_ppo.networks._checks import at_least_float32, check_size, check_weight
from nnx_ppo.networks._keys import initial_keys, split_keys, split_keys_over_time
from nnx_ppo.networks._streams import fork_stream


class LossWeight(nnx.Variable):
    """The weight of a regularization loss.

    A variable, so that a training loop can change it between iterations without compiling again.
    """


class _Bottleneck(StatefulModule):
    """What both bottlenecks share: the noisy latent vector and its KL divergence."""

    def __init__(self, latent_size: int, rng: nnx.Rngs, kl_weight: float, min_std: float) -> None:
        name = type(self).__name__
        if not min_std >= 0:
            raise ValueError(f"{name}: expected min_std >= 0, got min_std={min_std!r}.")
        self.latent_size = check_size(latent_size, f"{name}: latent_size")
        self.rng = fork_stream(rng, "noise", f"{name}: rng")
        self.kl_weight = LossWeight(check_weight(kl_weight, f"{type(self).__name__}: kl_weight"))
        self.min_std = min_std

    def _sample(
        self, keys: Key[Array, "*batch"], x: Float[Array, "*batch features"]
    ) -> tuple[Float[Array, "*batch latent"], dict[str | int, Any]]:
        """Return the latent vector and the metrics, by one key of noise for each sample."""
        if x.shape[-1] != 2 * self.latent_size:
            raise ValueError(
                f"{type(self).__name__}: x holds means and deviations side by side and needs "
                f"2 * latent_size = {2 * self.latent_size} features, got shape {x.shape}; make "
                "the layer before it that wide."
            )
        mu, spread = jnp.split(at_least_float32(x), 2, axis=-1)
        sigma = jax.nn.softplus(spread) + self.min_std
        z = mu + sigma * _noise(keys, self.latent_size, mu.dtype)
        return z, {"mu": mu, "sigma": sigma, "kl_divergence": _kl_divergence(mu, sigma)}


class VariationalBottleneck(_Bottleneck):
    """A Gaussian latent vector, held near a standard normal one (Alemi et al., arXiv:1612.00410).

    The first half of the input is the mean of the latent vector, the second half makes its
    standard deviation, `softplus(second half) + min_std`. The output is one reparameterized
    sample (Kingma and Welling, 2014, arXiv:1312.6114), through which gradients flow. The loss is
    `kl_weight` times the Kullback-Leibler divergence from N(0, 1), summed over dimensions.

    The carry is one random key for each environment, `(batch,)`. Each step splits it in two: one
    for the noise, one to go on with, also across the end of an episode. The output is thus
    determined by carry and input. It is sampled in evaluation mode, too.

    Args:
        latent_size: Size of the latent vector; the input has twice as many features.
        rng: Gives the first keys of the carries: from the stream `noise` if there is one,
            otherwise from the default stream.
        kl_weight: Weight of the divergence. It is kept in a `LossWeight`; write
            `bottleneck.kl_weight[...] = 0.1` to change it.
        min_std: Added to the standard deviation.

    Raises:
        TypeError: `latent_size` is not an integer, or `rng` not an `nnx.Rngs`.
        ValueError: A number is out of range, or `rng` has no suitable stream.

    Example:
        >>> bottleneck = VariationalBottleneck(latent_size=3, rng=nnx.Rngs(0))
        >>> out = bottleneck(bottleneck.initialize_state(5), jnp.zeros((5, 6)))
        >>> out.output.shape, out.regularization_loss.shape, sorted(out.metrics)
        ((5, 3), (5,), ['kl_divergence', 'mu', 'sigma'])
    """

    def __init__(
        self, latent_size: int, rng: nnx.Rngs, kl_weight: float = 1.0, min_std: float = 1e-6
    ) -> None:
        super().__init__(latent_size, rng, kl_weight, min_std)

    def __call__(
        self,
        key: Key[Array, " batch"],
        x: Float[Array, "batch features"],
        rollout_extras: Any = None,
    ) -> StatefulModuleOutput:
        """Sample the latent vector.

        Args:
            key: The carry: one key for each environment, `(batch,)`.
            x: Mean and deviation side by side, `(batch, 2 * latent_size)`.
            rollout_extras: Ignored: the noise comes from the carry.

        Raises:
            ValueError: `x` has another number of features.
        """
        del rollout_extras
        next_key, noise_key = split_keys(key)
        z, metrics = self._sample(noise_key, x)
        return StatefulModuleOutput(next_key, z, self._loss(metrics), metrics)

    def initialize_state(self, batch_size: int) -> Key[Array, " batch"]:
        """Draw the keys that a batch of episodes starts with, `(batch_size,)`."""
        return initial_keys(self.rng, batch_size)

    def reset_state(self, prev_state: Key[Array, "*batch"]) -> Key[Array, "*batch"]:
        """Return the keys as they are: fresh randomness is all that an episode needs."""
        return prev_state

    def unroll(
        self,
        state: Key[Array, " batch"],
        xs: Float[Array, "time batch features"],
        done: Bool[Array, "time batch"],
        rollout_extras: Any = None,
    ) -> UnrollOutput:
        """Run a window of steps, of which only the keys are split one after the other."""
        del rollout_extras
        next_keys, noise_keys = split_keys_over_time(state, len(done))
        z, metrics = self._sample(noise_keys, xs)
        return UnrollOutput(next_keys, z, self._loss(metrics))

    def _loss(self, metrics: dict[str | int, Any]) -> Float[Array, "*batch"]:
        return self.kl_weight[...] * metrics["kl_divergence"]


class AR1VariationalBottleneck(_Bottleneck):
    """A variational bottleneck whose latent vector pays for changing from step to step.

    As `VariationalBottleneck`, with one loss more: `ar1_weight` times `l2_diff`, the mean square
    of `z - last_z` over the latent dimensions. The first step of an episode has none.

    The carry is `{"keys": (batch,), "last_z": (batch, latent_size)}`: the random keys, and the
    latent vector of the step before, which is NaN at the start of an episode.

    Args:
        latent_size: Size of the latent vector; the input has twice as many features.
        rng: See `VariationalBottleneck`.
        kl_weight: See `VariationalBottleneck`.
        min_std: Added to the standard deviation.
        ar1_weight: Weight of the change, in a `LossWeight` like `kl_weight`.
        backprop_through_time: Whether the loss of a change also pulls the vector before it
            towards the one after it, which sends gradients back in time.

    Raises:
        TypeError: `latent_size` is not an integer, or `rng` not an `nnx.Rngs`.
        ValueError: A number is out of range, or `rng` has no suitable stream.

    Example:
        >>> bottleneck = AR1VariationalBottleneck(latent_size=3, rng=nnx.Rngs(0), ar1_weight=0.5)
        >>> out = bottleneck(bottleneck.initialize_state(2), jnp.zeros((2, 6)))
        >>> print(out.metrics["l2_diff"], bool((out.next_state["last_z"] == out.output).all()))
        [0. 0.] True
    """

    def __init__(
        self,
        latent_size: int,
        rng: nnx.Rngs,
        kl_weight: float = 1.0,
        min_std: float = 1e-6,
        ar1_weight: float = 1.0,
        backprop_through_time: bool = True,
    ) -> None:
        super().__init__(latent_size, rng, kl_weight, min_std)
        self.ar1_weight = LossWeight(check_weight(ar1_weight, f"{type(self).__name__}: ar1_weight"))
        self.backprop_through_time = backprop_through_time

    def __call__(
        self,
        state: dict[str, Any],
        x: Float[Array, "batch features"],
        rollout_extras: Any = None,
    ) -> StatefulModuleOutput:
        """Sample the latent vector.

        Args:
            state: The carry: `keys`, `(batch,)`, and `last_z`, `(batch, latent_size)`.
            x: Mean and deviation side by side, `(batch, 2 * latent_size)`.
            rollout_extras: Ignored: the noise comes from the carry.

        Raises:
            ValueError: `x` has another number of features.
        """
        del rollout_extras
        next_keys, noise_keys = split_keys(state["keys"])
        z, metrics = self._sample(noise_keys, x)
        metrics["l2_diff"] = self._l2_diff(z, state["last_z"])
        next_state = {"keys": next_keys, "last_z": z.astype(state["last_z"].dtype)}
        return StatefulModuleOutput(next_state, z, self._loss(metrics), metrics)

    def initialize_state(self, batch_size: int) -> dict[str, Any]:
        """Draw the keys that a batch of episodes starts with; there is no last vector yet."""
        last_z = jnp.full((batch_size, self.latent_size), jnp.nan, float)
        return {"keys": initial_keys(self.rng, batch_size), "last_z": last_z}

    def reset_state(self, prev_state: dict[str, Any]) -> dict[str, Any]:
        """Forget the last vector; the keys go on."""
        return {**prev_state, "last_z": jnp.full_like(prev_state["last_z"], jnp.nan)}

    def unroll(
        self,
        state: dict[str, Any],
        xs: Float[Array, "time batch features"],
        done: Bool[Array, "time batch"],
        rollout_extras: Any = None,
    ) -> UnrollOutput:
        """Run a window of steps, of which only the keys are split one after the other.

        Each step's last vector is the latent vector of the step before, or NaN behind a reset.
        """
        del rollout_extras
        next_keys, noise_keys = split_keys_over_time(state["keys"], len(done))
        z, metrics = self._sample(noise_keys, xs)
        after = reset_where(self, done, {"last_z": z.astype(state["last_z"].dtype)})["last_z"]
        last_z = jnp.concatenate([state["last_z"][None], after[:-1]])
        metrics["l2_diff"] = self._l2_diff(z, last_z)
        next_state = {"keys": next_keys, "last_z": after[-1]}
        return UnrollOutput(next_state, z, self._loss(metrics))

    def _l2_diff(self, z: Array, last_z: Array) -> Float[Array, "*batch"]:
        """Return the mean squared change, zero where there is no last vector.

        NaN must be replaced before it enters arithmetic: a zero gradient times NaN is NaN.
        """
        if not self.backprop_through_time:
            last_z = jax.lax.stop_gradient(last_z)
        fresh = jnp.all(jnp.isnan(last_z), axis=-1, keepdims=True)
        before = jnp.where(fresh, jax.lax.stop_gradient(z), last_z)
        return jnp.mean(jnp.square(z - before), axis=-1)

    def _loss(self, metrics: dict[str | int, Any]) -> Float[Array, "*batch"]:
        change = self.ar1_weight[...] * metrics["l2_diff"]
        return self.kl_weight[...] * metrics["kl_divergence"] + change


def _kl_divergence(mu: Array, sigma: Array) -> Float[Array, "*batch"]:
    """Return KL(N(mu, sigma²) ‖ N(0, 1)), summed (Kingma and Welling, 2014, appendix B)."""
    return 0.5 * jnp.sum(jnp.square(mu) + jnp.square(sigma) - 1.0 - 2.0 * jnp.log(sigma), axis=-1)


def _noise(keys: Key[Array, "*batch"], size: int, dtype: Any) -> Float[Array, "*batch size"]:
    """Draw `size` standard normal numbers from each key of an array of any shape."""

    def draw(key: Array) -> Array:
        return jax.random.normal(key, (size,), dtype)

    for _ in range(keys.ndim):
        draw = jax.vmap(draw)
    return draw(keys)
