"""Random streams of modules: one's own at construction, and its keys one at a time or many."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Key


def fork_stream(rng: Any, name: str, argument: str) -> nnx.RngStream:
    """Return a stream of one's own, which no later fork of `rng` gives to another module.

    Args:
        rng: What the user passed.
        name: The stream that suits the purpose, taken if `rng` has it; else the default stream.
        argument: Where they passed it, e.g. `"NormalTanhSampler: rng"`.

    Raises:
        TypeError: `rng` is not an `nnx.Rngs`.
        ValueError: `rng` has no suitable stream.
    """
    if not isinstance(rng, nnx.Rngs):
        raise TypeError(
            f"{argument} must be an nnx.Rngs, got {type(rng).__name__}; write nnx.Rngs(0) or "
            f"nnx.Rngs({name}=key)."
        )
    if name not in rng and "default" not in rng:
        raise ValueError(
            f"{argument} must have a stream {name!r} or a default one, got {sorted(rng)}; write "
            f"nnx.Rngs(0) or nnx.Rngs(params=0, {name}=1)."
        )
    return rng[name].fork()


def take_keys(stream: nnx.RngStream, number: int) -> Key[Array, " number"]:
    """Return the keys that so many calls of a stream give, and leave it as they would."""
    start = stream.count[...]
    keys = jax.vmap(jax.random.fold_in, (None, 0))(
        stream.key[...], start + jnp.arange(number, dtype=start.dtype)
    )
    stream.count[...] = start + jnp.asarray(number, start.dtype)
    return keys
