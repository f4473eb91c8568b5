"""Whether a module survives a checkpoint.

Needs orbax, which the extra `nnxppo-core[testing]` installs.
"""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from flax import nnx
from jaxtyping import PyTree

from nnx_ppo.core import StatefulModule
from nnx_ppo.core.testing._conformance.comparison import (
    as_numpy,
    describe,
    differences,
    is_array,
    leaves_with_paths,
)
from nnx_ppo.core.testing._conformance.findings import (
    ContractError,
    Finding,
    last_words,
)
from nnx_ppo.core.testing._conformance.subject import BATCH, Subject, make_subject, path_name

__all__ = ["check_roundtrip"]

_RULE = "roundtrip"


def check_roundtrip(module: StatefulModule, sample_input: Any, *, seed: int = 0) -> None:
    """Check that orbax saves and restores a module: all variables bit for bit, and what it does.

    Parameters, statistics, random keys and counters are saved to a temporary folder, and restored
    into a structure of the same shapes that knows no values. What comes back must be equal, and
    one step from its own initial carry must give the same output, carry, extras and variables.
    `module` is left as it is: a copy is saved, with its parameters nudged off their initial values.

    Args:
        module: The module.
        sample_input: An input for one environment, without batch axis; see `check_module`.
        seed: Of inputs and nudges.

    Raises:
        ContractError: With the rule `roundtrip`; names each variable that cannot be saved or comes
            back as another one.
        TypeError: `module` is not a `StatefulModule`.

    Example:
        >>> import jax.numpy as jnp
        >>> from nnx_ppo.core.testing.modules import LeakyMemory
        >>> check_roundtrip(LeakyMemory(3, 2, nnx.Rngs(0)), jnp.zeros(3))
    """
    if not isinstance(module, StatefulModule):
        raise TypeError(
            f"check_roundtrip: module must be a StatefulModule, got {type(module).__name__}; pass "
            "an instance."
        )
    subject = make_subject(module, sample_input, None, seed, tolerance=0.0)
    findings = list(_judge(subject))
    if findings:
        raise ContractError(subject.name, findings)


def _judge(subject: Subject) -> Iterator[Finding]:
    graphdef, saved = nnx.split(subject.module)
    unsuited = list(_what_cannot_be_saved(saved))
    yield from unsuited
    if unsuited or not jax.tree.leaves(saved):  # orbax refuses to save nothing
        return
    try:
        restored = _save_and_restore(saved)
    except Exception as error:
        cure = "keep arrays in variables, under names that make file names."
        yield Finding(_RULE, "saving or restoring", "no exception", last_words(error), cure)
        return
    changed = list(_what_changed(saved, restored))
    yield from changed
    if not changed:
        yield from _what_acts_differently(subject, graphdef, saved, restored)


def _variables(state: PyTree) -> Iterator[tuple[str, Any]]:
    """Yield path and value of the arrays in a module's variables."""
    for path, variable in nnx.to_flat_state(state):
        yield from leaves_with_paths(variable.get_value(), path_name(path))


def _what_cannot_be_saved(state: PyTree) -> Iterator[Finding]:
    for path, leaf in _variables(state):
        if not is_array(leaf):
            cure = "keep what is no array in a static attribute."
            yield Finding(_RULE, path, "an array", describe(leaf), cure)
        elif 0 in getattr(leaf, "shape", ()):
            cure = "orbax saves no empty arrays; leave the variable out if it has no elements."
            yield Finding(_RULE, path, "an array with elements", describe(leaf), cure)


def _save_and_restore(state: PyTree) -> PyTree:
    """Return what a fresh reader finds in a checkpoint of a state."""
    target = jax.eval_shape(lambda: state)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder).resolve() / "module"
        with ocp.StandardCheckpointer() as writer:
            writer.save(path, state)
            writer.wait_until_finished()
        with ocp.StandardCheckpointer() as reader:
            return reader.restore(path, target)


def _what_changed(saved: PyTree, restored: PyTree) -> Iterator[Finding]:
    cure = "two variables may have names that mean one file, such as `a.b` and `b` inside `a`."
    found = dict(_variables(restored))
    for path, leaf in _variables(saved):
        gaps = list(differences(leaf, found[path], path))
        for gap in gaps:
            yield Finding(_RULE, gap.path, f"{gap.want}, as it was saved", gap.have, cure)
        if not gaps and as_numpy(leaf).tobytes() != as_numpy(found[path]).tobytes():
            yield Finding(_RULE, path, "the bits that were saved", "others of equal value", cure)


def _what_acts_differently(
    subject: Subject, graphdef: Any, saved: PyTree, restored: PyTree
) -> Iterator[Finding]:
    """Compare a step of the module with one of what was restored."""

    @jax.jit
    def step(variables: PyTree, x: Any) -> dict[str, Any]:
        live = nnx.merge(graphdef, variables, copy=True)
        out = live(live.initialize_state(BATCH), x)
        fields = ("output", "next_state", "regularization_loss", "rollout_extras")
        return {name: getattr(out, name) for name in fields} | {"variables": nnx.state(live)}

    before, after = (step(variables, subject.x) for variables in (saved, restored))
    for name, want in before.items():
        for gap in differences(want, after[name], name):
            yield Finding(
                _RULE,
                f"{gap.path} of a step",
                f"{gap.want}, as without the round trip",
                gap.have,
                "a step may depend on variables and static attributes only.",
            )
