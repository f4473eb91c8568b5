"""One random key for every purpose, so that none can influence another."""

from typing import NamedTuple

import jax
from jaxtyping import Array, Key


class PurposeKeys(NamedTuple):
    """Keys of a run, all split from its seed at once.

    Attributes:
        reset: First states of the training environments.
        stagger: Ages of their first episodes.
        training: Iterations: resets and minibatches.
        evaluation: Evaluations.
        video: Rendered episodes.
    """

    reset: Key[Array, ""]
    stagger: Key[Array, ""]
    training: Key[Array, ""]
    evaluation: Key[Array, ""]
    video: Key[Array, ""]


# Networks are often made with `nnx.Rngs(seed)` of the same seed, whose streams fold small counts
# into `jax.random.key(seed)`; those folds can equal splits of that key. This one is far from them.
_TRAINING = 0x70706F00


def purpose_keys(seed: int) -> PurposeKeys:
    """Return the keys of a run."""
    root = jax.random.fold_in(jax.random.key(seed), _TRAINING)
    return PurposeKeys(*jax.random.split(root, len(PurposeKeys._fields)))


def at_step(key: Key[Array, ""], step: int) -> Key[Array, ""]:
    """Return a purpose's key for an environment step, which may exceed 32 bits."""
    return jax.random.fold_in(jax.random.fold_in(key, step % 2**32), step // 2**32)
