"""Whether a container gives each child its own carry, extras and statistics, and all of them."""

import dataclasses
import types
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from nnx_ppo.core import StatefulModule
from nnx_ppo.core.testing._conformance.comparison import differences, type_of
from nnx_ppo.core.testing._conformance.findings import Finding
from nnx_ppo.core.testing._conformance.subject import Subject, path_name, stateful_modules


@dataclasses.dataclass
class Probe:
    """What a module inside a container was given and returned, call by call."""

    states: list[Any] = dataclasses.field(default_factory=list)
    extras: list[Any] = dataclasses.field(default_factory=list)
    next_states: list[Any] = dataclasses.field(default_factory=list)
    emitted: list[Any] = dataclasses.field(default_factory=list)
    statistics: list[Any] = dataclasses.field(default_factory=list)


def routing(subject: Subject) -> Iterator[Finding]:
    """Each child gets back the carry that it returned, and in the replay the extras it emitted."""
    if not subject.is_container:
        return
    try:
        first, second, again = _three_calls(subject)
    except jax.errors.UnexpectedTracerError:
        return  # the container runs its children inside a transform; other rules judge it
    for path, probe in first.items():
        later, replayed = second[path], again[path]
        if len(probe.states) != len(later.states):
            continue
        yield from _compare(
            probe.next_states,
            later.states,
            f"carry given to {path}",
            "what it returned at the step before",
            "put the next_state of every child into the container's next_state.",
        )
        yield from _compare(
            probe.emitted,
            replayed.extras,
            f"rollout_extras given to {path} in the replay",
            "what it emitted in the rollout",
            "put the rollout_extras of every child into the container's, and hand them back.",
        )


def extras_keys(subject: Subject) -> Iterator[Finding]:
    """A container's extras have the keys of its state."""
    if not subject.is_container:
        return
    state, extras = subject.rollout.start, subject.rollout.outputs.rollout_extras
    if _keys(state) is not None and extras is not None and _keys(state) != _keys(extras):
        yield Finding(
            "extras",
            "rollout_extras",
            f"the keys of the state, {_keys(state)}",
            f"{_keys(extras) or type(extras).__name__}",
            "collect the extras of the children as you collect their carries.",
        )


def statistics(subject: Subject) -> Iterator[Finding]:
    """`update_statistics` writes statistics, all of them, once, and nothing else."""
    merge, variables = subject.split()
    extras = subject.rollout.outputs.rollout_extras

    @jax.jit
    def update(variables: Any, extras: Any) -> Any:
        live = merge(variables)
        live.update_statistics(extras)
        return nnx.state(live)

    before = subject.live()
    after = nnx.clone(before)
    nnx.update(after, update(variables, extras))
    yield from _what_was_written(before, after)
    yield from _who_was_told(subject, extras)


def _what_was_written(before: StatefulModule, after: StatefulModule) -> Iterator[Finding]:
    where = "{} after update_statistics"
    old_nodes, new_nodes = dict(nnx.iter_graph(before)), dict(nnx.iter_graph(after))
    for path, old in old_nodes.items():
        if not isinstance(old, nnx.Variable) or isinstance(old, nnx.RngState):
            continue
        new, name = new_nodes[path], where.format(path_name(path))
        kinds = [type_of(jax.typeof(variable[...])) for variable in (old, new)]
        if kinds[0] != kinds[1]:
            cure = "keep dtype and shape: cast before you write."
            yield Finding("statistics", name, kinds[0], kinds[1], cure)
        elif isinstance(old, nnx.Param) and _changed(old, new):
            cure = "parameters belong to the optimiser; make it another kind of nnx.Variable."
            yield Finding("statistics", name, "an unchanged parameter", "another value", cure)
    for path, module in stateful_modules(before):
        own = {k: v for k, v in vars(module).items() if _is_statistic(v)}
        if not own or not _keeps_statistics(module) or len(stateful_modules(module)) > 1:
            continue
        twin = dict(stateful_modules(after))[path]
        if not any(_changed(value, getattr(twin, name)) for name, value in own.items()):
            yield Finding(
                "statistics",
                where.format(f"{path}: {', '.join(own)}"),
                "another value in at least one of them",
                "the values from before",
                "fold the extras in; a container must hand them to update_statistics of each "
                "child.",
            )


