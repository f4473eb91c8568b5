"""Where the raw actions of a network's heads lie among its rollout extras.

Distillation evaluates the actions of one network under another. So it has to know, for each action
head, which sampler makes it and which entry of the extras is that sampler's raw action. Containers
put both where they like. To find them, one step is traced on shapes, in which each sampler labels
what it returns; the labels come out where the arrays would.
"""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
from flax import nnx
from jaxtyping import PyTree

from nnx_ppo.core import JaxDataclass, PPONetworkOutput, StatefulModule, StatefulModuleOutput
from nnx_ppo.networks.recording import Recorder, rebuilt
from nnx_ppo.networks.sampling_layers import (
    ActionSampler,
    CategoricalSampler,
    MultiCategoricalSampler,
    NormalSampler,
    NormalTanhSampler,
)

_KINDS = (NormalTanhSampler, NormalSampler, CategoricalSampler, MultiCategoricalSampler)


class Sampler(NamedTuple):
    """What is known of an action sampler without its parameters.

    Attributes:
        kind: Its class; of a subclass of one of ours, that one.
        choices: Of how many each choice of a discrete action is; None for other samplers.
        deterministic: Whether it acts by its mean.
    """

    kind: type
    choices: tuple[int, ...] | None
    deterministic: bool


class Head(NamedTuple):
    """An action head.

    Attributes:
        name: Its path among the network's actions; empty where there is only one head.
        sampler: The sampler that makes it.
        raw: Shapes and dtypes of its raw action, with the batch axis.
        place: Which leaf of `RawActions.extras` its raw action is.
    """

    name: str
    sampler: Sampler
    raw: Any
    place: int


@dataclasses.dataclass(frozen=True)
class RawActions:
    """Where a network has the raw actions of its heads.

    Attributes:
        heads: The action heads, in the order of the leaves of `tree`.
        tree: Tree of the action heads.
        extras: Tree of the network's rollout extras, in which each raw action is one leaf.
    """

    heads: tuple[Head, ...]
    tree: Any
    extras: Any

    def read(self, rollout_extras: PyTree) -> list[Any]:
        """Return the raw action of each head from the network's extras."""
        entries = self.extras.flatten_up_to(rollout_extras)
        return [entries[head.place] for head in self.heads]

    def write(self, rollout_extras: PyTree, raw_actions: Sequence[Any]) -> Any:
        """Return the network's extras with another raw action for each head."""
        entries = self.extras.flatten_up_to(rollout_extras)
        for head, raw in zip(self.heads, raw_actions, strict=True):
            entries[head.place] = raw
        return self.extras.unflatten(entries)


def find_raw_actions(role: str, network: StatefulModule, obs: PyTree) -> RawActions:
    """Find the raw actions of a network, from shapes alone.

    Args:
        role: What the network is to the caller, for messages.
        network: The network; it is not changed.
        obs: Observations, or their shapes and dtypes, leaves `(batch, *feature)`.

    Raises:
        TypeError: The network's output is no `PPONetworkOutput`.
        ValueError: An action head is not made by one action sampler, or its raw action is not
            among the extras.
    """
    graphdef, variables = nnx.split(network)
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), obs)
    batch = jax.tree.leaves(shapes)[0].shape[0]

    def step(variables: Any, obs: PyTree) -> tuple[Any, Any]:
        live = _labelling(nnx.merge(graphdef, variables, copy=True))
        out = live(live.initialize_state(batch), obs)
        if not isinstance(out.output, PPONetworkOutput):
            raise TypeError(
                f"{role} must return a PPONetworkOutput, got {type(out.output).__name__}. End the "
                "network with a PPOAdapter."
            )
        return out.output.loglikelihoods, out.rollout_extras

    try:
        loglikelihoods, extras = jax.eval_shape(step, variables, shapes)
    except Exception as error:
        error.add_note(
            f"This came up while the action samplers of {role} were looked for. Whatever stands "
            "between a sampler and the network's output may only pass on its log-likelihood and "
            "its rollout_extras, as containers and PPOAdapter do."
        )
        raise
    entries, extras_tree = jax.tree.flatten(extras, is_leaf=_is_label)
    places = {entry.call: i for i, entry in enumerate(entries) if _is_label(entry)}
    labels, tree = jax.tree.flatten_with_path(loglikelihoods, is_leaf=_is_label)
    heads = []
    for path, label in labels:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        if not _is_label(label) or label.call not in places:
            raise ValueError(
                f"{role}: {head_text(name)} must be made by one action sampler, such as "
                "NormalTanhSampler, whose log-likelihood and rollout_extras reach the network's "
                "output as they are. End the network with a PPOAdapter that has a sampler for "
                "each head."
            )
        place = places[label.call]
        heads.append(Head(name, label.sampler, entries[place].value, place))
    return RawActions(tuple(heads), tree, extras_tree)


