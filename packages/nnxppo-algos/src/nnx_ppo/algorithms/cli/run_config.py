"""What a run of the command consists of: an environment, a network, a training."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import tyro

from nnx_ppo.algorithms._plain import to_plain
from nnx_ppo.algorithms._validation import (
    check_fields,
    frozen_config,
    integer,
    number,
    optional,
    tuples_for_lists,
)
from nnx_ppo.algorithms.cli.network_config import NetworkConfig
from nnx_ppo.algorithms.cli.run_folder import is_run, read_config
from nnx_ppo.algorithms.config import (
    DistillationConfig,
    DistillationTrainConfig,
    PPOConfig,
    TrainConfig,
)
from nnx_ppo.algorithms.discovery import find_environment
from nnx_ppo.algorithms.types import LoggingLevel

_KEPT = {"keep_last": optional(integer(1)), "keep_best": optional(integer(1))}
_COMMAND = "command"
# Where a run lies, and whether it is only planned, is no setting of it.
_PLACES = ("out", "resume", "plan", "plan_memory_gib")
# What of the network belongs to its training alone, and not to what it computes.
_CHANGEABLE = ("entropy_weight",)


@frozen_config
class RunConfig:
    """Train a policy: nnxppo train ENV [options], or nnxppo train --resume RUN [options].

    Attributes:
        env: Name of the environment; `nnxppo envs` lists them. Settings that are known to train
            it become the defaults of all options.
        overrides: Settings of the environment, as pairs of name and value.
        network: The network.
        train: The training.
        loggers: Loggers to report to beside the run folder: wandb, tensorboard.
        keep_last: How many of the latest checkpoints to keep, or None for all.
        keep_best: How many of the best to keep beside those, by mean return, or None.
        out: The run folder; runs/ENV-DATE-TIME if not given.
        resume: The folder of a run to go on with. Its settings become the defaults of all options.
        plan: Do not train; print what the training would need.
        plan_memory_gib: Memory to plan for, in GiB, or None for that of this machine.
    """

    env: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="ENV")]
    overrides: dict[str, str] = dataclasses.field(default_factory=dict)
    network: NetworkConfig = dataclasses.field(default_factory=NetworkConfig)
    train: Annotated[TrainConfig, tyro.conf.arg(name="")] = dataclasses.field(
        default_factory=TrainConfig
    )
    loggers: tuple[str, ...] = ()
    keep_last: int | None = 3
    keep_best: int | None = 1
    out: str | None = None
    resume: str | None = None
    plan: bool = False
    plan_memory_gib: float | None = None

    def __post_init__(self) -> None:
        tuples_for_lists(self, "loggers")
        check_fields(self, {**_KEPT, "plan_memory_gib": optional(number(0.0, open_low=True))})
        if self.plan_memory_gib is not None and not self.plan:
            raise ValueError(
                f"plan_memory_gib={self.plan_memory_gib} changes no training; add --plan, or leave "
                "--plan-memory-gib out."
            )

    @property
    def learning(self) -> PPOConfig:
        """How it learns."""
        return self.train.ppo


@frozen_config
class DistillConfig:
    """Train a student to act like the policy of a run: nnxppo distill TEACHER [options].

    Attributes:
        teacher: The run folder of the teacher, or the folder of a policy. Its settings become the
            defaults of all options.
        checkpoint: Which of the teacher's checkpoints: latest, best, or its step.
        env: Name of the environment; that of the teacher if not given.
        overrides: Settings of the environment, as pairs of name and value, beside the teacher's.
        network: The student.
        train: The training.
        loggers: Loggers to report to beside the run folder: wandb, tensorboard.
        keep_last: How many of the latest checkpoints to keep, or None for all.
        keep_best: How many of the best to keep beside those, by mean return, or None.
        out: The run folder; runs/ENV-DATE-TIME if not given.
        resume: The folder of a distillation to go on with. Its settings become the defaults of all
            options, its teacher included.
    """

    teacher: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="TEACHER")]
    checkpoint: str = "latest"
    env: str | None = None
    overrides: dict[str, str] = dataclasses.field(default_factory=dict)
    network: NetworkConfig = dataclasses.field(default_factory=NetworkConfig)
    train: Annotated[DistillationTrainConfig, tyro.conf.arg(name="")] = dataclasses.field(
        default_factory=DistillationTrainConfig
    )
    loggers: tuple[str, ...] = ()
    keep_last: int | None = 3
    keep_best: int | None = 1
    out: str | None = None
    resume: str | None = None

    def __post_init__(self) -> None:
        tuples_for_lists(self, "loggers")
        check_fields(self, _KEPT)

    @property
    def learning(self) -> DistillationConfig:
        """How it learns."""
        return self.train.distillation


Settings: TypeAlias = RunConfig | DistillConfig
# Each kind with the name of the command, and the field that has no default.
_KINDS: dict[str, tuple[type[Any], str]] = {
    "train": (RunConfig, "env"),
    "distill": (DistillConfig, "teacher"),
}


def preset_run(env: str) -> RunConfig:
    """Return the run that is known to train an environment, or the defaults.

    Raises:
        ValueError: There is no such environment, or its preset names an unknown field.
    """
    return apply_settings(RunConfig(env), find_environment(env).preset(env))


def student_of(teacher: str) -> DistillConfig:
    """Return a distillation with the settings of the teacher's run, as far as it has them.

    Raises:
        FileNotFoundError: There is no such run; says which there are.
        ValueError: Its configuration cannot be read.
    """
    config = DistillConfig(teacher)
    if not is_run(Path(teacher)):
        return config
    run = read_settings(Path(teacher))
    names = {field.name for field in dataclasses.fields(DistillationConfig)}
    shared = {
        field.name: getattr(run.learning, field.name)
        for field in dataclasses.fields(run.learning)
        if field.name in names
    }
    train = dataclasses.replace(
        config.train,
        distillation=dataclasses.replace(config.train.distillation, **shared),
        eval=run.train.eval,
        video=run.train.video,
        checkpoint_every_steps=run.train.checkpoint_every_steps,
    )
    return dataclasses.replace(config, network=run.network, train=train)


def command_of(settings: Settings) -> str:
    """Return the name of the command that runs some settings."""
    return next(name for name, (kind, _) in _KINDS.items() if isinstance(settings, kind))


def as_record(settings: Settings) -> dict[str, Any]:
    """Return settings as plain data, from which `read_settings` makes them again."""
    kept = {name: value for name, value in to_plain(settings).items() if name not in _PLACES}
    return {_COMMAND: command_of(settings), **kept}


def read_settings(folder: Path) -> Settings:
    """Return the settings of a run.

    Raises:
        FileNotFoundError: There is no such run; says which there are.
        ValueError: Its configuration cannot be read.
    """
    record = read_config(folder)
    kind, first = _KINDS.get(record.get(_COMMAND, "train"), (None, ""))
    if kind is None or first not in record:
        raise ValueError(f"{folder} holds no run of `nnxppo train` or `nnxppo distill`.")
    names = {field.name for field in dataclasses.fields(kind)} - set(_PLACES)
    known = {name: value for name, value in record.items() if name in names}
    try:
        return apply_settings(kind(record[first]), known)
    except (TypeError, ValueError) as error:
        error.add_note(f"while reading the settings of {folder}")
        raise


def settings_to_resume(folder: str, kind: type[Settings]) -> Any:
    """Return the settings of a run that a command is to go on with.

    Raises:
        FileNotFoundError: There is no such run; says which there are.
        ValueError: It cannot be read, or belongs to another command.
    """
    settings = read_settings(Path(folder))
    if not isinstance(settings, kind):
        command = command_of(settings)
        raise ValueError(
            f"{folder} is a run of `nnxppo {command}`; to go on with it: nnxppo {command} --resume "
            f"{folder}"
        )
    return settings


def check_same_task(settings: Settings) -> None:
    """Raise if a run is to go on with something else than it began with, or elsewhere.

    Raises:
        ValueError: Environment, teacher or network differ, or another folder is named; names both.
    """
    before: Any = read_settings(Path(settings.resume or ""))
    for name in ("env", "teacher"):
        have, want = getattr(before, name, None), getattr(settings, name, None)
        if have != want:
            raise ValueError(
                f"{settings.resume} has {name} {have!r}, so it cannot go on with {want!r}. Leave "
                f"{name} out, or start another run."
            )
    for field in dataclasses.fields(NetworkConfig):
        have, want = getattr(before.network, field.name), getattr(settings.network, field.name)
        if have != want and field.name not in _CHANGEABLE:
            option = f"network.{field.name.replace('_', '-')}"
            raise ValueError(
                f"{settings.resume} has {option} {have!r}, so it cannot go on with {want!r}. Leave "
                f"--{option} out, or start another run."
            )
    if settings.out is not None:
        raise ValueError(
            f"A run goes on in its own folder, {settings.resume}; leave --out {settings.out} out."
        )


def apply_settings(config: Any, settings: Mapping[str, Any]) -> Any:
    """Return a copy of nested dataclasses with some fields replaced by plain data.

    Args:
        config: A dataclass.
        settings: New values by field; a mapping for a field that is a dataclass itself, a list of
            names for a `LoggingLevel`.

    Raises:
        ValueError: There is no such field; names those there are.
    """
    names = [field.name for field in dataclasses.fields(config)]
    changes = {}
    for name, value in settings.items():
        if name not in names:
            kind = type(config).__name__
            raise ValueError(f"{kind} has no field {name!r}; it has {', '.join(names)}.")
        current = getattr(config, name)
        if dataclasses.is_dataclass(current) and isinstance(value, Mapping):
            value = apply_settings(current, value)
        elif isinstance(current, LoggingLevel) and isinstance(value, list):
            value = _level(value)
        changes[name] = value
    return dataclasses.replace(config, **changes)


def _level(names: list[str]) -> LoggingLevel:
    """Return the logging level of some flags' names."""
    level = LoggingLevel.NONE
    for name in names:
        if name not in LoggingLevel.__members__:
            known = ", ".join(LoggingLevel.__members__)
            raise ValueError(f"There is no LoggingLevel {name!r}; there are {known}.")
        level |= LoggingLevel[name]
    return level
