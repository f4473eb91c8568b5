"""The folder that a run leaves behind: `config.json` and `metrics.jsonl`."""

import datetime
import itertools
import json
import math
import platform
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax

_PACKAGES = ("nnxppo-core", "nnxppo-networks", "nnxppo-algos", "jax", "flax", "optax")


class RunFolder:
    """Writes a run's configuration and metrics; a `Logger` without videos.

    Args:
        path: The folder; made if it is not there.
        config: The configuration as plain data.

    Raises:
        FileExistsError: The folder holds a run already.
    """

    def __init__(self, path: Path, config: Mapping[str, Any]) -> None:
        versions = {"python": platform.python_version(), **{p: version(p) for p in _PACKAGES}}
        record = {**config, "versions": versions, "device": jax.devices()[0].device_kind}
        path.mkdir(parents=True, exist_ok=True)
        try:
            # Made here or not at all: of two runs that start together only one gets the folder.
            with (path / "config.json").open("x") as file:
                file.write(json.dumps(record, indent=2) + "\n")
        except FileExistsError:
            raise FileExistsError(
                f"The folder {path} holds a run already; choose another with --out, or remove it."
            ) from None
        self.path = path
        self._metrics = (path / "metrics.jsonl").open("a", buffering=1)

    def log(self, metrics: Mapping[str, Any], step: int) -> None:
        """Append a line; numbers that JSON does not know (NaN, infinity) become null."""
        line = {"step": step, **{name: _finite(value) for name, value in metrics.items()}}
        self._metrics.write(json.dumps(line) + "\n")

    def video(self, data: Any) -> None:
        """Keep no videos."""

    def close(self) -> None:
        """Close the file; take back a folder that no metrics ever reached."""
        self._metrics.close()
        if not (self.path / "metrics.jsonl").stat().st_size:
            (self.path / "metrics.jsonl").unlink()
            (self.path / "config.json").unlink()


def new_run_folder(env: str, config: Mapping[str, Any]) -> RunFolder:
    """Return a folder of its own for a run that starts now, also beside others that do."""
    name = f"{env}-{datetime.datetime.now():%Y%m%d-%H%M%S}"
    for number in itertools.count(1):
        try:
            return RunFolder(Path("runs") / (name if number == 1 else f"{name}-{number}"), config)
        except FileExistsError:
            continue
    raise AssertionError("unreachable")


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
