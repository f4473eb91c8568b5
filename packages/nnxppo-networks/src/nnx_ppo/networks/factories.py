"""Factories of common networks."""

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import jax
from flax import nnx

from nnx_ppo.core import StatefulModule
from nnx_ppo.networks._checks import check_size, check_sizes
from nnx_ppo.networks.adapter import PPOAdapter
from nnx_ppo.networks.containers import Sequential
from nnx_ppo.networks.feedforward import Dense
from nnx_ppo.networks.normalizer import Normalizer
from nnx_ppo.networks.recurrent import LSTM
from nnx_ppo.networks.sampling_layers import NormalTanhSampler
from nnx_ppo.networks.utils import Flattener

Activation = Callable[[jax.Array], jax.Array]


def make_mlp_layers(
    sizes: Sequence[int],
    rngs: nnx.Rngs,
    activation: Activation = jax.nn.relu,
    activation_last_layer: bool = True,
    **linear_kwargs: Any,
) -> list[Dense]:
    """Make the layers of a multi-layer perceptron, to go into a `Sequential`.

    Args:
        sizes: Width of the input, of each layer, and of the output.
        rngs: Draws the initial parameters.
        activation: Applied after each layer.
        activation_last_layer: Whether to apply it after the last layer too.
        **linear_kwargs: Passed on to `nnx.Linear`.

    Returns:
        One layer fewer than there are sizes.

    Raises:
        TypeError: `sizes` is not a list of integers.
        ValueError: There are fewer than two sizes, or one is below 1.

    Example:
        >>> [layer.out_features for layer in make_mlp_layers([3, 16, 2], nnx.Rngs(0))]
        [16, 2]
    """
    sizes = check_sizes(sizes, "sizes")
    if len(sizes) < 2:
        raise ValueError(f"sizes must hold the input's and the output's, got {sizes}.")
    last = len(sizes) - 2
    return [
        Dense(
            size_in,
            size_out,
            rngs,
            activation if activation_last_layer or i < last else None,
            **linear_kwargs,
        )
        for i, (size_in, size_out) in enumerate(zip(sizes[:-1], sizes[1:], strict=True))
    ]


def make_mlp(
    sizes: Sequence[int],
    rngs: nnx.Rngs,
    activation: Activation = jax.nn.relu,
    activation_last_layer: bool = True,
    **linear_kwargs: Any,
) -> Sequential:
    """Make a multi-layer perceptron.

    Args:
        sizes: Width of the input, of each layer, and of the output.
        rngs: Draws the initial parameters.
        activation: Applied after each layer.
        activation_last_layer: Whether to apply it after the last layer too.
        **linear_kwargs: Passed on to `nnx.Linear`.

    Raises:
        TypeError: `sizes` is not a list of integers.
        ValueError: There are fewer than two sizes, or one is below 1.

    Example:
        >>> mlp = make_mlp([3, 16, 2], nnx.Rngs(0), activation_last_layer=False)
        >>> mlp(mlp.initialize_state(5), jax.numpy.ones((5, 3))).output.shape
        (5, 2)
    """
    return Sequential(
        make_mlp_layers(sizes, rngs, activation, activation_last_layer, **linear_kwargs)
    )


def make_mlp_actor_critic(  # noqa: PLR0917  (documented signature)
    obs_size: Any,
    action_size: int,
    actor_hidden_sizes: Sequence[int],
    critic_hidden_sizes: Sequence[int],
    rngs: nnx.Rngs,
    activation: Activation = jax.nn.relu,
    normalize_obs: bool = True,
    initializer_scale: float = 1.0,
    entropy_weight: float = 1e-2,
    min_std: float = 1e-1,
    std_scale: float = 1.0,
) -> Sequential:
    """Make a PPO network of two perceptrons, one for actions and one for values.

    They share nothing but the normalised observation.

    Args:
        obs_size: Number of features of an observation; or its shape; or a mapping of these,
            nested or not, whose entries the network then flattens and joins.
        action_size: Number of dimensions of an action.
        actor_hidden_sizes: Widths of the actor's hidden layers.
        critic_hidden_sizes: Widths of the critic's hidden layers.
        rngs: Draws the initial parameters, and gives the sampler its stream.
        activation: Activation of the hidden layers.
        normalize_obs: Whether to put a `Normalizer` first.
        initializer_scale: Weights are drawn uniformly with variance
            `initializer_scale / in_features`.
        entropy_weight: See `NormalTanhSampler`.
        min_std: See `NormalTanhSampler`.
        std_scale: See `NormalTanhSampler`.

    Returns:
        A network whose output is a `PPONetworkOutput`, with values of shape `(batch,)`.

    Raises:
        TypeError: A size is not an integer, or hidden sizes are not in a list.
        ValueError: A size is below 1, or a number of the sampler is out of range.

    Example:
        >>> net = make_mlp_actor_critic({"body": 3, "goal": 2}, 2, [16], [16], nnx.Rngs(0))
        >>> obs = {"body": jax.numpy.ones((5, 3)), "goal": jax.numpy.ones((5, 2))}
        >>> out = net(net.initialize_state(5), obs).output
        >>> out.actions.shape, out.value_estimates.shape
        ((5, 2), (5,))
    """
    obs_features, action_size = _num_features(obs_size), check_size(action_size, "action_size")
    kernel_init = _uniform(initializer_scale)

    def mlp(hidden: list[int], out: int) -> list[Dense]:
        sizes = [obs_features, *hidden, out]
        return make_mlp_layers(sizes, rngs, activation, False, kernel_init=kernel_init)

    actor = mlp(check_sizes(actor_hidden_sizes, "actor_hidden_sizes"), 2 * action_size)
    critic = mlp(check_sizes(critic_hidden_sizes, "critic_hidden_sizes"), 1)
    sampler = NormalTanhSampler(rngs, entropy_weight, min_std, std_scale)
    return _actor_critic(obs_size, normalize_obs, [*actor, sampler], critic)