def _who_was_told(subject: Subject, extras: Any) -> Iterator[Finding]:
    """Compare how often a child's statistics were updated with how often it ran."""
    keepers = [path for path, module in subject.modules() if _keeps_statistics(module)]
    if not subject.is_container or not keepers:
        return
    try:
        ran, told = _run_and_update(subject, extras)
    except jax.errors.UnexpectedTracerError:
        return
    for path in keepers:
        if path in ran and len(ran[path].states) != len(told[path].statistics):
            yield Finding(
                "statistics",
                f"update_statistics of {path}",
                f"{len(ran[path].states)} call(s), one for each run of a step",
                f"{len(told[path].statistics)}",
                "call it once for each child, with the child's part of the extras.",
            )


def _keeps_statistics(module: StatefulModule) -> bool:
    return type(module).update_statistics is not StatefulModule.update_statistics


def _is_statistic(value: Any) -> bool:
    return isinstance(value, nnx.Variable) and not isinstance(value, nnx.Param | nnx.RngState)


def _changed(old: nnx.Variable, new: nnx.Variable) -> bool:
    before, after = jax.tree.leaves(old[...]), jax.tree.leaves(new[...])
    return any(list(differences(a, b, "")) for a, b in zip(before, after, strict=True))


def _keys(tree: Any) -> list[Any] | None:
    """Return the keys of a dict, the positions of a list, None for other trees."""
    if isinstance(tree, Mapping):
        return sorted(tree, key=str)
    return list(range(len(tree))) if isinstance(tree, list) else None


def _compare(
    want: list[Any], have: list[Any], where: str, expected: str, cure: str
) -> Iterator[Finding]:
    for gap in differences(want, have, "", 0.0):
        yield Finding("routing", f"{where}{gap.path}", f"{gap.want}, {expected}", gap.have, cure)


def _three_calls(subject: Subject) -> list[dict[str, Probe]]:
    """Probe a step, the step after it, and the first one again as a replay."""
    merge, variables = subject.split()

    @jax.jit
    def calls(variables: Any, carry: Any, x: Any, other: Any) -> Any:
        live, probes = _probed(merge(variables))
        first = live(carry, x)
        records = [_drain(probes)]
        live(first.next_state, other)
        records.append(_drain(probes))
        live(carry, x, first.rollout_extras)
        return [*records, _drain(probes)]

    found = calls(variables, subject.used_carry, subject.x, subject.input_at(1))
    return [{path: Probe(**fields) for path, fields in record.items()} for record in found]


def _run_and_update(subject: Subject, extras: Any) -> list[dict[str, Probe]]:
    """Probe a step and an update of statistics."""
    merge, variables = subject.split()

    @jax.jit
    def calls(variables: Any, carry: Any, x: Any, extras: Any) -> Any:
        live, probes = _probed(merge(variables))
        live(carry, x)
        ran = _drain(probes)
        live.update_statistics(extras)
        return [ran, _drain(probes)]

    found = calls(variables, subject.used_carry, subject.x, extras)
    return [{path: Probe(**fields) for path, fields in record.items()} for record in found]


def _drain(probes: dict[str, Probe]) -> dict[str, Any]:
    """Return what the probes noted, and empty them."""
    noted = {path: dict(vars(probe)) for path, probe in probes.items()}
    for probe in probes.values():
        vars(probe).update(vars(Probe()))
    return noted


def _probed(live: StatefulModule) -> tuple[StatefulModule, dict[str, Probe]]:
    """Give every module inside `live` a class that notes its calls; they do what they did."""
    probes = {}
    for path, module in stateful_modules(live)[1:]:
        probes[path] = probe = Probe()
        object.__setattr__(module, "__class__", _noting(type(module), probe))
    return live, probes


def _noting(cls: type[StatefulModule], probe: Probe) -> type[StatefulModule]:
    def call(self: Any, state: Any, x: Any, rollout_extras: Any = None) -> Any:
        out = cls.__call__(self, state, x, rollout_extras)
        probe.states.append(state)
        probe.extras.append(rollout_extras)
        probe.next_states.append(out.next_state)
        probe.emitted.append(out.rollout_extras)
        return out

    def update_statistics(self: Any, rollout_extras: Any) -> None:
        probe.statistics.append(jnp.zeros(()))
        cls.update_statistics(self, rollout_extras)

    methods = {"__call__": call, "update_statistics": update_statistics}
    return types.new_class(cls.__name__, (cls,), exec_body=lambda body: body.update(methods))
