"""Action samplers: from distribution parameters to an action and its log-likelihood.

A sampler stores the action before squashing in `rollout_extras`, because the replay needs the
likelihood of the action that was taken, under weights that have changed since.
"""

import abc
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float

from nnx_ppo.core import StatefulModule, StatefulModuleOutput, UnrollOutput
from nnx_ppo.networks._streams import fork_stream, take_keys


class EntropyWeight(nnx.Variable):
    """The weight of an entropy bonus.

    A variable and not a plain attribute, so that a training loop can lower it between iterations
    without compiling again; not an `nnx.Param`, so that it has no gradient.
    """


class ActionSampler(StatefulModule):
    """Base of action samplers.

    The output is a dict `{"action", "log_likelihood"}`, which `PPOAdapter` collects.

    Attributes:
        deterministic: Whether to act by the mean instead of sampling; `network.eval()` sets it,
            `network.train()` clears it.
    """

    deterministic: bool = False

    @abc.abstractmethod
    def __call__(
        self,
        state: tuple[()],
        mean_and_std: Float[Array, "*batch mean_std_dim"],
        rollout_extras: Float[Array, "*batch action_dim"] | None = None,
    ) -> StatefulModuleOutput:
        """Sample an action, or evaluate the one that was taken.

        Args:
            state: An empty tuple.
            mean_and_std: Parameters of the distribution, `(batch, 2 * action_dim)`.
            rollout_extras: None to sample; in the replay the raw action, `(batch, action_dim)`.
        """


