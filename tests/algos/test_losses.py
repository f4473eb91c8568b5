"""Advantages, surrogate and value loss, computed by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nnx_ppo.algorithms import losses
from nnx_ppo.algorithms.losses import (
    approximate_kl,
    clipped_surrogate,
    explained_variance,
    gae,
    normalized,
    outside_clip,
    r_squared,
    sums_by_scan,
    sums_in_parallel,
    value_loss,
)

GAMMA, LAMBDA = 0.9, 0.95
REWARDS = [1.0, 1.0, 1.0, 5.0]


@pytest.fixture(params=[sums_by_scan, sums_in_parallel], ids=["scan", "parallel"])
def each_form(request, monkeypatch):
    """Both ways of summing up; the one that a machine takes depends on its back end."""
    monkeypatch.setattr(losses, "discounted_sums", request.param)


def column(values, dtype=jnp.float32):
    return jnp.asarray(values, dtype)[:, None]


def advantages(done=(0, 0, 0, 0), truncated=(0, 0, 0, 0), stored=None):
    """GAE with V = 10 throughout and at the bootstrap, γ = 0.9, λ = 0.95."""
    result = gae(
        column(REWARDS),
        column([10.0] * 4),
        jnp.asarray([10.0]),
        column(done, bool),
        column(truncated, bool),
        LAMBDA,
        GAMMA,
        None if stored is None else column(stored),
    )
    return np.asarray(result)[:, 0]


# δ₃ = 5 + 0.9·10 − 10 = 4 and δ₂ = 1 + 9 − 10 = 0, so A₃ = 4, A₂ = 0 + 0.855·4 = 3.42 (γλ = 0.855).
# What follows depends on how the episode ends at t = 1:
# - truncated, true last observation worth 20: δ₁ = 1 + 0.9·20 − 10 = 9, A₁ = 9,
#   A₀ = 0 + 0.855·9 = 7.695
# - terminated: δ₁ = 1 − 10 = −9, A₁ = −9, A₀ = 0.855·(−9) = −7.695
# - truncated with nothing stored: A₁ = 0, A₀ = 0
# - not at all: A₁ = 0.855·3.42 = 2.9241, A₀ = 0.855·2.9241 = 2.5001055
@pytest.mark.usefixtures("each_form")
@pytest.mark.parametrize(
    ("ends", "expected"),
    [
        ({"truncated": (0, 1, 0, 0), "stored": (0, 20, 0, 0)}, [7.695, 9.0, 3.42, 4.0]),
        (
            {"done": (0, 1, 0, 0), "truncated": (0, 1, 0, 0), "stored": (0, 20, 0, 0)},
            [7.695, 9.0, 3.42, 4.0],
        ),
        ({"done": (0, 1, 0, 0)}, [-7.695, -9.0, 3.42, 4.0]),
        ({"done": (0, 1, 0, 0), "stored": (0, 20, 0, 0)}, [-7.695, -9.0, 3.42, 4.0]),
        ({"truncated": (0, 1, 0, 0)}, [0.0, 0.0, 3.42, 4.0]),
        ({}, [2.5001055, 2.9241, 3.42, 4.0]),
        # At the last step: terminated δ₃ = 5 − 10 = −5; truncated δ₃ = 5 + 0.9·30 − 10 = 22.
        # A₂ = 0.855·A₃, A₁ = 0.855·A₂, A₀ = 0.855·A₁.
        ({"done": (0, 0, 0, 1)}, [-3.125131875, -3.655125, -4.275, -5.0]),
        (
            {"truncated": (0, 0, 0, 1), "stored": (0, 0, 0, 30)},
            [13.75058025, 16.08255, 18.81, 22.0],
        ),
        # Two one-step episodes: δ₀ = δ₁ = 1 − 10 = −9, each alone.
        ({"done": (1, 1, 0, 0)}, [-9.0, -9.0, 3.42, 4.0]),
    ],
)
def test_gae(ends, expected):
    np.testing.assert_allclose(advantages(**ends), expected, rtol=1e-6)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.int32, bool])
def test_gae_takes_flags_of_any_dtype(dtype):
    flags = column([0, 1, 0, 0], dtype)
    none = jnp.zeros_like(flags)
    values = column([10.0] * 4)
    last = jnp.asarray([10.0])
    result = gae(column(REWARDS), values, last, flags, none, LAMBDA, GAMMA)
    np.testing.assert_allclose(result[:, 0], [-7.695, -9.0, 3.42, 4.0], rtol=1e-6)


def test_gae_of_several_heads_shares_a_flat_done():
    # The head "b" has twice the rewards and values of "a", so twice its advantages.
    def head(scale):
        return column(REWARDS) * scale, column([10.0] * 4) * scale, jnp.asarray([10.0]) * scale

    heads = {"a": head(1.0), "b": head(2.0)}
    rewards, values, last = ({k: v[i] for k, v in heads.items()} for i in range(3))
    done = column([0, 1, 0, 0], bool)
    result = gae(rewards, values, last, done, jnp.zeros_like(done), LAMBDA, GAMMA)
    np.testing.assert_allclose(result["a"][:, 0], [-7.695, -9.0, 3.42, 4.0], rtol=1e-6)
    np.testing.assert_allclose(result["b"], 2.0 * result["a"], rtol=1e-6)


def test_gae_with_a_done_for_each_head():
    rewards = {"a": column(REWARDS), "b": column(REWARDS)}
    values = {"a": column([10.0] * 4), "b": column([10.0] * 4)}
    last = {"a": jnp.asarray([10.0]), "b": jnp.asarray([10.0])}
    done = {"a": column([0, 1, 0, 0], bool), "b": column([0, 0, 0, 0], bool)}
    none = column([0, 0, 0, 0], bool)
    result = gae(rewards, values, last, done, none, LAMBDA, GAMMA)
    np.testing.assert_allclose(result["a"][:, 0], [-7.695, -9.0, 3.42, 4.0], rtol=1e-6)
    np.testing.assert_allclose(result["b"][:, 0], [2.5001055, 2.9241, 3.42, 4.0], rtol=1e-6)


def test_gae_names_the_tree_that_does_not_fit():
    rewards = {"a": column(REWARDS)}
    values = {"b": column([10.0] * 4)}
    flags = column([0, 0, 0, 0], bool)
    with pytest.raises(ValueError, match="values_excl_last must be a tree like rewards"):
        gae(rewards, values, {"a": jnp.zeros(1)}, flags, flags, LAMBDA, GAMMA)
    flat = column(REWARDS)
    with pytest.raises(ValueError, match="gamma must be a tree like rewards, with one entry for"):
        gae(flat, flat, jnp.zeros(1), flags, flags, LAMBDA, {"a": 0.9})


@pytest.mark.usefixtures("each_form")
def test_gae_never_reads_past_an_end():
    """A NaN beyond an end, or stored where nothing was cut, stays where it is."""
    stored = column([jnp.nan, 20.0, jnp.nan, jnp.nan])
    values = column([10.0, 10.0, 10.0, 10.0])
    done = column([0, 0, 0, 1], bool)
    truncated = column([0, 1, 0, 0], bool)
    result = gae(
        column(REWARDS), values, jnp.asarray([jnp.nan]), done, truncated, LAMBDA, GAMMA, stored
    )
    # A₃ = 5 − 10 = −5, A₂ = 0.855·(−5) = −4.275; the episode before as in the anchor.
    np.testing.assert_allclose(result[:, 0], [7.695, 9.0, -4.275, -5.0], rtol=1e-6)


@pytest.mark.usefixtures("each_form")
def test_lambda_1_is_the_discounted_return():
    # V = 0: A₀ = 1 + 0.9·(1 + 0.9·(1 + 0.9·5)) = 6.355 with the episode ended at the last step.
    zeros = column([0.0] * 4)
    done = column([0, 0, 0, 1], bool)
    result = gae(column(REWARDS), zeros, jnp.zeros(1), done, jnp.zeros_like(done), 1.0, GAMMA)
    np.testing.assert_allclose(result[0, 0], 6.355, rtol=1e-6)


@pytest.mark.parametrize(
    ("length", "dtype"), [(1, jnp.float32), (6, jnp.float32), (21, jnp.float64)]
)
def test_sums_in_parallel_are_those_of_the_scan(length, dtype):
    with jax.enable_x64(dtype == jnp.float64):
        keys = jax.random.split(jax.random.key(length), 2)
        terms = jax.random.normal(keys[0], (length, 5), dtype)
        ended = jax.random.bernoulli(keys[1], 0.2, (length, 5))
        decay = jnp.where(ended, 0.0, 0.9405).astype(dtype)
        found = jax.jit(sums_in_parallel)(terms, decay)
        expected = jax.jit(sums_by_scan)(terms, decay)
        assert found.dtype == expected.dtype == dtype
        rounding = 32 * float(jnp.finfo(dtype).eps)
        np.testing.assert_allclose(found, expected, rtol=rounding, atol=rounding)


@pytest.mark.parametrize("form", [sums_by_scan, sums_in_parallel])
def test_what_lies_beyond_an_end_is_never_read(form):
    # Each sum by hand, with a decay of 1/2: 4, then NaN and what counts it, then 2 and 1 + 2/2 = 2.
    terms = column([1.0, 2.0, 3.0, jnp.nan, 4.0])
    decay = column([0.5, 0.0, 0.5, 0.5, 0.5])
    np.testing.assert_array_equal(
        jax.jit(form)(terms, decay)[:, 0], [2.0, 2.0, jnp.nan, jnp.nan, 4.0]
    )


@pytest.mark.parametrize(("back_end", "loops"), [("cpu", True), ("gpu", False), ("tpu", False)])
def test_only_a_cpu_sums_step_by_step(monkeypatch, back_end, loops):
    monkeypatch.setattr(jax, "default_backend", lambda: back_end)
    # A function of its own: JAX keeps what it has traced.
    jaxpr = jax.make_jaxpr(lambda x: losses.discounted_sums(x, x))(jnp.zeros((8, 2)))
    assert ("scan" in {equation.primitive.name for equation in jaxpr.eqns}) == loops


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected"),
    [
        # min(1.5·2, 1.2·2) = 2.4: gains beyond the clip range do not count.
        (1.5, 2.0, -2.4),
        # min(1.5·−2, 1.2·−2) = −3: losses do.
        (1.5, -2.0, 3.0),
        # min(0.5·2, 0.8·2) = 1
        (0.5, 2.0, -1.0),
        # min(0.5·−2, 0.8·−2) = −1.6
        (0.5, -2.0, 1.6),
        (1.1, 3.0, -3.3),
    ],
)
def test_clipped_surrogate(ratio, advantage, expected):
    loss = clipped_surrogate(jnp.full((1, 1), ratio), jnp.full((1, 1), advantage), 0.2)
    np.testing.assert_allclose(loss, expected, rtol=1e-6)


def test_surrogate_is_a_mean_over_time_and_batch():
    ratio = jnp.asarray([[1.5, 1.5], [0.5, 0.5]])
    advantage = jnp.asarray([[2.0, -2.0], [2.0, -2.0]])
    # (−2.4 + 3 − 1 + 1.6) / 4 = 0.3
    np.testing.assert_allclose(clipped_surrogate(ratio, advantage, 0.2), 0.3, rtol=1e-6)


def test_surrogate_has_no_gradient_beyond_the_clip_range():
    def loss(ratio):
        return clipped_surrogate(jnp.full((1, 1), ratio), jnp.full((1, 1), 2.0), 0.2)

    assert jax.grad(loss)(1.5) == 0.0
    np.testing.assert_allclose(jax.grad(loss)(1.1), -2.0)


def test_value_loss():
    # ½·((1−3)² + (2−2)²)/2 = 1
    loss = value_loss(jnp.asarray([[1.0, 2.0]]), jnp.asarray([[3.0, 2.0]]))
    np.testing.assert_allclose(loss, 1.0)


def test_normalized_uses_the_population_std():
    # Mean 2, population variance (1 + 1)/2 = 1.
    np.testing.assert_allclose(normalized(jnp.asarray([[1.0, 3.0]])), [[-1.0, 1.0]], rtol=1e-6)


def test_outside_clip():
    inside = outside_clip(jnp.asarray([[0.79, 0.81, 1.19, 1.21]]), 0.2)
    np.testing.assert_array_equal(inside, [[True, False, False, True]])


def test_divergence_of_two_policies() -> None:
    # Ratios 2 and 1/2: ((2 − 1 − log 2) + (1/2 − 1 + log 2)) / 2 = (1 − 1/2) / 2 = 1/4.
    old = jnp.zeros((1, 2))
    new = jnp.log(jnp.array([[2.0, 0.5]]))
    np.testing.assert_allclose(approximate_kl(new, old), 0.25, rtol=1e-6)
    assert approximate_kl(old, old) == 0.0


def test_a_constant_error_costs_no_explained_variance() -> None:
    # Targets 0 and 2 have variance 1. Values 1 too high leave errors of −1 and −1, whose variance
    # is 0, and whose squares add up to as much as those of the targets about their mean.
    targets = jnp.array([[0.0, 2.0]])
    np.testing.assert_allclose(explained_variance(targets + 1.0, targets), 1.0, rtol=1e-6)
    np.testing.assert_allclose(r_squared(targets + 1.0, targets), 0.0, atol=1e-6)
    # Errors 0 and 1 have variance 1/4.
    values = jnp.array([[0.0, 1.0]])
    np.testing.assert_allclose(explained_variance(values, targets), 0.75, rtol=1e-6)


def test_value_loss_with_a_clipped_value():
    # Old value 0, clip range 1. Value 3 clips to 1, 0.5 stays.
    # Target 5: errors 2 and 4, the larger counts: 16. Target −1: errors 4 and 2: 16.
    # Target 0, value 0.5: error 0.5 either way: 0.25. Half the mean: (16 + 16 + 0.25)/6 = 5.375.
    values, targets = column([3.0, 3.0, 0.5]), column([5.0, -1.0, 0.0])
    old = jnp.zeros_like(values)
    np.testing.assert_allclose(value_loss(values, targets, old, clip_range=1.0), 5.375)
    # No gradient where the clipped value has the larger error, as at the target 5.
    gradient = jax.grad(lambda v: value_loss(v, targets, old, clip_range=1.0))(values)
    np.testing.assert_allclose(gradient[:, 0], [0.0, 4.0 / 3.0, 0.5 / 3.0], rtol=1e-6)


def test_clipping_a_value_needs_the_old_one():
    with pytest.raises(ValueError, match="clip_range=0.2 clips how far values move from old_val"):
        value_loss(jnp.ones((1, 1)), jnp.ones((1, 1)), clip_range=0.2)


def test_huber_value_loss():
    # δ = 1: an error of 0.5 gives ½·0.25 = 0.125, one of −3 gives 1·(3 − ½) = 2.5; mean 1.3125.
    values, targets = column([0.5, -3.0]), column([0.0, 0.0])
    np.testing.assert_allclose(value_loss(values, targets, huber_delta=1.0), 1.3125)
    gradient = jax.grad(lambda v: value_loss(v, targets, huber_delta=1.0))(values)
    np.testing.assert_allclose(gradient[:, 0], [0.25, -0.5])


def test_a_discount_for_each_reward_head():
    # V = 0 and λ = 1: discounted sums. γ = 0.5: 1 + 0.5·(1 + 0.5) = 1.75; γ = 0: the reward alone.
    rewards = {"far": column([1.0, 1.0, 1.0]), "near": column([1.0, 1.0, 1.0])}
    zeros = jax.tree.map(jnp.zeros_like, rewards)
    last = {name: jnp.zeros(1) for name in rewards}
    never = jnp.zeros((3, 1), bool)
    found = gae(rewards, zeros, last, never, never, 1.0, {"far": 0.5, "near": 0.0})
    np.testing.assert_allclose(found["far"][:, 0], [1.75, 1.5, 1.0])
    np.testing.assert_allclose(found["near"][:, 0], [1.0, 1.0, 1.0])