def check_same_heads(teacher: RawActions, student: RawActions) -> None:
    """Raise unless the actions of one network can be evaluated under another.

    Single heads belong together whatever their names.

    Args:
        teacher: Heads of the network that acts.
        student: Heads of the network that evaluates.

    Raises:
        ValueError: Heads differ in number or names, or those of one name in their samplers or in
            the size of their raw actions.
    """
    single = len(teacher.heads) == len(student.heads) == 1
    if teacher.tree != student.tree and not single:
        expected, found = (_head_names(part) for part in (teacher, student))
        raise ValueError(
            f"The student must have the action heads of the teacher, expected {expected}, got "
            f"{found}. Name the children of its action port as the teacher's are named."
        )
    for theirs, own in zip(teacher.heads, student.heads, strict=True):
        name = head_text(own.name)
        if theirs.sampler.kind is not own.sampler.kind:
            raise ValueError(
                f"{name} has a {theirs.sampler.kind.__name__} in the teacher and a "
                f"{own.sampler.kind.__name__} in the student, whose raw actions mean different "
                "things. Give the student the sampler of the teacher."
            )
        expected, found = _size_text(theirs), _size_text(own)
        if expected != found:
            raise ValueError(
                f"{name} must have the size of the teacher's in the student, expected {expected}, "
                f"got {found}."
            )


def head_text(name: str) -> str:
    """Return how a message calls an action head."""
    return f"the action head {name!r}" if name else "the action head"


def _head_names(raw_actions: RawActions) -> list[str]:
    return [head.name for head in raw_actions.heads]


def _size_text(head: Head) -> str:
    """Return the size of an action for messages, equal where raw actions fit each other."""
    if head.sampler.choices is not None:
        return f"choices of {list(head.sampler.choices)}"
    shapes = jax.tree.map(lambda leaf: f"{leaf.dtype}{list(leaf.shape[1:])}", head.raw)
    return str(shapes)


class _Label(JaxDataclass):
    """What a sampler returned, and in which of the calls of a step."""

    value: Any
    call: int = dataclasses.field(metadata={"static": True})
    sampler: Sampler = dataclasses.field(metadata={"static": True})


def _is_label(node: Any) -> bool:
    return isinstance(node, _Label)


class _Labeller(Recorder):
    """Runs a sampler, and labels the log-likelihood and the extras that it returns.

    Args:
        wrapped: The sampler.
        calls: Numbers the calls of all samplers: one sampler may make several heads.
    """

    def __init__(self, wrapped: StatefulModule, calls: Iterator[int]) -> None:
        super().__init__(wrapped)
        self._calls = calls

    def __call__(
        self, module_state: Any, obs: Any, rollout_extras: Any = None
    ) -> StatefulModuleOutput:
        out = self.wrapped(module_state, obs, rollout_extras)
        call, sampler = next(self._calls), _described(self.wrapped, out)
        loglikelihood = _Label(out.output["log_likelihood"], call, sampler)
        return out.replace(
            output={**out.output, "log_likelihood": loglikelihood},
            rollout_extras=_Label(out.rollout_extras, call, sampler),
        )


def _labelling(network: StatefulModule) -> StatefulModule:
    """Return a copy of a network whose samplers label what they return."""
    calls = itertools.count()

    def label(path: Any, node: Any) -> Any:
        del path
        return _Labeller(node, calls) if isinstance(node, ActionSampler) else node

    return rebuilt(network, label, "Distillation")


def _described(sampler: Any, out: StatefulModuleOutput) -> Sampler:
    kinds = type(sampler).__mro__
    kind = next((kind for kind in kinds if kind in _KINDS), kinds[0])
    choices = None
    if kind is MultiCategoricalSampler:
        choices = tuple(sampler.sizes)
    elif kind is CategoricalSampler:
        choices = (out.metrics["probabilities"].shape[-1],)
    return Sampler(kind, choices, sampler.deterministic)
