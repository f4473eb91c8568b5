"""The points of a W&B run: one place decides at which step each of them stands."""

import json
import os
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import wandb

STEP = "total_steps"
"""The metric that all others are drawn over."""

_FILE_NAME = "wandb_run.json"


class RunFile:
    """`wandb_run.json` in a run folder: which W&B run it reports to, and which points that has.

    W&B's client keeps points in memory for a while. So the step that is written down is that of
    the last point when a run began or ended in order, and not of what was logged since.

    Args:
        run_dir: The run folder; made if it is missing.
    """

    def __init__(self, run_dir: str | os.PathLike[str]) -> None:
        self._path = Path(run_dir) / _FILE_NAME
        self._path.parent.mkdir(parents=True, exist_ok=True)

    def read(self) -> dict[str, Any]:
        """Return `"id"`, `"project"`, `"entity"`, `"total_steps"` and `"ended"`, if there."""
        return json.loads(self._path.read_text()) if self._path.exists() else {}

    def write(self, run: wandb.Run, last: int, *, ended: bool) -> None:
        """Remember a run, the step of its last point, and whether it ended in order."""
        content = {"id": run.id, "project": run.project, "entity": run.entity, STEP: last}
        content["ended"] = ended
        part = self._path.with_suffix(f".{os.getpid()}")
        part.write_text(json.dumps(content) + "\n")
        os.replace(part, self._path)


class Points:
    """All points that one W&B run gets, whoever they come from.

    W&B counts a step of its own, one for each call, which is left alone: it would drop what comes
    late without a word. Environment steps are the metric `total_steps`, which all others are drawn
    over, and they never fall: a point before the last one is left out, with a warning. After a
    resume from an older checkpoint that is right, since such points are in the run already.

    Whatever W&B raises becomes a warning, the first time.

    Args:
        run: The run.
        last: Step of its last point so far; −1 if it has none.
    """

    def __init__(self, run: wandb.Run, last: int) -> None:
        self.run, self.last = run, last
        self._warned: set[str] = set()
        self.attempt(self._define)

    def _define(self) -> None:
        self.run.define_metric(STEP)
        self.run.define_metric("*", step_metric=STEP)

    def log(self, values: Mapping[str, Any], step: int) -> None:
        """Add a point.

        Args:
            values: What W&B can log, by name.
            step: Environment steps taken so far.
        """
        if step < self.last:
            self._warn_once(
                "late",
                f"The W&B run {self.run.id} has points up to step {self.last:,} already; "
                f"those of earlier steps, from {step:,} on, are left out. That is right for a "
                "training that goes on; another one needs a run of its own.",
            )
            return
        self.attempt(self.run.log, {**values, STEP: step})
        self.last = step

    def attempt(self, call: Callable[..., Any], *args: Any, **options: Any) -> bool:
        """Call the client, warn of its first failure and go on; return whether it succeeded."""
        try:
            call(*args, **options)
        except Exception as error:
            self._warn_once(
                "failed",
                f"W&B raised {type(error).__name__}: {error}. Training goes on; further failures "
                f"of the run {self.run.id} are not reported.",
            )
            return False
        return True

    def _warn_once(self, kind: str, message: str) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            warnings.warn(message, RuntimeWarning, stacklevel=4)


_POINTS: dict[str, Points] = {}


def points_of(run: wandb.Run, last: int = -1) -> Points:
    """Return the one `Points` of a run.

    Args:
        run: The run.
        last: Step of its last point as far as the caller knows. What this process logged before
            and what the server knows of a resumed run count as well.
    """
    known = _POINTS.get(run.id)
    if known is None or known.run is not run:
        before = -1 if known is None else known.last
        known = _POINTS[run.id] = Points(run, max(before, _on_server(run)))
    known.last = max(known.last, last)
    return known


def _on_server(run: wandb.Run) -> int:
    """Return the step of the last point that the server has of a resumed run."""
    step = run.summary.get(STEP, -1)
    return int(step) if isinstance(step, int | float) else -1
