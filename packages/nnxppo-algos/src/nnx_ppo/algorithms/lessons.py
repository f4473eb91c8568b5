"""Collecting data with a student that acts and a teacher that says what it would have done."""

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx
from jaxtyping import Array, PyTree, Shaped

from nnx_ppo.algorithms._functional import functional_copy
from nnx_ppo.algorithms.raw_actions import check_same_heads, find_raw_actions
from nnx_ppo.algorithms.rollout import stack_transitions, transition
from nnx_ppo.algorithms.types import DistillationTransition
from nnx_ppo.core import RLEnv, StatefulModule, reset_where, scan_module

Carry = tuple[PyTree, PyTree, Any]
"""The student's carry, the teacher's carry, the environment states."""


class Lesson(nnx.Module):
    """The two networks of a distillation, to go through a scan together."""

    def __init__(self, student: StatefulModule, teacher: StatefulModule) -> None:
        self.student = student
        self.teacher = teacher


def step(
    env: RLEnv,
    lesson: Lesson,
    actions_of: Callable[[PyTree], Any],
    carry: Carry,
    keys: Array,
    *,
    bootstrap: bool,
) -> tuple[Carry, DistillationTransition]:
    """Take one step as `distillation_single_transition` does.

    Args:
        env: The environment.
        lesson: Both networks; their random streams advance.
        actions_of: Picks the teacher's actions out of what it emitted.
        carry: As there.
        keys: As there.
        bootstrap: Whether to ask the student for bootstrap values.
    """
    student_state, teacher_state, env_state = carry
    (student_state, env_state), seen = transition(
        env, lesson.student, (student_state, env_state), keys, bootstrap=bootstrap
    )
    told = lesson.teacher(teacher_state, seen.obs)
    teacher_state = reset_where(lesson.teacher, seen.done, told.next_state)
    seen_and_told = DistillationTransition(
        obs=seen.obs,
        student_output=seen.network_output,
        rewards=seen.rewards,
        done=seen.done,
        truncated=seen.truncated,
        next_obs=seen.next_obs,
        metrics=seen.metrics,
        student_rollout_extras=seen.rollout_extras,
        teacher_rollout_extras=told.rollout_extras,
        teacher_actions=actions_of(told.rollout_extras),
        bootstrap_values=seen.bootstrap_values,
    )
    return (student_state, teacher_state, env_state), seen_and_told


def unroll(  # noqa: PLR0917  (of the documented form)
    env: RLEnv,
    teacher: StatefulModule,
    student: StatefulModule,
    carry: Carry,
    length: int,
    key: Shaped[Array, "..."],
    *,
    bootstrap: bool,
    lean: bool = False,
) -> tuple[PyTree, PyTree, Any, DistillationTransition]:
    """Collect a window as `distillation_unroll_env` does, with or without bootstrap values.

    With `lean` it stores only what learning reads, as `stack_transitions` says.
    """
    env_state = carry[-1]
    actions_of = matched_heads(teacher, student, env_state.obs)

    def body(live: Lesson, carry: Any, keys: Array) -> tuple[Any, DistillationTransition]:
        return step(env, live, actions_of, carry, keys, bootstrap=bootstrap)

    keys = jax.random.split(key, (length, env_state.done.shape[0]))
    lesson = Lesson(student, by_its_means(teacher))
    if lean:
        carry, rollout = stack_transitions(lesson, body, carry, keys, env_state.obs)
    else:
        carry, rollout = scan_module(lesson, body, carry, keys)
    return (*carry, rollout)


def by_its_means(teacher: StatefulModule) -> StatefulModule:
    """Return a copy of a teacher that acts without noise, so that itself is never changed."""
    copy = functional_copy(teacher)
    copy.eval()
    return copy


def matched_heads(
    teacher: StatefulModule, student: StatefulModule, obs: PyTree
) -> Callable[[PyTree], Any]:
    """Return what picks the teacher's actions out of its extras, as a tree like the student's.

    Raises:
        ValueError: The networks' action heads do not match.
    """
    theirs = find_raw_actions("teacher", teacher, obs)
    own = find_raw_actions("student", student, obs)
    check_same_heads(theirs, own)
    return lambda rollout_extras: own.tree.unflatten(theirs.read(rollout_extras))
