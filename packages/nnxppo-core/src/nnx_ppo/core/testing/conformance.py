"""`check_module`: whether a module keeps the contract of `StatefulModule`."""

import warnings
from collections.abc import Callable, Collection, Iterator
from typing import Any, TypeAlias

import jax

from nnx_ppo.core import StatefulModule
from nnx_ppo.core.testing._conformance import calls, routing, samples, structure, windows
from nnx_ppo.core.testing._conformance.findings import (
    ContractError,
    ContractWarning,
    Finding,
    last_words,
)
from nnx_ppo.core.testing._conformance.subject import Subject, make_subject

Rule: TypeAlias = Callable[[Subject], Iterator[Finding]]

_STEP = ("runs", "transforms")
_WINDOW = (*_STEP, "batch-axis", "carry")
# Name, rule, and the rules without which it has nothing to stand on.
_RULES: tuple[tuple[str, Rule, tuple[str, ...]], ...] = (
    ("hidden-state", structure.hidden_state, ()),
    ("runs", calls.runs, ()),
    ("pure", calls.pure, ("runs",)),
    ("transforms", calls.compiles, ("runs",)),
    ("transforms", calls.same_when_compiled, (*_STEP, "pure")),
    ("batch-axis", calls.batch_axis, _STEP),
    ("carry", calls.carry_types, _STEP),
    ("reset", calls.reset, _WINDOW),
    ("finite", samples.finite, _WINDOW),
    ("replay", samples.replay, (*_WINDOW, "pure")),
    ("sampler", samples.sampler, (*_WINDOW, "pure", "replay")),
    ("eval", samples.eval_mode, (*_WINDOW, "pure")),
    ("per-sample", samples.per_sample, (*_WINDOW, "pure")),
    ("routing", routing.routing, _WINDOW),
    ("extras", routing.extras_keys, _WINDOW),
    ("statistics", routing.statistics, _WINDOW),
    ("unroll", windows.unroll, (*_WINDOW, "pure", "reset", "per-sample")),
    ("gradient", windows.gradients, (*_WINDOW, "finite")),
    ("transforms", windows.vmaps, (*_WINDOW, "pure")),
)

RULES: tuple[str, ...] = tuple(dict.fromkeys(name for name, _, _ in _RULES))
"""Names of the rules of `check_module`."""


def check_module(
    module: StatefulModule,
    sample_input: Any,
    *,
    draw_input: Callable[[jax.Array], Any] | None = None,
    skip: Collection[str] = (),
    seed: int = 0,
    tolerance: float = 1e-5,
) -> None:
    """Check that a module keeps the contract of `StatefulModule`.

    The module is run on copies, in a rollout of six steps with three environments whose episodes
    end at different times; it is left as it was. Parameters of the copies are nudged off their
    initial values, since much goes unseen at zero. The rules, by name:

    - `hidden-state`: variables, modules and arrays are attributes that JAX can see; other
      attributes can be hashed.
    - `runs`: a step runs, and returns a `StatefulModuleOutput` of arrays.
    - `pure`: equal variables, carry and input give equal results; a step writes no variable but
      random streams, no attribute, and not into its arguments.
    - `transforms`: a step gives the same under `jax.jit` and `jax.vmap`.
    - `batch-axis`: output, carry and extras lead with the batch axis; the loss is `(batch,)` or
      a scalar.
    - `carry`: it keeps tree, shape, dtype and weak type from initial to next to reset.
    - `reset`: the reset carry is the initial one (keys may go on), row by row, and also for one
      environment without batch axis.
    - `finite`: finite inputs give finite outputs and losses.
    - `replay`: from the stored extras comes the same window, whatever the random streams do.
    - `sampler`: a replayed action is the one taken; its log-likelihood follows the input.
    - `eval`: a module with a `deterministic` switch is deterministic after `eval()`.
    - `per-sample`: reordering, picking and repeating samples does the same to the results, in
      evaluation mode and in the replay, where they do not depend on a random stream.
    - `routing`: a container gives every child the carry that it returned and the extras that it
      emitted.
    - `extras`: a container's extras have the keys of its state.
    - `statistics`: `update_statistics` changes the statistics, once, no parameter, no dtype.
    - `unroll`: `unroll` equals `unroll_stepwise` in value, gradient and random streams.
    - `gradient`: gradients are finite. A parameter without gradient is a warning.

    All broken rules are reported, apart from those that stand on a broken one: where a step does
    not run, nothing is said about its replay.

    Args:
        module: The module.
        sample_input: An input for one environment, without batch axis, such as the observation
            that `env.reset` returns. Inputs of its shapes are drawn: normal floats, booleans,
            integers from 0 to the largest in the sample.
        draw_input: For inputs of another distribution: makes one sample from a random key.
            `sample_input` is then not used.
        skip: Names of rules to leave out.
        seed: Of inputs and nudges.
        tolerance: Largest difference between two ways to compute one value, relative to the
            largest magnitude in the array, or to 1 if that is smaller; gradients get ten times
            as much.

    Raises:
        ContractError: Lists all broken rules, each with the leaf, what was expected, what came
            and what to do.
        ValueError: `skip` names no rule.
        TypeError: `module` is not a `StatefulModule`.

    Example:
        >>> import jax.numpy as jnp
        >>> from nnx_ppo.core import StatefulModule, StatefulModuleOutput
        >>> class Forgetful(StatefulModule):  # lacks a reset_state
        ...     def __call__(self, state, x, rollout_extras=None):
        ...         total = state + x
        ...         return StatefulModuleOutput(total, total, jnp.zeros(()), {})
        ...
        ...     def initialize_state(self, batch_size):
        ...         return jnp.zeros((batch_size, 2))
        >>> try:
        ...     check_module(Forgetful(), jnp.zeros(2))
        ... except ContractError as error:
        ...     print(error.findings[0].rule, error.findings[0].where)
        reset reset_state(state)
    """
    unknown = sorted(set(skip) - set(RULES))
    if unknown:
        raise ValueError(f"skip={sorted(skip)} names no rule {unknown}; the rules are {RULES}.")
    if not isinstance(module, StatefulModule):
        raise TypeError(
            f"module must be a StatefulModule, got {type(module).__name__}; pass an instance."
        )
    subject = make_subject(module, sample_input, draw_input, seed, tolerance)
    findings = _judge(subject, skip)
    broken = [finding for finding in findings if not finding.is_warning]
    for finding in findings:
        if finding.is_warning:
            warnings.warn(f"{subject.name}: {finding}", ContractWarning, stacklevel=2)
    if broken:
        raise ContractError(subject.name, broken)


def _apply(name: str, rule: Rule, subject: Subject) -> Iterator[Finding]:
    """Yield what a rule finds; that it cannot be tried is a finding too."""
    try:
        yield from rule(subject)
    except Exception as error:
        what = (rule.__doc__ or name).splitlines()[0]
        yield Finding(name, what, "no exception", last_words(error), "see the exception.")


def _judge(subject: Subject, skip: Collection[str]) -> list[Finding]:
    found: list[Finding] = []
    for name, rule, needs in _RULES:
        broken = {finding.rule for finding in found if not finding.is_warning}
        if name not in skip and broken.isdisjoint(needs):
            found += _apply(name, rule, subject)
    return found
