"""What a window stores, and replays in segments that are computed anew for the gradient."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from nnx_ppo.algorithms import (
    DistillationConfig,
    LoggingLevel,
    PPOConfig,
    imitation,
    iteration,
    lessons,
    new_training_state,
)
from nnx_ppo.algorithms.distillation import new_distillation_state
from nnx_ppo.algorithms.imitation import imitation_loss
from nnx_ppo.algorithms.objective import loss_settings
from nnx_ppo.algorithms.replay import carry_drift, replay, replay_error
from nnx_ppo.algorithms.rollout import collect
from nnx_ppo.core.testing import AnalyticState, Endless
from nnx_ppo.networks import (
    LSTM,
    Delay,
    Dense,
    Normalizer,
    NormalTanhSampler,
    PPOAdapter,
    Sequential,
)

FEATURES = 7
TIME, BATCH = 5, 3


class Wide:
    """Observations of 7 features and metrics of 11; no episode ends."""

    action_size = 1

    def reset(self, rng):
        obs = jax.random.normal(rng, (FEATURES,))
        zero = jnp.zeros(())
        return AnalyticState(obs, zero, zero, {"rng": rng}, {"far": jnp.zeros(11)})

    def step(self, state, action):
        obs = 0.9 * state.obs + action.sum()
        metrics = {"far": jnp.concatenate([obs, obs[:4]])}
        return state.replace(obs=obs, reward=obs[0], metrics=metrics)


def network(features=FEATURES, seed=0):
    """A network with memory, a delay, statistics and random streams."""
    rngs = nnx.Rngs(seed)
    action = Sequential([Dense(4, 2, rngs), NormalTanhSampler(rngs, 1e-2)])
    memory = [Normalizer(features), Delay(jnp.zeros(features), k_steps=2), LSTM(features, 4, rngs)]
    return Sequential([*memory, PPOAdapter(action=action, value=Dense(4, 1, rngs))])


def stacked(jaxpr, shape):
    """How many arrays of a shape the scans of a traced function put out."""
    scans = [eqn for eqn in jaxpr.jaxpr.eqns if eqn.primitive.name == "scan"]
    return sum(var.aval.shape == shape for eqn in scans for var in eqn.outvars)


@pytest.mark.parametrize("lean", [False, True])
def test_observations_are_stored_once(lean):
    def run(key):
        states, net = jax.vmap(Wide().reset)(jax.random.split(key, BATCH)), network()
        carry = net.initialize_state(BATCH)
        return collect(Wide(), states, net, carry, TIME, jax.random.key(1), lean=lean)

    found = stacked(jax.make_jaxpr(run)(jax.random.key(0)), (TIME, BATCH, FEATURES))
    # Observations, next observations, and what the normaliser emits for its statistics; against
    # one that is all of them.
    assert found == (1 if lean else 3)


def test_a_lean_window_is_the_same_window():
    def window(lean):
        net, keys = network(), jax.random.split(jax.random.key(0), BATCH)
        states, carry = jax.vmap(Wide().reset)(keys), net.initialize_state(BATCH)
        return collect(Wide(), states, net, carry, TIME, jax.random.key(1), lean=lean)

    whole, lean = window(False), window(True)
    last = jax.tree.map(lambda leaf: leaf[-1:], whole.rollout.next_obs)
    assert_close(lean, whole._replace(rollout=whole.rollout.replace(next_obs=last)), 0.0)


@pytest.mark.parametrize("lean", [False, True])
def test_a_distillation_stores_observations_once(lean):
    def run(key):
        teacher, student = network(seed=0), network(seed=1)
        state = new_distillation_state(Wide(), teacher, student, BATCH, seed=0)
        carry = (state.student_states, state.teacher_states, state.env_states)
        return lessons.unroll(
            Wide(), teacher, student, carry, TIME, key, bootstrap=False, lean=lean
        )

    found = stacked(jax.make_jaxpr(run)(jax.random.key(0)), (TIME, BATCH, FEATURES))
    # Beside the three, what the teacher's normaliser emits.
    assert found == (1 if lean else 4)


LONG, SEGMENT = 11, 4  # two whole segments, and one of three steps


@pytest.fixture(scope="module")
def window():
    """A window of an environment in which episodes end every 5 steps, and its first carry."""
    env, net = Endless(max_len=5), network(features=1)
    state = new_training_state(env, net, BATCH, seed=0)
    collected = collect(env, state.env_states, net, state.network_states, LONG, jax.random.key(1))
    assert collected.rollout.done.any()
    return state.network_states, collected


def outcome(window, remat_length):
    """Loss, gradient, final carry and variables of a replay."""
    carry, collected = window
    rollout = collected.rollout
    graphdef, params, variables = nnx.split(network(features=1), nnx.Param, ...)

    @jax.jit
    def found(params):
        def loss(params):
            net = nnx.merge(graphdef, params, variables, copy=True)
            inputs = (rollout.obs, rollout.done, rollout.rollout_extras)
            out = replay(net, carry, *inputs, remat_length)
            weights = jnp.arange(1.0, LONG + 1)[:, None]
            terms = (
                out.output.loglikelihoods,
                out.output.value_estimates**2,
                out.regularization_loss,
            )
            value = sum((weights * term).sum() for term in terms)
            return value, (out, nnx.state(net, nnx.Not(nnx.Param)))

        return jax.value_and_grad(loss, has_aux=True)(params)

    return found(params)


def assert_close(found, expected, tolerance=1e-5):
    """Compare trees of arrays and keys."""

    def compare(new, old):
        if jnp.issubdtype(new.dtype, jax.dtypes.prng_key):
            new, old = jax.random.key_data(new), jax.random.key_data(old)
        np.testing.assert_allclose(new, old, rtol=tolerance, atol=tolerance)

    jax.tree.map(compare, found, expected)


def test_segments_give_values_gradients_and_streams_of_the_whole_window(window):
    expected = outcome(window, None)
    (_, (_, variables)), gradient = expected
    counts = [v for p, v in jax.tree.leaves_with_path(variables) if "count" in str(p)]
    assert LONG in [int(count) for count in counts]  # one key for each step
    assert all(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(gradient))
    assert_close(outcome(window, SEGMENT), expected)


def test_a_segment_as_long_as_the_window_is_the_window(window):
    jax.tree.map(np.testing.assert_array_equal, outcome(window, LONG)[1], outcome(window, None)[1])


def test_watching_metrics_do_not_depend_on_segments(window):
    carry, collected = window
    net, rollout = network(features=1), collected.rollout

    @jax.jit
    def watched():
        end = collected.network_state
        return (
            replay_error(net, carry, rollout, SEGMENT),
            carry_drift(net, carry, rollout, end, SEGMENT),
        )

    assert max(watched()) < 1e-4


def test_segments_need_less_memory():
    time, batch = 256, 4
    net = Sequential([LSTM(1, 16, nnx.Rngs(0)), Dense(16, 1, nnx.Rngs(1))])
    graphdef, params = nnx.split(net)
    xs, done = jnp.ones((time, batch, 1)), jnp.zeros((time, batch), bool)

    def temporary(remat_length):
        def loss(params):
            live = nnx.merge(graphdef, params, copy=True)
            state = live.initialize_state(batch)
            return replay(live, state, xs, done, None, remat_length).output.sum()

        found = jax.jit(jax.grad(loss)).lower(params).compile().memory_analysis()
        assert found is not None
        return found.temp_size_in_bytes

    # 16 segments of 16 steps: the activations of one, and 16 carries, instead of 256 steps'.
    assert temporary(16) < temporary(None) / 5


def test_ppo_learns_the_same_from_segments():
    whole = PPOConfig(
        n_envs=4, rollout_length=12, n_epochs=1, n_minibatches=2, learning_rate=1e-2,
        advantages="window", chunk_length=6, burn_in=2, logging_level=LoggingLevel.ACTOR_EXTRA,
    )  # fmt: skip

    def learned(config):
        state = new_training_state(Endless(max_len=5), network(features=1), 4, 0, 1e-2)
        graphdef, variables = nnx.split((state.networks, state.optimizer))
        data = state.replace(networks=None, optimizer=None)

        @jax.jit
        def run(variables, data):
            networks, optimizer = nnx.merge(graphdef, variables, copy=True)
            state = data.replace(networks=networks, optimizer=optimizer)
            state, metrics = iteration.iterate(Endless(max_len=5), state, config)
            return nnx.state(state.networks), metrics

        return run(variables, data)

    assert_close(learned(dataclasses.replace(whole, remat_length=4)), learned(whole))


def test_distillation_learns_from_segments(window):
    teacher, student = network(features=1), network(features=1, seed=1)
    config = DistillationConfig(n_envs=BATCH, rollout_length=8, n_minibatches=1, remat_length=3)
    state = new_distillation_state(Endless(max_len=3), teacher, student, BATCH, seed=0)

    def rematerializations(config):
        def run(key):
            live, optimizer = nnx.merge(*nnx.split((student, state.optimizer)), copy=True)
            fresh = state.replace(student=live, optimizer=optimizer, rng_key=key)
            return imitation.iterate(Endless(max_len=3), teacher, fresh, config)[1]

        return str(jax.make_jaxpr(run)(state.rng_key)).count("remat")

    whole = dataclasses.replace(config, remat_length=None)
    assert rematerializations(config) > rematerializations(whole)

    carry = (state.student_states, state.teacher_states, state.env_states)
    *_, rollout = lessons.unroll(
        Endless(max_len=3), teacher, student, carry, 8, jax.random.key(1), bootstrap=False
    )
    graphdef, params, variables = nnx.split(student, nnx.Param, ...)

    def gradient(remat_length):
        def loss(params):
            live = nnx.merge(graphdef, params, variables, copy=True)
            level = LoggingLevel.NONE
            return imitation_loss(live, state.student_states, rollout, level, remat_length)[0]

        return jax.jit(jax.value_and_grad(loss))(params)

    assert_close(gradient(3), gradient(None))
    assert loss_settings(config).remat_length == 3
