"""What the terminal shows while a run is under way."""

import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn


class ProgressDisplay:
    """A live line with steps, speed, time left and latest evaluation, and a line per evaluation.

    A `Logger` without videos. Where the output is no terminal, only the evaluations are printed.

    Args:
        env: Name of the environment.
        total_steps: Environment steps of the run.
        console: Where to print.
        first_step: Environment steps that were taken before.
    """

    def __init__(self, env: str, total_steps: int, console: Console, first_step: int = 0) -> None:
        self._console = console
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.completed:,.0f}/{task.total:,.0f} steps"),
            TextColumn("{task.fields[speed]}"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[latest]}"),
            console=console,
            disable=not console.is_terminal,
        )
        self._env = env
        self._task = self._progress.add_task(
            f"{env}: compiling", total=total_steps, completed=first_step, speed="", latest=""
        )
        self._first = first_step
        self._last: tuple[float, int] | None = None

    def __enter__(self) -> "ProgressDisplay":
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._progress.stop()

    def log(self, metrics: Mapping[str, Any], step: int) -> None:
        """Show an iteration."""
        now, speed = time.perf_counter(), ""
        if self._last is not None and step > self._last[1]:
            rate = (step - self._last[1]) / (now - self._last[0])
            speed = f"{rate:,.0f} steps/s"
        self._last = (now, step)
        started = self._env if step > self._first else f"{self._env}: compiling"
        self._progress.update(self._task, completed=step, speed=speed, description=started)
        evaluation = evaluation_text(metrics)
        if evaluation is not None:
            self._progress.update(self._task, latest=evaluation)
            self._console.print(f"step {step:>13,}  {evaluation}", highlight=False)

    def say(self, text: str) -> None:
        """Print a line above the live one."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def video(self, data: Any) -> None:
        """Show no videos."""

    def close(self) -> None:
        """Nothing is left to do."""


def evaluation_text(metrics: Mapping[str, Any]) -> str | None:
    """Return one evaluation in words, None where the metrics hold none."""
    if "eval/episode_reward/mean" not in metrics:
        return None
    mean, std = (metrics[f"eval/episode_reward/{name}"] for name in ("mean", "std"))
    return f"return {mean:.1f} ± {std:.1f}"
