"""Precision of matrix products: the network's as chosen, the environment's as it was."""

import re

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from nnx_ppo.algorithms import (
    DistillationConfig,
    EvalConfig,
    LoggingLevel,
    PPOConfig,
    TrainConfig,
    imitation,
    iteration,
    new_training_state,
    train_ppo,
)
from nnx_ppo.algorithms.distillation import new_distillation_state
from nnx_ppo.core.testing import AnalyticState, Endless
from nnx_ppo.networks import LSTM, Dense, NormalTanhSampler, PPOAdapter, Sequential

TURN = 5  # the size of the environment's own products; the network has none of it


class Turning:
    """Its reset and its steps multiply a matrix of size 5."""

    action_size = 1

    def reset(self, rng):
        turned = jnp.eye(TURN) @ jax.random.normal(rng, (TURN,))
        zero = jnp.zeros(())
        return AnalyticState(turned[:2], zero, zero, {"rng": rng, "all": turned}, {})

    def step(self, state, action):
        turned = jnp.full((TURN, TURN), 0.1) @ state.info["all"] + action.sum()
        return state.replace(obs=turned[:2], reward=turned[0], info={**state.info, "all": turned})


def network(features=2, seed=0):
    rngs = nnx.Rngs(seed)
    action = Sequential([Dense(8, 2, rngs), NormalTanhSampler(rngs, 1e-2)])
    return Sequential([LSTM(features, 8, rngs), PPOAdapter(action=action, value=Dense(8, 1, rngs))])


def products(iterate):
    """The precisions of the environment's and of the network's products in StableHLO."""
    own, network = set(), set()
    lines = [line for line in jax.jit(iterate).lower().as_text().splitlines() if "dot_gen" in line]
    assert lines
    for line in lines:
        if "algorithm" in line:
            found = re.search(r"lhs_precision_type = (\w+), .*accumulation_type = (\w+)", line)
        else:
            found = re.search(r"precision = \[(\w+), \w+\]", line)
        is_own = re.search(rf"tensor<(\d+x)?{TURN}x{TURN}xf32>", line)
        assert found
        (own if is_own else network).add(found.groups())
    assert own and network
    return own, network


def of_ppo(**fields):
    config = PPOConfig(n_envs=4, rollout_length=3, n_minibatches=2, **fields)

    def iterate():
        state = new_training_state(Turning(), network(), 4, seed=0)
        return iteration.iterate(Turning(), state, config)[1]

    return products(iterate)


def of_distillation(**fields):
    config = DistillationConfig(
        n_envs=4, rollout_length=3, n_minibatches=2, ppo_weight=1.0, **fields
    )

    def iterate():
        teacher, student = network(seed=1), network()
        state = new_distillation_state(Turning(), teacher, student, 4, seed=0)
        return imitation.iterate(Turning(), teacher, state, config)[1]

    return products(iterate)


PLAIN = {("DEFAULT",)}
EXTRA = LoggingLevel.LOSSES | LoggingLevel.ACTOR_EXTRA


@pytest.mark.parametrize("found", [of_ppo, of_distillation])
def test_precision_of_an_iteration(found):
    assert found() == (PLAIN, PLAIN)
    assert found(matmul_precision="float32") == (PLAIN, {("HIGHEST",)})
    assert found(matmul_precision="tensorfloat32") == (PLAIN, {("HIGH",)})
    expected = {("bf16", "f32")}  # inputs, and sums
    assert found(matmul_precision="bfloat16", logging_level=EXTRA) == (PLAIN, expected)


def test_bfloat16_holds_in_segments_chunks_and_burn_in():
    found = of_ppo(
        matmul_precision="bfloat16",
        advantages="window",
        chunk_length=3,
        burn_in=1,
        remat_length=2,
        logging_level=EXTRA,
    )
    assert found == (PLAIN, {("bf16", "f32")})


def test_what_jax_is_configured_for_stays_for_all_else():
    with jax.default_matmul_precision("high"):
        assert of_ppo() == ({("HIGH",)}, {("HIGH",)})
        assert of_ppo(matmul_precision="float32") == ({("HIGH",)}, {("HIGHEST",)})


def test_the_replay_is_as_precise_as_the_rollout():
    logged = []
    config = TrainConfig(
        ppo=PPOConfig(
            n_envs=16, rollout_length=8, n_epochs=1, n_minibatches=1, total_steps=16 * 8 * 3,
            matmul_precision="bfloat16", logging_level=EXTRA,
        ),
        eval=EvalConfig(enabled=False),
    )  # fmt: skip
    train_ppo(
        Endless(max_len=3), network(features=1), config, log_fn=lambda m, step: logged.append(m)
    )
    assert len(logged) == 3
    assert max(metrics["losses/ratio_error"] for metrics in logged) <= 1e-4


def test_layers_may_compute_in_bfloat16_and_keep_float32_parameters():
    rngs = nnx.Rngs(0)
    half = {"dtype": jnp.bfloat16}
    trunk = [Dense(1, 8, rngs, nnx.tanh, **half), Dense(8, 8, rngs, nnx.tanh, **half)]
    # What log-likelihoods and values are computed from stays in float32.
    action = Sequential([Dense(8, 2, rngs), NormalTanhSampler(rngs, 1e-2)])
    net = Sequential([*trunk, PPOAdapter(action=action, value=Dense(8, 1, rngs))])
    config = TrainConfig(
        ppo=PPOConfig(n_envs=8, rollout_length=5, n_minibatches=2, total_steps=40),
        eval=EvalConfig(enabled=False),
    )
    before = jax.tree.map(jnp.copy, nnx.state(net, nnx.Param))
    train_ppo(Endless(max_len=3), net, config)
    after = nnx.state(net, nnx.Param)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(after)} == {"float32"}
    changed = jax.tree.map(lambda new, old: bool((new != old).any()), after, before)
    assert all(jax.tree.leaves(changed))