class NormalTanhSampler(ActionSampler):
    """A diagonal Gaussian, squashed to (−1, 1) by tanh.

    The first half of the input is the mean of the raw action `z`, the second half makes its
    standard deviation, `std_scale * (softplus(second half) + min_std)`. The log-likelihood is
    that of the squashed action, with the Jacobian of tanh (appendix C of Haarnoja et al., 2018,
    arXiv:1801.01290) in the form that does not overflow,
    `log(1 - tanh(z)^2) = 2 (log 2 - z - softplus(-2 z))`.

    The squashed distribution has no closed entropy. It is estimated as the entropy of the
    Gaussian plus the log-Jacobian at one reparameterised sample of its own, which depends on the
    parameters; the action does not: no gradient flows through it.

    The sampler owns a random stream, split off `rng` when it is made, and takes one key from it
    at each step, in the replay too. In deterministic mode it draws nothing: the action and the
    sample of the entropy are the mean, whether `rollout_extras` is given or not.

    Args:
        rng: Gives the sampler its stream: from the stream `action` if there is one, otherwise
            from the default stream.
        entropy_weight: The loss of a sample is minus this times its entropy. It is kept in an
            `EntropyWeight`; write `sampler.entropy_weight[...] = 0.01` to change it.
        min_std: Added to the standard deviation before scaling.
        std_scale: Factor of the standard deviation.

    Raises:
        TypeError: `rng` is not an `nnx.Rngs`.
        ValueError: `rng` has no suitable stream, or a number is out of range.

    Example:
        >>> sampler = NormalTanhSampler(nnx.Rngs(0), entropy_weight=1e-2)
        >>> out = sampler((), jnp.zeros((5, 6)))
        >>> out.output["action"].shape, out.output["log_likelihood"].shape
        ((5, 3), (5,))
    """

    def __init__(
        self,
        rng: nnx.Rngs,
        entropy_weight: float,
        min_std: float = 1e-3,
        std_scale: float = 1.0,
    ) -> None:
        if not (min_std >= 0 and std_scale > 0):
            raise ValueError(
                "NormalTanhSampler: expected min_std >= 0 and std_scale > 0, got "
                f"min_std={min_std!r}, std_scale={std_scale!r}."
            )
        self.rng = fork_stream(rng, "action", "NormalTanhSampler: rng")
        self.entropy_weight = EntropyWeight(jnp.asarray(entropy_weight, jnp.float32))
        self.min_std = min_std
        self.std_scale = std_scale
        self.deterministic = False

    def __call__(
        self,
        state: tuple[()],
        mean_and_std: Float[Array, "*batch mean_std_dim"],
        rollout_extras: Float[Array, "*batch action_dim"] | None = None,
    ) -> StatefulModuleOutput:
        """Sample an action, or evaluate the one that was taken; see `ActionSampler`."""
        mean, std = self._distribution(mean_and_std)
        noise = _no_noise(mean) if self.deterministic else _draw_noise(self.rng(), mean.shape)
        raw, output, loss = self._act(mean, std, noise, rollout_extras)
        return StatefulModuleOutput(state, output, loss, {"mu": mean, "sigma": std}, raw)

    def initialize_state(self, batch_size: int) -> tuple[()]:
        """Return an empty tuple: a sampler keeps no carry."""
        del batch_size
        return ()

    def unroll(
        self,
        state: tuple[()],
        xs: Float[Array, "time batch mean_std_dim"],
        done: Bool[Array, "time batch"],
        rollout_extras: Float[Array, "time batch action_dim"] | None = None,
    ) -> UnrollOutput:
        """Sample a window at once, with the draws that the steps would have made."""
        mean, std = self._distribution(xs)
        if self.deterministic:
            noise = _no_noise(mean)
        else:
            keys = take_keys(self.rng, len(done))
            noise = jax.vmap(lambda key: _draw_noise(key, mean.shape[1:]))(keys)
        _, output, loss = self._act(mean, std, noise, rollout_extras)
        return UnrollOutput(state, output, loss)

    def _distribution(self, mean_and_std: Array) -> tuple[Array, Array]:
        if mean_and_std.shape[-1] % 2 or not mean_and_std.shape[-1]:
            raise ValueError(
                "NormalTanhSampler: mean_and_std holds means and deviations side by side and needs "
                f"an even last axis, got shape {mean_and_std.shape}; make the layer before it "
                "2 * action_size wide."
            )
        mean, spread = jnp.split(mean_and_std, 2, axis=-1)
        return mean, (jax.nn.softplus(spread) + self.min_std) * self.std_scale

    def _act(
        self, mean: Array, std: Array, noise: tuple[Array, Array], stored: Array | None
    ) -> tuple[Array, dict[str, Array], Array]:
        """Return the raw action, the output and the loss, for any number of leading axes."""
        action_noise, entropy_noise = noise
        if stored is None or self.deterministic:
            raw = jax.lax.stop_gradient(mean + std * action_noise)
        elif stored.shape != mean.shape:
            raise ValueError(
                f"NormalTanhSampler: rollout_extras must be the raw action, of shape {mean.shape}, "
                f"got {stored.shape}; pass what the sampler emitted at this step."
            )
        else:
            raw = jax.lax.stop_gradient(stored)
        output = {"action": jnp.tanh(raw), "log_likelihood": _log_likelihood(raw, mean, std)}
        entropy = _entropy(mean, std, entropy_noise)
        return raw, output, -self.entropy_weight[...] * entropy


def _log_likelihood(raw: Array, mean: Array, std: Array) -> Float[Array, "*batch"]:
    """Return the log-density of `tanh(raw)`, `raw` being Gaussian."""
    gaussian = -0.5 * jnp.square((raw - mean) / std) - jnp.log(std) - 0.5 * math.log(2 * math.pi)
    return jnp.sum(gaussian - _log_jacobian(raw), axis=-1)


def _entropy(mean: Array, std: Array, noise: Array) -> Float[Array, "*batch"]:
    """Return an unbiased estimate of the entropy of the squashed Gaussian."""
    gaussian = jnp.log(std) + 0.5 * math.log(2 * math.pi * math.e)
    return jnp.sum(gaussian + _log_jacobian(mean + std * noise), axis=-1)


def _log_jacobian(raw: Array) -> Array:
    """Return log(d tanh(z) / dz), exact also where tanh is flat."""
    return 2.0 * (math.log(2.0) - raw - jax.nn.softplus(-2.0 * raw))


def _no_noise(mean: Array) -> tuple[Array, Array]:
    return jnp.zeros_like(mean), jnp.zeros_like(mean)


def _draw_noise(key: Array, shape: tuple[int, ...]) -> tuple[Array, Array]:
    """Return the noise of the action and that of the entropy's sample."""
    action_noise, entropy_noise = jax.random.normal(key, (2, *shape))
    return action_noise, entropy_noise
