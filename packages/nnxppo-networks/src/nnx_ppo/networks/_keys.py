"""Keys that live in the carry, one for each environment.

Noise that is a forward activation must come out the same in the replay. It is drawn from keys in
the carry, which the replay starts with as the rollout did; each step splits them once.
"""

import jax
from flax import nnx
from jaxtyping import Array, Key


def initial_keys(stream: nnx.RngStream, batch_size: int) -> Key[Array, " batch"]:
    """Return one key for each environment, from the next key of a stream."""
    return jax.random.split(stream(), batch_size)


def split_keys(
    keys: Key[Array, " batch"],
) -> tuple[Key[Array, " batch"], Key[Array, " batch"]]:
    """Return the keys to go on with, and those to draw this step's noise from."""
    pairs = jax.vmap(jax.random.split)(keys)
    return pairs[:, 0], pairs[:, 1]


def split_keys_over_time(
    keys: Key[Array, " batch"], time: int
) -> tuple[Key[Array, " batch"], Key[Array, "time batch"]]:
    """Return what so many `split_keys` in a row give: the last keys, and those of each step."""
    return jax.lax.scan(lambda carry, _: split_keys(carry), keys, length=time)
