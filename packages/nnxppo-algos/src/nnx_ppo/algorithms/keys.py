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
        video: Videos.
    """

    reset: Key[Array, ""]
    stagger: Key[Array, ""]
    training: Key[Array, ""]
    evaluation: Key[Array, ""]
    video: Key[Array, ""]


def purpose_keys(seed: int) -> PurposeKeys:
    """Return the keys of a run."""
    return PurposeKeys(*jax.random.split(jax.random.key(seed), len(PurposeKeys._fields)))


def at_step(key: Key[Array, ""], step: int) -> Key[Array, ""]:
    """Return a purpose's key for an environment step, which may exceed 32 bits."""
    return jax.random.fold_in(jax.random.fold_in(key, step % 2**32), step // 2**32)
