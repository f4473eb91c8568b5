"""What every iteration does beside collecting and learning: keys, counts, metrics."""

from typing import Any, NamedTuple, TypeVar

import jax
from jaxtyping import Array, PyTree

from nnx_ppo.algorithms.config import DistillationConfig, PPOConfig
from nnx_ppo.algorithms.counters import add_steps, as_float, words_of
from nnx_ppo.algorithms.metrics import compute_metrics, log_weight_stats
from nnx_ppo.algorithms.types import DistillationTransition, LoggingLevel, Transition
from nnx_ppo.algorithms.updates import TAKEN
from nnx_ppo.core import JaxDataclass, StatefulModule

State = TypeVar("State", bound=JaxDataclass)


class IterationKeys(NamedTuple):
    """Keys of an iteration.

    Attributes:
        next: Key of the next iteration.
        reset: Resets of environments.
        minibatches: Which environments go to which minibatch.
    """

    next: Array
    reset: Array
    minibatches: Array


def iteration_keys(key: Array) -> IterationKeys:
    """Return the keys of an iteration, all split from that of its state at once."""
    return IterationKeys(*jax.random.split(key, 3))


def finished(
    state: State,
    networks: StatefulModule,
    updates: dict[str, PyTree],
    rollout: Transition | DistillationTransition,
    config: PPOConfig | DistillationConfig,
) -> tuple[State, dict[str, Any]]:
    """Count the steps of an iteration, and reduce what is known of it to what is logged.

    Args:
        state: The state after the iteration, with the count from before it.
        networks: The network that has learned.
        updates: What `learn` returned, and more of its kind.
        rollout: The window, leaves `(time, batch, …)`.
        config: The configuration.

    Returns:
        The state with the new count, and the metrics by name.
    """
    level, percentiles = config.logging_level, config.logging_percentiles
    left_out = {TAKEN} if LoggingLevel.GRAD_NORM in level else {TAKEN, "grad_norm"}
    shown = {name: values for name, values in updates.items() if name not in left_out}
    metrics = compute_metrics(shown, rollout, level, percentiles, updates.get(TAKEN))
    if LoggingLevel.WEIGHTS in level:
        log_weight_stats(metrics, networks, percentiles)
    old: Any = state
    words = words_of(old.steps_taken, old.step_words)
    words = add_steps(words, config.n_envs * config.rollout_length)
    metrics["total_steps"] = as_float(words)
    return state.replace(steps_taken=as_float(words), step_words=words), metrics
