"""Samplers of choices: probabilities by hand, masks, gradients and messages."""

# Some tests hand in what the types forbid.
# pyright: reportArgumentType=false

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from scipy import special, stats

from nnx_ppo.networks.sampling_layers import (
    CategoricalSampler,
    MultiCategoricalSampler,
    NormalTanhSampler,
)

# Probabilities 1/8, 2/8 and 5/8.
LOGITS = jnp.log(jnp.array([[1.0, 2.0, 5.0]]))


def categorical(entropy_weight=1.0):
    return CategoricalSampler(nnx.Rngs(0), entropy_weight)


def masked(*allowed, logits=LOGITS):
    return {"logits": logits, "mask": jnp.array([allowed], bool)}


def gradients(inputs, action, make=categorical):
    """Gradients of log-likelihood and entropy of one sample by the logits."""

    def values(logits):
        given = {**inputs, "logits": logits} if isinstance(inputs, dict) else logits
        out = make()((), given, jnp.asarray(action))
        return out.output["log_likelihood"][0], -out.regularization_loss[0]

    logits = inputs["logits"] if isinstance(inputs, dict) else inputs
    return [gradient[0] for gradient in jax.jacrev(values)(logits)]


def test_by_hand() -> None:
    out = categorical(2.0)((), LOGITS, jnp.array([1]))
    # log(2/8) = -1.386294
    np.testing.assert_allclose(out.output["log_likelihood"], [-1.386294], rtol=1e-6)
    # Entropy: log(8) / 8 + log(4) / 4 + 5 log(8/5) / 8 = 0.259930 + 0.346574 + 0.293752 =
    # 0.900256; -2 * 0.900256 = -1.800512
    np.testing.assert_allclose(out.regularization_loss, [-1.800512], rtol=1e-6)
    np.testing.assert_allclose(out.metrics["probabilities"], [[0.125, 0.25, 0.625]], rtol=1e-6)
    np.testing.assert_allclose(out.metrics["entropy"], [0.900256], rtol=1e-6)
    assert out.output["action"].dtype == out.rollout_extras.dtype == jnp.int32


def test_gradients_by_hand() -> None:
    # d log p(1) / d logits = [0, 1, 0] - p
    # dH / d logits = -p (log p + H), H = 0.900256: -0.125 (-2.079442 + 0.900256) = 0.147398,
    # -0.25 (-1.386294 + 0.900256) = 0.121510, -0.625 (-0.470004 + 0.900256) = -0.268908
    log_likelihood, entropy = gradients(LOGITS, [1])
    np.testing.assert_allclose(log_likelihood, [-0.125, 0.75, -0.625], rtol=1e-5)
    np.testing.assert_allclose(entropy, [0.147398, 0.121510, -0.268908], rtol=1e-4)


def test_mask_by_hand() -> None:
    inputs = masked(True, True, False)
    out = categorical()((), inputs, jnp.array([0]))
    # Probabilities 1/3 and 2/3: log(1/3) = -1.098612; entropy log(3) - 2 log(2) / 3 = 0.636514
    np.testing.assert_allclose(out.output["log_likelihood"], [-1.098612], rtol=1e-6)
    np.testing.assert_allclose(out.regularization_loss, [-0.636514], rtol=1e-5)
    assert out.metrics["probabilities"][0, 2] == 0.0
    log_likelihood, entropy = gradients(inputs, [0])
    np.testing.assert_allclose(log_likelihood, [2 / 3, -2 / 3, 0.0], rtol=1e-5)
    # -(-1.098612 + 0.636514) / 3 = 0.154033, and its opposite
    np.testing.assert_allclose(entropy, [0.154033, -0.154033, 0.0], rtol=1e-4)


def test_what_the_mask_forbids_has_no_likelihood() -> None:
    out = categorical()((), masked(True, True, False), jnp.array([2]))
    assert out.output["log_likelihood"] == -jnp.inf
    assert all(jnp.isfinite(g).all() for g in gradients(masked(True, True, False), [2]))


def test_the_logits_of_forbidden_choices_do_not_matter() -> None:
    sampler = categorical()
    sampler.eval()
    allowed = [True, True, False]
    outs = [
        sampler((), masked(*allowed, logits=LOGITS.at[0, 2].set(logit)))
        for logit in (0.0, 100.0, -jnp.inf, jnp.inf)
    ]
    for out in outs:
        for left, right in zip(jax.tree.leaves(out), jax.tree.leaves(outs[0]), strict=True):
            np.testing.assert_array_equal(left, right)
    assert outs[0].output["action"] == 1


