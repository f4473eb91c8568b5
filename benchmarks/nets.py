"""The networks of the benchmarks, by name."""

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from flax import nnx

from nnx_ppo.core import StatefulModule
from nnx_ppo.networks import (
    GRU,
    LSTM,
    AR1VariationalBottleneck,
    Dense,
    Filter,
    Flattener,
    Normalizer,
    NormalTanhSampler,
    PopulationGraph,
    PPOAdapter,
    Sequential,
    make_lstm_actor_critic,
    make_mlp_actor_critic,
    make_mlp_layers,
)


def build(name: str, obs_size: int, action_size: int) -> StatefulModule:
    """Return a network, the same one each time.

    Args:
        name: One of `NETWORKS`.
        obs_size: Features of an observation.
        action_size: Features of an action.
    """
    return NETWORKS[name](obs_size, action_size, nnx.Rngs(0))


def _mlp(*actor: int) -> Callable[[int, int, nnx.Rngs], StatefulModule]:
    """Return a maker of perceptrons; actor and critic have the same layers."""
    return lambda obs, act, rngs: make_mlp_actor_critic(obs, act, actor, actor, rngs)


def _preset(obs_size: int, action_size: int, rngs: nnx.Rngs) -> StatefulModule:
    """Make the perceptrons of our preset for CartpoleBalance."""
    return make_mlp_actor_critic(obs_size, action_size, (64, 64), (128, 128), rngs)


def _lstm(obs_size: int, action_size: int, rngs: nnx.Rngs) -> StatefulModule:
    """Make a dense layer and an LSTM of 128 units for the actor, and the same for the critic."""
    return make_lstm_actor_critic(obs_size, action_size, (128,), (128,), rngs, lstm_features=128)


def _lstm_actor(obs_size: int, action_size: int, rngs: nnx.Rngs) -> StatefulModule:
    """Make an actor with an LSTM of 128 units, and a critic without memory."""
    actor = [
        Dense(obs_size, 128, rngs, jax.nn.relu),
        LSTM(128, 128, rngs),
        Dense(128, 2 * action_size, rngs),
    ]
    critic = make_mlp_layers([obs_size, 128, 128, 1], rngs, activation_last_layer=False)
    return _actor_critic(obs_size, rngs, actor, critic)


def _gru(obs_size: int, action_size: int, rngs: nnx.Rngs) -> StatefulModule:
    """Make what `_lstm` makes, of gated recurrent units."""

    def stack(out: int) -> list[StatefulModule]:
        first = Dense(obs_size, 128, rngs, jax.nn.relu)
        return [first, GRU(128, 128, rngs), Dense(128, out, rngs)]

    return _actor_critic(obs_size, rngs, stack(2 * action_size), stack(1))


def _graph(obs_size: int, action_size: int, rngs: nnx.Rngs) -> StatefulModule:
    """Make a cortex whose loop takes two steps, and a latent motor plan with an AR(1) prior."""
    graph = PopulationGraph(rngs)
    graph.add_input("vision", obs_size, input_from="eye")
    graph.add_population("association", 128, activation=jnp.tanh)
    graph.add_population("premotor", 128, activation=jnp.tanh)
    graph.add_population("plan", 16)
    graph.add_output("motor", 2 * action_size)
    graph.add_output("critic", 1)
    latent = Sequential(
        [Dense(128, 32, rngs), AR1VariationalBottleneck(16, rngs, kl_weight=1e-3, ar1_weight=1e-3)]
    )
    graph.connect("vision", "association")
    graph.connect("association", "premotor", delay=1, reciprocal=True)
    graph.connect("premotor", "plan", transform=latent)
    graph.connect("plan", "motor")
    graph.connect("association", "motor", delay=2)
    graph.connect("association", "critic")
    graph.finalize()
    action = [Filter({"motor": "motor"}), Flattener(), NormalTanhSampler(rngs, 1e-2)]
    value = Sequential([Filter({"critic": "critic"}), Flattener()])
    head = PPOAdapter(action=Sequential(action), value=value)
    return Sequential([Normalizer(obs_size), Filter({"eye": lambda obs: obs}), graph, head])


def _many_leaves(obs_size: int, action_size: int, rngs: nnx.Rngs) -> StatefulModule:
    """Make narrow perceptrons of many layers, whose variables are `NUM_LEAVES` arrays."""
    hidden = [16] * 26
    actor = make_mlp_layers([obs_size, *hidden, 2 * action_size], rngs, activation_last_layer=False)
    critic = [*make_mlp_layers([obs_size, *hidden], rngs), Dense(16, 1, rngs, use_bias=False)]
    network = _actor_critic(obs_size, rngs, actor, critic)
    found = len(jax.tree.leaves(nnx.state(network)))
    if found != NUM_LEAVES:
        raise ValueError(f"many-leaves has {found} leaves, not {NUM_LEAVES}; change its layers.")
    return network


def _actor_critic(
    obs_size: int,
    rngs: nnx.Rngs,
    actor: list[StatefulModule] | list[Dense],
    critic: list[StatefulModule] | list[Dense],
) -> StatefulModule:
    """Join an actor without sampler and a critic behind a normaliser."""
    action = Sequential([*actor, NormalTanhSampler(rngs, 1e-2)])
    head = PPOAdapter(action=action, value=Sequential(critic))
    return Sequential([Normalizer(obs_size), head])


NUM_LEAVES = 115

NETWORKS: Mapping[str, Callable[[int, int, nnx.Rngs], StatefulModule]] = {
    "mlp": _preset,
    "lstm": _lstm,
    "gru": _gru,
    "graph": _graph,
    "mlp-128": _mlp(128, 128),
    "mlp-256": _mlp(256, 256),
    "lstm-actor": _lstm_actor,
    "many-leaves": _many_leaves,
}
