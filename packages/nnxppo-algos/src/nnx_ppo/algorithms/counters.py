"""Environment steps as exact integers on the device, where only 32-bit integers exist."""

import jax.numpy as jnp
from jaxtyping import Array, Float, UInt32

_WORD = 2**32


def step_words(steps: int) -> UInt32[Array, "2"]:
    """Return a count as its low and high 32 bits."""
    return jnp.array([steps % _WORD, steps // _WORD], jnp.uint32)


def words_of(steps_taken: Float[Array, ""], words: UInt32[Array, "2"] | None) -> Array:
    """Return the exact count of a state, derived from the rounded one where it is missing."""
    if words is not None:
        return words
    high = jnp.floor(steps_taken / float(_WORD))
    return jnp.stack([steps_taken - high * float(_WORD), high]).astype(jnp.uint32)


def add_steps(words: UInt32[Array, "2"], steps: int) -> UInt32[Array, "2"]:
    """Add `steps` (below 2³²) to a count, with carry."""
    low = words[0] + jnp.uint32(steps)
    return jnp.stack([low, words[1] + (low < words[0])])


def as_float(words: UInt32[Array, "2"]) -> Float[Array, ""]:
    """Return a count rounded to float32."""
    return words[1].astype(jnp.float32) * float(_WORD) + words[0].astype(jnp.float32)


def as_int(words: UInt32[Array, "2"]) -> int:
    """Return a count as a Python integer; waits for the device."""
    low, high = (int(word) for word in words)
    return high * _WORD + low
