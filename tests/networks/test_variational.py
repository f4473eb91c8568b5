"""Bottlenecks: losses and gradients by hand, noise that the replay meets again, windows."""

# Some tests hand in what the types forbid.
# pyright: reportArgumentType=false

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from nnx_ppo.core import reset_where, unroll_stepwise
from nnx_ppo.networks.variational import (
    AR1VariationalBottleneck,
    LossWeight,
    VariationalBottleneck,
)

ONE = math.log(math.e - 1)  # softplus of this is 1


def plain(latent_size=2, kl_weight=1.0, min_std=0.0, **kwargs):
    return VariationalBottleneck(latent_size, nnx.Rngs(0), kl_weight, min_std, **kwargs)


def ar1(latent_size=2, **kwargs):
    return AR1VariationalBottleneck(latent_size, nnx.Rngs(0), **{"min_std": 0.0, **kwargs})


def carry(last_z, seed=0):
    """A carry with this last vector, NaN for none."""
    last_z = jnp.asarray(last_z, jnp.float32)
    return {"keys": jax.random.split(jax.random.key(seed), len(last_z)), "last_z": last_z}


def test_divergence_by_hand() -> None:
    # Means 0.5 and -1, deviations 1 and log 2 = 0.693147.
    # 0.5 (0.5^2 + 1 - 1 - 2 log 1) = 0.125
    # 0.5 (1 + 0.480453 - 1 - 2 log 0.693147) = 0.5 (0.480453 + 0.733026) = 0.606739
    x = jnp.array([[0.5, -1.0, ONE, 0.0]])
    out = plain(kl_weight=0.1)(carry([[0.0]])["keys"], x)
    np.testing.assert_allclose(out.metrics["kl_divergence"], [0.731739], rtol=1e-5)
    np.testing.assert_allclose(out.regularization_loss, [0.0731739], rtol=1e-5)
    np.testing.assert_array_equal(out.metrics["mu"], [[0.5, -1.0]])
    np.testing.assert_allclose(out.metrics["sigma"], [[1.0, 0.693147]], rtol=1e-6)
    assert out.rollout_extras is None
    # min_std comes on top.
    widened = plain(min_std=0.25)(carry([[0.0]])["keys"], x).metrics["sigma"]
    np.testing.assert_allclose(widened, [[1.25, 0.943147]], rtol=1e-6)


def test_gradient_of_the_divergence_by_hand() -> None:
    """d KL / d mu = mu, d KL / d sigma = sigma - 1 / sigma."""
    key = carry([[0.0]])["keys"]
    gradient = jax.grad(lambda x: plain(1)(key, x).regularization_loss[0])(jnp.array([[0.5, 0.0]]))
    # sigma = log 2: (0.693147 - 1.442695) * sigmoid(0) = -0.374774
    np.testing.assert_allclose(gradient, [[0.5, -0.374774]], rtol=1e-5)


@pytest.mark.parametrize("make", [plain, ar1])
def test_the_latent_vector_is_reparameterized(make) -> None:
    """z = mu + sigma n with the noise n of the carry's key, so dz / dmu = 1, dz / dsigma = n."""
    module = make(1)
    state = module.initialize_state(1)

    def latent(mu, sigma):
        x = jnp.stack([mu, jnp.log(jnp.expm1(sigma))])[None]
        return module(state, x).output[0, 0]

    noise = float(latent(jnp.float32(0.0), jnp.float32(1.0)))
    point = jnp.float32(0.5), jnp.float32(2.0)
    z, gradient = jax.value_and_grad(latent, (0, 1))(*point)
    np.testing.assert_allclose(z, 0.5 + 2.0 * noise, rtol=1e-5)
    np.testing.assert_allclose(gradient, [1.0, noise], rtol=1e-4)


def test_noise_is_normal_and_of_each_environment_and_step_its_own() -> None:
    module = plain(4)
    state = module.initialize_state(500)
    x = jnp.broadcast_to(jnp.array([0.0] * 4 + [ONE] * 4), (500, 8))
    first = module(state, x)
    second = module(first.next_state, x)
    drawn = np.concatenate([first.output, second.output])
    assert len(np.unique(drawn, axis=0)) == 1000
    # 4000 numbers: mean within 4 / sqrt(4000) = 0.063, variance within 4 sqrt(2 / 4000) = 0.09
    assert abs(drawn.mean()) < 0.063
    assert abs(drawn.var() - 1) < 0.09
    correlation = np.corrcoef(np.ravel(first.output), np.ravel(second.output))[0, 1]
    assert abs(correlation) < 4 / math.sqrt(2000)


