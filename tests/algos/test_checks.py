"""A network that does not fit its environment is refused, naming the leaf, before compiling."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from nnx_ppo.algorithms import PPOConfig, TrainConfig, VideoConfig, ppo_step, train_ppo
from nnx_ppo.algorithms.checks import check_network
from nnx_ppo.algorithms.ppo import new_training_state
from nnx_ppo.core import PPONetworkOutput, StatefulModule, StatefulModuleOutput
from nnx_ppo.core.testing import FollowTarget, TwoHands
from nnx_ppo.networks.feedforward import Dense

from .helpers import mlp_network


class Network(StatefulModule):
    """Fits `FollowTarget`, unless told otherwise."""

    def __init__(self, carry=None, action=None, value=None, next_carry=None):
        self.carry, self.action, self.value = carry, action, value
        self.next_carry = next_carry

    def __call__(self, module_state, obs, rollout_extras=None):
        n = obs.shape[0]
        action = jnp.zeros((n, 1)) if self.action is None else self.action(n)
        value = jnp.zeros(n) if self.value is None else self.value(n)
        state = module_state if self.next_carry is None else self.next_carry(module_state)
        output = PPONetworkOutput(action, jnp.zeros(n), value)
        return StatefulModuleOutput(state, output, jnp.zeros(()), {}, ())

    def initialize_state(self, batch_size):
        return {"memory": jnp.zeros((batch_size, 2))}


def halved(state):
    return {"memory": state["memory"].astype(jnp.float16)}


def shrunk(state):
    return {"memory": state["memory"][:, :1]}


def renamed(state):
    return {"other": state["memory"]}


def late(state):
    return {**state, "late": jnp.zeros(3)}


@pytest.mark.parametrize(
    ("network", "kind", "message"),
    [
        (Network(next_carry=halved), ValueError, r"state\['memory'\].*float32\[3, 2\].*float16"),
        (Network(next_carry=shrunk), ValueError, r"state\['memory'\].*\[3, 2\], got float32\[3, 1"),
        (Network(next_carry=renamed), ValueError, "carry of the same tree"),
        (Network(next_carry=late), ValueError, "carry of the same tree"),
        (
            Network(action=lambda n: jnp.zeros((n, 2))),
            ValueError,
            r"actions must have env.action_size=1 features, expected shape \(3, 1\).*got \(3, 2\)",
        ),
        (
            Network(action=lambda n: {"arm": jnp.zeros((n, 1))}),
            ValueError,
            "tree like env.action_size",
        ),
        (Network(value=lambda n: jnp.zeros((n, 1))), ValueError, r"value_estimates.*\(3, 1\)"),
        (
            Network(value=lambda n: {"a": jnp.zeros(n), "b": jnp.zeros(n)}),
            ValueError,
            "one value for each reward",
        ),
        (Dense(1, 2, nnx.Rngs(0)), TypeError, "PPONetworkOutput.*PPOAdapter"),
    ],
)
def test_networks_that_do_not_fit(network, kind, message):
    with pytest.raises(kind, match=message):
        check_network(FollowTarget(), network, combine_advantages=False)


def test_a_network_that_fits():
    check_network(FollowTarget(), Network(), combine_advantages=False)


def test_observations_of_the_wrong_size_are_named():
    with pytest.raises(Exception) as caught:
        check_network(FollowTarget(), mlp_network(obs_size=4), combine_advantages=False)
    assert any("observations (3, 1)" in note for note in caught.value.__notes__)


def test_missing_heads_are_named():
    with pytest.raises(Exception) as caught:
        check_network(TwoHands(), Network(), combine_advantages=False)
    assert caught.value.args


class LateKey(FollowTarget):
    """Adds a key to info in step."""

    def step(self, state, action):
        state = super().step(state, action)
        return state.replace(info={**state.info, "late": jnp.zeros(())})


class OtherDtype(FollowTarget):
    """Its reward is an integer at reset."""

    def reset(self, rng):
        return super().reset(rng).replace(reward=jnp.zeros((), jnp.int32))


def test_environments_whose_state_changes_are_refused():
    with pytest.raises(ValueError, match=r"info\['late'\]"):
        check_network(LateKey(), Network(), combine_advantages=False)
    with pytest.raises(ValueError, match="state.reward.*int32.*float32"):
        check_network(OtherDtype(), Network(), combine_advantages=False)


class Unreachable(FollowTarget):
    """Must not be run, only traced."""

    def step(self, state, action):
        jax.debug.callback(pytest.fail)
        return super().step(state, action)


class WideReward(FollowTarget):
    """Its reward is no scalar."""

    def step(self, state, action):
        state = super().step(state, action)
        return state.replace(reward=state.reward[None])

    def reset(self, rng):
        return super().reset(rng).replace(reward=jnp.zeros(1))


def test_rewards_must_be_scalars():
    with pytest.raises(ValueError, match=r"reward must be a scalar, got shape \(1,\)"):
        check_network(WideReward(), Network(), combine_advantages=False)


class Forgetful(Network):
    """Does not pass on what the replay needs."""

    def __call__(self, module_state, obs, rollout_extras=None):
        return super().__call__(module_state, obs).replace(rollout_extras=None)


def test_a_network_that_cannot_be_replayed_is_refused():
    with pytest.raises(ValueError, match="rollout_extras=None"):
        check_network(FollowTarget(), Forgetful(), combine_advantages=False)


def test_the_evaluation_environment_is_checked_too():
    with pytest.raises(Exception) as caught:
        train_ppo(FollowTarget(), mlp_network(), eval_env=TwoHands())
    assert "observations" in "".join(caught.value.__notes__)


def test_train_ppo_checks_before_it_runs_anything():
    with pytest.raises(ValueError, match="action_size"):
        train_ppo(Unreachable(), Network(action=lambda n: jnp.zeros((n, 2))))


def test_a_state_with_another_number_of_environments_is_refused():
    network = mlp_network()
    state = new_training_state(FollowTarget(), network, 4, seed=0)
    config = TrainConfig(ppo=PPOConfig(n_envs=8))
    with pytest.raises(ValueError, match="holds 4 environments, but n_envs=8"):
        train_ppo(FollowTarget(), network, config, initial_state=state)
    with pytest.raises(ValueError, match="holds 4 environments, but n_envs=8"):
        ppo_step(FollowTarget(), state, 8, 5, 0.95, 0.99, 0.2, True, False, 1, 1)


def test_a_network_left_in_evaluation_mode_is_refused():
    network = mlp_network()
    network.eval()
    with pytest.raises(ValueError, match=r"networks.train\(\)"):
        train_ppo(FollowTarget(), network)


def test_videos_need_an_environment_that_renders():
    config = TrainConfig(video=VideoConfig(enabled=True))
    with pytest.raises(ValueError, match="video.enabled=True, but FollowTarget has no method"):
        train_ppo(FollowTarget(), mlp_network(), config)


def test_checking_leaves_the_network_alone():
    network = mlp_network()
    before = jax.tree.leaves(nnx.state(network, nnx.RngCount))
    check_network(FollowTarget(), network, combine_advantages=False)
    assert [int(a) for a in before] == [
        int(a) for a in jax.tree.leaves(nnx.state(network, nnx.RngCount))
    ]
