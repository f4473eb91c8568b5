"""The networks that the factories make."""

# Some tests hand in what the types forbid.
# pyright: reportArgumentType=false

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from nnx_ppo.networks import (
    LSTM,
    Dense,
    Flattener,
    Normalizer,
    NormalTanhSampler,
    PPOAdapter,
    PPONetworkOutput,
    Sequential,
    make_lstm_actor_critic,
    make_mlp,
    make_mlp_actor_critic,
    make_mlp_layers,
)

ZEROS: dict[str, Any] = {"kernel_init": nnx.initializers.zeros}


def widths(layers):
    return [(layer.in_features, layer.out_features) for layer in layers if isinstance(layer, Dense)]


def kinds(net):
    return [type(layer) for layer in net.layers]


def ports(net) -> tuple[Any, Any]:
    adapter: Any = net.layers[-1]
    return adapter.action, adapter.value


def test_mlp_layers() -> None:
    layers = make_mlp_layers([3, 5, 2], nnx.Rngs(0), **ZEROS)
    assert widths(layers) == [(3, 5), (5, 2)]
    assert [layer.activation for layer in layers] == [jax.nn.relu, jax.nn.relu]
    layers = make_mlp_layers([3, 5, 2], nnx.Rngs(0), jnp.tanh, False, use_bias=False, **ZEROS)
    assert [layer.activation for layer in layers] == [jnp.tanh, None]
    assert layers[0].linear.bias is None


def test_mlp_by_hand() -> None:
    # relu(1 + 2) = 3, then 3 + 0 = 3
    ones: dict[str, Any] = {"kernel_init": nnx.initializers.ones}
    mlp = make_mlp([2, 1, 1], nnx.Rngs(0), activation_last_layer=False, **ones)
    assert isinstance(mlp, Sequential)
    out = mlp(mlp.initialize_state(1), jnp.array([[1.0, 2.0]]))
    np.testing.assert_array_equal(out.output, [[3.0]])


@pytest.mark.parametrize("make", [make_mlp_actor_critic, make_lstm_actor_critic])
@pytest.mark.parametrize(
    ("obs_size", "normalize", "front"),
    [
        (3, True, [Normalizer]),
        (3, False, []),
        ((3,), True, [Normalizer, Flattener]),
        ({"b": 1, "a": {"c": (2, 1)}}, True, [Normalizer, Flattener]),
        ({"b": 1, "a": {"c": (2, 1)}}, False, [Flattener]),
    ],
)
def test_actor_critics(make, obs_size, normalize, front) -> None:
    sizes = {"lstm_features": 4} if make is make_lstm_actor_critic else {}

    def run():
        net = make(obs_size, 2, [6], [], nnx.Rngs(0), normalize_obs=normalize, **sizes)
        assert kinds(net) == [*front, PPOAdapter]
        obs = jnp.ones((5, 3))
        if isinstance(obs_size, dict):
            obs = {"b": obs[:, :1], "a": {"c": obs[:, 1:, None]}}
        return net(net.initialize_state(5), obs).output

    out = jax.eval_shape(run)
    assert isinstance(out, PPONetworkOutput)
    assert (out.actions.shape, out.loglikelihoods.shape) == ((5, 2), (5,))
    assert out.value_estimates.shape == (5,)


def test_mlp_actor_critic_layers() -> None:
    net = nnx.eval_shape(
        lambda: make_mlp_actor_critic(
            3, 2, [6, 5], [4], nnx.Rngs(0), jnp.tanh, entropy_weight=0.5, std_scale=2.0
        )
    )
    actor, critic = ports(net)
    assert widths(actor.layers) == [(3, 6), (6, 5), (5, 4)]
    assert widths(critic.layers) == [(3, 4), (4, 1)]
    assert [layer.activation for layer in critic.layers] == [jnp.tanh, None]
    sampler = actor.layers[-1]
    assert (sampler.min_std, sampler.std_scale) == (0.1, 2.0)


def test_lstm_actor_critic_layers() -> None:
    net = nnx.eval_shape(
        lambda: make_lstm_actor_critic(
            3, 2, [6], [], nnx.Rngs(0), lstm_features=4, trainable_initial_state=True
        )
    )
    actor, critic = ports(net)
    assert kinds(actor) == [Dense, LSTM, Dense, NormalTanhSampler]
    assert kinds(critic) == [LSTM, Dense]
    assert widths(actor.layers) == [(3, 6), (4, 4)]
    assert widths(critic.layers) == [(4, 1)]
    assert actor.layers[1] is not critic.layers[0]
    assert actor.layers[1].trainable_initial_state and critic.layers[0].trainable_initial_state


def test_initializer_scale_is_the_variance() -> None:
    # Uniform with variance scale / in_features = 3 / 300, so on ±sqrt(3 * 0.01) = ±0.173205
    net = make_mlp_actor_critic(300, 50, [], [], nnx.Rngs(0), initializer_scale=3.0)
    kernel = np.asarray(ports(net)[0].layers[0].linear.kernel[...])
    assert kernel.var() == pytest.approx(0.01, rel=0.05)
    assert np.abs(kernel).max() == pytest.approx(0.173205, rel=0.01)


@pytest.mark.usefixtures("unchecked")
def test_messages() -> None:
    with pytest.raises(ValueError, match=r"sizes must hold .* the output's, got \[3\]"):
        make_mlp([3], nnx.Rngs(0))
    with pytest.raises(TypeError, match="Dense: activation must be a function or None, got 'relu'"):
        make_mlp([3, 2], nnx.Rngs(0), "relu")
    for make in (make_mlp_actor_critic, make_lstm_actor_critic):
        with pytest.raises(ValueError, match="action_size must be at least 1, got 0"):
            make(3, 0, [4], [4], nnx.Rngs(0))
        with pytest.raises(TypeError, match="obs_size must be an integer, got None"):
            make(None, 1, [4], [4], nnx.Rngs(0))
        with pytest.raises(TypeError, match="actor_hidden_sizes must be a list of sizes, got 64"):
            make(3, 1, 64, [4], nnx.Rngs(0))
        with pytest.raises(ValueError, match=r"critic_hidden_sizes\[0\] must be at least 1, got 0"):
            make(3, 1, [], [0], nnx.Rngs(0))
