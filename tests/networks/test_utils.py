"""Flattener and Filter."""

# Some tests hand in what the types forbid.
# pyright: reportArgumentType=false

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nnx_ppo.networks import Filter, Flattener


def tree():
    return {
        "b": {"q": jnp.full((2, 2, 2), 3.0), "p": jnp.full((2,), 2.0)},
        "a": (jnp.full((2, 1), 1.0), [jnp.full((2, 1), 9)]),
    }


def test_flattener_joins_all_leaves_sorted_by_key() -> None:
    out = Flattener()((), tree())
    np.testing.assert_array_equal(out.output, [[1, 9, 2, 3, 3, 3, 3]] * 2)


def test_flattener_preserves_levels() -> None:
    one = Flattener(preserve_levels=1)
    out = one((), tree()).output
    assert jax.tree.map(jnp.shape, out) == {"a": (2, 2), "b": (2, 5)}
    again = one((), out).output
    assert jax.tree.map(jnp.shape, again) == {"a": (2, 2), "b": (2, 5)}
    two = Flattener(preserve_levels=2)((), tree()).output
    assert isinstance(two["a"], tuple)
    assert jax.tree.map(jnp.shape, two) == {
        "a": ((2, 1), (2, 1)),
        "b": {"p": (2, 1), "q": (2, 4)},
    }


@pytest.mark.usefixtures("unchecked")
def test_messages_of_the_flattener() -> None:
    with pytest.raises(ValueError, match="preserve_levels must be 0 or more, got -1"):
        Flattener(-1)
    with pytest.raises(ValueError, match=r"levels=3\): x\['b'\]\['q'\] must be .*only 2 levels"):
        Flattener(3)((), tree())
    with pytest.raises(ValueError, match=r"x must have leaves, each with a batch axis, got \{\}"):
        Flattener()((), {})
    with pytest.raises(ValueError, match=r"each with a batch axis, got \{'a': \(\)\}"):
        Flattener()((), {"a": jnp.ones(())})


def test_filter() -> None:
    x = {"a": jnp.ones((2, 1)), "b": {"c": [jnp.zeros((2, 1)), jnp.full((2, 1), 5.0)]}}
    spec = {"one": "a", "two": ("b", "c", 1), "three": lambda x: x["a"] + 1}
    out = Filter(spec)((), x).output
    assert list(out) == ["one", "two", "three"]
    assert [float(value[0, 0]) for value in out.values()] == [1.0, 5.0, 2.0]


@pytest.mark.usefixtures("unchecked")
def test_messages_of_the_filter() -> None:
    with pytest.raises(TypeError, match=r"spec must be a dict .* got str; write Filter\("):
        Filter("a")
    with pytest.raises(ValueError, match="spec is empty"):
        Filter({})
    for entry in (3, ["a"], ("a", None)):
        with pytest.raises(TypeError, match=r"spec\['x'\] must be a string, a tuple .* got"):
            Filter({"x": entry})
    with pytest.raises(ValueError, match=r"spec\['x'\] is an empty path"):
        Filter({"x": ()})
    for entry, path in {"b": "b", ("a", "c"): "a'\\]\\['c", ("a", 5): "a'\\]\\[5"}.items():
        with pytest.raises(ValueError, match=rf"asks for x\['?{path}.*has the shapes"):
            Filter({"x": entry})((), {"a": jnp.ones((2, 1))})
