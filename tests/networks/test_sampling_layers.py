"""The squashed Gaussian: values by hand, gradients, random streams and messages."""

# Some tests hand in what the types forbid.
# pyright: reportArgumentType=false

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from nnx_ppo.networks import ActionSampler, EntropyWeight, NormalTanhSampler


def inverse_softplus(y):
    return math.log(math.expm1(y))


def make(entropy_weight=1.0, min_std=0.0, **kwargs):
    return NormalTanhSampler(nnx.Rngs(0), entropy_weight, min_std, **kwargs)


def parameters(mean, std):
    """Return the input with which a sampler with `min_std=0` has this mean and deviation."""
    return jnp.array([[*mean, *map(inverse_softplus, std)]])


def log_likelihood(mean, std, raw):
    out = make()((), parameters(mean, std), jnp.array([raw])).output
    return float(out["log_likelihood"][0])


def test_log_likelihood_at_half() -> None:
    # z = 0.5, mean 0, std 1.
    # Gaussian: -0.5 * 0.5^2 - log(1) - 0.5 log(2 pi) = -0.125 - 0.918939 = -1.043939
    # Jacobian: log(1 - tanh(0.5)^2) = log(1 - 0.462117^2) = log(0.786448) = -0.240229
    # -1.043939 + 0.240229 = -0.803710
    assert log_likelihood([0.0], [1.0], [0.5]) == pytest.approx(-0.803710, abs=2e-6)


def test_log_likelihood_of_two_dimensions_adds_up() -> None:
    # z = -1, mean 0.5, std 2:
    # Gaussian: -0.5 * (1.5 / 2)^2 - log 2 - 0.918939 = -0.281250 - 0.693147 - 0.918939 = -1.893336
    # Jacobian: log(1 - tanh(1)^2) = log(0.419974) = -0.867562; -1.893336 + 0.867562 = -1.025774
    # With the dimension of the test above: -1.025774 - 0.803710 = -1.829484
    assert log_likelihood([0.0, 0.5], [1.0, 2.0], [0.5, -1.0]) == pytest.approx(-1.829484, abs=3e-6)


def test_log_likelihood_is_finite_where_tanh_is_flat() -> None:
    # z = 30, mean 30, std 1: -0.918939 - 2 (log 2 - 30 - softplus(-60)) = 57.694767
    assert log_likelihood([30.0], [1.0], [30.0]) == pytest.approx(57.694767, abs=1e-4)
    # z = -30: log 2 + 30 - softplus(60) = log 2 - 30, the same by symmetry
    assert log_likelihood([-30.0], [1.0], [-30.0]) == pytest.approx(57.694767, abs=1e-4)


def test_standard_deviation() -> None:
    # softplus(0) = log 2 = 0.693147; (0.693147 + 0.1) * 0.5 = 0.396574
    sampler = make(min_std=0.1, std_scale=0.5)
    metrics = sampler((), jnp.array([[0.3, 0.0]])).metrics
    np.testing.assert_allclose(metrics["sigma"], [[0.396574]], rtol=1e-5)
    np.testing.assert_allclose(metrics["mu"], [[0.3]])


def test_deterministic_acts_by_the_mean_and_draws_nothing() -> None:
    sampler = make(entropy_weight=2.0)
    sampler.eval()
    xs = parameters([0.5], [1.0])
    for extras in (None, jnp.array([[3.0]])):
        out = sampler((), xs, extras)
        np.testing.assert_allclose(out.rollout_extras, [[0.5]])
        np.testing.assert_allclose(out.output["action"], [[math.tanh(0.5)]], rtol=1e-6)
        # Gaussian: 0.5 log(2 pi e) = 1.418939; log-Jacobian at 0.5: -0.240229 (see above);
        # -2 * (1.418939 - 0.240229) = -2.357420
        np.testing.assert_allclose(out.regularization_loss, [-2.357420], rtol=1e-5)
    assert int(sampler.rng.count[...]) == 0
    sampler.train()
    assert float(sampler((), xs).rollout_extras[0, 0]) != 0.5


@pytest.mark.parametrize("extras", [None, jnp.zeros((1, 1))])
def test_one_key_for_each_step(extras) -> None:
    sampler = make()
    losses = [sampler((), parameters([0.5], [1.0]), extras).regularization_loss for _ in range(2)]
    assert int(sampler.rng.count[...]) == 2
    assert losses[0] != losses[1]  # the sample of the entropy is a fresh one


