"""What a training will cost, against numbers worked out by hand and against XLA's own."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from rich.console import Console

from nnx_ppo.algorithms import LoggingLevel, PPOConfig, TrainConfig, new_training_state
from nnx_ppo.algorithms.cli import main
from nnx_ppo.algorithms.cli.run_config import RunConfig, as_record
from nnx_ppo.algorithms.costs import count_flops, estimate_memory, traced_bytes
from nnx_ppo.algorithms.iteration import iterate
from nnx_ppo.algorithms.planning import available_memory, plan_training
from nnx_ppo.core.testing import AnalyticState
from nnx_ppo.networks import make_lstm_actor_critic, make_mlp_actor_critic

N, T, OBS = 6, 5, 3


class Three:
    """Three features, two actions; no episode ends."""

    action_size = 2

    def reset(self, rng):
        zero = jnp.zeros(())
        return AnalyticState(jnp.zeros(OBS), zero, zero, {"rng": rng}, {"far": jnp.zeros(50)})

    def step(self, state, action):
        return state.replace(obs=state.obs + action.sum(), reward=action.sum())


def mlp(normalize_obs=True):
    return make_mlp_actor_critic(OBS, 2, [4], [5], nnx.Rngs(0), normalize_obs=normalize_obs)


def ppo(**fields):
    return TrainConfig(
        ppo=PPOConfig(n_envs=N, rollout_length=T, n_epochs=2, n_minibatches=3, **fields)
    )


def planned(config, network=None, memory_bytes: int | None = 10**6):
    return plan_training(Three(), network or mlp(), config, memory_bytes=memory_bytes)


@pytest.fixture(scope="module")
def plan():
    with jax.numpy_rank_promotion("raise"):
        return planned(ppo())


def test_parameters_by_part(plan):
    # Actor: 3·4 + 4 weights and biases, and 4·4 + 4 for means and deviations of two actions;
    # critic: 3·5 + 5, and 5·1 + 1.
    parts = {part.path: (part.parameters, part.bytes) for part in plan.parts}
    assert parts == {"1/action": (36, 144), "1/value": (26, 104)}
    assert (plan.parameters, plan.parameter_bytes) == (62, 248)
    # Adam has two moments of each; beside them there are a few counters.
    assert 0 < plan.optimizer_bytes - 2 * 248 < 32


def test_operations(plan):
    # One sample: actor 2·(3·4 + 4·4) = 56, critic 2·(3·5 + 5·1) = 40.
    assert plan.rollout_flops == N * T * (56 + 40)
    # Its gradient: forward 96; as much again for the weights; and what goes back to each layer but
    # the first, which is 2·4·4 + 2·5·1 = 42. Twice, since there are two epochs. After the last
    # step the value is asked for once more.
    assert plan.learning_flops == 2 * N * (T * (96 + 96 + 42) + 40)
    assert plan.updates == 6


def test_bytes_of_a_window(plan):
    # Float32 each: 3 of the observation, which the normaliser's extras share; 2 raw actions,
    # 1 log-likelihood, 1 reward and 1 bootstrap value; the booleans done and truncated. The last
    # next observation once. Neither the actions nor the metrics are read.
    assert plan.window_bytes == N * T * (4 * (3 + 2 + 1 + 1 + 1) + 2) + N * 4 * OBS


def test_what_is_logged_is_stored(plan):
    level = LoggingLevel.LOSSES | LoggingLevel.ENV_METRICS
    logged = planned(ppo(logging_level=level))
    assert logged.window_bytes - plan.window_bytes == N * T * 4 * 50


def test_bytes_of_states(plan):
    # A key of 2 words, 3 features, reward, done, 50 metrics.
    key = traced_bytes(jax.random.key(0))
    assert plan.env_state_bytes == key + 4 * (3 + 1 + 1 + 50)
    assert plan.carry_bytes == 0
    lstm = make_lstm_actor_critic(OBS, 2, [4], [4], nnx.Rngs(0), lstm_features=8)
    # Two LSTMs of 8 units with two arrays each, and nothing else.
    assert planned(ppo(), lstm).carry_bytes == 2 * 2 * 8 * 4


def test_rematerialization_needs_less_and_computes_more():
    lstm = make_lstm_actor_critic(OBS, 2, [4], [4], nnx.Rngs(0), lstm_features=8)
    config = TrainConfig(ppo=PPOConfig(n_envs=64, rollout_length=256, n_minibatches=1))
    shorter = TrainConfig(
        ppo=PPOConfig(n_envs=64, rollout_length=256, n_minibatches=1, remat_length=16)
    )
    whole, segments = planned(config, lstm), planned(shorter, lstm)
    assert segments.learning_bytes < whole.learning_bytes / 5
    assert (segments.largest_rollout_length or 0) > (whole.largest_rollout_length or 0) > 0
    assert 1.2 < segments.learning_flops / whole.learning_flops < 1.5


@pytest.mark.parametrize("fields", [{}, dict(chunk_length=5, advantages="window", burn_in=2)])
def test_the_largest_windows_just_fit(fields):
    fields = {"n_envs": 256, "rollout_length": 10, "n_minibatches": 4, **fields}
    memory = 3 * 10**7
    plan = planned(TrainConfig(ppo=PPOConfig(**fields)), memory_bytes=memory)
    largest = {"n_envs": plan.largest_n_envs, "rollout_length": plan.largest_rollout_length}
    for name, value in largest.items():
        assert value % {"n_envs": 4, "rollout_length": fields.get("chunk_length", 1)}[name] == 0
        config = TrainConfig(ppo=PPOConfig(**{**fields, name: value}))
        found = planned(config, memory_bytes=memory).iteration_bytes
        # 65 % of the memory are to be used, and all but a step or a few environments are.
        np.testing.assert_allclose(found, 0.65 * memory, rtol=0.02)


def test_nothing_fits_into_little_memory():
    plan = planned(ppo(), memory_bytes=100)
    assert (plan.largest_n_envs, plan.largest_rollout_length) == (0, 0)


def test_unknown_memory(monkeypatch):
    monkeypatch.setattr("nnx_ppo.algorithms.planning.available_memory", lambda: None)
    plan = planned(ppo(), memory_bytes=None)
    assert plan.largest_n_envs is None and plan.memory_bytes is None
    assert "n_envs" not in shown(plan)


def test_the_memory_of_a_device_or_else_of_the_machine(monkeypatch):
    class Device:
        def __init__(self, statistics):
            self.memory_stats = lambda: statistics

    monkeypatch.setattr(jax, "local_devices", lambda: [Device({"bytes_limit": 7})])
    assert available_memory() == 7
    monkeypatch.setattr(jax, "local_devices", lambda: [Device(None)])
    assert (available_memory() or 0) > 2**28


def shown(plan):
    console = Console(width=100)
    with console.capture() as capture:
        console.print(plan)
    return capture.get()


def test_the_estimate_is_near_what_xla_reports():
    env, config = Three(), PPOConfig(n_envs=32, rollout_length=40, n_epochs=1, n_minibatches=2)
    network = make_mlp_actor_critic(OBS, 2, [64, 64], [64], nnx.Rngs(0), activation=nnx.swish)
    estimate = plan_training(env, network, TrainConfig(ppo=config)).iteration_bytes
    state = new_training_state(env, network, 32, seed=0)
    graphdef, variables = nnx.split((state.networks, state.optimizer))
    rest = state.replace(networks=None, optimizer=None)

    def iteration(variables, rest):
        networks, optimizer = nnx.merge(graphdef, variables, copy=True)
        state, metrics = iterate(env, rest.replace(networks=networks, optimizer=optimizer), config)
        after = nnx.state((state.networks, state.optimizer))
        return after, state.replace(networks=None, optimizer=None), metrics

    jitted = jax.jit(iteration, donate_argnums=1)
    found = jitted.lower(variables, rest).compile().memory_analysis()
    assert found is not None
    reported = found.argument_size_in_bytes + found.output_size_in_bytes
    reported += found.temp_size_in_bytes - found.alias_size_in_bytes
    assert 0.6 < estimate / reported < 1.6


def test_plan_training_changes_nothing_and_checks_its_arguments(unchecked):
    network = mlp()
    before = jax.tree.map(np.asarray, nnx.state(network, nnx.Not(nnx.RngState)))
    planned(ppo(), network)
    after = nnx.state(network, nnx.Not(nnx.RngState))
    jax.tree.map(np.testing.assert_array_equal, after, before)
    with pytest.raises(ValueError, match="memory_bytes=0 must be above 0"):
        planned(ppo(), memory_bytes=0)
    with pytest.raises(TypeError, match="config must be a TrainConfig, got PPOConfig"):
        planned(PPOConfig())
    with pytest.raises(ValueError, match="env.action_size=2"):
        planned(ppo(), make_mlp_actor_critic(OBS, 1, [4], [4], nnx.Rngs(0)))


def test_the_command_prints_a_plan_and_writes_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    arguments = ["train", "FollowTarget", "--ppo.n-envs=8", "--ppo.rollout-length=5"]
    assert main([*arguments, "--plan", "--plan-memory-gib=0.5"]) == 0
    printed = capsys.readouterr().out
    # The command's perceptron: actor 1·64+64 + 64·64+64 + 64·2+2, critic of width 128.
    assert "4,418" in printed and "512.0 MiB" in printed
    assert "one iteration of 8 × 5 steps" in printed
    assert not list(tmp_path.iterdir())
    with pytest.raises(SystemExit) as stop:
        main([*arguments, "--plan-memory-gib=0.5"])
    assert stop.value.code == 2
    assert "add --plan" in capsys.readouterr().err


def test_a_plan_is_no_setting_of_a_run():
    record = as_record(RunConfig("FollowTarget", plan=True, plan_memory_gib=2.0))
    assert "plan" not in json.dumps(record)


def flops(function, *shapes):
    return count_flops(jax.make_jaxpr(function)(*(jnp.ones(shape) for shape in shapes)))


def test_operations_of_products():
    assert flops(lambda a, b: a @ b, (2, 3), (3, 5)) == 2 * 2 * 3 * 5
    assert flops(jax.vmap(lambda a, b: a @ b), (7, 2, 3), (7, 3, 5)) == 7 * 60
    assert flops(lambda a, b: a @ b, (3,), (3,)) == 6

    def convolve(x, kernel):
        numbers = ("NHWC", "HWIO", "NHWC")
        return jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=numbers)

    # Each of 2·8·8·4 numbers is a sum of 3·3·5 products.
    assert flops(convolve, (2, 8, 8, 5), (3, 3, 5, 4)) == 2 * (2 * 8 * 8 * 4) * (3 * 3 * 5)


def test_operations_in_loops_branches_and_calls():
    square = jnp.ones((4, 4))
    one = 2 * 4**3

    def loop(x):
        return jax.lax.scan(lambda x, _: (x @ square, None), x, length=10)[0]

    assert flops(loop, (4, 4)) == 10 * one
    assert flops(jax.jit(loop), (4, 4)) == 10 * one
    # Forward and backward; the constant needs no gradient. Recomputed: forward once more, but for
    # the sum, which does not depend on the products' values.
    assert flops(jax.grad(lambda x: loop(x).sum()), (4, 4)) == 10 * one

    def branch(x):
        return jax.lax.cond(x.sum() > 0, lambda: x @ x @ x, lambda: x @ x)

    assert flops(branch, (4, 4)) == 2 * one
    # What nobody reads is not computed.
    assert flops(lambda x: (x @ x, x + 1.0)[1], (4, 4)) == 0

    def twice(x):
        return jax.checkpoint(lambda x: jnp.sin(x @ x) @ x)(x).sum()

    # Forward 2, whose second product only the loss reads, and it is not asked for; backward: the
    # first product again, and two for each of them.
    assert flops(jax.grad(twice), (4, 4)) == (1 + 4) * one


def memory(function, *shapes, **options):
    jaxpr = jax.make_jaxpr(function)(*(jnp.ones(shape) for shape in shapes))
    return estimate_memory(jaxpr, **options)


def test_memory_of_what_lives_at_a_time():
    array = 4 * 8 * 8

    def chain(x):
        for _ in range(5):
            x = jnp.tanh(x @ x)
        return x

    # A product and its tanh, which the next product reads; each goes when the next one is there.
    assert memory(chain, (8, 8)).peak == 2 * array
    # Elementwise operations are fused, whatever they are called from.
    assert memory(lambda x: jax.jit(jnp.sin)(jnp.cos(x)) + 1.0, (8, 8)).peak == array
    # The argument counts where it is given away, until it is read for the last time.
    assert memory(lambda x: (x @ x) @ (x @ x), (8, 8), given_away=[True]).peak == 3 * array


def test_memory_of_loops():
    array = 4 * 8 * 8

    def stack(x):
        return jax.lax.scan(lambda c, _: (c @ x, (c @ x).sum(axis=0)), x, length=5)

    # 5 rows of 8 are stacked; the carry, and in the body two products (the same to XLA, but not
    # here) and a row.
    found = memory(stack, (8, 8)).peak
    assert array + 5 * 32 + 2 * array <= found <= array + 5 * 32 + 3 * array + 64

    def repeat(x):
        return jax.lax.scan(lambda c, _: (c @ c, None), x, length=5)[0]

    # What is carried, begun in the place of an argument that is given away, and a product.
    assert memory(repeat, (8, 8), given_away=[True]).peak == 2 * array
    # An output that nobody wants is not stored.
    unread = memory(stack, (8, 8), wanted=[True, False]).peak
    assert found - unread == 5 * 32


def test_what_is_read():
    found = memory(lambda a, b, c: (a @ b, c + 1.0), (3, 3), (3, 3), (3, 3), wanted=[True, False])
    assert found.reads == [True, True, False]