@pytest.mark.parametrize("make", [plain, ar1])
def test_the_carry_decides_the_noise(make) -> None:
    """The replay meets the noise of the rollout; in evaluation mode, too, there is noise."""
    module = make()
    state, x = module.initialize_state(3), jnp.zeros((3, 4))
    rolled, replayed = module(state, x), module(state, x, "ignored")
    np.testing.assert_array_equal(rolled.output, replayed.output)
    assert int(module.rng.count[...]) == 1  # of initialize_state
    module.eval()
    np.testing.assert_array_equal(module(state, x).output, rolled.output)
    again = module.initialize_state(3)
    assert (module(again, x).output != rolled.output).all()


def test_siblings_share_no_keys() -> None:
    rngs = nnx.Rngs(0, noise=1)
    states = [VariationalBottleneck(1, rngs).initialize_state(2) for _ in range(2)]
    assert (states[0] != states[1]).all()
    expected = jax.random.split(nnx.Rngs(1).default.fork()(), 2)
    assert (states[0] == expected).all()


def test_change_by_hand() -> None:
    """Three environments: a change, none, and one right after a reset."""
    module = ar1(kl_weight=0.5, ar1_weight=2.0)
    x = jnp.broadcast_to(jnp.array([0.0, 0.0, ONE, ONE]), (3, 4))
    z = module(carry([[jnp.nan, jnp.nan]] * 3), x).output  # the noise itself
    last_z = jnp.stack([z[0] + jnp.array([1.0, -3.0]), z[1], jnp.full(2, jnp.nan)])
    out = module(carry(last_z), x)
    # (1 + 9) / 2 = 5; the divergence is 0 at mean 0 and deviation 1; 2 * 5 = 10
    np.testing.assert_allclose(out.metrics["l2_diff"], [5.0, 0.0, 0.0], rtol=1e-5, atol=1e-12)
    np.testing.assert_allclose(out.regularization_loss, [10.0, 0.0, 0.0], rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(out.next_state["last_z"], out.output)


@pytest.mark.parametrize("back", [True, False])
def test_gradients_of_the_change_by_hand(back) -> None:
    """One environment with a last vector, one right after a reset, where nothing may be NaN."""
    module = ar1(kl_weight=0.0, ar1_weight=2.0, backprop_through_time=back)

    def total(mu, last_z):
        x = jnp.concatenate([mu, jnp.full((2, 2), ONE)], axis=-1)
        out = module({**carry(last_z), "last_z": last_z}, x)
        return jnp.sum(out.regularization_loss), out.output

    mu = jnp.array([[0.5, -1.0], [0.5, -1.0]])
    z = total(mu, jnp.full((2, 2), jnp.nan))[1]
    last_z = jnp.stack([z[0] - jnp.array([1.0, -3.0]), jnp.full(2, jnp.nan)])
    by_mu, by_last_z = jax.grad(total, (0, 1), has_aux=True)(mu, last_z)[0]
    # 2 * mean((z - last_z)^2): by z it is 2 * 2 (z - last_z) / 2 = 2 (1, -3)
    np.testing.assert_allclose(by_mu, [[2.0, -6.0], [0.0, 0.0]], rtol=1e-5)
    expected = [[-2.0, 6.0], [0.0, 0.0]] if back else np.zeros((2, 2))
    np.testing.assert_allclose(by_last_z, expected, rtol=1e-5)


def test_vectors_that_turned_nan_are_not_taken_for_a_reset() -> None:
    out = ar1()(carry([[jnp.nan, 1.0]]), jnp.zeros((1, 4)))
    assert jnp.isnan(out.regularization_loss).all()


def test_reset_keeps_the_keys_and_forgets_the_vector() -> None:
    module = ar1()
    used = module(module.initialize_state(2), jnp.zeros((2, 4))).next_state
    reset = module.reset_state(used)
    assert (reset["keys"] == used["keys"]).all()
    assert jnp.isnan(reset["last_z"]).all()
    assert jnp.isnan(module.initialize_state(2)["last_z"]).all()
    one = module.reset_state(jax.tree.map(lambda leaf: leaf[0], used))  # without a batch axis
    assert one["last_z"].shape == (2,) and jnp.isnan(one["last_z"]).all()
    some = reset_where(module, jnp.array([True, False]), used)
    np.testing.assert_array_equal(jnp.isnan(some["last_z"]), [[True, True], [False, False]])
    keys = plain().initialize_state(2)
    assert (plain().reset_state(keys) == keys).all()


def flat_gradients(tree):
    return [leaf for leaf in jax.tree.leaves(tree) if leaf.dtype != jax.dtypes.float0]


@pytest.mark.parametrize(
    "make",
    [plain, ar1, functools.partial(ar1, backprop_through_time=False)],
    ids=["plain", "ar1", "ar1 one way"],
)
def test_unroll_equals_stepwise(make) -> None:
    """Output, loss, carry and gradients, by the first carry too, across resets."""
    module = make()
    state = module.initialize_state(3)
    graphdef, variables = nnx.split(module)
    if isinstance(state, dict):  # an environment in mid-episode, two at a start
        state["last_z"] = state["last_z"].at[0].set(jnp.array([0.3, -0.7]))
    xs = jnp.asarray(np.random.default_rng(0).normal(size=(5, 3, 4)), jnp.float32)
    done = jnp.array([[0, 1, 0], [1, 0, 0], [1, 0, 0], [0, 0, 0], [0, 0, 1]], bool)

    def run(form):
        def loss(state, xs):
            out = form(nnx.merge(graphdef, variables, copy=True), state, xs, done, None)
            last = out.next_state["last_z"] if isinstance(out.next_state, dict) else 0.0
            weights = jnp.cos(jnp.arange(15.0)).reshape(5, 3)
            total = jnp.sum(weights * out.regularization_loss) + jnp.sum(jnp.sin(out.output))
            return total + jnp.sum(jnp.where(jnp.isnan(last), 0.0, 3 * last)), out

        return jax.value_and_grad(loss, (0, 1), has_aux=True, allow_int=True)(state, xs)

    @jax.jit
    def both():
        return run(lambda module, *rest: module.unroll(*rest)), run(unroll_stepwise)

    (windowed, gradient), (stepwise, expected) = both()
    assert windowed[1].regularization_loss.shape == (5, 3)
    for left, right in zip(*map(jax.tree.leaves, (windowed, stepwise)), strict=True):
        if jnp.issubdtype(left.dtype, jax.dtypes.prng_key):
            assert (left == right).all()
        else:
            np.testing.assert_allclose(left, right, rtol=1e-5, atol=1e-6)
    for left, right in zip(*map(flat_gradients, (gradient, expected)), strict=True):
        assert jnp.isfinite(left).all()
        np.testing.assert_allclose(left, right, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("make", [plain, ar1])
def test_no_key_is_used_twice(make) -> None:
    module = make()
    state, xs = module.initialize_state(2), jnp.zeros((3, 2, 4))
    with jax.debug_key_reuse(True):
        state = jax.jit(lambda state: module(state, xs[0]).next_state)(state)
        done = jnp.array([[0, 1], [1, 0], [0, 0]], bool)
        state = jax.jit(lambda state: module.unroll(state, xs, done).next_state)(state)
        jax.jit(lambda state: module(state, xs[0]).output)(state)


def test_weights_change_without_tracing_again() -> None:
    module = ar1(kl_weight=1.0, ar1_weight=1.0)
    graphdef, variables = nnx.split(module)
    traces = []

    @jax.jit
    def loss(variables):
        traces.append(1)
        live = nnx.merge(graphdef, variables)
        return live(carry([[1.0, 1.0]]), jnp.ones((1, 4))).regularization_loss

    both = loss(variables)
    module.kl_weight[...] = 0.0
    change = loss(nnx.state(module))
    module.ar1_weight[...] = 3.0
    np.testing.assert_allclose(loss(nnx.state(module)), 3 * change, rtol=1e-6)
    assert both > change > 0
    assert len(traces) == 1
    assert isinstance(module.kl_weight, LossWeight)
    assert not jax.tree.leaves(nnx.state(module, nnx.Param))


@pytest.mark.usefixtures("unchecked")
def test_messages() -> None:
    with pytest.raises(ValueError, match="VariationalBottleneck: latent_size must be at least 1"):
        plain(0)
    with pytest.raises(TypeError, match=r"AR1Var.*: rng must be an nnx\.Rngs, got int"):
        AR1VariationalBottleneck(2, 0)
    with pytest.raises(ValueError, match=r"stream 'noise' or a default one, got \['params'\]"):
        VariationalBottleneck(2, nnx.Rngs(params=0))
    with pytest.raises(ValueError, match="AR1Var.*: expected min_std >= 0, got min_std=-1"):
        ar1(min_std=-1)
    with pytest.raises(ValueError, match=r"2 \* latent_size = 4 features, got shape \(1, 3\)"):
        plain()(carry([[0.0]])["keys"], jnp.zeros((1, 3)))
