"""Gaussian samplers: values by hand, gradients, messages; and what holds for all samplers."""

# Some tests hand in what the types forbid.
# pyright: reportArgumentType=false

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from scipy import stats

from nnx_ppo.core import unroll_stepwise
from nnx_ppo.networks.sampling_layers import (
    ActionSampler,
    CategoricalSampler,
    EntropyWeight,
    MultiCategoricalSampler,
    NormalSampler,
    NormalTanhSampler,
)


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


def test_normal_sampler_by_hand() -> None:
    sampler = NormalSampler(nnx.Rngs(0), 0.5, min_std=0.0)
    out = sampler((), parameters([0.0, 0.5], [1.0, 2.0]), jnp.array([[0.5, -1.0]]))
    np.testing.assert_array_equal(out.output["action"], [[0.5, -1.0]])
    # The Gaussian parts of the tests above: -1.043939 - 1.893336 = -2.937275
    np.testing.assert_allclose(out.output["log_likelihood"], [-2.937275], rtol=1e-5)
    # 0.5 log(2 pi e) = 1.418939 for std 1, and log 2 more for std 2: 1.418939 + 2.112086 =
    # 3.531024; -0.5 * 3.531024 = -1.765512
    np.testing.assert_allclose(out.regularization_loss, [-1.765512], rtol=1e-5)


def test_gaussian_samplers_against_scipy() -> None:
    rng = np.random.default_rng(0)
    xs, raw = rng.normal(size=(7, 6)).astype(np.float32), rng.normal(size=(7, 3))
    mean, std = xs[:, :3], np.log1p(np.exp(xs[:, 3:])) + 1e-3
    plain = stats.norm.logpdf(raw, mean, std)
    squashed = plain - np.log(1 - np.tanh(raw) ** 2)
    for kind, expected in ((NormalSampler, plain), (NormalTanhSampler, squashed)):
        out = kind(nnx.Rngs(0), 1.0)((), jnp.asarray(xs), jnp.asarray(raw, jnp.float32))
        np.testing.assert_allclose(out.output["log_likelihood"], expected.sum(-1), rtol=2e-5)
    loss = NormalSampler(nnx.Rngs(0), 1.0)((), jnp.asarray(xs)).regularization_loss
    np.testing.assert_allclose(loss, -stats.norm.entropy(mean, std).sum(-1), rtol=1e-5)


def test_normal_sampler_draws_its_distribution() -> None:
    sampler = NormalSampler(nnx.Rngs(0), 0.0, min_std=0.0)
    xs = jnp.broadcast_to(parameters([0.3], [0.7]), (4096, 2))
    raw = sampler((), xs).rollout_extras[:, 0]
    assert stats.kstest(raw, stats.norm(0.3, 0.7).cdf).pvalue > 1e-3


@pytest.mark.parametrize("kind", [NormalSampler, NormalTanhSampler])
def test_free_deviations_are_parameters(kind) -> None:
    """Two dimensions, three samples: the same deviations for all, whatever the input."""
    sampler = kind(nnx.Rngs(0), 0.1, 0.05, 2.0, free_std=(0.5, 30.0))
    means = jnp.array([[0.0, 1.0], [2.0, 3.0], [4.0, -5.0]])
    out = sampler((), means)
    np.testing.assert_allclose(out.metrics["sigma"], [[0.5, 30.0]] * 3, rtol=1e-6)
    np.testing.assert_array_equal(out.metrics["mu"], means)
    # Before softplus, scale 2 and minimum 0.05: log(exp(0.5 / 2 - 0.05) - 1) = log(0.221403) =
    # -1.507772 and log(exp(30 / 2 - 0.05) - 1) = 14.95 to six digits.
    assert isinstance(sampler.free_std, nnx.Param)
    np.testing.assert_allclose(sampler.free_std[...], [-1.507772, 14.95], rtol=1e-5)


