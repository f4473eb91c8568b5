"""Learning to act as a teacher does: the loss, and one iteration of distillation."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from nnx_ppo.algorithms.bookkeeping import finished, iteration_keys
from nnx_ppo.algorithms.config import DistillationConfig
from nnx_ppo.algorithms.counters import as_float, words_of
from nnx_ppo.algorithms.heads import sum_heads
from nnx_ppo.algorithms.lessons import unroll
from nnx_ppo.algorithms.objective import loss_settings, objective
from nnx_ppo.algorithms.optimizers import last_learning_rate
from nnx_ppo.algorithms.precision import OwnPrecision, matmul_precision
from nnx_ppo.algorithms.raw_actions import RawActions, find_raw_actions, head_text
from nnx_ppo.algorithms.replay import carry_drift, replay, replay_error
from nnx_ppo.algorithms.types import (
    DistillationState,
    DistillationTransition,
    LoggingLevel,
    Transition,
)
from nnx_ppo.algorithms.updates import learn
from nnx_ppo.core import RLEnv, StatefulModule

_LOSSES = ("losses/actor", "losses/critic", "losses/regularization")


def imitation_loss(
    student: StatefulModule,
    student_state: PyTree,
    rollout_data: DistillationTransition,
    logging_level: LoggingLevel,
    remat_length: int | None = None,
) -> tuple[Array, dict[str, PyTree]]:
    """Return the loss that `distillation_loss` describes, and its metrics."""
    obs = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), rollout_data.obs
    )
    heads = heads_that_learn(student, obs)
    extras = heads.write(rollout_data.student_rollout_extras, _teacher_actions(rollout_data, heads))
    replayed = replay(
        student, student_state, rollout_data.obs, rollout_data.done, extras, remat_length
    )
    loglikelihoods = replayed.output.loglikelihoods
    nll = jax.tree.map(lambda loglikelihood: -loglikelihood.mean(), loglikelihoods)
    regularization = replayed.regularization_loss.mean()
    metrics: dict[str, PyTree] = {}
    if LoggingLevel.LOSSES in logging_level:
        metrics["losses/distillation_nll"] = nll
        metrics["losses/regularization"] = regularization
    if LoggingLevel.ACTOR_EXTRA in logging_level:
        metrics["loglikelihood"] = loglikelihoods
    return sum_heads(nll) + regularization, metrics


def heads_that_learn(student: StatefulModule, obs: PyTree) -> RawActions:
    """Find the raw actions of a student, as `find_raw_actions` does.

    Raises:
        ValueError: An action head is in evaluation mode.
    """
    found = find_raw_actions("student", student, obs)
    for head in found.heads:
        if head.sampler.deterministic:
            raise ValueError(
                f"The student is in evaluation mode: {head_text(head.name)} would evaluate its own "
                "mean and not the teacher's. Call student.train() before training."
            )
    return found


def _teacher_actions(rollout: DistillationTransition, student: RawActions) -> list[Any]:
    """Return the teacher's raw action of each of the student's heads.

    Raises:
        ValueError: The rollout does not hold them.
    """
    own, theirs = rollout.student_rollout_extras, rollout.teacher_rollout_extras
    if own is None or (theirs is None and rollout.teacher_actions is None):
        raise ValueError(
            "rollout_data lacks student_rollout_extras, or both teacher_actions and "
            "teacher_rollout_extras, but a replay needs what the networks emitted during the "
            "rollout. Pass the rollout as distillation_unroll_env returned it."
        )
    if rollout.teacher_actions is not None:
        return student.tree.flatten_up_to(rollout.teacher_actions)
    if jax.tree.structure(theirs) != jax.tree.structure(own):
        raise ValueError(
            "Without rollout_data.teacher_actions the teacher's rollout extras must be a tree like "
            f"the student's, expected {jax.tree.structure(own)}, got {jax.tree.structure(theirs)}."
        )
    return student.read(theirs)


def mixed_loss(
    student: StatefulModule,
    student_state: PyTree,
    part: DistillationTransition,
    config: DistillationConfig,
    weight: Float[Array, ""],
) -> tuple[Array, dict[str, PyTree]]:
    """Return the loss of distillation plus PPO's surrogate and value loss, weighted.

    Args:
        student: The network that learns; its random streams advance.
        student_state: Its carry at the window's start, leaves `(batch, …)`.
        part: The window, leaves `(time, batch, …)`, with bootstrap values.
        config: The settings of PPO's loss, and which metrics to return.
        weight: Weight of PPO's part.
    """
    loss, metrics = imitation_loss(
        student, student_state, part, config.logging_level, config.remat_length
    )
    settings = loss_settings(config)
    settings = dataclasses.replace(
        settings, logging_level=settings.logging_level | LoggingLevel.LOSSES
    )
    acted = _as_ppo_sees_it(part)
    ppo, ppo_metrics = objective(student, student_state, acted, None, settings)
    # Both losses have the student's regularisation in them, which is to count once.
    ppo = ppo - ppo_metrics["losses/regularization"]
    if LoggingLevel.LOSSES in config.logging_level:
        metrics["losses/ppo_weight"] = weight
    else:
        ppo_metrics = {name: value for name, value in ppo_metrics.items() if name not in _LOSSES}
    return loss + weight * ppo, {**ppo_metrics, **metrics}


def _as_ppo_sees_it(rollout: DistillationTransition) -> Transition:
    """Return what the student did by itself."""
    return Transition(
        obs=rollout.obs,
        network_output=rollout.student_output,
        rewards=rollout.rewards,
        done=rollout.done,
        truncated=rollout.truncated,
        next_obs=rollout.next_obs,
        metrics={},
        rollout_extras=rollout.student_rollout_extras,
        bootstrap_values=rollout.bootstrap_values,
    )


def iterate(
    env: RLEnv, teacher: StatefulModule, state: DistillationState, config: DistillationConfig
) -> tuple[DistillationState, dict[str, Any]]:
    """Collect, learn, fold in statistics; student and optimiser are updated in place.

    Args:
        env: The environment, written for a single instance.
        teacher: The network to learn from; not changed.
        state: The state to go on from.
        config: The configuration.

    Returns:
        The next state, and the metrics by name.
    """
    student, keys = state.student, iteration_keys(state.rng_key)
    env = OwnPrecision(env)
    with matmul_precision(config.matmul_precision):
        student_states, teacher_states, env_states, rollout = unroll(
            env,
            teacher,
            student,
            (state.student_states, state.teacher_states, state.env_states),
            config.rollout_length,
            keys.reset,
            bootstrap=config.uses_ppo,
            lean=True,
        )
        updates = _learn(state, rollout, student_states, keys.minibatches, config)
    student.update_statistics(rollout.student_rollout_extras)
    state = state.replace(
        student_states=student_states,
        teacher_states=teacher_states,
        env_states=env_states,
        rng_key=keys.next,
    )
    return finished(state, student, updates, rollout, config)


def _learn(
    state: DistillationState,
    rollout: DistillationTransition,
    end_state: PyTree,
    key: Array,
    config: DistillationConfig,
) -> dict[str, Any]:
    """Take the gradient steps of an iteration; return what is logged of them.

    Args:
        state: The state that the window was collected from; student and optimiser are updated.
        rollout: The window, leaves `(time, batch, …)`.
        end_state: The student's carry at the window's end, leaves `(batch, …)`.
        key: The key of the minibatches.
        config: The configuration.
    """
    student, student_states, level = state.student, state.student_states, config.logging_level
    weight = config.ppo_weight
    if callable(weight):
        weight = weight(as_float(words_of(state.steps_taken, state.step_words)))

    def loss_fn(student: StatefulModule, student_state: PyTree, part: Any) -> Any:
        if not config.uses_ppo:
            return imitation_loss(student, student_state, part, level, config.remat_length)
        return mixed_loss(student, student_state, part, config, jnp.asarray(weight, jnp.float32))

    acted = _as_ppo_sees_it(rollout)
    shown: dict[str, Any] = {}
    if LoggingLevel.ACTOR_EXTRA in level and not config.uses_ppo:
        shown["losses/ratio_error"] = replay_error(
            student, student_states, acted, config.remat_length
        )
    updates = learn(
        student,
        state.optimizer,
        (student_states, _what_learning_needs(rollout)),
        loss_fn,
        key,
        n_epochs=config.n_epochs,
        n_minibatches=config.n_minibatches,
    )
    if LoggingLevel.ACTOR_EXTRA in level:
        shown["losses/carry_drift"] = carry_drift(
            student, student_states, acted, end_state, config.remat_length
        )
    if LoggingLevel.LOSSES in level and callable(config.learning_rate):
        shown["learning_rate"] = last_learning_rate(state.optimizer)
    return {**updates, **shown}


def _what_learning_needs(rollout: DistillationTransition) -> DistillationTransition:
    """Drop what no loss reads, so that minibatches do not copy it."""
    return rollout.replace(
        student_output=rollout.student_output.replace(actions=None, value_estimates=None),
        metrics={},
        teacher_rollout_extras=None,
    )
