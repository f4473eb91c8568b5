"""Writing checkpoints."""

import dataclasses
import json
import math
import pickle
import warnings
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

import jax

from nnx_ppo.algorithms._validation import integer, one_of, optional
from nnx_ppo.algorithms._versions import installed_versions
from nnx_ppo.algorithms.checkpointing._folders import (
    METADATA,
    METRICS,
    checkpoints_in,
    clear_leftovers,
    delete_whole,
    metrics_of,
    ranking,
    step_name,
    written_whole,
)
from nnx_ppo.algorithms.checkpointing._variables import split_variables, write_arrays
from nnx_ppo.algorithms.checkpointing.nodes import describe
from nnx_ppo.algorithms.config import DistillationTrainConfig, TrainConfig
from nnx_ppo.algorithms.types import DistillationState, TrainingState

FORMAT = 1
NETWORK_FIELDS: dict[type, str] = {TrainingState: "networks", DistillationState: "student"}
"""The field of each training state that holds the network that learns."""


@runtime_checkable
class CheckpointCallback(Protocol):
    """What `train_ppo` and `train_distillation` take as `checkpoint_fn`.

    A callback may also have the methods `observe(metrics, step)`, called with whatever is logged,
    before the checkpoint of the same step, and `wait()`, called at the end of training.
    """

    def __call__(self, training_state: Any, step: int) -> None:
        """Save a training state.

        Args:
            training_state: A state that later steps do not change.
            step: Its environment steps.
        """
        ...


def make_checkpoint_fn(
    directory: str | Path,
    config: TrainConfig | DistillationTrainConfig | None = None,
    *,
    keep_last: int | None = None,
    keep_best: int | None = None,
    best_metric: str = "eval/episode_reward/mean",
    best_mode: Literal["max", "min"] = "max",
    asynchronous: bool = False,
) -> CheckpointCallback:
    """Return a callback that saves each training state to `{directory}/step_{step:010d}`.

    A checkpoint is written beside its place and then renamed, so that it is complete or absent.
    One that is there already is replaced. At most one run may write to a directory at a time; what
    a killed one left half done is removed.

    Args:
        directory: Where to save; made if it is missing.
        config: Stored with each checkpoint.
        keep_last: How many of the latest to keep, or None for all.
        keep_best: How many of the best to keep beside those, or None for no ranking.
        best_metric: What ranks them; its value at the checkpoint's own step counts, and those
            without one are no candidates. So let `checkpoint_every_steps` be a multiple of
            `eval.every_steps`. As long as no checkpoint has it, all are kept, with a warning.
        best_mode: Whether higher or lower is better.
        asynchronous: Whether to write in the background. The state is copied to the host first;
            an error comes up with the next checkpoint, or at the end of training.

    Raises:
        ValueError: An argument is out of range.
        OSError: The directory cannot be made.

    Example:
        >>> import tempfile
        >>> folder = tempfile.mkdtemp()
        >>> checkpoint_fn = make_checkpoint_fn(folder, keep_last=3)
    """
    rules = {
        "keep_last": (keep_last, optional(integer(1))),
        "keep_best": (keep_best, optional(integer(1))),
        "best_mode": (best_mode, one_of("max", "min")),
    }
    for name, (value, rule) in rules.items():
        if not rule.holds(value):
            raise ValueError(f"make_checkpoint_fn: {name}={value!r} must be {rule.text}.")
    directory = Path(directory).absolute()  # orbax asks for absolute paths
    directory.mkdir(parents=True, exist_ok=True)
    clear_leftovers(directory)
    keep = None
    if keep_last is not None or keep_best is not None:
        keep = _Keep(directory, keep_last or 1, keep_best, best_metric, best_mode)
    return _Checkpoints(directory, config, keep, asynchronous)


