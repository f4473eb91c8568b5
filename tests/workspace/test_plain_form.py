"""Training is that of the plain form, which replays step by step and resets everything."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from plain_form import Stepwise, plain_form

from nnx_ppo.algorithms import (
    DistillationConfig,
    DistillationTrainConfig,
    EvalConfig,
    LoggingLevel,
    PPOConfig,
    TrainConfig,
    new_training_state,
    train_distillation,
    train_ppo,
)
from nnx_ppo.algorithms.bookkeeping import iteration_keys
from nnx_ppo.algorithms.objective import loss_settings, objective
from nnx_ppo.algorithms.rollout import collect
from nnx_ppo.algorithms.updates import learn
from nnx_ppo.core import EpisodeWrapper, Wrapper
from nnx_ppo.core.testing import FollowTarget
from nnx_ppo.networks import (
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
    make_mlp_actor_critic,
)

ITERATIONS = 10


class EndsByMissing(Wrapper):
    """Ends an episode where the action misses the target by far."""

    def step(self, state, action):
        state = self.env.step(state, action)
        missed = state.metrics["error"] > 0.4
        return state.replace(done=jnp.where(missed, 1.0, state.done).astype(float))


def environment():
    """Episodes that end by a miss, or by time limit in four steps."""
    return EpisodeWrapper(EndsByMissing(FollowTarget(length=100)), 4)


def mlp():
    return make_mlp_actor_critic(1, 1, [6], [6], nnx.Rngs(0))


def lstm():
    """An LSTM that actor and critic share."""
    rngs = nnx.Rngs(0)
    actor = Sequential([Dense(6, 2, rngs), NormalTanhSampler(rngs, entropy_weight=1e-2)])
    adapter = PPOAdapter(action=actor, value=Dense(6, 1, rngs))
    return Sequential([Normalizer(1), LSTM(1, 6, rngs), adapter])


def graph():
    """Populations that loop with delays, one of them through autoregressive noise."""
    rngs = nnx.Rngs(0)
    noisy = Sequential([Dense(4, 8, rngs), AR1VariationalBottleneck(4, rngs, kl_weight=0.1)])
    populations = PopulationGraph(rngs)
    populations.add_input("sensors", 1, input_from="obs")
    populations.add_population("inner", 4, activation=jnp.tanh)
    populations.add_output("motor", 2)
    populations.add_output("critic", 1)
    populations.connect("sensors", "inner")
    populations.connect("inner", "inner", transform=noisy, delay=1)
    populations.connect("inner", "motor")
    populations.connect("sensors", "motor", delay=2)
    populations.connect("inner", "critic")
    populations.finalize()
    sampler = NormalTanhSampler(rngs, entropy_weight=1e-2)
    adapter = PPOAdapter(
        action=Sequential([Filter({"motor": "motor"}), Flattener(), sampler]),
        value=Sequential([Filter({"critic": "critic"}), Flattener()]),
    )
    return Sequential([Normalizer(1), Filter({"obs": lambda obs: obs}), populations, adapter])


NETWORKS = {"mlp": mlp, "lstm": lstm, "graph": graph}


def in_double_precision(network):
    """Make a network's floats those of 64 bits, its parameters and statistics."""

    def double(leaf):
        return leaf.astype(jnp.float64) if jnp.issubdtype(leaf.dtype, jnp.float32) else leaf

    nnx.update(network, jax.tree.map(double, nnx.state(network)))
    return network


def as_numpy(leaf):
    """An array as numpy's; keys as their data."""
    is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(leaf) if is_key else leaf)


def distance(found, expected):
    """Norm of the difference of two arrays or trees, relative to that of the second."""
    pairs = [
        (as_numpy(a).astype(np.float64), as_numpy(b).astype(np.float64))
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    ]
    difference = np.sqrt(sum(np.square(a - b).sum() for a, b in pairs))
    return difference / np.sqrt(sum(np.square(b).sum() for _, b in pairs))


def assert_same_state(found, expected):
    """Floats are equal within 1e-9 of each array's norm, whatever else is in the state is equal."""
    found, expected = jax.tree.leaves_with_path(found), jax.tree.leaves_with_path(expected)
    doubles = 0
    for (path, a), (_, b) in zip(found, expected, strict=True):
        a, b = as_numpy(a), as_numpy(b)
        assert a.dtype == b.dtype
        where = jax.tree_util.keystr(path)
        if not np.issubdtype(a.dtype, np.floating):
            np.testing.assert_array_equal(a, b, err_msg=where)
            continue
        doubles += a.dtype == np.float64
        np.testing.assert_array_equal(np.isnan(a), np.isnan(b), err_msg=where)
        a, b = np.nan_to_num(a), np.nan_to_num(b)
        assert np.linalg.norm(a - b) <= 1e-9 * np.linalg.norm(b), where
    assert doubles


