"""What PPO can do beyond its defaults: schedules, stops, value losses, windows, chunks."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from nnx_ppo.algorithms import EvalConfig, LoggingLevel, PPOConfig, TrainConfig, train_ppo
from nnx_ppo.algorithms.entropy import check_entropy_weight, schedule_entropy_weight
from nnx_ppo.algorithms.heads import per_reward
from nnx_ppo.algorithms.iteration import iterate
from nnx_ppo.algorithms.metrics import compute_metrics
from nnx_ppo.algorithms.objective import estimate_from_rollout, loss_settings
from nnx_ppo.algorithms.optimizers import (
    AdaptiveRate,
    configured_optimizer,
    given_optimizer,
    last_learning_rate,
    make_optimizer,
)
from nnx_ppo.algorithms.ppo import new_training_state
from nnx_ppo.algorithms.rollout import collect
from nnx_ppo.algorithms.updates import learn
from nnx_ppo.core import EpisodeWrapper
from nnx_ppo.core.testing import Endless, FollowTarget, TwoHands
from nnx_ppo.networks.adapter import PPOAdapter
from nnx_ppo.networks.containers import Sequential
from nnx_ppo.networks.feedforward import Dense
from nnx_ppo.networks.recurrent import LSTM
from nnx_ppo.networks.sampling_layers import ActionSampler, EntropyWeight, NormalTanhSampler
from nnx_ppo.networks.variational import AR1VariationalBottleneck

from .helpers import CountingNetwork, IntegerEnv, lstm_network, mlp_network
from .test_metrics import ROLLOUT
from .test_training import assert_same_parameters, hands_network

ENV = EpisodeWrapper(FollowTarget(length=7), 5)


def noisy_network(seed=0):
    """Memory of every kind: an LSTM, keys in the carry, floats that are NaN after a reset."""
    rngs = nnx.Rngs(seed)
    actor = Sequential([Dense(2, 2, rngs), NormalTanhSampler(rngs, entropy_weight=1e-2)])
    adapter = PPOAdapter(action=actor, value=Dense(2, 1, rngs))
    return Sequential(
        [LSTM(1, 4, rngs), Dense(4, 4, rngs), AR1VariationalBottleneck(2, rngs), adapter]
    )


def after_one_iteration():
    """Stops then; the first question comes before it."""
    return iter([False, True]).__next__


def run(network, stop_fn=None, initial_state=None, optimizer=None, **fields):
    """Train for three iterations of 48 steps, or fewer."""
    defaults = {"n_envs": 8, "rollout_length": 6, "n_epochs": 2, "n_minibatches": 2}
    ppo = PPOConfig(**{**defaults, "total_steps": 144, **fields})
    return train_ppo(
        ENV,
        network,
        TrainConfig(ppo=ppo, eval=EvalConfig(enabled=False), seed=3),
        stop_fn=stop_fn,
        initial_state=initial_state,
        optimizer=optimizer,
    )


# Learning rate


def test_the_rate_follows_the_divergence():
    # Target 0.1. Above 0.2: divided by 1.5. Below 0.05: times 1.5. Between, or NaN: as it is.
    # 0.3 → 0.2 → 0.3 → 0.3 → 0.3; bounded by 0.25 from below and 0.4 from above.
    adaptive = AdaptiveRate(target=0.1, minimum=0.1, maximum=0.4)
    rate, found = jnp.asarray(0.3), []
    for divergence in (0.3, 0.01, 0.1, jnp.nan, 0.0, 0.0):
        rate = adaptive.after(rate, jnp.asarray(divergence))
        found.append(float(rate))
    np.testing.assert_allclose(found, [0.2, 0.3, 0.3, 0.3, 0.4, 0.4], rtol=1e-6)


def test_the_optimisers_state_has_the_same_tree_whatever_the_settings():
    network = CountingNetwork()
    settings = [
        {},
        {"gradient_clipping": 1.0, "weight_decay": 0.1},
        {"final_learning_rate": 0.0},
        {"learning_rate": optax.cosine_decay_schedule(1e-3, 10)},
        {"adaptive_kl": 0.01},
    ]
    states = [nnx.state(configured_optimizer(network, PPOConfig(**fields))) for fields in settings]
    assert len({jax.tree.structure(state) for state in states}) == 1
    assert len({str(jax.tree.map(lambda leaf: leaf.dtype, state)) for state in states}) == 1


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"gradient_clipping": 1.0}, "gradient_clipping=1.0 has no effect with the optimizer"),
        ({"weight_decay": 0.1}, "weight_decay=0.1 has no effect"),
        ({"adaptive_kl": 0.1}, "adaptive_kl=0.1 has no effect"),
        ({"final_learning_rate": 0.1}, "final_learning_rate=0.1 has no effect"),
        ({"learning_rate": lambda n: 0.1}, "learning_rate=a schedule has no effect"),
    ],
)
def test_an_optimiser_handed_in_takes_no_settings(fields, message):
    with pytest.raises(ValueError, match=message):
        run(mlp_network(), optimizer=optax.sgd(0.1), **fields)


@pytest.mark.usefixtures("unchecked")
def test_an_optimiser_of_another_kind_is_refused():
    with pytest.raises(TypeError, match=r"must be an optax.GradientTransformation.*got function"):
        run(mlp_network(), optimizer=optax.sgd)
    with pytest.raises(ValueError, match="gradient_clipping=1.0 has no effect"):
        new_training_state(ENV, mlp_network(), 2, 0, 1e-4, 1.0, optimizer=optax.sgd(0.1))


def test_an_optimiser_that_needs_more_than_gradients_is_refused():
    plateau = optax.chain(optax.sgd(0.1), optax.contrib.reduce_on_plateau())
    with pytest.raises(TypeError) as caught:
        run(mlp_network(), optimizer=plateau)
    assert any("trial of optimizer.update" in note for note in caught.value.__notes__)
    every_second: Any = optax.MultiSteps(optax.sgd(0.1), 2)
    given_optimizer(mlp_network(), every_second.gradient_transformation(), {})


@pytest.mark.usefixtures("unchecked")
def test_steps_of_several_gradients_are_handed_in_as_a_transformation():
    every_second: Any = optax.MultiSteps(optax.sgd(0.1), 2)
    with pytest.raises(TypeError, match=r"got MultiSteps. Hand in its .gradient_transformation"):
        given_optimizer(mlp_network(), every_second, {})


def test_a_schedule_must_give_a_number():
    with pytest.raises(ValueError, match="learning_rate is a schedule and must return one number"):
        run(mlp_network(), learning_rate=lambda n: jnp.ones(2))


def test_an_optimiser_handed_in_trains_stops_and_resumes():
    """Plain gradient descent whose rate is 0 after its first update.

    A target that any movement exceeds ends the first iteration after that update of 4; from then
    on nothing moves, so nothing is left out.
    """
    network, other = mlp_network(), mlp_network(seed=9)
    optimizer = optax.sgd(optax.piecewise_constant_schedule(1e-1, {1: 0.0}))
    first = run(network, stop_fn=after_one_iteration(), optimizer=optimizer, target_kl=1e-7)
    assert first.final_metrics["losses/update_rate"] == 0.25
    assert first.training_state.optimizer.step[...] == 1
    rest = run(other, initial_state=first.training_state, optimizer=optimizer, target_kl=1e-7)
    assert rest.final_metrics["losses/update_rate"] == 1.0
    assert rest.training_state.optimizer.step[...] == 1 + 2 * 4
    assert_same_parameters(network, other)
    start = jax.tree.leaves(nnx.state(mlp_network(), nnx.Param))
    learned = jax.tree.leaves(nnx.state(network, nnx.Param))
    assert any((a != b).any() for a, b in zip(start, learned, strict=True))


# Divergence


class Falling(CountingNetwork):
    """A single weight; the losses below let it fall by 1 with each update."""

    def __init__(self):
        self.scale = nnx.Param(jnp.zeros(()))


def fall(optimizer, n_epochs, **settings):
    """Learn from one environment; the divergence is how far the weight has fallen."""
    network = Falling()
    optimizer = optimizer(network)

    def loss(network, state, part):
        weight = network.scale[...]
        return weight, {"divergence": jnp.abs(weight), "losses/weight": weight}

    data = (jnp.zeros(1), jnp.zeros((1, 1)))
    key = jax.random.key(0)
    found = learn(
        network, optimizer, data, loss, key, n_epochs=n_epochs, n_minibatches=1, **settings
    )
    return network, optimizer, found


def descent(network):
    return nnx.Optimizer(network, optax.with_extra_args_support(optax.adam(1.0)), wrt=nnx.Param)


def test_target_kl_leaves_out_the_rest():
    # Adam with rate 1 takes steps of 1 here. Weights 0, −1, −2, −3: the fourth update would start
    # from a divergence of 3 > 2.5; three take place.
    network, optimizer, found = fall(descent, 6, max_divergence=2.5)
    np.testing.assert_array_equal(found["taken"], [True] * 3 + [False] * 3)
    np.testing.assert_allclose(found["losses/weight"][:3], [0.0, -1.0, -2.0], rtol=1e-5)
    shorter, other, _ = fall(descent, 3)
    np.testing.assert_array_equal(network.scale[...], shorter.scale[...])
    jax.tree.map(np.testing.assert_array_equal, nnx.state(optimizer), nnx.state(other))


def test_the_first_update_always_takes_place():
    def nan(network):
        network.scale[...] = jnp.asarray(jnp.nan)
        return descent(network)

    *_, found = fall(nan, 3, max_divergence=1.0)
    np.testing.assert_array_equal(found["taken"], [True, False, False])


def test_the_rate_adapts_from_the_second_update_on():
    # Steps are as large as the rate. Target 1: below 0.5 times 1.5, above 2 divided by 1.5.
    # Update 1, nothing known:     rate 0.4, weight −0.4
    # Update 2, divergence 0.4:    rate 0.6, weight −1.0
    # Update 3, divergence 1:      rate 0.6, weight −1.6
    # Update 4, divergence 1.6:    rate 0.6, weight −2.2
    # Update 5, divergence 2.2:    rate 0.4, weight −2.6
    adaptive = AdaptiveRate(1.0, 1e-3, 10.0)
    network, optimizer, _ = fall(
        lambda network: make_optimizer(network, 0.4, adaptive=adaptive), n_epochs=5
    )
    np.testing.assert_allclose(network.scale[...], -2.6, rtol=1e-5)
    rate = last_learning_rate(optimizer)
    assert rate is not None and last_learning_rate(descent(network)) is None
    np.testing.assert_allclose(rate, 0.4, rtol=1e-6)


def test_an_adapted_rate_goes_on_and_any_other_does_not():
    # Nothing is known of one update, so it keeps the rate that adaptation starts from: the
    # settings' until a rate was adapted, then that one, until settings take over again.
    network, gradient = Falling(), nnx.State({"scale": nnx.Param(jnp.ones(()))})
    adaptive = AdaptiveRate(1.0, 1e-3, 10.0)

    def rate_after(state, settings, **known):
        optimizer = make_optimizer(network, **settings)
        nnx.update(optimizer, state)
        optimizer.update(network, gradient, **known)
        return last_learning_rate(optimizer), nnx.state(optimizer)

    state = nnx.state(make_optimizer(network, 0.4))
    found = []
    for settings, known in (
        ({"learning_rate": 0.4}, {}),
        ({"learning_rate": 0.2, "adaptive": adaptive}, {"divergence": jnp.asarray(jnp.nan)}),
        ({"learning_rate": 0.1, "adaptive": adaptive}, {"divergence": jnp.asarray(jnp.nan)}),
        ({"learning_rate": 0.1}, {}),
        ({"learning_rate": 0.3, "adaptive": adaptive}, {"divergence": jnp.asarray(jnp.nan)}),
    ):
        rate, state = rate_after(state, settings, **known)
        found.append(rate)
    np.testing.assert_allclose(found, [0.4, 0.2, 0.2, 0.1, 0.3], rtol=1e-6)


def test_a_linear_rate_ends_where_it_should_whatever_is_left_out():
    """Only the first of 4 updates of each of 3 iterations takes place, from 0.01 towards 0."""
    fields = {"learning_rate": 1e-2, "final_learning_rate": 0.0, "target_kl": 1e-9}
    result = run(mlp_network(), **fields)
    assert result.final_metrics["losses/update_rate"] == 0.25
    # The last iteration starts after 96 of 144 steps.
    np.testing.assert_allclose(result.final_metrics["learning_rate"], 1e-2 / 3, rtol=1e-5)


# Metrics


def test_metrics_count_only_updates_that_took_place():
    # Of 1, 3 and 100 the first two: mean 2, standard deviation 1; 25th percentile 1.5.
    losses = {
        "losses/actor": jnp.asarray([1.0, 3.0, 100.0]),
        "losses/clipping_fraction": jnp.asarray([[True], [False], [True]]),
        "losses/ratio_error": jnp.asarray([0.5, 9.0, 9.0]),
    }
    taken = jnp.asarray([True, True, False])
    metrics = compute_metrics(losses, ROLLOUT, LoggingLevel.LOSSES, None, taken)
    assert metrics["losses/actor/mean"] == 2.0 and metrics["losses/actor/std"] == 1.0
    assert metrics["losses/clipping_fraction"] == 0.5
    assert metrics["losses/ratio_error"] == 0.5
    np.testing.assert_allclose(metrics["losses/update_rate"], 2 / 3, rtol=1e-6)
    metrics = compute_metrics(losses, ROLLOUT, LoggingLevel.NONE, (25,), taken)
    assert metrics["losses/actor/p25"] == 1.5 and metrics["losses/ratio_error"] == 0.5
    assert "losses/update_rate" not in metrics


def test_percentiles_do_not_hide_nan():
    losses = {"losses/actor": jnp.asarray([1.0, jnp.nan, 3.0])}
    taken = jnp.asarray([True, True, False])
    metrics = compute_metrics(losses, ROLLOUT, LoggingLevel.NONE, (50,), taken)
    assert np.isnan(metrics["losses/actor/p50"])


# Entropy


def test_the_weight_of_the_entropy_follows_its_schedule():
    # From 0.4 to 0.1 over 100 steps: 0.25 halfway, and 0.1 from the end on.
    network = hands_network()
    config = PPOConfig(total_steps=100, entropy_weight=0.4, final_entropy_weight=0.1)
    for steps, expected in ((0.0, 0.4), (50.0, 0.25), (100.0, 0.1), (150.0, 0.1)):
        schedule_entropy_weight(network, config, jnp.asarray(steps))
        weights = jax.tree.leaves(nnx.state(network, EntropyWeight))
        np.testing.assert_allclose(weights, [expected] * 2, rtol=1e-6)
    config = PPOConfig(entropy_weight=lambda steps: 1e-3 * steps)
    schedule_entropy_weight(network, config, jnp.asarray(7.0))
    np.testing.assert_allclose(weights_of(network), [7e-3] * 2, rtol=1e-6)
    with pytest.raises(ValueError, match="networks has no EntropyWeight"):
        check_entropy_weight(CountingNetwork(), config)


def test_a_sampler_without_a_weight_is_named():
    class Weightless(ActionSampler):
        def __call__(self, state, mean_and_std, rollout_extras=None):
            raise NotImplementedError

    samplers: Any = [NormalTanhSampler(nnx.Rngs(0), 0.1), Weightless()]
    with pytest.raises(ValueError, match="the Weightless at layers/1 has no EntropyWeight"):
        check_entropy_weight(Sequential(samplers), PPOConfig(entropy_weight=0.1))


def weights_of(network):
    return jax.tree.leaves(nnx.state(network, EntropyWeight))


# Discounts


def test_discounts_by_name():
    rewards = {"arm": {"left": 0, "right": 0}, "leg": 0}
    found = per_reward("γ", {"leg": 0.5, "arm/left": 0.9, "arm/right": 0.8}, rewards)
    assert found == {"arm": {"left": 0.9, "right": 0.8}, "leg": 0.5}
    assert per_reward("γ", 0.9, {"a": 0, "b": 0}) == {"a": 0.9, "b": 0.9}


@pytest.mark.parametrize(
    ("env", "make", "discounts", "message"),
    [
        (TwoHands(), hands_network, {"left": 0.9}, r"expected \['left', 'right'\], got \['left'\]"),
        (ENV, mlp_network, {"left": 0.9}, "the environment's reward is one array without names"),
    ],
)
def test_discounts_of_other_heads_are_refused(env, make, discounts, message):
    config = TrainConfig(ppo=PPOConfig(discounting_factor=discounts))
    with pytest.raises(ValueError, match=message):
        train_ppo(env, make(), config)


# Windows and chunks

SMALL = PPOConfig(n_envs=4, rollout_length=6, n_epochs=2, n_minibatches=2)


def counted_window(keep=()):
    """Five steps of two environments whose episodes last three; the carry is the age."""
    env, network = Endless(max_len=3), CountingNetwork()
    states = jax.vmap(env.reset)(jax.random.split(jax.random.key(0), 2))
    carry = network.initialize_state(2)
    return network, collect(env, states, network, carry, 5, jax.random.key(1), keep=keep)


def test_the_carries_that_are_kept_are_those_before_the_steps():
    # Ages before the steps: 0 1 2 0 1.
    _, window = counted_window(keep=(0, 2, 3, 4))
    np.testing.assert_array_equal(window.kept, [[0.0] * 2, [2.0] * 2, [0.0] * 2, [1.0] * 2])
    assert counted_window()[1].kept is None


def test_advantages_of_the_window():
    # V = carry + observation (age/3) = 4/3·age, reward 1, γ = 0.9, λ = 0: A = δ. Ages 0 1 2 0 1,
    # then 2 at the bootstrap; the third step is cut and goes on from age 3, worth 4.
    # A = 1 + 0.9·V' − V. Targets are A + V.
    network, window = counted_window()
    config = PPOConfig(
        gae_lambda=0.0,
        discounting_factor=0.9,
        normalize_advantages=False,
        advantages="window",
    )
    end = (network, window.network_state, window.rollout)
    found = estimate_from_rollout(*end, loss_settings(config))
    values = np.array([0.0, 4 / 3, 8 / 3, 0.0, 4 / 3])
    targets = 1 + 0.9 * np.array([4 / 3, 8 / 3, 4.0, 4 / 3, 8 / 3])
    np.testing.assert_allclose(found.targets[:, 0], targets, rtol=1e-6)
    np.testing.assert_allclose(found.advantages[:, 1], targets - values, rtol=1e-5)
    np.testing.assert_array_equal(found.per_action, found.advantages)
    config = PPOConfig(
        gae_lambda=0.0,
        discounting_factor=0.9,
        advantages="window",
        advantage_normalization="window",
    )
    found = estimate_from_rollout(*end, loss_settings(config))
    raw = targets - values
    expected = (raw - raw.mean()) / raw.std()
    np.testing.assert_allclose(found.per_action[:, 0], expected, rtol=1e-4)


def test_no_ratio_moves_in_chunks_while_no_weight_does():
    """With a learning rate of 0, over windows that begin in mid-episode, with short episodes.

    Of chunks of 2 steps with a burn-in of 3, the first has none, the second 2 steps, the third 3.
    """
    env = IntegerEnv(low=1, high=4)
    state = new_training_state(env, noisy_network(), 4, seed=0, learning_rate=0.0)
    config = dataclasses.replace(
        SMALL,
        chunk_length=2,
        burn_in=3,
        advantages="window",
        clip_range=1e-4,
        logging_level=LoggingLevel.ACTOR_EXTRA,
    )
    step = nnx.jit(lambda state: iterate(env, state, config))
    for _ in range(2):
        state, metrics = step(state)
        assert metrics["losses/clipping_fraction"] == 0.0
        assert metrics["losses/ratio_error"] < 1e-4
        assert metrics["losses/carry_drift"] < 1e-5


def test_chunks_as_long_as_the_window_are_the_window():
    networks = [lstm_network(), lstm_network()]
    run(networks[0], advantages="window", stop_fn=after_one_iteration())
    run(networks[1], advantages="window", chunk_length=6, stop_fn=after_one_iteration())
    assert_same_parameters(*networks)


# All at once


@pytest.mark.slow
def test_everything_at_once_resumes_exactly():
    """Three iterations at a stretch, under JAX's check of keys, against one and two more."""
    traced = []

    def entropy_weight(steps):
        traced.append(steps)
        return 1e-2 * optax.cosine_decay_schedule(1.0, 144)(steps)

    fields = {
        "adaptive_kl": 1e-4,
        "learning_rate": 1e-3,
        "entropy_weight": entropy_weight,
        "value_clip_range": 0.2,
        "huber_delta": 1.0,
        "advantages": "window",
        "advantage_normalization": "window",
        "chunk_length": 2,
        "burn_in": 3,
        "logging_level": LoggingLevel.ALL & ~LoggingLevel.THROUGHPUT,
        "logging_percentiles": (50,),
    }
    through, network, other = noisy_network(), noisy_network(), noisy_network(seed=9)
    with jax.debug_key_reuse(True):
        whole = run(through, **fields)
    # Once when the schedule is checked, once when the iteration is compiled.
    assert len(traced) == 2
    first = run(network, stop_fn=after_one_iteration(), **fields)
    rest = run(other, initial_state=first.training_state, **fields)
    assert (first.total_iterations, rest.total_iterations) == (1, 2)
    assert_same_parameters(through, other)
    states = [nnx.state(result.training_state.optimizer) for result in (whole, rest)]
    jax.tree.map(np.testing.assert_array_equal, *states)
    metrics = whole.final_metrics
    assert np.isfinite(list(metrics.values())).all()
    assert metrics["losses/ratio_error"] < 1e-4 and metrics["losses/carry_drift"] > 0.0
    assert metrics["learning_rate"] != 1e-3
    # The last iteration starts after 96 of 144 steps: (1 + cos(2π/3))/2 = 1/4.
    np.testing.assert_allclose(weights_of(through), [2.5e-3], rtol=1e-5)
