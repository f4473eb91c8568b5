"""What action samplers share: the contract, and the steps around a distribution."""

import abc
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float

from nnx_ppo.core import StatefulModule, StatefulModuleOutput, UnrollOutput
from nnx_ppo.networks._checks import check_weight
from nnx_ppo.networks._streams import fork_stream, take_keys
from nnx_ppo.networks.distributions import Distribution


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


class DistributionSampler(ActionSampler):
    """Base of samplers that are made of a `Distribution`; a subclass makes it from the input.

    Everything else is done here. The raw action is stored for the replay, and no gradient flows
    through it. The loss of a sample is minus `entropy_weight` times its entropy. In deterministic
    mode the action is the distribution's mode, whether `rollout_extras` is given or not.

    A sampler owns a random stream, split off `rng` when it is made, and takes one key from it at
    each step, in the replay too; in deterministic mode it takes none.

    Args:
        rng: Gives the sampler its stream: from the stream `action` if there is one, otherwise
            from the default stream.
        entropy_weight: The loss of a sample is minus this times its entropy. It is kept in an
            `EntropyWeight`; write `sampler.entropy_weight[...] = 0.01` to change it.

    Raises:
        TypeError: `rng` is not an `nnx.Rngs`.
        ValueError: `rng` has no suitable stream.

    Example:
        >>> from nnx_ppo.networks.distributions import Normal
        >>> class UnitNormalSampler(DistributionSampler):
        ...     def _distribution(self, inputs):
        ...         return Normal(mean=inputs, std=jnp.ones_like(inputs))
        >>> sampler = UnitNormalSampler(nnx.Rngs(0), entropy_weight=0.0)
        >>> sampler((), jnp.zeros((5, 3))).output["action"].shape
        (5, 3)
    """

    def __init__(self, rng: nnx.Rngs, entropy_weight: float) -> None:
        self.rng = fork_stream(rng, "action", f"{type(self).__name__}: rng")
        self.entropy_weight = EntropyWeight(
            check_weight(entropy_weight, f"{type(self).__name__}: entropy_weight")
        )
        self.deterministic = False

    @abc.abstractmethod
    def _distribution(self, inputs: Any) -> Distribution:
        """Make the distribution of each sample.

        Args:
            inputs: What the sampler was given, leaves `(batch, *feature)` or
                `(time, batch, *feature)`.

        Returns:
            The distribution; all its arrays have the samples' axes first.
        """

    def __call__(
        self, state: tuple[()], mean_and_std: Any, rollout_extras: Any = None
    ) -> StatefulModuleOutput:
        """Sample an action, or evaluate the one that was taken.

        Args:
            state: An empty tuple.
            mean_and_std: Parameters of the distribution, leaves `(batch, *feature)`; the name is
                that of the Gaussian samplers.
            rollout_extras: None to sample; in the replay the raw action of this step.

        Raises:
            ValueError: `rollout_extras` has not the shape of a raw action.
            TypeError: `rollout_extras` is of another kind: floats for integers, say.
        """
        distribution = self._distribution(mean_and_std)
        noise = None if self.deterministic else distribution.noise(self.rng())
        raw, output, loss = self._act(distribution, noise, rollout_extras)
        return StatefulModuleOutput(state, output, loss, distribution.metrics(), raw)

    def initialize_state(self, batch_size: int) -> tuple[()]:
        """Return an empty tuple: a sampler keeps no carry."""
        del batch_size
        return ()

    def unroll(
        self,
        state: tuple[()],
        xs: Any,
        done: Bool[Array, "time batch"],
        rollout_extras: Any = None,
    ) -> UnrollOutput:
        """Sample a window at once, with the draws that the steps would have made."""
        distribution, noise = self._distribution(xs), None
        if not self.deterministic:
            keys = take_keys(self.rng, len(done))
            noise = jax.vmap(lambda step, key: step.noise(key))(distribution, keys)
        _, output, loss = self._act(distribution, noise, rollout_extras)
        return UnrollOutput(state, output, loss)

    def _act(
        self, distribution: Distribution, noise: Any, stored: Any
    ) -> tuple[Array, dict[str, Array], Array]:
        """Return the raw action, the output and the loss, for any number of leading axes."""
        if stored is None or self.deterministic:
            raw = distribution.sample(noise)
        else:
            raw = self._checked(stored, jax.eval_shape(distribution.sample, None))
        raw = jax.lax.stop_gradient(raw)
        output = {
            "action": distribution.action(raw),
            "log_likelihood": distribution.log_likelihood(raw),
        }
        return raw, output, -self.entropy_weight[...] * distribution.entropy(noise)

    def _checked(self, stored: Any, expected: jax.ShapeDtypeStruct) -> Array:
        """Return stored raw actions as an array, if they are some."""
        raw = jnp.asarray(stored)
        floats = jnp.issubdtype(expected.dtype, jnp.floating)
        if raw.shape == expected.shape and jnp.issubdtype(
            raw.dtype, jnp.floating if floats else jnp.integer
        ):
            return raw
        error = ValueError if raw.shape != expected.shape else TypeError
        raise error(
            f"{type(self).__name__}: rollout_extras must be the raw action, {expected.dtype} of "
            f"shape {expected.shape}, got {raw.shape} of {raw.dtype}; pass what the sampler "
            "emitted at this step."
        )
