"""The folder that a run leaves behind: `config.json` and `metrics.jsonl`."""

import datetime
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
        metrics = path / "metrics.jsonl"
        if metrics.exists() and metrics.stat().st_size:
            raise FileExistsError(
                f"The folder {path} holds a run already; choose another with --out, or remove it."
            )
        path.mkdir(parents=True, exist_ok=True)
        self.path = path
        versions = {"python": platform.python_version(), **{p: version(p) for p in _PACKAGES}}
        record = {**config, "versions": versions, "device": jax.devices()[0].device_kind}
        (path / "config.json").write_text(json.dumps(record, indent=2) + "\n")
        self._metrics = metrics.open("a", buffering=1)

    def log(self, metrics: Mapping[str, Any], step: int) -> None:
        """Append a line; numbers that JSON does not know (NaN, infinity) become null."""
        line = {"step": step, **{name: _finite(value) for name, value in metrics.items()}}
        self._metrics.write(json.dumps(line) + "\n")

    def video(self, data: Any) -> None:
        """Keep no videos."""

    def close(self) -> None:
        """Close the file."""
        self._metrics.close()


def default_path(env: str) -> Path:
    """Return a folder name for a run that starts now."""
    return Path("runs") / f"{env}-{datetime.datetime.now():%Y%m%d-%H%M%S}"


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