def test_siblings_share_no_stream() -> None:
    rngs = nnx.Rngs(0)
    first, second = NormalTanhSampler(rngs, 0.0), NormalTanhSampler(rngs, 0.0)
    keys = [jax.random.key_data(s.rng.key[...]).tolist() for s in (first, second)]
    assert keys[0] != keys[1]


def test_the_action_stream_comes_first() -> None:
    sampler = NormalTanhSampler(nnx.Rngs(0, action=7), 0.0)
    expected = nnx.Rngs(7).default.fork()
    assert sampler.rng.key[...] == expected.key[...]


def test_no_gradient_through_the_drawn_action() -> None:
    xs = parameters([0.3], [0.7])

    def action(xs):
        out = make()((), xs)
        return jnp.sum(out.output["action"]) + jnp.sum(out.rollout_extras)

    def drawn(xs):
        return jnp.sum(make()((), xs).output["log_likelihood"])

    raw = make()((), xs).rollout_extras
    given = jax.grad(lambda xs: jnp.sum(make()((), xs, raw).output["log_likelihood"]))(xs)
    np.testing.assert_array_equal(jax.grad(action)(xs), jnp.zeros_like(xs))
    np.testing.assert_allclose(jax.grad(drawn)(xs), given, rtol=1e-6)


def test_entropy_and_its_gradient_are_unbiased() -> None:
    """Against the entropy by integration, and the finite differences of that."""
    many, mean, std, step = 2**18, 0.4, 0.8, 1e-3

    def loss(pair):
        raw = jnp.stack([pair[0], jnp.log(jnp.expm1(pair[1]))])
        xs = jnp.broadcast_to(raw[None], (many, 2))
        return -jnp.mean(make()((), xs).regularization_loss)

    def exact(mean, std):
        # 0.5 log(2 pi e std^2) + E[log(1 - tanh(mean + std n)^2)], n standard normal
        n = np.linspace(-9, 9, 20001)
        density = np.exp(-0.5 * n**2) / math.sqrt(2 * math.pi)
        jacobian = -2 * np.log(np.cosh(mean + std * n))
        closed = 0.5 * math.log(2 * math.pi * math.e * std**2)
        return closed + np.trapezoid(density * jacobian, n)

    entropy, gradient = jax.jit(jax.value_and_grad(loss))(jnp.array([mean, std]))
    # Standard error of the mean of 2^18 samples is below 0.003.
    assert float(entropy) == pytest.approx(exact(mean, std), abs=1e-2)
    by_mean = (exact(mean + step, std) - exact(mean - step, std)) / (2 * step)
    by_std = (exact(mean, std + step) - exact(mean, std - step)) / (2 * step)
    np.testing.assert_allclose(gradient, [by_mean, by_std], atol=1e-2)


def test_entropy_weight_changes_without_tracing_again() -> None:
    traces = []
    sampler = make(entropy_weight=1.0)
    sampler.eval()
    graphdef, state = nnx.split(sampler)

    @jax.jit
    def loss(state):
        traces.append(1)
        return nnx.merge(graphdef, state)((), jnp.zeros((1, 2))).regularization_loss

    before = loss(state)
    sampler.entropy_weight[...] = 3.0
    after = loss(nnx.state(sampler))
    np.testing.assert_allclose(after, 3 * before, rtol=1e-6)
    assert len(traces) == 1
    assert isinstance(sampler.entropy_weight, EntropyWeight)
    assert not jax.tree.leaves(nnx.state(sampler, nnx.Param))


def test_the_base_class_is_abstract() -> None:
    assert not ActionSampler.deterministic
    with pytest.raises(TypeError, match="abstract"):
        ActionSampler()  # pyright: ignore[reportAbstractUsage]


@pytest.mark.usefixtures("unchecked")
def test_messages() -> None:
    with pytest.raises(TypeError, match=r"rng must be an nnx\.Rngs, got int; write nnx\.Rngs\(0\)"):
        NormalTanhSampler(0, 0.1)
    with pytest.raises(ValueError, match=r"stream 'action' or a default one, got \['params'\]"):
        NormalTanhSampler(nnx.Rngs(params=0), 0.1)
    with pytest.raises(ValueError, match=r"min_std >= 0 and std_scale > 0, got min_std=-1"):
        NormalTanhSampler(nnx.Rngs(0), 0.1, min_std=-1)
    with pytest.raises(ValueError, match=r"even last axis, got shape \(2, 3\).*2 \* action_size"):
        make()((), jnp.zeros((2, 3)))
    with pytest.raises(ValueError, match=r"rollout_extras .* shape \(2, 2\), got \(2, 3\)"):
        make()((), jnp.zeros((2, 4)), jnp.zeros((2, 3)))
