"""What a traced function costs, found in its jaxpr alone: operations and memory.

XLA knows better, but only after compiling, and it counts the body of a loop once.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

# Calls whose body belongs to what is around them.
_CALLS = (
    "checkpoint",
    "closed_call",
    "core_call",
    "custom_jvp_call",
    "custom_vjp_call",
    "custom_vjp_call_jaxpr",
    "jit",
    "pjit",
    "remat2",
)
# Other names of the same array.
_ALIASES = ("reshape", "squeeze", "expand_dims", "stop_gradient", "copy", "random_clone")
# What reads and writes memory; XLA fuses all else into what uses it.
_UNFUSED = (
    "argmax",
    "argmin",
    "concatenate",
    "conv_general_dilated",
    "cum",
    "dot_general",
    "dynamic_update_slice",
    "fft",
    "gather",
    "random_",
    "reduce_",
    "rng_",
    "scatter",
    "sort",
    "threefry",
    "top_k",
    "transpose",
)


def traced_bytes(tree: Any) -> int:
    """Return the bytes of a tree's arrays, or of their `jax.ShapeDtypeStruct`."""
    return sum(_bytes(leaf) for leaf in jax.tree.leaves(tree))


def count_flops(jaxpr: ClosedJaxpr) -> int:
    """Count the floating-point operations of matrix products and convolutions.

    A multiplication and an addition count as two. A loop over a known number of steps counts that
    often; one that runs until something holds counts once, and of branches the dearest counts.

    Args:
        jaxpr: From `jax.make_jaxpr`; what its outputs do not depend on is left out.
    """
    return _flops(jaxpr.jaxpr)


class Memory(NamedTuple):
    """Memory of a traced function.

    Attributes:
        peak: Bytes that are in use at most, without arguments that are not given away.
        reads: For each argument whether the wanted outputs depend on it.
    """

    peak: int
    reads: list[bool]


def estimate_memory(
    jaxpr: ClosedJaxpr,
    *,
    wanted: Sequence[bool] | None = None,
    given_away: Sequence[bool] | None = None,
) -> Memory:
    """Estimate the memory that a function needs, as if XLA compiled it.

    Operations run in the order of the jaxpr, and an array lives from its making to its last use.
    Elementwise operations are fused into what uses them: of their results only those that a matrix
    product, a reduction or a loop reads are stored, and the others keep alive what they were made
    from. A loop updates in place what it carries.

    Args:
        jaxpr: From `jax.make_jaxpr`.
        wanted: For each output whether anybody wants it; all if None.
        given_away: For each argument whether its memory may be used again; none if None.
    """
    inner = jaxpr.jaxpr
    wanted = [True] * len(inner.outvars) if wanted is None else wanted
    given_away = [False] * len(inner.invars) if given_away is None else given_away
    program = _program(inner, wanted)
    own = [value for value, away in zip(program.arguments, given_away, strict=True) if away]
    read = {value for op in program.ops for value in op.inputs} | set(program.outputs)
    return Memory(_peak(program, own), [value in read for value in program.arguments])


class _Value:
    """An array, or a name of one."""

    def __init__(self, aval: Any) -> None:
        self.size = _bytes(aval)


class _Op(NamedTuple):
    """An operation and the arrays that it reads, None for literals, and makes."""

    eqn: JaxprEqn
    operands: list[_Value | None]
    outputs: list[_Value]

    @property
    def inputs(self) -> list[_Value]:
        return [value for value in self.operands if value is not None]


class _Program(NamedTuple):
    """A jaxpr with its calls written out, and without what no output needs."""

    ops: list[_Op]
    arguments: list[_Value]
    outputs: list[_Value]


def _program(jaxpr: Jaxpr, wanted: Sequence[bool] | None = None) -> _Program:
    names = {var: _Value(var.aval) for var in (*jaxpr.invars, *jaxpr.constvars)}
    arguments = [names[var] for var in jaxpr.invars]
    ops: list[_Op] = []
    outputs = _write_out(jaxpr, names, ops)
    if wanted is not None:
        outputs = [value for value, want in zip(outputs, wanted, strict=True) if want]
    found = [value for value in outputs if value is not None]
    needed, kept = set(found), []
    for op in reversed(ops):
        if needed.intersection(op.outputs) or op.eqn.effects:
            kept.append(op)
            needed.update(op.inputs)
    return _Program(kept[::-1], arguments, found)


def _write_out(jaxpr: Jaxpr, names: dict[Any, _Value], ops: list[_Op]) -> list[_Value | None]:
    """Append the operations of a jaxpr to `ops`; return its outputs, None for literals."""

    def read(var: Any) -> _Value | None:
        if isinstance(var, Literal):
            return None
        return names.setdefault(var, _Value(var.aval))

    for eqn in jaxpr.eqns:
        inputs = [read(var) for var in eqn.invars]
        bodies = list(_bodies(eqn))
        name = eqn.primitive.name
        if name in _CALLS and len(bodies) == 1 and len(bodies[0].invars) == len(inputs):
            known = {v: i for v, i in zip(bodies[0].invars, inputs, strict=True) if i is not None}
            found = _write_out(bodies[0], known, ops)
            names.update({v: f for v, f in zip(eqn.outvars, found, strict=True) if f is not None})
        elif name in _ALIASES and len(inputs) == 1 and inputs[0] is not None:
            names[eqn.outvars[0]] = inputs[0]
        else:
            made = [_Value(var.aval) for var in eqn.outvars]
            names.update(zip(eqn.outvars, made, strict=True))
            ops.append(_Op(eqn, inputs, made))
    return [read(var) for var in jaxpr.outvars]