def test_infinite_logits_forbid_as_well() -> None:
    logits = LOGITS.at[0, 2].set(-jnp.inf)
    out = categorical()((), logits, jnp.array([0]))
    np.testing.assert_allclose(out.regularization_loss, [-0.636514], rtol=1e-5)
    log_likelihood, entropy = gradients(logits, [0])
    np.testing.assert_allclose(log_likelihood, [2 / 3, -2 / 3, 0.0], rtol=1e-5)
    np.testing.assert_allclose(entropy, [0.154033, -0.154033, 0.0], rtol=1e-4)


@pytest.mark.parametrize(
    "inputs", [masked(False, False, False), jnp.full((1, 3), -jnp.inf)], ids=["mask", "logits"]
)
def test_where_nothing_is_allowed_all_is_equally_likely(inputs) -> None:
    out = categorical()((), inputs, jnp.array([1]))
    # log(1/3) = -1.098612, entropy log(3)
    np.testing.assert_allclose(out.output["log_likelihood"], [-1.098612], rtol=1e-6)
    np.testing.assert_allclose(out.regularization_loss, [-1.098612], rtol=1e-6)
    np.testing.assert_array_equal(jnp.stack(gradients(inputs, [1])), jnp.zeros((2, 3)))


def test_likelihoods_and_entropies_against_scipy() -> None:
    rng = np.random.default_rng(0)
    logits = (3 * rng.normal(size=(20, 6))).astype(np.float32)
    action = rng.integers(0, 6, 20).astype(np.int32)
    mask = rng.random((20, 6)) < 0.6
    mask[np.arange(20), action] = True
    inputs = {"logits": jnp.asarray(logits), "mask": jnp.asarray(mask)}
    out = categorical()((), inputs, jnp.asarray(action))
    log_p = special.log_softmax(np.where(mask, logits, -np.inf), axis=-1)
    np.testing.assert_allclose(
        out.output["log_likelihood"], log_p[np.arange(20), action], rtol=1e-5, atol=1e-6
    )
    np.testing.assert_allclose(
        -out.regularization_loss, stats.entropy(np.exp(log_p), axis=-1), rtol=1e-5, atol=1e-6
    )


def test_draws_have_the_probabilities() -> None:
    many = 8000
    drawn = categorical()((), jnp.broadcast_to(LOGITS, (many, 3))).output["action"]
    assert stats.chisquare(np.bincount(drawn), [1000, 2000, 5000]).pvalue > 1e-3
    only_two = masked(True, True, False)
    wide = {name: jnp.broadcast_to(leaf, (many, 3)) for name, leaf in only_two.items()}
    drawn = categorical()((), wide).output["action"]
    counts = np.bincount(drawn, minlength=3)
    assert counts[2] == 0
    # Third of 8000: deviation sqrt(8000 * 2/9) = 42
    assert abs(counts[0] - many / 3) < 4 * 42


def test_the_mode_is_the_first_of_the_likeliest() -> None:
    sampler = categorical()
    sampler.eval()
    logits = jnp.array([[1.0, 2.0, 2.0], [3.0, 2.0, 1.0]])
    assert sampler((), logits).output["action"].tolist() == [1, 0]


def test_several_choices_are_those_of_one_added_up() -> None:
    """Against two samplers of one choice each, with a mask and without, gradients too."""
    rng = np.random.default_rng(0)
    logits = jnp.asarray(rng.normal(size=(1, 5)), jnp.float32)

    def pair():
        return MultiCategoricalSampler(nnx.Rngs(0), [2, 3], 1.0)

    for mask in (None, jnp.array([[True, False, True, True, False]])):
        inputs = {"logits": logits} if mask is None else {"logits": logits, "mask": mask}
        parts = [
            {name: leaf[:, cut] for name, leaf in inputs.items()}
            for cut in (slice(0, 2), slice(2, 5))
        ]
        action = [0, 1]
        out = pair()((), inputs, jnp.array([action], jnp.int32))
        singles = [
            categorical()((), part, jnp.array([choice], jnp.int32))
            for part, choice in zip(parts, action, strict=True)
        ]
        for read in (lambda o: o.output["log_likelihood"], lambda o: o.regularization_loss):
            np.testing.assert_allclose(read(out), sum(map(read, singles)), rtol=1e-6)
        together = gradients(inputs, [action], pair)
        apart = [gradients(p, [c]) for p, c in zip(parts, action, strict=True)]
        for i in range(2):
            expected = np.concatenate([gradient[i] for gradient in apart])
            np.testing.assert_allclose(together[i], expected, rtol=1e-5, atol=1e-7)


