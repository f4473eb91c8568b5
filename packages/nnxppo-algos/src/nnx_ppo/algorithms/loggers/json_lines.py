"""`JsonLinesLogger`: one JSON object per point, in a file that any language reads."""

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

FILE_NAME = "metrics.jsonl"


class JsonLinesLogger:
    """Appends metrics to `metrics.jsonl` in the run folder, one line per point.

    A line is an object with `"step"` and the metrics by name. JSON knows neither NaN nor
    infinity: both become null. Arrays become lists.

    Nothing is ever taken back. A run that goes on from an older checkpoint appends lines whose
    steps start again from there; `read_metrics` sorts that out. The command writes this file by
    itself.

    Args:
        run_dir: The run folder; made if it is missing.
        config: Not kept. Loggers that the command makes are given the settings of the run.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as run_dir:
        ...     logger = JsonLinesLogger(run_dir)
        ...     logger.log({"losses/critic/mean": 0.5}, step=3840)
        ...     logger.close()
        ...     read_metrics(run_dir)
        [{'step': 3840, 'losses/critic/mean': 0.5}]
    """

    def __init__(
        self, run_dir: str | os.PathLike[str], config: Mapping[str, Any] | None = None
    ) -> None:
        self.path = Path(run_dir) / FILE_NAME
        self.path.parent.mkdir(parents=True, exist_ok=True)
        cut = _ends_within_a_line(self.path)
        self._file = self.path.open("a", buffering=1, encoding="utf-8")  # a line at a time
        if cut:
            self._file.write("\n")

    def log(self, metrics: Mapping[str, Any], step: int) -> None:
        """Append a line.

        Args:
            metrics: Numbers, text or arrays by name.
            step: Environment steps taken so far.
        """
        line = {"step": int(step), **{name: _plain(value) for name, value in metrics.items()}}
        self._file.write(json.dumps(line, allow_nan=False) + "\n")

    def video(self, data: Any) -> None:
        """Keep no videos."""

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_metrics(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Read what a run logged, in rising order of steps.

    Where the run went on from an older checkpoint, what had been logged for later steps is
    dropped, as those steps were taken anew. Lines of the same step are joined; of a metric that
    both have, the later value holds. A line that was cut off, because the process was killed, is
    passed over.

    Args:
        path: A run folder, or a `metrics.jsonl`.

    Returns:
        One dict per step: `"step"` and the metrics by name. NaN stands for null.

    Raises:
        FileNotFoundError: There is no such file.
    """
    path = Path(path)
    path = path / FILE_NAME if path.is_dir() else path
    rows: dict[int, dict[str, Any]] = {}
    last = -1
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue
        step = row["step"]
        if step < last:
            rows = {earlier: rows[earlier] for earlier in rows if earlier <= step}
        rows.setdefault(step, {}).update(
            {name: math.nan if value is None else value for name, value in row.items()}
        )
        last = step
    return list(rows.values())


def _plain(value: Any) -> Any:
    """Return a value as JSON can hold it."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, list):
        return [_plain(entry) for entry in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if isinstance(value, int) else _plain(np.asarray(value).tolist())


def _ends_within_a_line(path: Path) -> bool:
    """Whether a file's last line is cut off, so that another would be glued to it."""
    if not path.exists() or not path.stat().st_size:
        return False
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read() != b"\n"
