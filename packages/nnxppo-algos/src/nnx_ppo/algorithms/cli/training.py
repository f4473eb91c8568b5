"""What `train` and `distill` have in common: folder, loggers, checkpoints, signals, result."""

import dataclasses
import functools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from nnx_ppo.algorithms._forgiving import call_forgivingly
from nnx_ppo.algorithms.checkpointing import latest_checkpoint, make_checkpoint_fn
from nnx_ppo.algorithms.checks import count_environments
from nnx_ppo.algorithms.cli.acting import load_saved
from nnx_ppo.algorithms.cli.environments import literals
from nnx_ppo.algorithms.cli.errors import InputError, writing
from nnx_ppo.algorithms.cli.progress import ProgressDisplay, evaluation_text
from nnx_ppo.algorithms.cli.run_config import Settings, as_record, command_of
from nnx_ppo.algorithms.cli.run_folder import CHECKPOINTS, POLICY, RunFolder, new_run_folder
from nnx_ppo.algorithms.cli.signals import stop_on_signals
from nnx_ppo.algorithms.config import DistillationTrainResult, TrainResult, VideoData
from nnx_ppo.algorithms.discovery import logger_factory
from nnx_ppo.algorithms.policies import save_policy
from nnx_ppo.algorithms.resuming import restart_environments
from nnx_ppo.algorithms.types import DistillationState
from nnx_ppo.core import Logger, RLEnv, StatefulModule

Learn = Callable[..., TrainResult | DistillationTrainResult]
_TOTAL = {"train": "--ppo.total-steps", "distill": "--distillation.total-steps"}


class Start(NamedTuple):
    """Where a training starts: the state to go on from, None for the beginning; and its step."""

    state: Any
    step: int


def find_start(
    settings: Settings,
    env: RLEnv,
    networks: StatefulModule,
    console: Console,
    carries: Mapping[str, StatefulModule] | None = None,
) -> Start:
    """Return the state of the latest checkpoint of the run that is to go on, if any.

    Args:
        settings: The run.
        env: The environment.
        networks: Takes the weights, in place.
        console: Where to say what is not as it was.
        carries: As for `restart_environments`.

    Raises:
        ValueError: The checkpoint does not fit the settings; names the first leaf that differs.
    """
    if settings.resume is None:
        return Start(None, 0)
    path = latest_checkpoint(Path(settings.resume) / CHECKPOINTS)
    if path is None:
        return Start(None, 0)
    loaded = load_saved(path, settings, networks, "remove it to go on from the one before")
    state, step = loaded["training_state"], loaded["step"]
    have, want = count_environments(state.env_states), settings.learning.n_envs
    if have != want:
        console.print(
            f"{want} fresh environments take the place of the {have} that {path} holds",
            highlight=False,
            soft_wrap=True,
        )
        state = restart_environments(state, env, want, settings.train.seed, carries=carries)
    return Start(state, step)


def prepare_training(
    settings: Settings,
    env: RLEnv,
    learn: Learn,
    start: Start,
    console: Console,
    *,
    prepare_folder: Callable[[Path], None] | None = None,
) -> Callable[[], None]:
    """Make the folder and the loggers of a training, and return a function that runs it.

    Args:
        settings: The run.
        env: The environment.
        learn: Trains; takes the callbacks of `train_ppo` by keyword.
        start: Where it starts.
        console: Where to print.
        prepare_folder: Writes into the run folder what else belongs there.

    Raises:
        FileExistsError: The folder holds a run already.
        InputError: The folder cannot be written, or a logger cannot start.
        ValueError: A logger is not installed, or named twice.
    """
    factories = _logger_factories(settings.loggers)
    total = settings.learning.total_steps
    if start.state is not None and start.step >= total:
        text = (
            f"{settings.resume} is complete: it has taken {start.step:,} steps, and "
            f"{_TOTAL[command_of(settings)]} is {total:,}; raise that to train on"
        )
        return functools.partial(console.print, text, highlight=False, soft_wrap=True)
    plain = as_record(settings)
    folder = _run_folder(settings, plain)
    display = ProgressDisplay(str(settings.env), total, console, start.step)
    loggers: list[Logger] = [folder, display]
    try:
        if prepare_folder is not None:
            with writing(folder.path, "choose another --out"):
                prepare_folder(folder.path)
        for name, make_logger in factories.items():
            loggers.append(_started_logger(name, make_logger, folder.path, plain))
    except BaseException:
        _close(reversed(loggers))
        raise
    return functools.partial(_Training(settings, env, learn, folder, display, loggers).run, console)