def make_lstm_actor_critic(
    obs_size: Any,
    action_size: int,
    actor_hidden_sizes: Sequence[int],
    critic_hidden_sizes: Sequence[int],
    rngs: nnx.Rngs,
    *,
    lstm_features: int = 128,
    trainable_initial_state: bool = False,
    activation: Activation = jax.nn.relu,
    normalize_obs: bool = True,
    initializer_scale: float = 1.0,
    entropy_weight: float = 1e-2,
    min_std: float = 1e-1,
    std_scale: float = 1.0,
) -> Sequential:
    """Make a PPO network with memory: dense layers, an LSTM and a linear readout.

    Actor and critic have one such stack each, so that value estimates, too, know what was seen
    before.

    Args:
        obs_size: See `make_mlp_actor_critic`.
        action_size: Number of dimensions of an action.
        actor_hidden_sizes: Widths of the dense layers before the actor's LSTM; may be empty.
        critic_hidden_sizes: Widths of the dense layers before the critic's LSTM; may be empty.
        rngs: Draws the initial parameters, and gives the sampler its stream.
        lstm_features: Number of units of each LSTM.
        trainable_initial_state: Whether the LSTMs learn the carry that an episode starts with.
        activation: Activation of the dense layers before the LSTM.
        normalize_obs: Whether to put a `Normalizer` first.
        initializer_scale: Weights of the dense layers are drawn uniformly with variance
            `initializer_scale / in_features`; those of the LSTM as flax does.
        entropy_weight: See `NormalTanhSampler`.
        min_std: See `NormalTanhSampler`.
        std_scale: See `NormalTanhSampler`.

    Returns:
        A network whose output is a `PPONetworkOutput`, with values of shape `(batch,)`.

    Raises:
        TypeError: A size is not an integer, or hidden sizes are not in a list.
        ValueError: A size is below 1, or a number of the sampler is out of range.

    Example:
        >>> net = make_lstm_actor_critic(3, 2, [16], [16], nnx.Rngs(0), lstm_features=8)
        >>> out = net(net.initialize_state(5), jax.numpy.ones((5, 3))).output
        >>> out.actions.shape, out.value_estimates.shape
        ((5, 2), (5,))
    """
    obs_features, action_size = _num_features(obs_size), check_size(action_size, "action_size")
    lstm_features = check_size(lstm_features, "lstm_features")
    kernel_init = _uniform(initializer_scale)

    def stack(hidden: list[int], out: int) -> list[StatefulModule]:
        sizes = [obs_features, *hidden]
        dense = make_mlp_layers(sizes, rngs, activation, kernel_init=kernel_init) if hidden else []
        lstm = LSTM(sizes[-1], lstm_features, rngs, trainable_initial_state=trainable_initial_state)
        return [*dense, lstm, Dense(lstm_features, out, rngs, kernel_init=kernel_init)]

    actor = stack(check_sizes(actor_hidden_sizes, "actor_hidden_sizes"), 2 * action_size)
    critic = stack(check_sizes(critic_hidden_sizes, "critic_hidden_sizes"), 1)
    sampler = NormalTanhSampler(rngs, entropy_weight, min_std, std_scale)
    return _actor_critic(obs_size, normalize_obs, [*actor, sampler], critic)


def _actor_critic(
    obs_size: Any,
    normalize_obs: bool,
    actor: Sequence[StatefulModule],
    critic: Sequence[StatefulModule],
) -> Sequential:
    head = PPOAdapter(action=Sequential(actor), value=Sequential(critic))
    normalizer = [Normalizer(obs_size)] if normalize_obs else []
    flattener = [Flattener()] if isinstance(obs_size, Mapping | Sequence) else []
    return Sequential([*normalizer, *flattener, head])


def _num_features(obs_size: Any) -> int:
    """Return how many features a flattened observation has."""
    if isinstance(obs_size, Mapping):
        return sum(_num_features(size) for size in obs_size.values())
    if isinstance(obs_size, Sequence) and not isinstance(obs_size, str):
        return prod(check_sizes(obs_size, "obs_size"))
    return check_size(obs_size, "obs_size")


def _uniform(scale: float) -> Callable[..., jax.Array]:
    return nnx.initializers.variance_scaling(scale, "fan_in", "uniform")
