"""One step: whether it runs, what it returns, what it leaves behind."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from nnx_ppo.core import StatefulModule, StatefulModuleOutput
from nnx_ppo.core.testing._conformance.comparison import (
    describe,
    differences,
    is_array,
    is_key,
    leaves_with_paths,
    select,
    type_of,
)
from nnx_ppo.core.testing._conformance.findings import Finding, last_words
from nnx_ppo.core.testing._conformance.subject import BATCH, Subject, path_name

_FIELDS = ("output", "next_state", "rollout_extras")


def runs(subject: Subject) -> Iterator[Finding]:
    """A step runs on the initial carry, and returns a `StatefulModuleOutput`."""
    live, what = subject.live(), "initialize_state"
    try:
        carry = live.initialize_state(BATCH)
        what = "__call__"
        out = live(carry, subject.x)
    except Exception as error:  # whatever the user's code raises is what they want to read
        yield Finding("runs", what, "no exception", last_words(error), "see the exception.")
        return
    if not isinstance(out, StatefulModuleOutput):
        yield Finding(
            "runs",
            "__call__",
            "a StatefulModuleOutput",
            type(out).__name__,
            "return StatefulModuleOutput(next_state, output, regularization_loss, metrics).",
        )
    elif not isinstance(out.metrics, dict):
        found = type(out.metrics).__name__
        cure = "return {} if there is nothing to log."
        yield Finding("runs", "metrics", "a dict", found, cure)
    else:
        yield from _only_arrays(out)


def _only_arrays(out: StatefulModuleOutput) -> Iterator[Finding]:
    for field in (*_FIELDS, "regularization_loss", "metrics"):
        for path, leaf in leaves_with_paths(getattr(out, field), field):
            if not is_array(leaf):
                yield Finding(
                    "runs",
                    path,
                    "an array",
                    f"{leaf!r} ({type(leaf).__name__})",
                    "leaves cross JAX transforms and are stacked over time; keep other values in "
                    "static attributes.",
                )


def compiles(subject: Subject) -> Iterator[Finding]:
    """A step can be compiled."""
    try:
        _jitted(subject)
    except Exception as error:
        yield Finding(
            "transforms",
            "__call__ under jax.jit",
            "no exception",
            last_words(error),
            "use jnp.where or jax.lax.cond instead of Python's if on values of arrays, and jnp "
            "instead of np.",
        )


def same_when_compiled(subject: Subject) -> Iterator[Finding]:
    """A compiled step gives the same."""
    jitted, live = _jitted(subject), subject.live()
    eager = live(live.initialize_state(BATCH), subject.x)
    for field in ("output", "next_state", "rollout_extras", "regularization_loss"):
        without, within = _numbers([getattr(eager, field), getattr(jitted, field)])
        for gap in differences(without, within, field, subject.tolerance):
            yield Finding(
                "transforms",
                f"{gap.path} under jax.jit",
                f"{gap.want}, as without",
                gap.have,
                "do not let the result depend on whether values are known (jax.core.Tracer).",
            )


def _jitted(subject: Subject) -> StatefulModuleOutput:
    """Return what the first step gives under `jax.jit`."""
    if "jitted" in subject.memo:
        return subject.memo["jitted"]
    merge, variables = subject.split()

    @jax.jit
    def step(variables: Any, x: Any) -> StatefulModuleOutput:
        live = merge(variables)
        return live(live.initialize_state(BATCH), x)

    return subject.memo.setdefault("jitted", step(variables, subject.x))


def batch_axis(subject: Subject) -> Iterator[Finding]:
    """Every leaf of output, carry and extras leads with the batch axis; losses are per sample."""
    at = {size: _shapes_at(subject, size) for size in (BATCH, BATCH + 1)}
    fields = ("initialize_state", *_FIELDS)
    for field in fields:
        small, large = (dict(leaves_with_paths(at[size][field], field)) for size in at)
        for path, leaf in small.items():
            grown = large.get(path)
            rest = leaf.shape[1:]
            if leaf.shape[:1] != (BATCH,) or grown is None or grown.shape != (BATCH + 1, *rest):
                yield Finding(
                    "batch-axis",
                    path,
                    f"({BATCH}, …) for {BATCH} samples and ({BATCH + 1}, …) for {BATCH + 1}",
                    f"{describe(leaf)} and {describe(grown)}",
                    "give every leaf one row for each sample; what belongs to all samples is an "
                    "nnx.Variable of the module.",
                )
    yield from _loss_shape(at[BATCH]["regularization_loss"])


def _shapes_at(subject: Subject, size: int) -> dict[str, Any]:
    """Return the abstract results of one step for a number of samples."""
    live = subject.live()
    row = jax.tree.map(lambda leaf: leaf[0, 0], subject.xs)

    def step() -> dict[str, Any]:
        module = nnx.clone(live)
        carry = module.initialize_state(size)
        x = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (size, *leaf.shape)), row)
        out = module(carry, x)
        results = {field: getattr(out, field) for field in (*_FIELDS, "regularization_loss")}
        return {"initialize_state": carry, **results}

    return jax.eval_shape(step)


def _loss_shape(loss: Any) -> Iterator[Finding]:
    shape, dtype = jnp.shape(loss), jnp.result_type(loss)
    if shape not in ((), (BATCH,)) or not jnp.issubdtype(dtype, jnp.floating):
        yield Finding(
            "batch-axis",
            "regularization_loss",
            f"one floating-point value for each sample, ({BATCH},), or a scalar",
            describe(loss),
            "sum it over the feature axes; jnp.zeros(()) if there is none.",
        )


def carry_types(subject: Subject) -> Iterator[Finding]:
    """The carry keeps tree, shapes, dtypes and weak types, from initial to next to reset."""
    live = subject.live()

    def step(x: Any) -> Any:
        module = nnx.clone(live)
        start = module.initialize_state(BATCH)
        return start, module(start, x).next_state

    start, after = jax.eval_shape(step, subject.x)
    changes = list(_same_types(start, after, "next_state", "initialize_state returns"))
    yield from changes
    if not changes:  # else reset_state is not made for it
        reset = jax.eval_shape(lambda state: nnx.clone(live).reset_state(state), after)
        yield from _same_types(after, reset, "reset_state(next_state)", "__call__ returns")


def _same_types(want: Any, have: Any, where: str, source: str) -> Iterator[Finding]:
    cure = "a scan needs one type of carry; write it as jnp.zeros(shape, dtype) everywhere."
    if jax.tree.structure(want) != jax.tree.structure(have):
        expected = f"{jax.tree.structure(want)}, as {source}"
        yield Finding("carry", where, expected, str(jax.tree.structure(have)), cure)
        return
    old, new = leaves_with_paths(want, where), jax.tree.leaves(have)
    for (path, before), after in zip(old, new, strict=True):
        if type_of(before) != type_of(after):
            expected = f"{type_of(before)}, as {source}"
            yield Finding("carry", path, expected, type_of(after), cure)


def reset(subject: Subject) -> Iterator[Finding]:
    """A reset carry is the initial one, row by row, and also without a batch axis."""
    live, used = subject.live(), subject.used_carry

    @jax.jit
    def resets(used: Any) -> Any:
        module = nnx.clone(live)
        whole = module.reset_state(used)
        turned = module.reset_state(jax.tree.map(lambda leaf: leaf[::-1], used))
        return module.initialize_state(BATCH), whole, turned

    initial, whole, turned = resets(used)
    plain = [select(tree, lambda leaf: not is_key(leaf)) for tree in (initial, whole)]
    for gap in differences(plain[0], plain[1], "reset_state(state)", subject.tolerance):
        yield Finding(
            "reset",
            gap.path,
            f"{gap.want}, as initialize_state returns",
            gap.have,
            "override reset_state to return the initial carry in the shape of prev_state; the "
            "default keeps the carry, so the next episode would see this one.",
        )
    turned_back = jax.tree.map(lambda leaf: leaf[::-1], turned)
    for gap in differences(whole, turned_back, "reset_state(state)", subject.tolerance):
        cure = "reset each environment by itself: no row may depend on the others."
        yield Finding("reset", gap.path, f"{gap.want}, whatever the order", gap.have, cure)
    yield from _reset_one(live, used, whole, subject.tolerance)


def _reset_one(live: StatefulModule, used: Any, whole: Any, tolerance: float) -> Iterator[Finding]:
    cure = "take shapes from prev_state instead of assuming a batch axis."
    one = jax.tree.map(lambda leaf: leaf[0], used)
    try:
        alone = jax.jit(lambda state: nnx.clone(live).reset_state(state))(one)
    except Exception as error:
        where = "reset_state(carry of one environment)"
        yield Finding("reset", where, "no exception", last_words(error), cure)
        return
    expected = jax.tree.map(lambda leaf: leaf[0], whole)
    for gap in differences(expected, alone, "reset_state(carry of one)", tolerance):
        yield Finding("reset", gap.path, f"{gap.want}, the row of the batch", gap.have, cure)


def pure(subject: Subject) -> Iterator[Finding]:
    """Equal variables, carry and input give equal results; only random streams are written."""
    carry, x = subject.carry(), subject.x
    first, second = subject.live(), subject.live()
    before = _attributes(first)
    given, again = (jax.tree.map(lambda leaf: leaf, (carry, x)) for _ in range(2))
    outs = [first(*given), second(*again)]
    for field in ("output", "next_state", "rollout_extras", "regularization_loss"):
        once, twice = _numbers([getattr(out, field) for out in outs])
        for gap in differences(once, twice, field):
            yield Finding(
                "pure",
                gap.path,
                f"{gap.want} again on a second call with the same arguments",
                gap.have,
                "draw randomness from an nnx stream or from keys in the carry; keep no counters "
                "or caches in Python.",
            )
    for gap in differences((carry, x), given, "arguments after the call"):
        cure = "do not write into the trees that are passed in; build new ones."
        yield Finding("pure", gap.path, gap.want, gap.have, cure)
    yield from _written(before, _attributes(first))


def _numbers(trees: list[Any]) -> list[Any]:
    """Make arrays of Python numbers, so that two results can be compared."""
    return [
        jax.tree.map(lambda leaf: leaf if is_key(leaf) else jnp.asarray(leaf), t) for t in trees
    ]


def _attributes(module: nnx.Module) -> dict[str, Any]:
    """Return the values of variables that are no random state, and static attributes."""
    found: dict[str, Any] = {}
    for path, node in nnx.iter_graph(module):
        if isinstance(node, nnx.Variable) and not isinstance(node, nnx.RngState):
            found[path_name(path)] = node[...]
        elif isinstance(node, nnx.Pytree):
            for name, value in vars(node).items():
                is_static = not isinstance(value, nnx.Pytree | nnx.Variable)
                if is_static and not name.startswith("_pytree__"):
                    found[f"{path_name(path)}.{name}"] = value
    return found


def _written(before: dict[str, Any], after: dict[str, Any]) -> Iterator[Finding]:
    for path in {**before, **after}:
        old, new = before.get(path, "nothing"), after.get(path, "nothing")
        if isinstance(old, jax.Array) and isinstance(new, jax.Array):
            gaps = list(differences(old, new, path))
            expected, got = (gaps[0].want, gaps[0].have) if gaps else ("", "")
        else:
            expected, got = (repr(old), repr(new)) if old is not new and old != new else ("", "")
        if expected != got:
            yield Finding(
                "pure",
                path,
                f"{expected}, as before the call",
                got,
                "write no variables or attributes in __call__; what changes from step to step "
                "goes into the carry, statistics into update_statistics.",
            )
