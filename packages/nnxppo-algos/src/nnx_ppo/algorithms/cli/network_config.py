"""The network that the command builds."""

from typing import Any, Literal

import jax
from flax import nnx

from nnx_ppo.algorithms._validation import (
    check_fields,
    frozen_config,
    instance,
    integer,
    number,
    one_of,
    sizes,
    tuples_for_lists,
)
from nnx_ppo.core import RLEnv, StatefulModule
from nnx_ppo.networks.factories import make_lstm_actor_critic, make_mlp_actor_critic

_ACTIVATIONS = {"swish": nnx.swish, "relu": nnx.relu, "tanh": nnx.tanh, "elu": nnx.elu}


@frozen_config
class NetworkConfig:
    """The network that the command builds.

    Attributes:
        kind: A perceptron, or one with an LSTM behind it.
        actor_hidden: Widths of the actor's dense layers.
        critic_hidden: Widths of the critic's dense layers.
        lstm_features: Units of each LSTM.
        activation: Activation of the dense layers.
        entropy_weight: Weight of the entropy bonus.
        min_std: Smallest standard deviation of an action.
        normalize_obs: Whether to normalise observations.
    """

    kind: Literal["mlp", "lstm"] = "mlp"
    actor_hidden: tuple[int, ...] = (64, 64)
    critic_hidden: tuple[int, ...] = (128, 128)
    lstm_features: int = 64
    activation: Literal["swish", "relu", "tanh", "elu"] = "swish"
    entropy_weight: float = 1e-2
    min_std: float = 0.1
    normalize_obs: bool = True

    def __post_init__(self) -> None:
        tuples_for_lists(self, "actor_hidden", "critic_hidden")
        rules = {
            "actor_hidden": sizes(),
            "critic_hidden": sizes(),
            "normalize_obs": instance(bool, "True or False"),
            "kind": one_of("mlp", "lstm"),
            "activation": one_of(*_ACTIVATIONS),
            "lstm_features": integer(1),
            "entropy_weight": number(0.0),
            "min_std": number(0.0),
        }
        check_fields(self, rules)


def make_network(env: RLEnv, config: NetworkConfig, rngs: nnx.Rngs) -> StatefulModule:
    """Build the network for an environment.

    Raises:
        ValueError: The environment does not say how large its action is, or has several.
    """
    action_size = getattr(env, "action_size", None)
    if not isinstance(action_size, int):
        raise ValueError(
            f"The command builds networks for environments with one action array, whose size "
            f"env.action_size gives as an int; got {action_size!r}. For others build the network "
            "in Python and call train_ppo."
        )
    obs = jax.eval_shape(env.reset, jax.eval_shape(lambda: jax.random.key(0))).obs
    make = make_mlp_actor_critic
    options: dict[str, Any] = {}
    if config.kind == "lstm":
        make, options = make_lstm_actor_critic, {"lstm_features": config.lstm_features}
    return make(
        jax.tree.map(lambda leaf: leaf.shape, obs),
        action_size,
        config.actor_hidden,
        config.critic_hidden,
        rngs,
        activation=_ACTIVATIONS[config.activation],
        normalize_obs=config.normalize_obs,
        entropy_weight=config.entropy_weight,
        min_std=config.min_std,
        **options,
    )
