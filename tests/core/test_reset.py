"""Resets of the carry, per environment."""

from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nnx_ppo.core import StatefulModule, StatefulModuleOutput, check_same_carry, reset_where

from .helpers import Leak, Scale


class Replaces(StatefulModule):
    """Resets its carry to whatever it was made with."""

    def __init__(self, fresh: Any) -> None:
        self.fresh = lambda: fresh

    def __call__(
        self, module_state: Any, obs: Any, rollout_extras: Any = None
    ) -> StatefulModuleOutput:
        return StatefulModuleOutput(module_state, obs, jnp.zeros(()), {})

    def reset_state(self, prev_state: Any) -> Any:
        return self.fresh()


def test_only_those_asked_are_reset() -> None:
    state = jnp.asarray([[1.0], [2.0], [3.0]])
    found = reset_where(Leak(), jnp.asarray([False, True, False]), state)
    assert found.tolist() == [[1.0], [0.0], [3.0]]


@hypothesis.given(st.lists(st.booleans(), min_size=3, max_size=3))
@hypothesis.settings(deadline=None, max_examples=8)
def test_any_mask_selects_leaf_by_leaf(mask: list[bool]) -> None:
    old = {"a": jnp.arange(3), "b": (jnp.ones((3, 2, 2)),)}
    new = {"a": jnp.full(3, -1), "b": (jnp.zeros((3, 2, 2)),)}
    found = reset_where(Replaces(new), jnp.asarray(mask), old)
    for index, reset in enumerate(mask):
        source = new if reset else old
        assert found["a"][index] == source["a"][index]
        assert (found["b"][0][index] == source["b"][0][index]).all()


def test_a_reset_is_idempotent() -> None:
    done = jnp.asarray([True, False])
    once = reset_where(Leak(), done, jnp.ones((2, 1)))
    assert reset_where(Leak(), done, once).tolist() == once.tolist()


def test_unbatched_carry() -> None:
    assert reset_where(Leak(), jnp.asarray(True), jnp.ones(1)).tolist() == [0.0]
    assert reset_where(Leak(), jnp.asarray(False), jnp.ones(1)).tolist() == [1.0]


def test_leaves_of_the_batch_axis_only() -> None:
    found = reset_where(Replaces(jnp.zeros(2)), jnp.asarray([True, False]), jnp.ones(2))
    assert found.tolist() == [0.0, 1.0]


def test_key_leaves() -> None:
    old, new = jax.random.split(jax.random.key(0), 2), jax.random.split(jax.random.key(1), 2)
    found = reset_where(Replaces({"key": new}), jnp.asarray([True, False]), {"key": old})
    data = jax.random.key_data(found["key"])
    np.testing.assert_array_equal(data[0], jax.random.key_data(new)[0])
    np.testing.assert_array_equal(data[1], jax.random.key_data(old)[1])


def test_module_without_memory_is_left_alone() -> None:
    assert reset_where(Scale(), jnp.asarray([True]), ()) == ()


def test_values_that_are_not_selected_may_be_anything() -> None:
    new = jnp.full((2, 1), jnp.nan)
    found = reset_where(Replaces(new), jnp.asarray([False, False]), jnp.ones((2, 1)))
    assert found.tolist() == [[1.0], [1.0]]


@pytest.mark.parametrize(
    ("fresh", "message"),
    [
        ({"h": jnp.zeros((2, 3))}, r"'state\['h'\]': expected float32\[2, 1\], got float32\[2, 3"),
        ({"h": jnp.zeros((2, 1), int)}, r"'state\['h'\]': expected float32\[2, 1\], got int32"),
        ({"h": 0.0}, r"expected float32\[2, 1\], got float32\[\]"),
        ({"g": jnp.zeros((2, 1))}, r"Replaces.reset_state must return a carry of the same tree"),
        (jnp.zeros((2, 1)), r"same tree as it was given, expected .*'h'"),
    ],
)
def test_reset_may_not_change_the_carry(fresh: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        reset_where(Replaces(fresh), jnp.asarray([True, False]), {"h": jnp.ones((2, 1))})


def test_message_names_the_source_and_the_cure() -> None:
    with pytest.raises(ValueError, match=r"^Cell.__call__ changes .*make them in initialize_state"):
        check_same_carry("Cell.__call__", jnp.zeros(2), jnp.zeros(3))


def test_same_carries_pass() -> None:
    # A weak type is no difference: a Python number is a float32 scalar too.
    check_same_carry("Cell", (jnp.zeros(()), None), (0.0, None))
    key = jax.random.key(0)
    check_same_carry("Cell", key, jax.random.fold_in(key, 1))


def test_kinds_of_keys_differ() -> None:
    with pytest.raises(ValueError, match=r"expected key<fry>\[\], got key<rbg>\[\]"):
        check_same_carry("Cell", jax.random.key(0), jax.random.key(0, impl="rbg"))