def _logger_factories(names: Sequence[str]) -> dict[str, Callable[[str, Any], Logger]]:
    """Return what makes each logger, by name.

    Raises:
        ValueError: One is not installed, or named twice.
    """
    if len(set(names)) < len(names):
        raise ValueError(f"--loggers {' '.join(names)} names one twice; name each once.")
    # The run folder has JSON lines anyway; with a second logger each would be there twice.
    return {name: logger_factory(name) for name in names if name != "jsonl"}


def _started_logger(
    name: str, make_logger: Callable[[str, Any], Logger], folder: Path, config: dict[str, Any]
) -> Logger:
    try:
        return make_logger(str(folder), config)
    except Exception as error:
        raise InputError(
            f"The logger {name} could not start: {type(error).__name__}: {error}"
        ) from error


def _close(loggers: Iterable[Logger]) -> None:
    for logger in loggers:
        call_forgivingly(logger.close, then="Its last points may be missing.")


def _run_folder(settings: Settings, plain: dict[str, Any]) -> RunFolder:
    """Return the folder of the run that goes on, the one that is named, or a new one."""
    if settings.resume is not None:
        return RunFolder(Path(settings.resume), plain, resume=True)
    if settings.out is not None:
        return RunFolder(Path(settings.out), plain)
    return new_run_folder(str(settings.env), plain)


@dataclasses.dataclass(frozen=True)
class _Training:
    """A training whose parts have been made.

    Attributes:
        settings: The run.
        env: The environment.
        learn: Trains.
        folder: The run folder.
        display: The progress display.
        loggers: All that metrics are reported to, folder and display included.
    """

    settings: Settings
    env: RLEnv
    learn: Learn
    folder: RunFolder
    display: ProgressDisplay
    loggers: list[Logger]

    def run(self, console: Console) -> None:
        """Train, and print the result."""
        begun = time.perf_counter()
        try:
            with self.display, stop_on_signals(self.display.say) as stop_fn:
                result = self.learn(
                    log_fn=self._log,
                    video_fn=self._show,
                    checkpoint_fn=self._make_checkpoint_fn(),
                    stop_fn=stop_fn,
                )
        except KeyboardInterrupt as interrupt:
            if latest_checkpoint(self.folder.path / CHECKPOINTS) is not None:
                interrupt.add_note(self._how_to_go_on())
            raise
        finally:
            _close(self.loggers)
        self._report(result, time.perf_counter() - begun, console)

    def _report(
        self, result: TrainResult | DistillationTrainResult, seconds: float, console: Console
    ) -> None:
        minutes, seconds = divmod(round(seconds), 60)
        lines = [
            f"run folder: {self.folder.path}",
            f"{self.settings.env}: {_last_evaluation(result)} after {result.total_steps:,} steps, "
            f"{minutes} min {seconds:02d} s",
        ]
        if result.total_steps < self.settings.learning.total_steps:
            lines.append(self._how_to_go_on())
        for line in lines:
            console.print(line, markup=False, highlight=False, soft_wrap=True)

    def _how_to_go_on(self) -> str:
        return f"to go on: nnxppo {command_of(self.settings)} --resume {self.folder.path}"

    def _make_checkpoint_fn(self) -> "_Saves":
        settings = self.settings
        save_checkpoint = make_checkpoint_fn(
            self.folder.path / CHECKPOINTS,
            settings.train,
            keep_last=settings.keep_last,
            keep_best=settings.keep_best,
        )
        save = functools.partial(
            save_policy,
            self.folder.path / POLICY,
            env=self.env,
            environment=settings.env,
            overrides=literals(settings.overrides),
            config=settings.train,
        )
        return _Saves(save_checkpoint, save)

    def _log(self, metrics: dict[str, Any], step: int) -> None:
        for logger in self.loggers:
            call_forgivingly(logger.log, dict(metrics), step)  # what one changes is its own

    def _show(self, data: VideoData) -> None:
        for logger in self.loggers:
            call_forgivingly(logger.video, data)


def _last_evaluation(result: TrainResult | DistillationTrainResult) -> str:
    """Return the last evaluation in words, with its step if the run went on after it."""
    text = evaluation_text(result.final_metrics)
    if text is None:
        return "not evaluated,"
    step = result.eval_history[-1]["step"]
    if step == result.total_steps:
        return f"final evaluation {text}"
    return f"evaluation at step {step:,} {text}, stopped"


class _Saves:
    """Saves a checkpoint, to go on from, and the policy, which acts without the command."""

    def __init__(self, save_checkpoint: Any, save: Callable[..., None]) -> None:
        self.observe = save_checkpoint.observe
        self._save_checkpoint = save_checkpoint
        self._save_policy = save

    def __call__(self, state: Any, step: int) -> None:
        self._save_checkpoint(state, step)
        networks = state.student if isinstance(state, DistillationState) else state.networks
        self._save_policy(networks, step=step)
