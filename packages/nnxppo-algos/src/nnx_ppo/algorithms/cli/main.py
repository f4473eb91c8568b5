"""Entry point of the command `nnxppo`."""

import ast
import contextlib
import dataclasses
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import tyro
from flax import nnx
from rich.console import Console

from nnx_ppo.algorithms._forgiving import call_forgivingly
from nnx_ppo.algorithms.checks import check_video
from nnx_ppo.algorithms.cli.progress import ProgressDisplay, evaluation_text
from nnx_ppo.algorithms.cli.run_config import RunConfig, make_network, preset_run, to_plain
from nnx_ppo.algorithms.cli.run_folder import RunFolder, new_run_folder
from nnx_ppo.algorithms.config import VideoData
from nnx_ppo.algorithms.discovery import environment_providers, find_environment, logger_factory
from nnx_ppo.algorithms.ppo import train_ppo
from nnx_ppo.core import Logger, RLEnv, StatefulModule

_DESCRIPTION = "Train stateful policies with PPO: nnxppo train ENV [options]"


@dataclasses.dataclass(frozen=True)
class ListEnvironments:
    """List the environments that are installed."""


def main(args: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        args: The arguments; those of the process if None.

    Returns:
        The exit code: 0, or 2 where the input is at fault.
    """
    args = list(sys.argv[1:] if args is None else args)
    console = Console()
    try:
        command = _parse(args)
        if isinstance(command, ListEnvironments):
            _list_environments(console)
            return 0
        run = _prepared(command, console)
    except (ValueError, TypeError, FileNotFoundError, FileExistsError) as error:
        message = "\n".join([str(error), *getattr(error, "__notes__", [])])
        Console(stderr=True, style="red").print(
            f"nnxppo: {message}", markup=False, highlight=False, soft_wrap=True
        )
        return 2
    run.train(console)  # errors from here on are no fault of the input, and show where they arose
    return 0


def _parse(args: list[str]) -> RunConfig | ListEnvironments:
    """Parse the arguments; the environment's preset gives the defaults.

    Raises:
        ValueError: An option stands before the environment, whose preset would be missed.
    """
    run = RunConfig(tyro.MISSING)
    if args[:1] == ["train"] and args[1:2] not in ([], ["-h"], ["--help"]):
        if args[1].startswith("-"):
            raise ValueError(
                f"The environment comes first, since it decides the defaults: nnxppo train ENV "
                f"{args[1]} …"
            )
        run = preset_run(args[1])
    commands = tyro.extras.subcommand_type_from_defaults(
        {"train": run, "envs": ListEnvironments()}, prefix_names=False
    )
    return tyro.cli(commands, args=args, prog="nnxppo", description=_DESCRIPTION)


def _list_environments(console: Console) -> None:
    """Print the names of all environments, by provider."""
    for provider, environments in environment_providers().items():
        for name in environments.names():
            console.print(f"{provider:12} {name}", highlight=False)


@dataclasses.dataclass(frozen=True)
class _Run:
    """A run whose parts have been made.

    Attributes:
        config: The configuration.
        env: The environment.
        networks: The network.
        folder: The run folder.
        display: The progress display.
        loggers: All that metrics are reported to, folder and display included.
    """

    config: RunConfig
    env: RLEnv
    networks: StatefulModule
    folder: RunFolder
    display: ProgressDisplay
    loggers: list[Logger]

    def train(self, console: Console) -> None:
        """Train, and print the result."""
        start = time.perf_counter()
        try:
            with self.display, _stop_on_interrupt(self.display.say) as stop_fn:
                result = train_ppo(
                    self.env,
                    self.networks,
                    self.config.train,
                    log_fn=self._log,
                    video_fn=self._show,
                    stop_fn=stop_fn,
                )
        finally:
            for logger in self.loggers:
                call_forgivingly(logger.close)
        minutes, seconds = divmod(round(time.perf_counter() - start), 60)
        evaluation = evaluation_text(result.final_metrics) or "not evaluated"
        for line in (
            f"run folder: {self.folder.path}",
            f"{self.config.env}: final evaluation {evaluation} after {result.total_steps:,} steps, "
            f"{minutes} min {seconds:02d} s",
        ):
            console.print(line, highlight=False, soft_wrap=True)

    def _log(self, metrics: dict[str, Any], step: int) -> None:
        for logger in self.loggers:
            call_forgivingly(logger.log, metrics, step)

    def _show(self, data: VideoData) -> None:
        for logger in self.loggers:
            call_forgivingly(logger.video, data)


def _prepared(config: RunConfig, console: Console) -> _Run:
    """Make the parts of a run; whatever is wrong with the input comes up here."""
    overrides = {name: _literal(value) for name, value in config.overrides.items()}
    env = find_environment(config.env).load(config.env, **overrides)
    networks = make_network(env, config.network, nnx.Rngs(config.train.seed))
    check_video(config.train.video, env)
    if config.train.video.enabled and not config.loggers:
        raise ValueError(
            "video.enabled: the run folder keeps no videos, a logger does; add --loggers wandb."
        )
    factories = [logger_factory(name) for name in config.loggers]
    plain = to_plain(config)
    if config.out is None:
        folder = new_run_folder(config.env, plain)
    else:
        folder = RunFolder(Path(config.out), plain)
    display = ProgressDisplay(config.env, config.train.ppo.total_steps, console)
    loggers: list[Logger] = [folder, display]
    loggers += [make_logger(str(folder.path), plain) for make_logger in factories]
    return _Run(config, env, networks, folder, display, loggers)


@contextlib.contextmanager
def _stop_on_interrupt(say: Callable[[str], None]) -> Iterator[Callable[[], bool]]:
    """Turn the first Ctrl-C into a request to stop after the iteration under way.

    A second one interrupts at once.
    """
    asked = False

    def ask(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        asked = True
        signal.signal(signal.SIGINT, before)
        say("stopping after this iteration; press Ctrl-C again to stop at once")

    before = signal.signal(signal.SIGINT, ask)
    try:
        yield lambda: asked
    finally:
        signal.signal(signal.SIGINT, before)


def _literal(text: str) -> Any:
    """Read a Python literal; anything else is a string."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
