"""Whole windows: the fast form against the definition, gradients, vmap."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from nnx_ppo.core import StatefulModule, owns_random_stream, unroll_stepwise
from nnx_ppo.core.testing._conformance.comparison import (
    as_numpy,
    differences,
    is_key,
    leaves_with_paths,
)
from nnx_ppo.core.testing._conformance.findings import Finding, last_words
from nnx_ppo.core.testing._conformance.subject import BATCH, DONE, Subject, path_name


def unroll(subject: Subject) -> Iterator[Finding]:
    """`unroll` equals `unroll_stepwise`: value, gradient and random streams."""
    if _is_stepwise(subject):
        return
    for when, stored in _cases(subject):
        (_, want), want_slopes = _stepwise(subject, when)
        (_, have), have_slopes = _differentiate(subject, _unrolled, stored)
        named = {"unroll": (want, have), "gradient of unroll": (want_slopes, have_slopes)}
        for name, (slow, fast) in named.items():
            for gap in differences(slow, fast, f"{name} {when}", 10 * subject.tolerance):
                yield Finding(
                    "unroll",
                    gap.path,
                    f"{gap.want}, as unroll_stepwise gives",
                    gap.have,
                    "unroll must be the step-by-step scan with resets, up to rounding; delete "
                    "the override to get the default back. The default folds time into the batch "
                    "for modules without carry: do not depend on the batch size.",
                )


def _is_stepwise(subject: Subject) -> bool:
    """Whether `unroll` is `unroll_stepwise` by definition: the default, with carry or stream."""
    is_default = type(subject.module).unroll is StatefulModule.unroll
    has_carry = bool(jax.tree.leaves(subject.rollout.start))
    return is_default and (has_carry or owns_random_stream(subject.module))


def gradients(subject: Subject) -> Iterator[Finding]:
    """Gradients of a window with a reset are finite, and reach every parameter."""
    reached: dict[str, bool] = {}
    for when, _ in _cases(subject):
        _, slopes = _stepwise(subject, when)
        for path, slope in _named_slopes(slopes):
            values = as_numpy(slope)
            if (values != values).any() or abs(values).max(initial=0.0) == float("inf"):
                yield Finding(
                    "gradient",
                    f"{path} {when}",
                    "a finite gradient",
                    "NaN or infinity",
                    "jnp.where hides a bad value but not its gradient: make the argument of the "
                    "bad branch harmless as well.",
                )
            if path.startswith("self"):
                reached[path] = reached.get(path, False) or bool((values != 0).any())
    for path, has_gradient in reached.items():
        if not has_gradient:
            yield Finding(
                "gradient",
                path,
                "a gradient in a window that includes a reset",
                "zero everywhere",
                "if it is not meant to be learned, make it another kind of nnx.Variable; if it "
                "is, look for stop_gradient, integer casts or an initial state that is not used, "
                "or pass draw_input with inputs that reach it.",
                is_warning=True,
            )


def _named_slopes(slopes: Any) -> Iterator[tuple[str, Any]]:
    for path, variable in nnx.to_flat_state(slopes["params"]):
        yield path_name(path), variable[...]
    yield from leaves_with_paths(slopes["carry"], "state")
    yield from leaves_with_paths(slopes["xs"], "x")


def vmaps(subject: Subject) -> Iterator[Finding]:
    """A step can be vmapped over a further axis."""
    merge, variables = subject.split()
    carry, x = subject.used_carry, subject.x
    turn = partial(jax.tree.map, lambda leaf: leaf[::-1])
    pair = jax.tree.map(lambda a, b: jnp.stack([a, b]), (carry, x), turn((carry, x)))

    def step(carry: Any, x: Any) -> Any:
        out = merge(variables)(carry, x)
        return out.output, out.next_state

    try:
        mapped, step = jax.jit(jax.vmap(step))(*pair), jax.jit(step)
    except Exception as error:
        cure = "use jnp and lax functions only, and no shapes that depend on values."
        yield Finding(
            "transforms", "__call__ under jax.vmap", "no exception", last_words(error), cure
        )
        return
    expected = step(carry, x), step(*turn((carry, x)))
    for row, want in enumerate(expected):
        have = jax.tree.map(lambda leaf, row=row: leaf[row], mapped)
        for gap in differences(want, have, "__call__ under jax.vmap", subject.tolerance):
            cure = "a step may depend on its arguments only, not on what else is mapped."
            yield Finding("transforms", gap.path, gap.want, gap.have, cure)


def _cases(subject: Subject) -> Iterator[tuple[str, Any]]:
    """Yield the rollout, and the replay if there is something to replay."""
    yield "(rollout)", None
    stored = subject.rollout.outputs.rollout_extras
    if jax.tree.leaves(stored):
        yield "(replay)", stored


def _stepwise(subject: Subject, when: str) -> Any:
    """Return value and gradient of the window by its definition; two rules look at them."""
    if when not in subject.memo:
        stored = dict(_cases(subject))[when]
        subject.memo[when] = _differentiate(subject, unroll_stepwise, stored)
    return subject.memo[when]


def _unrolled(module: StatefulModule, *args: Any) -> Any:
    return module.unroll(*args)


def _differentiate(subject: Subject, form: Callable[..., Any], stored: Any) -> Any:
    """Return value and gradient of a window in one of its two forms.

    The window starts from the initial carry as the parameters make it, plus a perturbation; the
    value is everything that the window returns and the variables it leaves behind.
    """
    graphdef, params, rest = nnx.split(subject.live(), nnx.Param, ...)
    floats, others = _partition(subject.xs)
    shift = jax.tree.map(lambda leaf: jnp.zeros_like(leaf), _partition(subject.carry())[0])

    def window(learned: Any, rest: Any, others: Any, stored: Any) -> Any:
        live = nnx.merge(graphdef, learned["params"], rest, copy=True)
        carry = live.initialize_state(BATCH)
        moving, fixed = _partition(carry)
        moving = jax.tree.map(lambda a, b: a + b, moving, learned["carry"])
        xs = _join(learned["xs"], others)
        out = form(live, _join(moving, fixed), xs, jnp.asarray(DONE), stored)
        left = nnx.state(live, nnx.Not(nnx.Param))
        results = {
            "next_state": out.next_state,
            "output": out.output,
            "regularization_loss": out.regularization_loss,
            "variables": left,
        }
        return _mix((out.output, out.regularization_loss, out.next_state)), results

    learned = {"params": params, "carry": shift, "xs": floats}
    run = jax.jit(jax.value_and_grad(window, has_aux=True, allow_int=True))
    value, slopes = run(learned, rest, others, stored)
    return value, _partition(slopes)[0]


def _is_float(leaf: Any) -> bool:
    return not is_key(leaf) and jnp.issubdtype(jnp.result_type(leaf), jnp.floating)


def _partition(tree: Any) -> tuple[Any, Any]:
    """Split a tree in its floating leaves and the others, None in place of what is missing."""
    return (
        jax.tree.map(lambda leaf: leaf if _is_float(leaf) else None, tree),
        jax.tree.map(lambda leaf: None if _is_float(leaf) else leaf, tree),
    )


def _join(floats: Any, others: Any) -> Any:
    return jax.tree.map(
        lambda a, b: b if a is None else a, floats, others, is_leaf=lambda leaf: leaf is None
    )


def _mix(tree: Any) -> jax.Array:
    """Return a number in which every finite element of every floating leaf counts differently."""
    total = jnp.zeros(())
    for leaf in filter(_is_float, jax.tree.leaves(tree)):
        weights = jnp.cos(jnp.arange(leaf.size, dtype=jnp.float32)).reshape(leaf.shape)
        # A carry may hold NaN for "nothing yet".
        total = total + jnp.sum(jnp.where(jnp.isfinite(leaf), leaf, 0.0) * weights)
    return total
