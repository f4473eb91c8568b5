"""How far a replay is from the rollout: metrics that watch whether the replay is right."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from nnx_ppo.algorithms._functional import clone_keys, functional_copy
from nnx_ppo.algorithms.types import Transition
from nnx_ppo.core import StatefulModule, UnrollOutput


def ratio_error(ratios: PyTree) -> Float[Array, ""]:
    """Return how far any ratio is from 1, at most."""
    return jnp.stack([jnp.abs(ratio - 1.0).max() for ratio in jax.tree.leaves(ratios)]).max()


def replay_error(
    networks: StatefulModule, network_state: PyTree, rollout: Transition
) -> Float[Array, ""]:
    """Return how far any probability ratio is from 1 in a replay under unchanged weights.

    Args:
        networks: The network, still with the weights of the rollout; not changed.
        network_state: The carry at the window's start, leaves `(batch, …)`.
        rollout: The window, leaves `(time, batch, …)`.
    """
    replay = _replayed(networks, network_state, rollout)
    new, old = replay.output.loglikelihoods, rollout.network_output.loglikelihoods
    return ratio_error(jax.tree.map(lambda new, old: jnp.exp(new - old), new, old))


def carry_drift(
    networks: StatefulModule, network_state: PyTree, rollout: Transition, end_state: PyTree
) -> Float[Array, ""]:
    """Return how far new weights have moved the carry at the end of a window.

    It is the root mean square, over all floats of the carry and all environments, of the
    difference between the carry that the rollout ended with and that of a replay of the window.
    Floats that are NaN at the rollout's end do not count (some modules mark a fresh carry so).

    Args:
        networks: The network with the new weights; not changed.
        network_state: The carry at the window's start, leaves `(batch, …)`.
        rollout: The window, leaves `(time, batch, …)`.
        end_state: The carry at the window's end, leaves `(batch, …)`.

    Returns:
        The drift; 0 for a carry without floats.
    """
    replayed = _replayed(networks, network_state, rollout)
    total, count = jnp.zeros(()), jnp.zeros(())
    pairs = zip(jax.tree.leaves(end_state), jax.tree.leaves(replayed.next_state), strict=True)
    for old, new in pairs:
        if jnp.issubdtype(old.dtype, jnp.floating):
            counts = ~jnp.isnan(old)
            total += jnp.square(jnp.where(counts, new - old, 0.0)).sum()
            count += counts.sum()
    return jnp.sqrt(total / jnp.maximum(count, 1.0))


def _replayed(networks: StatefulModule, network_state: PyTree, rollout: Transition) -> UnrollOutput:
    """Replay a window, leaving the network as it is."""
    return functional_copy(networks).unroll(
        clone_keys(network_state), rollout.obs, rollout.done, rollout.rollout_extras
    )
