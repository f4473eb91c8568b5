"""Exact step counts beyond 24 and 32 bits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nnx_ppo.algorithms.counters import add_steps, as_float, as_int, step_words, words_of
from nnx_ppo.algorithms.keys import at_step, purpose_keys


@pytest.mark.parametrize("start", [0, 2**24, 2**31 - 1, 2**32 - 3, 2**32, 5 * 10**9])
def test_counts_are_exact(start):
    words = step_words(start)
    for _ in range(3):
        words = jax.jit(add_steps, static_argnums=1)(words, 5)
    assert as_int(words) == start + 15
    np.testing.assert_allclose(as_float(words), start + 15, rtol=1e-7)


def test_a_missing_count_is_derived_from_the_rounded_one():
    assert as_int(words_of(jnp.float32(5 * 2.0**32 + 2.0**20), None)) == 5 * 2**32 + 2**20
    assert as_int(words_of(jnp.float32(0.0), step_words(7))) == 7


def test_no_two_keys_of_a_run_coincide():
    """Purposes, steps, iterations and the streams of `nnx.Rngs(seed)` all differ."""
    keys = purpose_keys(3)
    root = jax.random.key(3)
    derived = [
        *keys,
        *(at_step(keys.evaluation, step) for step in (0, 1, 2**32, 2**32 + 1)),
        *jax.random.split(keys.training, 3),
        *(jax.random.fold_in(root, i) for i in range(8)),
        *jax.random.split(root, 8),
    ]
    data = np.stack([np.asarray(jax.random.key_data(key)) for key in derived])
    folds, splits = data[-16:-8], data[-8:]
    ours = data[:-16]
    for others in (folds, splits):
        both = np.concatenate([ours, others])
        assert len(np.unique(both, axis=0)) == len(both)
