"""PPO's loss of some environments' windows, with all its variants."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from nnx_ppo.algorithms._functional import query_values
from nnx_ppo.algorithms.config import DistillationConfig, PPOConfig
from nnx_ppo.algorithms.heads import advantages_per_action, match_rewards, per_reward, sum_heads
from nnx_ppo.algorithms.losses import (
    Scalar,
    approximate_kl,
    clipped_surrogate,
    explained_variance,
    gae,
    normalized,
    outside_clip,
    r_squared,
    value_loss,
)
from nnx_ppo.algorithms.replay import ratio_error, replay
from nnx_ppo.algorithms.types import LoggingLevel, Transition
from nnx_ppo.algorithms.updates import DIVERGENCE
from nnx_ppo.core import JaxDataclass, StatefulModule, UnrollOutput


@dataclasses.dataclass(frozen=True)
class LossSettings:
    """What the loss depends on; fields as in `PPOConfig`, where numbers may also be arrays.

    Nothing is checked: the functions that users call with single settings take any number.
    """

    clip_range: Scalar
    normalize_advantages: bool
    combine_advantages: bool
    discounting_factor: Scalar | Mapping[str, Scalar]
    gae_lambda: Scalar
    critic_loss_weight: Scalar
    logging_level: LoggingLevel
    advantage_normalization: str = "minibatch"
    value_clip_range: Scalar | None = None
    huber_delta: Scalar | None = None
    target_kl: float | None = None
    adaptive_kl: float | None = None
    remat_length: int | None = None


def loss_settings(config: PPOConfig | DistillationConfig) -> LossSettings:
    """Return what a configuration says of the loss."""
    names = {field.name for field in dataclasses.fields(config)}
    shared = [field.name for field in dataclasses.fields(LossSettings) if field.name in names]
    return LossSettings(**{name: getattr(config, name) for name in shared})


class Estimates(JaxDataclass):
    """What a window says about its actions and values, without gradients.

    Attributes:
        advantages: Advantages, a tree with leaves `(time, batch)`, one per reward head.
        per_action: Those that train each action head, standardised if they are at all.
        targets: What the values should have been, a tree like `advantages`.
    """

    advantages: PyTree
    per_action: PyTree
    targets: PyTree


def estimate(
    rollout: Transition,
    values: PyTree,
    last_values: PyTree,
    settings: LossSettings,
    *,
    normalize: bool,
) -> Estimates:
    """Estimate advantages and targets.

    Args:
        rollout: The window, leaves `(time, batch, …)`.
        values: Values of its observations, leaves `(time, batch)`.
        last_values: Values after the last step, leaves `(batch,)`.
        settings: The settings.
        normalize: Whether to standardise over what is given here.

    Raises:
        ValueError: Heads of rewards, values, discounts and actions do not fit each other.
    """
    discounts = per_reward("discounting_factor", settings.discounting_factor, rollout.rewards)
    advantages = gae(
        match_rewards(rollout.rewards, values),
        values,
        last_values,
        rollout.done,
        rollout.truncated,
        settings.gae_lambda,
        match_rewards(discounts, values),
        rollout.bootstrap_values,
    )
    per_action = advantages_per_action(
        advantages, rollout.network_output.loglikelihoods, settings.combine_advantages
    )
    if normalize:
        per_action = jax.tree.map(normalized, per_action)
    targets = jax.tree.map(jnp.add, advantages, values)
    return Estimates(advantages, per_action, targets)


def estimate_from_rollout(
    networks: StatefulModule, end_state: PyTree, rollout: Transition, settings: LossSettings
) -> Estimates:
    """Estimate advantages once for a whole window, from the values of the rollout.

    Args:
        networks: The network, still with the weights of the rollout; not changed.
        end_state: The carry at the window's end, leaves `(batch, …)`.
        rollout: The window, leaves `(time, batch, …)`.
        settings: The settings.
    """
    return estimate(
        rollout,
        rollout.network_output.value_estimates,
        query_values(networks, end_state, _last(rollout.next_obs)),
        settings,
        normalize=settings.normalize_advantages and settings.advantage_normalization == "window",
    )


def objective(
    networks: StatefulModule,
    network_state: PyTree,
    rollout: Transition,
    estimates: Estimates | None,
    settings: LossSettings,
) -> tuple[Array, dict[str, PyTree]]:
    """Replay a window under the current weights and return PPO's loss.

    Args:
        networks: The network; its random streams advance.
        network_state: The carry at the window's start, leaves `(batch, …)`.
        rollout: The window, leaves `(time, batch, …)`; of `next_obs` the last step is read.
        estimates: Those of the window, or None to make them from the values of the replay.
        settings: The settings.

    Returns:
        The loss: surrogates and weighted value losses summed over heads, plus the network's mean
        regularisation; and the metrics by name, with one entry per head where there are several.
    """
    replayed = replay(
        networks,
        network_state,
        rollout.obs,
        rollout.done,
        rollout.rollout_extras,
        settings.remat_length,
    )
    if estimates is None:
        estimates = _estimate_from_replay(networks, replayed, rollout, settings)
    elif settings.normalize_advantages and settings.advantage_normalization == "minibatch":
        per_action = jax.tree.map(normalized, estimates.per_action)
        estimates = estimates.replace(per_action=per_action)
    old = rollout.network_output
    ratios = jax.tree.map(
        lambda new, old: jnp.exp(new - old), replayed.output.loglikelihoods, old.loglikelihoods
    )
    actor = jax.tree.map(
        lambda r, a: clipped_surrogate(r, a, settings.clip_range), ratios, estimates.per_action
    )
    critic = _value_losses(replayed.output.value_estimates, estimates.targets, old, settings)
    regularization = replayed.regularization_loss.mean()
    loss = sum_heads(actor) + settings.critic_loss_weight * sum_heads(critic) + regularization

    metrics: dict[str, PyTree] = {}
    if LoggingLevel.LOSSES in settings.logging_level:
        metrics["losses/actor"] = actor
        metrics["losses/critic"] = critic
        metrics["losses/regularization"] = regularization
    metrics.update(_actor_metrics(replayed, rollout, ratios, settings))
    if LoggingLevel.CRITIC_EXTRA in settings.logging_level:
        metrics.update(_critic_metrics(replayed.output.value_estimates, estimates))
    return loss, metrics


def _estimate_from_replay(
    networks: StatefulModule, replayed: UnrollOutput, rollout: Transition, settings: LossSettings
) -> Estimates:
    """Estimate advantages of a minibatch from the values of its replay."""
    last_values = query_values(networks, replayed.next_state, _last(rollout.next_obs))
    return estimate(
        rollout,
        jax.lax.stop_gradient(replayed.output.value_estimates),
        jax.lax.stop_gradient(last_values),
        settings,
        normalize=settings.normalize_advantages,
    )


def _value_losses(values: PyTree, targets: PyTree, old: Any, settings: LossSettings) -> Any:
    """Return the value loss of each head."""
    if settings.value_clip_range is None:
        return jax.tree.map(
            lambda v, t: value_loss(v, t, huber_delta=settings.huber_delta), values, targets
        )
    return jax.tree.map(
        lambda v, t, o: value_loss(
            v, t, o, clip_range=settings.value_clip_range, huber_delta=settings.huber_delta
        ),
        values,
        targets,
        old.value_estimates,
    )


def _actor_metrics(
    replayed: UnrollOutput, rollout: Transition, ratios: PyTree, settings: LossSettings
) -> dict[str, PyTree]:
    """Return what is to be known of the policy's change."""
    metrics: dict[str, PyTree] = {}
    new, old = replayed.output.loglikelihoods, rollout.network_output.loglikelihoods
    if settings.target_kl is not None or settings.adaptive_kl is not None:
        metrics[DIVERGENCE] = sum_heads(jax.tree.map(approximate_kl, new, old))
    if LoggingLevel.ACTOR_EXTRA in settings.logging_level:
        metrics["losses/clipping_fraction"] = jax.tree.map(
            lambda ratio: outside_clip(ratio, settings.clip_range), ratios
        )
        metrics["losses/approx_kl"] = jax.tree.map(approximate_kl, new, old)
        metrics["losses/ratio_error"] = ratio_error(ratios)
        metrics["loglikelihood"] = new
    return metrics


def _critic_metrics(values: PyTree, estimates: Estimates) -> dict[str, PyTree]:
    """Return what is to be known of the values."""
    targets = estimates.targets
    return {
        "losses/advantages": estimates.advantages,
        "losses/critic_R^2": jax.tree.map(r_squared, values, targets),
        "losses/explained_variance": jax.tree.map(explained_variance, values, targets),
        "losses/predicted_value": values,
    }


def _last(tree: PyTree) -> Any:
    """Return the last step of each leaf."""
    return jax.tree.map(lambda leaf: leaf[-1], tree)