def test_several_choices_by_hand() -> None:
    """Probabilities 1/4, 3/4 and 1/8, 2/8, 5/8, drawn independently."""
    logits = jnp.log(jnp.array([[1.0, 3.0, 1.0, 2.0, 5.0]]))
    sampler = MultiCategoricalSampler(nnx.Rngs(0), (2, 3), 1.0)
    out = sampler((), logits, jnp.array([[1, 2]]))
    # log(3/4 * 5/8) = log(0.46875) = -0.757686
    np.testing.assert_allclose(out.output["log_likelihood"], [-0.757686], rtol=1e-5)
    # log(4) / 4 + 3 log(4/3) / 4 + 0.900256 = 0.346574 + 0.215762 + 0.900256 = 1.462591
    np.testing.assert_allclose(out.regularization_loss, [-1.462591], rtol=1e-5)
    assert out.metrics["probabilities"].shape == (1, 5)
    drawn = sampler((), jnp.broadcast_to(logits, (8000, 5))).output["action"]
    assert (drawn.shape, drawn.dtype) == ((8000, 2), jnp.int32)
    joint = np.bincount(3 * drawn[:, 0] + drawn[:, 1])
    # 8000 times 1/4 or 3/4 times 1/8, 2/8 or 5/8
    assert stats.chisquare(joint, [250, 500, 1250, 750, 1500, 3750]).pvalue > 1e-3


@pytest.mark.usefixtures("unchecked")
def test_messages() -> None:
    with pytest.raises(ValueError, match=r"keys 'logits' and 'mask', got the keys \['mask'\]"):
        categorical()((), {"mask": jnp.ones((1, 3), bool)})
    with pytest.raises(ValueError, match=r"got the keys \['logits', 'masks'\]; select them with"):
        categorical()((), {"logits": LOGITS, "masks": LOGITS})
    with pytest.raises(TypeError, match="mask must be boolean, .* got float32; write mask != 0"):
        categorical()((), {"logits": LOGITS, "mask": LOGITS})
    with pytest.raises(ValueError, match=r"shape of the logits, \(1, 3\), got \(3,\)"):
        categorical()((), {"logits": LOGITS, "mask": jnp.ones(3, bool)})
    with pytest.raises(ValueError, match=r"one value for each choice .* got shape \(2, 0\)"):
        categorical()((), jnp.zeros((2, 0)))
    with pytest.raises(TypeError, match=r"CategoricalSampler: rng must be an nnx\.Rngs, got int"):
        CategoricalSampler(0, 0.1)
    with pytest.raises(ValueError, match=r"sum\(sizes\) = 5 on their last axis, got shape \(1, 3"):
        MultiCategoricalSampler(nnx.Rngs(0), [2, 3], 0.1)((), LOGITS)
    with pytest.raises(ValueError, match="sizes is empty; write sizes="):
        MultiCategoricalSampler(nnx.Rngs(0), [], 0.1)
    with pytest.raises(ValueError, match=r"sizes\[1\] must be at least 1, got 0"):
        MultiCategoricalSampler(nnx.Rngs(0), [2, 0], 0.1)


def test_likelihoods_have_at_least_the_digits_of_float32() -> None:
    """The layer before may compute in bfloat16, whose steps near 1 are 1/128."""
    logits = jnp.array([[1.0, 0.5]], jnp.bfloat16)
    out = CategoricalSampler(nnx.Rngs(0), 0.1)((), logits, jnp.zeros(1, jnp.int32))
    assert out.output["log_likelihood"].dtype == jnp.float32
    # log(e / (e + √e)) = −log(1 + 1/√e)
    np.testing.assert_allclose(out.output["log_likelihood"], [-np.log1p(np.exp(-0.5))], rtol=1e-6)
    gaussian = NormalTanhSampler(nnx.Rngs(0), 0.1)((), logits)
    assert gaussian.output["log_likelihood"].dtype == jnp.float32


@pytest.mark.parametrize("weight", [float("nan"), float("inf")])
def test_weights_are_finite(weight) -> None:
    with pytest.raises(ValueError, match="CategoricalSampler: entropy_weight must be finite"):
        CategoricalSampler(nnx.Rngs(0), weight)