def assert_same_metrics(found, expected):
    """Metrics of all iterations are equal within 1e-9; those that are 0 up to rounding, too."""
    assert len(found) == len(expected) == ITERATIONS
    for a, b in zip(found, expected, strict=True):
        assert a.keys() == b.keys()
        for name in a:
            if not name.startswith("throughput/"):
                np.testing.assert_allclose(a[name], b[name], rtol=1e-9, atol=1e-12, err_msg=name)


SHARED: dict[str, Any] = dict(
    n_envs=12,
    rollout_length=6,
    total_steps=ITERATIONS * 12 * 6,
    learning_rate=1e-2,
    n_epochs=2,
    n_minibatches=3,
    logging_level=LoggingLevel.ALL | LoggingLevel.ROLLOUT_OBS,
)


@pytest.mark.parametrize("name", NETWORKS)
def test_ten_iterations_in_double_precision(name):
    ppo = PPOConfig(**SHARED, gradient_clipping=1.0)
    config = TrainConfig(ppo=ppo, eval=EvalConfig(enabled=False))

    def train(network):
        logged = []
        result = train_ppo(
            environment(), network, config, log_fn=lambda metrics, _: logged.append(metrics)
        )
        state = result.training_state
        modules = (nnx.state(state.networks), nnx.state(state.optimizer))
        return (*modules, state.network_states, state.env_states, state.rng_key), logged

    with jax.enable_x64(True):
        fast, logged = train(in_double_precision(NETWORKS[name]()))
        with plain_form():
            plain, logged_of_plain = train(Stepwise(in_double_precision(NETWORKS[name]())))
    # Episodes ended both ways.
    for metrics in logged:
        assert 0.0 < metrics["rollout_batch/truncation_rate"] < metrics["rollout_batch/done_rate"]
    assert_same_state(fast, plain)
    assert_same_metrics(logged, logged_of_plain)


def test_ten_iterations_of_distillation_in_double_precision():
    settings = DistillationConfig(**SHARED, ppo_weight=0.5)
    config = DistillationTrainConfig(distillation=settings, eval=EvalConfig(enabled=False))

    def train(student, teacher):
        logged = []
        result = train_distillation(
            environment(),
            teacher,
            student,
            config,
            log_fn=lambda metrics, _: logged.append(metrics),
        )
        state = result.training_state
        modules = (nnx.state(state.student), nnx.state(state.optimizer))
        carries = (state.student_states, state.teacher_states)
        return (*modules, *carries, state.env_states, state.rng_key), logged

    with jax.enable_x64(True):
        fast, logged = train(in_double_precision(lstm()), in_double_precision(mlp()))
        with plain_form():
            student = Stepwise(in_double_precision(lstm()))
            plain, logged_of_plain = train(student, in_double_precision(mlp()))
    assert_same_state(fast, plain)
    assert_same_metrics(logged, logged_of_plain)


@pytest.mark.parametrize("name", NETWORKS)
def test_one_update_in_single_precision(name):
    """From the same state and rollout. A step of SGD of length 1 is the gradient itself."""
    env, n_envs, length = environment(), 16, 20
    network = NETWORKS[name]()
    state = new_training_state(env, network, n_envs, seed=0)
    settings = loss_settings(PPOConfig())

    @jax.jit
    def rollout(variables, carry, env_states, key):
        live = nnx.merge(nnx.graphdef(network), variables, copy=True)
        return collect(env, env_states, live, carry, length, key)

    keys = iteration_keys(state.rng_key)
    window = rollout(nnx.state(network), state.network_states, state.env_states, keys.reset)

    def change(network):
        before = nnx.state(network, nnx.Param)
        graphdef = nnx.graphdef(network)

        @jax.jit
        def update(variables):
            live = nnx.merge(graphdef, variables, copy=True)
            optimizer = nnx.Optimizer(live, optax.sgd(1.0), wrt=nnx.Param)
            learn(
                live,
                optimizer,
                (state.network_states, window.rollout),
                lambda networks, carry, part: objective(networks, carry, part, None, settings),
                keys.minibatches,
                n_epochs=1,
                n_minibatches=1,
            )
            return nnx.state(live, nnx.Param)

        after = update(nnx.state(network))
        return jax.tree.map(lambda new, old: new - old, after, before)

    fast, plain = change(network), change(Stepwise(network))
    assert distance(fast, plain) <= 1e-5