def test_gradient_of_free_deviations() -> None:
    sampler = NormalSampler(nnx.Rngs(0), 1.0, 0.0, free_std=[1.0])
    graphdef, params, rest = nnx.split(sampler, nnx.Param, ...)

    def total(params, raw):
        live = nnx.merge(graphdef, params, rest, copy=True)
        out = live((), jnp.zeros((2, 1)), raw)
        return jnp.sum(out.output["log_likelihood"]) + jnp.sum(out.regularization_loss)

    # With std s: d/ds log p(z) = z^2 / s^3 - 1 / s = z^2 - 1, and d/ds of minus the entropy is
    # -1 / s = -1. z = 2 and 0: 3 - 1 - 1 - 1 = 0; z = 2 and 3: 3 + 8 - 2 = 9.
    # d s / d raw = sigmoid(log(e - 1)) = 1 - 1 / e = 0.632121; 9 * 0.632121 = 5.689085.
    for raw, expected in (([[2.0], [0.0]], 0.0), ([[2.0], [3.0]], 5.689085)):
        gradient = jax.grad(total)(params, jnp.array(raw))
        np.testing.assert_allclose(gradient["free_std"][...], [expected], rtol=1e-5, atol=1e-6)


LOGITS = jnp.asarray(np.random.default_rng(1).normal(size=(4, 3, 5)), jnp.float32)
MASK = np.array([[1, 1, 0, 1, 1], [1, 0, 1, 0, 1], [0, 0, 0, 0, 0]], bool)
MASKED = {"logits": LOGITS, "mask": jnp.stack([MASK, MASK[::-1], ~MASK, MASK])}
# (how to make the sampler, its input for a window of 4 steps and 3 environments)
SAMPLERS = {
    "tanh": (lambda: NormalTanhSampler(nnx.Rngs(0), 0.3), LOGITS[..., :4]),
    "normal": (lambda: NormalSampler(nnx.Rngs(0), 0.3), LOGITS[..., :4]),
    "free": (lambda: NormalTanhSampler(nnx.Rngs(0), 0.3, free_std=[0.5] * 4), LOGITS[..., :4]),
    "categorical": (lambda: CategoricalSampler(nnx.Rngs(0), 0.3), MASKED),
    "multi": (lambda: MultiCategoricalSampler(nnx.Rngs(0), [2, 3], 0.3), MASKED),
}
EACH_SAMPLER = pytest.mark.parametrize("name", SAMPLERS)


def at_step(xs, step):
    return jax.tree.map(lambda leaf: jnp.asarray(leaf[step]), xs)


@EACH_SAMPLER
def test_unroll_equals_stepwise(name) -> None:
    """Values, gradients by input and parameters, and the stream, fresh and in the replay."""
    build, xs = SAMPLERS[name]
    graphdef, params, rest = nnx.split(build(), nnx.Param, ...)
    done = jnp.asarray(np.arange(12).reshape(4, 3) % 4 == 1)

    def run(form, extras):
        def loss(params, xs):
            live = nnx.merge(graphdef, params, rest, copy=True)
            out = form(live, (), xs, done, extras)
            weights = jnp.arange(12.0).reshape(4, 3)
            both = out.output["log_likelihood"] + 2 * out.regularization_loss
            return jnp.sum(weights * both), (out, live.rng.count[...])

        return jax.value_and_grad(loss, (0, 1), has_aux=True, allow_int=True)(params, xs)

    @jax.jit
    def everything():
        live = nnx.merge(graphdef, params, rest, copy=True)
        extras = jnp.stack([live((), at_step(xs, t)).rollout_extras for t in range(4)])
        return [
            [run(form, given) for form in (lambda m, *rest: m.unroll(*rest), unroll_stepwise)]
            for given in (None, extras)
        ]

    fresh, replay = everything()
    for windowed, stepwise in (fresh, replay):
        assert windowed[0][1][0].regularization_loss.shape == (4, 3)
        assert int(windowed[0][1][1]) == int(stepwise[0][1][1]) == 4
        for left, right in zip(jax.tree.leaves(windowed), jax.tree.leaves(stepwise), strict=True):
            if left.dtype != jax.dtypes.float0:
                assert jnp.isfinite(left).all()
                np.testing.assert_allclose(left, right, rtol=2e-5, atol=2e-5)
    # The replay starts from the same stream, so fresh and replayed windows are the same.
    for left, right in zip(*map(jax.tree.leaves, (fresh[0][0], replay[0][0])), strict=True):
        np.testing.assert_allclose(left, right, rtol=2e-5, atol=2e-5)


