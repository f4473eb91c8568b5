"""The one place that names metrics and reduces arrays to what is logged."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, PyTree

from nnx_ppo.algorithms.types import DistillationTransition, LoggingLevel, Transition
from nnx_ppo.core import StatefulModule

SINGLE = ("learning_rate", "losses/carry_drift", "losses/ppo_weight", "losses/ratio_error")
"""Metrics that are one number for an iteration: the first that was reported, without ending."""


def compute_metrics(
    loss_metrics: dict[str, PyTree],
    rollout_data: Transition | DistillationTransition,
    logging_level: LoggingLevel,
    percentile_levels: tuple[int, ...] | None = None,
    taken: Bool[Array, " updates"] | None = None,
) -> dict[str, Any]:
    """Reduce one iteration to scalars.

    Args:
        loss_metrics: What the loss reported, by full name, stacked over the updates.
        rollout_data: The rollout, leaves `(time, batch, …)`.
        logging_level: Which parts of the rollout to log.
        percentile_levels: Percentiles to log of each array, or None for mean and std.
        taken: Which updates took place, if some may not have; only those count.

    Returns:
        Scalars by name: `name/mean` and `name/std`, or `name/p{N}`; a tree of arrays adds the
        path of each leaf to the name; booleans become the fraction that is true, without ending.
    """
    metrics: dict[str, Any] = {}
    for name, tree in loss_metrics.items():
        if name in SINGLE:
            metrics[name] = jnp.ravel(tree)[0]
        else:
            write_tree(metrics, name, tree, percentile_levels, taken)
    if taken is not None and LoggingLevel.LOSSES in logging_level:
        metrics["losses/update_rate"] = taken.mean()
    parts: dict[str, PyTree] = {}
    if LoggingLevel.ROLLOUT_STATS in logging_level:
        parts["rollout_batch/reward"] = rollout_data.rewards
        parts["rollout_batch/action"] = _output(rollout_data).actions
        parts["rollout_batch/done_rate"] = rollout_data.done
        parts["rollout_batch/truncation_rate"] = rollout_data.truncated
    if LoggingLevel.ROLLOUT_OBS in logging_level:
        parts["rollout_batch/obs"] = rollout_data.obs
    if LoggingLevel.ENV_METRICS in logging_level:
        parts["env"] = rollout_data.metrics["env"]
    if LoggingLevel.NETWORK_METRICS in logging_level:
        parts["net"] = rollout_data.metrics["net"]
    for name, tree in parts.items():
        write_tree(metrics, name, tree, percentile_levels)
    return metrics


def log_weight_stats(
    metrics: dict[str, Any],
    networks: StatefulModule,
    percentile_levels: tuple[int, ...] | None = None,
) -> None:
    """Add statistics over all of a network's parameters to `metrics`, under `weights`.

    Args:
        metrics: Changed in place.
        networks: The network.
        percentile_levels: Percentiles to log, or None for mean and std.
    """
    leaves = [leaf.ravel() for leaf in jax.tree.leaves(nnx.state(networks, nnx.Param))]
    if leaves:
        write_tree(metrics, "weights", jnp.concatenate(leaves), percentile_levels)


def write_tree(
    metrics: dict[str, Any],
    name: str,
    tree: PyTree,
    percentile_levels: tuple[int, ...] | None,
    counts: Bool[Array, " first"] | None = None,
) -> None:
    """Add the statistics of each leaf of a tree to `metrics`.

    Args:
        metrics: Changed in place.
        name: Name of the tree.
        tree: Arrays of any shape.
        percentile_levels: Percentiles to log, or None for mean and std.
        counts: Which entries along the first axis count; all if None.
    """
    for path, leaf in jax.tree.leaves_with_path(tree):
        suffix = jax.tree_util.keystr(path, simple=True, separator="/")
        full_name = f"{name}/{suffix}" if path else name
        metrics.update(_statistics(full_name, leaf, percentile_levels, counts))


def _statistics(
    name: str,
    values: Array,
    percentile_levels: tuple[int, ...] | None,
    counts: Bool[Array, " first"] | None,
) -> dict[str, Array]:
    """Return the statistics of one array by name."""
    where = None
    if counts is not None:
        where = counts.reshape((-1,) + (1,) * (values.ndim - 1))
        where = jnp.broadcast_to(where, values.shape)
    if values.dtype == bool:
        return {name: values.mean(where=where)}
    values = values.astype(jnp.promote_types(values.dtype, jnp.float32))
    if percentile_levels is None:
        return mean_and_std(name, values, where)
    found = _percentiles(values, jnp.asarray(percentile_levels, jnp.float32), where)
    return {f"{name}/p{level}": found[i] for i, level in enumerate(percentile_levels)}


def _percentiles(values: Array, levels: Array, where: Array | None) -> Array:
    """Return percentiles of those values that count, NaN if one of them is or there are none.

    Between two values they are interpolated from the lower one, so that percentiles of equal values
    are that value; `jnp.percentile` adds two weighted values, which rounds.
    """
    if not values.size:
        return jnp.full(levels.shape, jnp.nan, values.dtype)
    where = jnp.ones(values.shape, bool) if where is None else where
    last = where.sum() - 1
    ordered = jnp.sort(jnp.where(where, values, jnp.inf).ravel())
    position = levels * last / 100.0
    below = jnp.floor(position).astype(jnp.int32)
    low, high = ordered[below], ordered[jnp.minimum(below + 1, last)]
    # Where nothing lies between, an infinity above must not be multiplied by 0.
    exact = (low == high) | (position == below)
    found = jnp.where(exact, low, low + (position - below) * (high - low))
    return jnp.where((jnp.isnan(values) & where).any(), jnp.nan, found)


def mean_and_std(name: str, values: Array, where: Array | None = None) -> dict[str, Array]:
    """Return mean and population standard deviation of an array by name."""
    return {f"{name}/mean": values.mean(where=where), f"{name}/std": values.std(where=where)}


def _output(rollout: Transition | DistillationTransition) -> Any:
    """Return the output of the network that acted."""
    if isinstance(rollout, DistillationTransition):
        return rollout.student_output
    return rollout.network_output
