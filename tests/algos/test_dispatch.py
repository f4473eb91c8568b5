"""How iterations get to the device: several in a call, reported late, compiled once."""

import dataclasses
import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from nnx_ppo.algorithms import EvalConfig, PPOConfig, TrainConfig, train_ppo
from nnx_ppo.algorithms.programs import TracedEnvironment, frozen, traced
from nnx_ppo.core import EpisodeWrapper
from nnx_ppo.core.testing import FollowTarget
from nnx_ppo.networks.normalizer import NormalizerStatistics

from .helpers import lstm_network, mlp_network

ENV = EpisodeWrapper(FollowTarget(length=7), 5)
# Iterations of 40 steps, an evaluation at 0, 120, 240 and the end.
CONFIG = TrainConfig(
    ppo=PPOConfig(n_envs=8, rollout_length=5, total_steps=280, n_epochs=2, n_minibatches=2),
    eval=EvalConfig(every_steps=120, n_envs=4, max_episode_length=10, logging_percentiles=None),
    seed=3,
)


def trained(make, **settings):
    """Return a network after training, and what was logged."""
    network, calls = make(), []
    train_ppo(
        ENV,
        network,
        dataclasses.replace(CONFIG, **settings),
        log_fn=lambda metrics, step: calls.append((step, metrics)),
    )
    return network, calls


@pytest.mark.parametrize("make", [mlp_network, lstm_network], ids=["mlp", "lstm"])
def test_fused_iterations_are_single_ones(make):
    """Two and seven iterations in a call: bit-equal parameters, the same reports in order."""
    single, calls = trained(make)
    assert [step for step, _ in calls] == [0, 40, 80, 120, 160, 200, 240, 280]
    for iterations in (2, 7):
        fused, other_calls = trained(make, iterations_per_call=iterations)
        learned = nnx.Any(nnx.Param, NormalizerStatistics)
        states = (nnx.state(network, learned) for network in (fused, single))
        jax.tree.map(np.testing.assert_array_equal, *states)
        assert other_calls == calls


def test_a_call_ends_where_something_is_due():
    """Of seven iterations a call may take four: those up to 120 steps, to 240, and to the end."""
    known = []
    env = traced(EpisodeWrapper(FollowTarget(length=7), 5))
    train_ppo(
        env,
        network := mlp_network(),
        dataclasses.replace(CONFIG, iterations_per_call=4),
        log_fn=lambda metrics, step: known.append(int(count_of(network))),
    )
    # The normaliser has seen 8 · 5 samples for each iteration: what callbacks see is the state
    # after the whole call. The reports at 120 and 240 come with an evaluation, at once.
    assert known == [0, 120, 120, 120, 240, 240, 240, 280]


def count_of(network):
    """Return how many samples the normaliser has seen."""
    return network.layers[0].counter[...]


def test_reports_are_read_when_the_next_call_is_under_way():
    """With nothing due in between, a report comes when the network is one call ahead."""
    seen = []
    train_ppo(
        ENV,
        network := mlp_network(),
        dataclasses.replace(CONFIG, eval=EvalConfig(enabled=False)),
        log_fn=lambda metrics, step: seen.append((step, int(count_of(network)))),
    )
    assert seen == [(40, 80), (80, 120), (120, 160), (160, 200), (200, 240), (240, 280), (280, 280)]


def test_what_was_reported_is_not_lost_when_a_callback_raises():
    """The checkpoint of step 80 fails: steps 40 and 80 have been logged before it."""
    steps = []

    def fail(state, step):
        if step:
            raise OSError("disk full")

    config = dataclasses.replace(CONFIG, checkpoint_every_steps=80, iterations_per_call=2)
    with pytest.raises(OSError, match="disk full"):
        train_ppo(
            ENV,
            mlp_network(),
            config,
            log_fn=lambda metrics, step: steps.append(step),
            checkpoint_fn=fail,
        )
    assert steps == [0, 40, 80]


def test_a_variable_that_a_callback_replaced_is_used():
    """Not only its value: the entropy weight is a new object after the first call."""
    network = mlp_network()
    sampler = network.layers[-1].action.layers[-1]

    def log(metrics, step):
        if step == 0:
            kind = type(sampler.entropy_weight)
            sampler.entropy_weight = kind(jnp.asarray(10.0))

    result = train_ppo(ENV, network, CONFIG, log_fn=log)
    assert sampler.entropy_weight[...] == 10.0
    assert abs(result.final_metrics["losses/regularization/mean"]) > 0.1


class Scaled(FollowTarget):
    """Its reward has a scale, an attribute that can be changed."""

    scale = 1.0

    def step(self, state, action):
        state = super().step(state, action)
        return state.replace(reward=self.scale * state.reward)


def test_an_environment_that_has_been_changed_is_traced_anew():
    """Rewards that are doubled in place double the return of a network that does not learn."""
    env = Scaled(length=7)
    config = dataclasses.replace(CONFIG, ppo=dataclasses.replace(CONFIG.ppo, learning_rate=0.0))
    returns = []
    for scale in (1.0, 2.0):
        env.scale = scale
        metrics = train_ppo(env, mlp_network(), config, total_steps=40).final_metrics
        returns.append(metrics["eval/episode_reward/mean"])
    np.testing.assert_allclose(returns[1], 2.0 * returns[0], rtol=1e-6)


def test_environments_and_programs_are_kept_within_bounds():
    kept = [FollowTarget(length=n) for n in range(3, 12)]
    first = traced(kept[0])
    assert traced(kept[0]) is first and traced(first) is first
    newer = [weakref.ref(traced(env)) for env in kept]
    del first
    gc.collect()
    assert sum(ref() is not None for ref in newer) == 4
    env, made = TracedEnvironment(ENV), []
    for name in [*range(20), 19, 0]:
        env.program(lambda name=name: made.append(name) or name, name)
    assert made == [*range(20), 0]


def test_programs_hold_no_parameters():
    """Once the caller lets go of a network and its results, their arrays are gone."""
    network = mlp_network()
    result = train_ppo(ENV, network, CONFIG, total_steps=40)
    leaf = jax.tree.leaves(nnx.state(network, nnx.Param))[0]
    held = [weakref.ref(network), weakref.ref(leaf)]
    del network, result, leaf
    gc.collect()
    assert [ref() for ref in held] == [None, None]


def test_a_picture_of_a_value_tells_contents_apart():
    def same(left, right):
        return frozen(left) == frozen(right)

    assert same({"a": [1, np.arange(3)]}, {"a": [1, np.arange(3)]})
    assert same(FollowTarget(length=3), FollowTarget(length=3))
    assert same(float("nan"), float("nan"))
    changed = [
        (1, True),
        (1, 1.0),
        (0.0, -0.0),
        ([1], (1,)),
        (np.arange(3), np.arange(3.0)),
        ({"a": {"b": 1}}, {"a": {"b": 2}}),
        (FollowTarget(length=3), FollowTarget(length=4)),
        (EpisodeWrapper(FollowTarget(length=3), 5), EpisodeWrapper(FollowTarget(length=4), 5)),
        (jnp.ones(3), jnp.ones(3)),
    ]
    assert not any(same(left, right) for left, right in changed)
    loop = []
    loop.append(loop)
    assert same(loop, loop)
