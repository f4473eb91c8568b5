"""The result of planning a training, and how it is shown."""

import dataclasses
from collections.abc import Iterator

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table


@dataclasses.dataclass(frozen=True)
class PlannedPart:
    """The parameters of a part of a network.

    Attributes:
        path: Its place, named as `describe` names it.
        parameters: Number of trained numbers.
        bytes: Their size.
    """

    path: str
    parameters: int
    bytes: int


@dataclasses.dataclass(frozen=True)
class TrainingPlan:
    """What `plan_training` returns: print it with rich, or read it.

    Attributes:
        n_envs: Environments that run side by side.
        rollout_length: Steps of the window.
        updates: Gradient steps of an iteration.
        parts: The parameters by the parts of the network.
        optimizer_bytes: What the optimiser keeps.
        carry_bytes: The network's carry, per environment.
        env_state_bytes: The environment's state, per environment.
        rollout_flops: Floating-point operations of the network while an iteration collects. The
            environment's are not counted.
        learning_flops: Those of the rest of an iteration. Both count matrix products and
            convolutions, a multiplication and an addition as two.
        window_bytes: The window as it is stored.
        learning_bytes: What learning needs at most beside the window: above all, the activations
            that the gradient of a minibatch keeps. An estimate.
        iteration_bytes: What an iteration needs at most, all of the above included. An estimate.
        memory_bytes: The memory there is; None if unknown.
        largest_n_envs: The most environments that fit into 65 % of it with this `rollout_length`;
            None if it is unknown. The rest is for what the estimate misses.
        largest_rollout_length: The longest window that fits with these `n_envs`, likewise.
    """

    n_envs: int
    rollout_length: int
    updates: int
    parts: tuple[PlannedPart, ...]
    optimizer_bytes: int
    carry_bytes: int
    env_state_bytes: int
    rollout_flops: int
    learning_flops: int
    window_bytes: int
    learning_bytes: int
    iteration_bytes: int
    memory_bytes: int | None
    largest_n_envs: int | None
    largest_rollout_length: int | None

    @property
    def parameters(self) -> int:
        """Number of trained numbers."""
        return sum(part.parameters for part in self.parts)

    @property
    def parameter_bytes(self) -> int:
        """Their size."""
        return sum(part.bytes for part in self.parts)

    def __rich__(self) -> RenderableType:
        network = Table("parameters of", box=SIMPLE_HEAD, show_edge=False, pad_edge=False)
        for title in ("number", "size"):
            network.add_column(title, justify="right")
        for part in self.parts:
            network.add_row(part.path, f"{part.parameters:,}", _size(part.bytes))
        network.add_row("all", f"{self.parameters:,}", _size(self.parameter_bytes))
        costs = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False)
        costs.add_column(f"one iteration of {self.n_envs:,} × {self.rollout_length:,} steps")
        costs.add_column("", justify="right")
        for name, value in self._costs():
            costs.add_row(name, value)
        return Group(network, "", costs)

    def _costs(self) -> Iterator[tuple[str, str]]:
        yield "operations of the network, collecting", _operations(self.rollout_flops)
        yield f"operations of {self.updates:,} updates", _operations(self.learning_flops)
        yield "optimiser", _size(self.optimizer_bytes)
        yield "carry, per environment", _size(self.carry_bytes)
        yield "environment state, per environment", _size(self.env_state_bytes)
        yield "window", _size(self.window_bytes)
        yield "learning, beside the window (estimate)", _size(self.learning_bytes)
        yield "all together (estimate)", _size(self.iteration_bytes)
        if self.memory_bytes is None:
            return
        yield "memory", _size(self.memory_bytes)
        yield f"most n_envs at rollout_length={self.rollout_length}", f"{self.largest_n_envs:,}"
        yield f"largest rollout_length at n_envs={self.n_envs}", f"{self.largest_rollout_length:,}"


def _size(number: int) -> str:
    """Return a number of bytes in words."""
    amount, unit = float(number), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if amount < 1024:
            break
        amount, unit = amount / 1024, larger
    return f"{number:,} B" if unit == "B" else f"{amount:,.1f} {unit}"


def _operations(number: int) -> str:
    """Return a number of operations in words."""
    amount, unit = float(number), ""
    for larger in ("k", "M", "G", "T", "P"):
        if amount < 1000:
            break
        amount, unit = amount / 1000, larger
    return f"{amount:,.1f} {unit}FLOP" if unit else f"{number:,} FLOP"