@EACH_SAMPLER
def test_the_replay_keeps_the_action_under_other_parameters(name) -> None:
    build, xs = SAMPLERS[name]
    sampler, x = build(), at_step(xs, 0)
    rolled = sampler((), x)
    moved = jax.tree.map(lambda leaf: leaf if leaf.dtype == bool else 0.5 - leaf, x)
    replayed = sampler((), moved, rolled.rollout_extras)
    np.testing.assert_array_equal(replayed.output["action"], rolled.output["action"])
    assert replayed.rollout_extras.dtype == rolled.rollout_extras.dtype
    changed = replayed.output["log_likelihood"] != rolled.output["log_likelihood"]
    # The last mask allows nothing, and then the logits do not count.
    np.testing.assert_array_equal(changed, [True, True, xs is not MASKED])


@EACH_SAMPLER
def test_deterministic_mode_gives_the_mode(name) -> None:
    build, xs = SAMPLERS[name]
    sampler, x = build(), at_step(xs, 0)
    sampler.eval()
    stored = sampler((), x).rollout_extras
    ignored = jnp.zeros((), stored.dtype)  # not even looked at
    outs = [sampler((), x), sampler((), x, ignored)]
    for out in outs:
        np.testing.assert_array_equal(out.rollout_extras, stored)
    assert int(sampler.rng.count[...]) == 0
    # No other action is likelier under the raw action's distribution.
    sampler.train()
    best = sampler((), x, stored).output["log_likelihood"]
    for _ in range(5):
        if name not in ("tanh", "free"):
            assert (sampler((), x).output["log_likelihood"] <= best).all()


@EACH_SAMPLER
@pytest.mark.usefixtures("unchecked")
def test_extras_of_another_kind_are_refused(name) -> None:
    build, xs = SAMPLERS[name]
    sampler, x = build(), at_step(xs, 0)
    raw = sampler((), x).rollout_extras
    with pytest.raises(ValueError, match=r"rollout_extras must be the raw action, \w+32 of shape"):
        sampler((), x, raw[:1])
    other = jnp.int32 if jnp.issubdtype(raw.dtype, jnp.floating) else jnp.float32
    with pytest.raises(TypeError, match=rf"of {np.dtype(other)}; pass what the sampler emitted"):
        sampler((), x, raw.astype(other))
    with pytest.raises(ValueError, match="rollout_extras must be the raw action"):
        sampler.unroll((), xs, jnp.zeros((4, 3), bool), raw)


@pytest.mark.usefixtures("unchecked")
def test_messages_of_free_deviations() -> None:
    with pytest.raises(TypeError, match=r"free_std must be a list .* got 0\.5; write free_std="):
        NormalSampler(nnx.Rngs(0), 0.1, free_std=0.5)
    with pytest.raises(ValueError, match=r"above min_std .* = 0\.2 .* got \[0\.3, 0\.2\]"):
        NormalSampler(nnx.Rngs(0), 0.1, 0.1, 2.0, free_std=[0.3, 0.2])
    with pytest.raises(ValueError, match=r"one number above .* got \[\]"):
        NormalTanhSampler(nnx.Rngs(0), 0.1, free_std=[])
    sampler = NormalTanhSampler(nnx.Rngs(0), 0.1, free_std=[0.5])
    with pytest.raises(ValueError, match=r"means alone, .* 1 dimensions, got shape \(3, 2\)"):
        sampler((), jnp.zeros((3, 2)))


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