class _Checkpoints:
    """The callback; see `make_checkpoint_fn`."""

    def __init__(
        self, directory: Path, config: Any, keep: "_Keep | None", asynchronous: bool
    ) -> None:
        self._directory = directory
        self._config = describe(config, "config")
        self._keep = keep
        self._thread = ThreadPoolExecutor(max_workers=1) if asynchronous else None
        self._pending: Future[None] | None = None
        self._metrics: dict[str, float | None] = {}
        self._observed: int | None = None
        self._is_first = True

    def observe(self, metrics: Mapping[str, Any], step: int) -> None:
        """Remember what was logged, to be stored beside a checkpoint of the same step."""
        if step != self._observed:
            self._observed, self._metrics = step, {}
        for name, value in metrics.items():
            self._metrics[name] = float(value) if math.isfinite(value) else None

    def __call__(self, training_state: Any, step: int) -> None:
        """Save a training state."""
        self.wait()
        if self._is_first:
            self._is_first = False
            _warn_of_higher_steps(self._directory, step)
        metrics = self._metrics if step == self._observed else {}
        content = _Content(training_state, step, self._config, dict(metrics))

        def save() -> None:
            final = self._directory / step_name(step)
            known = metrics_of(final)
            with written_whole(final) as folder:
                content.write(folder, known)
            if self._keep is not None:
                self._keep.discard_others(final)

        if self._thread is None:
            save()
        else:
            self._pending = self._thread.submit(save)

    def wait(self) -> None:
        """Wait for what is being written, and raise what went wrong."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()


def _warn_of_higher_steps(directory: Path, step: int) -> None:
    """Warn if a directory holds the checkpoints of a run that came further."""
    highest = max(checkpoints_in(directory), default=step)
    if highest > step:
        warnings.warn(
            f"{directory} holds {step_name(highest)}, above {step_name(step)} that is saved now, "
            "and it counts as the latest. Give each run a directory of its own.",
            stacklevel=3,
        )


class _Content:
    """A checkpoint in the memory of the host."""

    def __init__(
        self, state: Any, step: int, config: Any, metrics: Mapping[str, float | None]
    ) -> None:
        field = NETWORK_FIELDS.get(type(state))
        if field is None:
            raise TypeError(
                f"A checkpoint holds a TrainingState or a DistillationState, got a "
                f"{type(state).__name__}."
            )
        modules = {"networks": getattr(state, field), "optimizer": state.optimizer}
        arrays, keys = {}, {}
        for name, module in modules.items():
            arrays[name], found = split_variables(module)
            keys[name] = [(path, describe(key, "/".join(path))) for path, key in found.items()]
        self._arrays = jax.device_get(arrays)
        self._metrics = {**metrics, "step": step}
        fields = set(type(state).__dataclass_fields__) - {field, "optimizer"}
        metadata = {
            "format": FORMAT,
            "versions": installed_versions(),
            "kind": type(state).__name__,
            "state": {name: describe(getattr(state, name), name) for name in sorted(fields)},
            "keys": keys,
            "step": step,
            "config": config,
        }
        self._metadata = pickle.dumps(metadata)

    def write(self, folder: Path, known: Mapping[str, Any]) -> None:
        """Write to an empty folder; metrics that were not observed are as `known`."""
        for name, arrays in self._arrays.items():
            write_arrays(folder / name, arrays)
        (folder / METADATA).write_bytes(self._metadata)
        (folder / METRICS).write_text(json.dumps({**known, **self._metrics}, indent=1))


@dataclasses.dataclass(frozen=True)
class _Keep:
    """Which checkpoints are kept; fields as in `make_checkpoint_fn`."""

    directory: Path
    last: int
    best: int | None
    metric: str
    mode: Literal["max", "min"]

    def discard_others(self, written: Path) -> None:
        """Delete the checkpoints that are not to be kept; never the one just written."""
        everything = list(checkpoints_in(self.directory).values())
        kept = {written, *everything[-self.last :]}
        if self.best is not None:
            ranked = ranking(self.directory, self.metric, self.mode)
            if not ranked and len(everything) > len(kept):
                warnings.warn(
                    f"keep_best={self.best}, but no checkpoint in {self.directory} has the metric "
                    f"{self.metric!r} yet, so all are kept. Is it logged, and spelled so?",
                    stacklevel=2,
                )
                return
            kept.update(ranked[: self.best])
        for path in everything:
            if path not in kept:
                delete_whole(path)
