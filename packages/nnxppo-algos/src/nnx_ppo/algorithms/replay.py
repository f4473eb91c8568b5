"""Replaying windows, and metrics that watch how far a replay is from the rollout."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, PyTree

from nnx_ppo.algorithms._functional import clone_keys, functional_copy
from nnx_ppo.algorithms.types import Transition
from nnx_ppo.core import StatefulModule, UnrollOutput, scan_module


def replay(
    networks: StatefulModule,
    network_state: PyTree,
    obs: PyTree,
    done: Bool[Array, "time batch"],
    rollout_extras: PyTree,
    remat_length: int | None = None,
) -> UnrollOutput:
    """Replay a window, on request in segments whose activations are computed anew for gradients.

    The result is that of `networks.unroll`, up to rounding, and so is where the random streams are
    left. Of a segment the gradient keeps the carry it starts from alone, and computes the rest
    again when it comes to it (Chen et al. 2016, "Training deep nets with sublinear memory cost",
    arXiv:1604.06174).

    Args:
        networks: The network; its random streams advance.
        network_state: The carry at the window's start, leaves `(batch, …)`.
        obs: The observations, leaves `(time, batch, *feature)`.
        done: Where an episode ended.
        rollout_extras: What the network emitted, leaves `(time, batch, …)`.
        remat_length: Steps of a segment; the last one may be shorter. None replays the window as
            one and keeps its activations.
    """
    state, inputs = clone_keys(network_state), (obs, done, rollout_extras)
    if remat_length is None or remat_length >= len(done):
        return networks.unroll(state, *inputs)
    number, left = divmod(len(done), remat_length)
    whole = number * remat_length
    split = (number, remat_length)
    segments = jax.tree.map(lambda leaf: leaf[:whole].reshape(*split, *leaf.shape[1:]), inputs)
    state, parts = scan_module(networks, _rematerialized, state, segments)
    outputs = jax.tree.map(lambda leaf: leaf.reshape(whole, *leaf.shape[2:]), parts)
    if left:  # gradients begin here, so that nothing would be saved
        last = networks.unroll(state, *jax.tree.map(lambda leaf: leaf[whole:], inputs))
        state, rest = last.next_state, (last.output, last.regularization_loss)
        outputs = jax.tree.map(lambda *leaves: jnp.concatenate(leaves), outputs, rest)
    return UnrollOutput(state, *outputs)


def _rematerialized(networks: StatefulModule, state: PyTree, inputs: Any) -> tuple[Any, Any]:
    """Replay a segment; return the carry after it, and its outputs and losses.

    Args:
        networks: The network; variables that are no parameters are left as by the segment.
        state: The carry before the segment, leaves `(batch, …)`.
        inputs: Observations, ends of episodes and extras of the segment.
    """
    graphdef, params, variables = nnx.split(networks, nnx.Param, ...)

    def segment(params: Any, variables: Any, state: Any, inputs: Any) -> Any:
        live = nnx.merge(graphdef, params, variables, copy=True)
        found = live.unroll(state, *inputs)
        after = nnx.state(live, nnx.Not(nnx.Param))
        return after, found.next_state, (found.output, found.regularization_loss)

    # In a scan XLA cannot merge the two computations anyway; a barrier between them costs speed.
    rematerialized = jax.checkpoint(segment, prevent_cse=False)
    variables, state, outputs = rematerialized(params, variables, state, inputs)
    nnx.update(networks, variables)
    return state, outputs


def ratio_error(ratios: PyTree) -> Float[Array, ""]:
    """Return how far any ratio is from 1, at most."""
    return jnp.stack([jnp.abs(ratio - 1.0).max() for ratio in jax.tree.leaves(ratios)]).max()


def replay_error(
    networks: StatefulModule,
    network_state: PyTree,
    rollout: Transition,
    remat_length: int | None = None,
) -> Float[Array, ""]:
    """Return how far any probability ratio is from 1 in a replay under unchanged weights.

    Args:
        networks: The network, still with the weights of the rollout; not changed.
        network_state: The carry at the window's start, leaves `(batch, …)`.
        rollout: The window, leaves `(time, batch, …)`.
        remat_length: As in `replay`; without gradients it bounds what is in memory at a time.
    """
    replayed = _replayed(networks, network_state, rollout, remat_length)
    new, old = replayed.output.loglikelihoods, rollout.network_output.loglikelihoods
    return ratio_error(jax.tree.map(lambda new, old: jnp.exp(new - old), new, old))


def carry_drift(
    networks: StatefulModule,
    network_state: PyTree,
    rollout: Transition,
    end_state: PyTree,
    remat_length: int | None = None,
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
        remat_length: As in `replay_error`.

    Returns:
        The drift; 0 for a carry without floats.
    """
    replayed = _replayed(networks, network_state, rollout, remat_length)
    total, count = jnp.zeros(()), jnp.zeros(())
    pairs = zip(jax.tree.leaves(end_state), jax.tree.leaves(replayed.next_state), strict=True)
    for old, new in pairs:
        if jnp.issubdtype(old.dtype, jnp.floating):
            counts = ~jnp.isnan(old)
            total += jnp.square(jnp.where(counts, new - old, 0.0)).sum()
            count += counts.sum()
    return jnp.sqrt(total / jnp.maximum(count, 1.0))


def _replayed(
    networks: StatefulModule,
    network_state: PyTree,
    rollout: Transition,
    remat_length: int | None,
) -> UnrollOutput:
    """Replay a window, leaving the network as it is."""
    return replay(
        functional_copy(networks),
        network_state,
        rollout.obs,
        rollout.done,
        rollout.rollout_extras,
        remat_length,
    )
