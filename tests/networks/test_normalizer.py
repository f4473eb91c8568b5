"""Running statistics against numpy, and what inputs are accepted."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from nnx_ppo.networks import Normalizer, NormalizerStatistics

END = 2**32 - 1


def draw(shape, seed=0, scale=1.0, offset=0.0):
    values = np.random.default_rng(seed).normal(size=shape) * scale + offset
    return values.astype(np.float32)


def test_divides_by_ten_before_the_first_update() -> None:
    out = Normalizer(2)((), jnp.array([[3.0, -50.0]]))
    np.testing.assert_allclose(out.output, [[0.3, -5.0]], rtol=1e-6)
    np.testing.assert_array_equal(out.rollout_extras, [[3.0, -50.0]])
    assert out.next_state == () and out.metrics == {}


def test_one_update_by_hand() -> None:
    # Samples 1, 2, 3, 6: mean 12 / 4 = 3, M2 = 4 + 1 + 0 + 9 = 14, variance 14 / 4 = 3.5,
    # and 5 becomes (5 - 3) / sqrt(3.5) = 1.069045.
    normalizer = Normalizer(1)
    normalizer.update_statistics(jnp.array([[[1.0], [2.0]], [[3.0], [6.0]]]))
    np.testing.assert_allclose(normalizer.mean[...], [3.0])
    np.testing.assert_allclose(normalizer.M2[...], [14.0])
    assert int(normalizer.counter[...]) == 4
    out = normalizer((), jnp.array([[5.0]]), rollout_extras=jnp.array([[9.0]]))
    np.testing.assert_allclose(out.output, [[1.069045]], rtol=1e-6)
    np.testing.assert_array_equal(out.rollout_extras, [[5.0]])


def test_many_merges_equal_numpy_on_everything() -> None:
    normalizer = Normalizer((3, 2))
    update = nnx.jit(lambda module, x: module.update_statistics(x))
    windows = [draw((5, 4, 3, 2), seed, 1.0 + seed, 1000.0) for seed in range(4)]
    for window in windows:
        update(normalizer, window)
    samples = np.concatenate(windows).reshape(-1, 3, 2).astype(np.float64)
    np.testing.assert_allclose(normalizer.mean[...], samples.mean(0), rtol=1e-6)
    variance = normalizer.M2[...] / normalizer.counter[...]
    np.testing.assert_allclose(variance, samples.var(0), rtol=1e-4)


def test_output_is_clipped() -> None:
    normalizer = Normalizer(1, clip=2.0)
    np.testing.assert_array_equal(normalizer((), jnp.array([[99.0], [-99.0]])).output, [[2], [-2]])


def test_a_constant_feature_becomes_zero() -> None:
    normalizer = Normalizer(1)
    normalizer.update_statistics(jnp.full((3, 2, 1), 0.1))
    assert float(normalizer.M2[...][0]) >= 0
    np.testing.assert_allclose(normalizer((), jnp.full((1, 1), 0.1)).output, [[0.0]], atol=1e-3)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e30])
def test_a_bad_sample_is_dropped_whole(bad) -> None:
    normalizer = Normalizer({"a": 2, "b": 1})
    window = {"a": draw((3, 2, 2)), "b": draw((3, 2, 1), 1)}
    window["a"][1, 0, 1] = bad
    window["b"][2, 1, 0] = bad
    normalizer.update_statistics(jax.tree.map(jnp.asarray, window))
    good = np.array([[True, True], [False, True], [True, False]])
    assert (int(normalizer.counter[...]), int(normalizer.dropped[...])) == (4, 2)
    for name, values in window.items():
        np.testing.assert_allclose(normalizer.mean[name][...], values[good].mean(0), rtol=1e-5)
        np.testing.assert_allclose(normalizer.M2[name][...] / 4, values[good].var(0), rtol=1e-5)


def test_a_window_of_bad_samples_changes_nothing() -> None:
    normalizer = Normalizer(1)
    normalizer.update_statistics(jnp.full((2, 2, 1), jnp.nan))
    assert (int(normalizer.counter[...]), int(normalizer.dropped[...])) == (0, 4)
    np.testing.assert_allclose(normalizer((), jnp.ones((1, 1))).output, [[0.1]])
    normalizer.update_statistics(jnp.ones((1, 1, 1)))
    np.testing.assert_array_equal(normalizer.mean[...], [1.0])


@pytest.mark.parametrize("start", [2**24, 2**31, END - 6])
def test_the_count_is_exact(start) -> None:
    normalizer = Normalizer(1)
    normalizer.counter[...] = jnp.uint32(start)
    normalizer.update_statistics(draw((3, 2, 1)))
    assert int(normalizer.counter[...]) == start + 6


def test_the_count_stays_at_its_end_and_the_variance_is_right() -> None:
    normalizer = Normalizer(1)
    normalizer.counter[...] = jnp.uint32(END - 1)
    normalizer.M2[...] = jnp.array([4.0 * (END - 1)])
    for _ in range(2):
        normalizer.update_statistics(draw((3, 2, 1), scale=2.0))
        assert int(normalizer.counter[...]) == END
        np.testing.assert_allclose(normalizer.M2[...] / normalizer.counter[...], [4.0], rtol=1e-6)


def test_no_gradient_reaches_the_statistics() -> None:
    normalizer = Normalizer(1)
    normalizer.update_statistics(draw((3, 2, 1)))
    graphdef, statistics, rest = nnx.split(normalizer, lambda _, v: v[...].dtype == "float32", ...)

    def total(statistics):
        return jnp.sum(nnx.merge(graphdef, statistics, rest)((), jnp.ones((1, 1))).output)

    assert all(not leaf.any() for leaf in jax.tree.leaves(jax.grad(total)(statistics)))
    assert not jax.tree.leaves(nnx.state(normalizer, nnx.Param))
    assert len(jax.tree.leaves(nnx.state(normalizer, NormalizerStatistics))) == 4


NESTED = {"z": {"items": 2, "keys": (2, 1)}, "a": 1}  # names that nnx.Dict's methods have, too


@pytest.mark.parametrize("wrap", [dict, types.MappingProxyType])
def test_nested_mappings_of_any_kind(wrap) -> None:
    normalizer = Normalizer(wrap(NESTED))
    # An nnx.Dict comes back from split and merge with its keys sorted.
    normalizer = nnx.merge(*nnx.split(normalizer))
    leaves = {"items": jnp.full((2, 3, 2), 4.0), "keys": jnp.full((2, 3, 2, 1), 5.0)}
    window = wrap({"z": wrap(leaves), "a": jnp.full((2, 3, 1), 6)})
    normalizer.update_statistics(window)
    x = wrap({"z": wrap({name: leaf[0] for name, leaf in leaves.items()}), "a": window["a"][0]})
    out = normalizer((), x)
    assert jax.tree.map(jnp.shape, out.output) == {
        "z": {"items": (3, 2), "keys": (3, 2, 1)},
        "a": (3, 1),
    }
    assert out.rollout_extras is x
    np.testing.assert_array_equal(normalizer.mean["z"]["items"][...], [4.0, 4.0])
    np.testing.assert_array_equal(normalizer.mean["a"][...], [6.0])


@pytest.mark.usefixtures("unchecked")
def test_messages_of_the_constructor() -> None:
    with pytest.raises(ValueError, match="clip must be above 0, got 0"):
        Normalizer(1, clip=0)
    with pytest.raises(TypeError, match=r"shape\['a'\] must be an integer, got None"):
        Normalizer({"a": None})
    with pytest.raises(ValueError, match=r"shape\['a'\]\[1\] must be at least 1, got 0"):
        Normalizer({"a": (3, 0)})
    with pytest.raises(ValueError, match=r"shape\['a'\] is an empty mapping"):
        Normalizer({"a": {}})
    with pytest.raises(TypeError, match="shape must have strings as keys, got 1"):
        Normalizer({1: 2})


@pytest.mark.usefixtures("unchecked")
def test_messages_of_the_call() -> None:
    normalizer = Normalizer({"a": 2})
    with pytest.raises(ValueError, match=r"x must have .* leaves \['a'\], got \['a'\], \['b'\]"):
        normalizer((), {"a": jnp.ones((1, 2)), "b": jnp.ones((1, 2))})
    with pytest.raises(ValueError, match=r"leaves \['a'\], got one array; select entries"):
        normalizer((), jnp.ones((1, 2)))
    with pytest.raises(ValueError, match=r"x\['a'\] of shape \(batch, 2\), got \(1, 3\)"):
        normalizer((), {"a": jnp.ones((1, 3))})
    with pytest.raises(ValueError, match=r"expected x of shape \(batch, 2\), got \(2,\)"):
        Normalizer(2)((), jnp.ones(2))
    with pytest.raises(ValueError, match="rollout_extras must have the nesting"):
        normalizer.update_statistics(jnp.ones((1, 1, 2)))
