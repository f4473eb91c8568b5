"""`PPOAdapter`: trees of heads, and values that keep their batch axis."""

# Some tests hand in what the types forbid.
# pyright: reportArgumentType=false

import jax.numpy as jnp
import numpy as np
import pytest

from nnx_ppo.core import StatefulModule, StatefulModuleOutput
from nnx_ppo.networks import Filter, Parallel, PPOAdapter, PPONetworkOutput, Sequential


class Give(StatefulModule):
    """Returns what it was made to return, whatever the input is."""

    def __init__(self, make):
        self.make = make

    def __call__(self, state, x, rollout_extras=None):
        return StatefulModuleOutput(state, self.make(x), jnp.zeros(()), {"m": jnp.ones(())})


def head(x):
    return {"action": x, "log_likelihood": jnp.sum(x, axis=-1)}


def run(action, value, batch=3):
    net = PPOAdapter(action=Give(action), value=Give(value))
    return net(net.initialize_state(batch), jnp.ones((batch, 2)))


def test_one_head() -> None:
    out = run(head, lambda x: x[..., :1])
    assert isinstance(out.output, PPONetworkOutput)
    np.testing.assert_array_equal(out.output.actions, np.ones((3, 2)))
    np.testing.assert_array_equal(out.output.loglikelihoods, [2.0, 2.0, 2.0])
    np.testing.assert_array_equal(out.output.value_estimates, [1.0, 1.0, 1.0])
    assert out.next_state == {"action": (), "value": ()}
    assert out.rollout_extras == {"action": None, "value": None}
    assert set(out.metrics) == {"action", "value"}


def test_trees_of_heads_and_values_keep_their_form() -> None:
    out = run(
        lambda x: {"arm": head(x), "legs": [head(x), {**head(x), "more": x}]},
        lambda x: {"run": x[..., :1], "eat": x[..., 0]},
    ).output
    assert set(out.actions) == {"arm", "legs"}
    assert out.actions["legs"][1].shape == (3, 2)
    assert out.loglikelihoods["legs"][0].shape == (3,)
    assert {name: value.shape for name, value in out.value_estimates.items()} == {
        "run": (3,),
        "eat": (3,),
    }


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("features", [(), (1,), (1, 1), (2,), (2, 1), (1, 2)])
def test_only_trailing_axes_of_length_one_are_squeezed(batch, features) -> None:
    def value(x):
        return jnp.ones((*x.shape[:-1], *features))

    kept = {(): (), (1,): (), (1, 1): (), (2,): (2,), (2, 1): (2,), (1, 2): (1, 2)}[features]
    assert run(head, value, batch).output.value_estimates.shape == (batch, *kept)
    net = PPOAdapter(action=Give(head), value=Give(value))
    for time in (1, 4):
        done = jnp.zeros((time, batch), bool)
        out = net.unroll(net.initialize_state(batch), jnp.ones((time, batch, 2)), done)
        assert out.output.value_estimates.shape == (time, batch, *kept)


def test_the_documented_pipeline() -> None:
    trunk = Parallel(action_params=Give(lambda x: x), value=Give(lambda x: x[..., :1]))
    action = Sequential([Filter({"action_params": "action_params"}), Give(lambda _: head(ones))])
    ones = jnp.ones((3, 2))
    net = Sequential([trunk, PPOAdapter(action=action, value=Filter({"value": "value"}))])
    out = net(net.initialize_state(3), ones)
    assert out.output.value_estimates["value"].shape == (3,)


@pytest.mark.usefixtures("unchecked")
def test_messages() -> None:
    with pytest.raises(TypeError, match="PPOAdapter: action must be a StatefulModule, got NoneTy"):
        PPOAdapter(action=None, value=Give(head))
    with pytest.raises(TypeError, match="PPOAdapter: value must be a StatefulModule, got functi"):
        PPOAdapter(action=Give(head), value=lambda x: x)
    with pytest.raises(TypeError, match=r"got an array of shape \(3, 2\) at output; end the act"):
        run(lambda x: x, lambda x: x)
    with pytest.raises(TypeError, match=r"shape \(3,\) at output\['arm'\]\['log_prob'\]; end the"):
        run(lambda x: {"arm": {"log_prob": x[:, 0]}}, lambda x: x)
    with pytest.raises(
        TypeError, match=r"output of the action port is empty: \{\}; end the action"
    ):
        run(lambda x: {}, lambda x: x)
    with pytest.raises(TypeError, match=r"output of the value port is empty: None"):
        run(head, lambda x: None)