def _bodies(eqn: JaxprEqn) -> Iterator[Jaxpr]:
    """Yield the jaxprs among the parameters of an equation."""
    for value in eqn.params.values():
        for part in value if isinstance(value, list | tuple) else [value]:
            if isinstance(part, ClosedJaxpr):
                yield part.jaxpr
            elif isinstance(part, Jaxpr):
                yield part


def _flops(jaxpr: Jaxpr) -> int:
    total = 0
    for op in _program(jaxpr).ops:
        eqn = op.eqn
        name, bodies = eqn.primitive.name, [_flops(body) for body in _bodies(eqn)]
        if name in ("dot_general", "conv_general_dilated"):
            total += 2 * math.prod(_shape(eqn.outvars[0])) * _terms(eqn)
        elif name == "cond":
            total += max(bodies)
        else:
            total += eqn.params.get("length", 1) * sum(bodies)
    return total


def _terms(eqn: JaxprEqn) -> int:
    """Return how many products are summed up for each number that comes out."""
    numbers = eqn.params["dimension_numbers"]
    if eqn.primitive.name == "dot_general":
        (contracted, _), _ = numbers
        return math.prod(_shape(eqn.invars[0])[axis] for axis in contracted)
    kernel = list(_shape(eqn.invars[1]))
    del kernel[numbers.rhs_spec[0]]  # the features that come out
    return math.prod(kernel)


def _shape(var: Any) -> tuple[int, ...]:
    return var.aval.shape


def _peak(program: _Program, own: list[_Value]) -> int:
    """Return the most bytes in use at a time: arguments of one's own, and all that is made."""
    ops, outputs = program.ops, set(program.outputs)
    stored = _stored(program)
    last = _last_uses(ops, stored)
    alive = {value: value.size for value in own if value in last or value in outputs}
    in_use = peak = sum(alive.values())
    leaving: dict[int, list[_Value]] = {}
    for value, when in last.items():
        leaving.setdefault(when, []).append(value)
    for now, op in enumerate(ops):
        inside = max((_peak(_program(body), []) for body in _bodies(op.eqn)), default=0)
        made = {value: value.size for value in op.outputs if value in stored and value in last}
        made.update({value: value.size for value in op.outputs if value in outputs})
        for old, new in _in_place(op):
            if old in alive and old not in outputs and last.get(old) == now and new in made:
                in_use -= alive.pop(old)
        size = sum(made.values())
        # A branch writes the outputs itself.
        extra = max(inside, size) if op.eqn.primitive.name == "cond" else inside + size
        peak = max(peak, in_use + extra)
        alive.update(made)
        in_use += size
        for value in leaving.get(now, ()):
            if value in alive and value not in outputs:
                in_use -= alive.pop(value)
    return peak


def _stored(program: _Program) -> set[_Value]:
    """Return the arrays that are written to memory."""
    stored = {*program.arguments, *program.outputs}
    for op in program.ops:
        if _is_unfused(op.eqn):
            stored.update(op.inputs, op.outputs)
    return stored


def _is_unfused(eqn: JaxprEqn) -> bool:
    name = eqn.primitive.name
    return name.startswith(_UNFUSED) or "call" in name or any(True for _ in _bodies(eqn))


def _last_uses(ops: list[_Op], stored: set[_Value]) -> dict[_Value, int]:
    """Return which operation is the last that needs each stored array, fused ones included."""
    made_from: dict[_Value, set[_Value]] = {}
    last: dict[_Value, int] = {}
    for now, op in enumerate(ops):
        needs: set[_Value] = set()
        for value in op.inputs:
            needs |= {value} if value in stored else made_from.get(value, set())
        last.update(dict.fromkeys(needs, now))
        made_from.update(dict.fromkeys(op.outputs, needs))
    return last


def _in_place(op: _Op) -> list[tuple[_Value | None, _Value]]:
    """Return the pairs of what a loop begins with, and what it ends with in the same place."""
    eqn = op.eqn
    if eqn.primitive.name == "scan":
        # How a scan says which is which differs between versions of JAX; what it steps through
        # has an axis more outside of its body, and constants come before what is carried.
        (body,) = _bodies(eqn)
        number = _same_shapes(eqn.outvars, body.outvars)
        first = _same_shapes(eqn.invars, body.invars) - number
    elif eqn.primitive.name == "while":
        number = len(op.outputs)
        first = len(op.operands) - number
    else:
        return []
    return list(zip(op.operands[first : first + number], op.outputs[:number], strict=True))


def _same_shapes(outer: Sequence[Any], inner: Sequence[Any]) -> int:
    """Return how many variables of a loop have the same shape outside and inside of its body."""
    return sum(_shape(out) == _shape(var) for out, var in zip(outer, inner, strict=True))


def _bytes(array: Any) -> int:
    """Return the size of an array, key or `jax.ShapeDtypeStruct` in bytes."""
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        words = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct((), array.dtype))
        return array.size * words.size * words.dtype.itemsize
    return array.size * jnp.dtype(array.dtype).itemsize
