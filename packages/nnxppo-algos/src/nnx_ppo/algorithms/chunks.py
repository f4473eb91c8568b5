"""Windows cut into shorter chunks, each replayed from the carry at its own start.

Shorter chunks bound how far gradients flow back, and how far a carry has drifted from the one that
acted by the time it is used. Burn-in lets some steps before a chunk run under the current weights
first (Kapturowski et al. 2019, "Recurrent experience replay in distributed reinforcement
learning", https://openreview.net/forum?id=r1lyTjAqYX).
"""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import PyTree

from nnx_ppo.algorithms._functional import clone_keys, functional_copy
from nnx_ppo.algorithms.config import PPOConfig
from nnx_ppo.algorithms.types import Transition
from nnx_ppo.core import JaxDataclass, StatefulModule


class Chunks(JaxDataclass):
    """The chunks of a window.

    Attributes:
        steps: What is learned from, leaves `(chunk_length, batch, chunk, …)`.
        burn_in: For each number of burn-in steps that occurs, in the order of the chunks: the
            inputs of those steps, leaves `(burn_in, batch, chunk, …)`, or None for 0 steps.
    """

    steps: PyTree
    burn_in: list[Any]


def kept_steps(config: PPOConfig) -> tuple[int, ...]:
    """Return the steps of a rollout before which carries must be kept, in order."""
    if config.chunk_length is None:
        return ()
    starts = range(0, config.rollout_length, config.chunk_length)
    return tuple(sorted({max(0, start - config.burn_in) for start in starts}))


def cut(
    rollout: Transition, steps: PyTree, carries: PyTree, config: PPOConfig
) -> tuple[list[Any], Chunks]:
    """Cut a window into chunks.

    Burn-in that would begin before the window begins with it.

    Args:
        rollout: The window, leaves `(time, batch, …)`.
        steps: What is learned from, leaves `(time, batch, …)`.
        carries: The carries at `kept_steps(config)`, leaves `(kept, batch, …)`.
        config: Has a `chunk_length`.

    Returns:
        The carries from which the chunks start, burn-in included, one tree with leaves
        `(batch, chunk, …)` for each entry of `burn_in`; and the chunks.
    """
    time, length = config.rollout_length, config.chunk_length or config.rollout_length
    kept = kept_steps(config)
    inputs = (rollout.obs, rollout.done, rollout.rollout_extras)
    states, burn_in = [], []
    lengths = itertools.groupby(range(0, time, length), key=lambda s: min(s, config.burn_in))
    for n_before, group in lengths:
        starts = list(group)
        rows = np.array([kept.index(start - n_before) for start in starts])
        picked = jax.tree.map(lambda leaf, at=rows: leaf[at], clone_keys(carries))
        states.append(jax.tree.map(lambda leaf: leaf.swapaxes(0, 1), clone_keys(picked)))
        burn_in.append(_before(inputs, starts, n_before) if n_before else None)

    def chunked(leaf: Any) -> Any:
        return jnp.moveaxis(leaf.reshape((time // length, length, *leaf.shape[1:])), 0, 2)

    return states, Chunks(jax.tree.map(chunked, steps), burn_in)


def joined(networks: StatefulModule, states: list[Any], chunks: Chunks) -> tuple[Any, Any]:
    """Return the chunks of some environments as if each were an environment of its own.

    Args:
        networks: Runs the burn-in; not changed, and no gradient flows through it.
        states: Carries as from `cut`.
        chunks: Chunks as from `cut`.

    Returns:
        The carries at the chunks' starts, leaves `(batch * chunk, …)`, and what is learned from,
        leaves `(chunk_length, batch * chunk, …)`.
    """
    carries = [
        state if inputs is None else _burnt_in(networks, state, inputs)
        for state, inputs in zip(clone_keys(states), chunks.burn_in, strict=True)
    ]
    carry = jax.tree.map(lambda *leaves: jnp.concatenate(leaves, axis=1), *carries)
    return _merged(carry, 0), _merged(chunks.steps, 1)


def _before(inputs: PyTree, starts: list[int], n_steps: int) -> Any:
    """Return the inputs of the steps before each start, leaves `(n_steps, batch, start, …)`."""
    return jax.tree.map(
        lambda leaf: jnp.stack([leaf[start - n_steps : start] for start in starts], axis=2), inputs
    )


def _burnt_in(networks: StatefulModule, state: PyTree, inputs: PyTree) -> Any:
    """Return the carries `(batch, chunk, …)` after the burn-in."""
    graphdef, variables = nnx.split(functional_copy(networks))
    still = nnx.merge(graphdef, jax.tree.map(jax.lax.stop_gradient, variables), copy=True)
    batch_and_chunk = inputs[1].shape[1:]
    after = still.unroll(_merged(state, 0), *_merged(inputs, 1)).next_state
    return jax.tree.map(lambda leaf: leaf.reshape((*batch_and_chunk, *leaf.shape[1:])), after)


def _merged(tree: PyTree, axis: int) -> Any:
    """Merge an axis of each leaf with the one after it."""

    def merge(leaf: Any) -> Any:
        return leaf.reshape((*leaf.shape[:axis], -1, *leaf.shape[axis + 2 :]))

    return jax.tree.map(merge, tree)
