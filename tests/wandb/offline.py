"""Reads what W&B's client wrote offline, without the client's help."""

import dataclasses
import json
import pathlib
import struct
from typing import Any

from wandb.proto import wandb_internal_pb2

_BLOCK, _FILE_HEADER, _HEADER = 32768, 7, 7
_WHOLE, _LAST = 1, 4


@dataclasses.dataclass
class OfflineRun:
    """One file of a run, in the order it was written.

    Attributes:
        run_id: Id of the run.
        resumes: Whether it asks the server to go on with a run of that id.
        points: What was logged, without the client's own entries.
        step_metrics: What the metrics are drawn over, by name or pattern.
        config: The settings.
        artifacts: Artifacts, as `(name, type, aliases, metadata)`.
    """

    run_id: str = ""
    resumes: bool = False
    points: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    step_metrics: dict[str, str] = dataclasses.field(default_factory=dict)
    config: dict[str, Any] = dataclasses.field(default_factory=dict)
    artifacts: list[tuple[str, str, list[str], Any]] = dataclasses.field(default_factory=list)


def read_offline_runs(folder: pathlib.Path) -> list[OfflineRun]:
    """Return the runs of a run folder, oldest first."""
    paths = folder.glob("wandb/offline-run-*/run-*.wandb")
    return [_read(path) for path in sorted(paths, key=lambda path: path.stat().st_mtime_ns)]


def _read(path: pathlib.Path) -> OfflineRun:
    found = OfflineRun()
    for message in _messages(path.read_bytes()):
        record = wandb_internal_pb2.Record.FromString(message)  # pyright: ignore[reportAttributeAccessIssue]
        kind = record.WhichOneof("record_type")
        if kind == "run":
            found.run_id, found.resumes = record.run.run_id, record.run.resume
            found.config |= _items(record.run.config.update)
        elif kind == "config":
            found.config |= _items(record.config.update)
        elif kind == "history":
            point = _items(record.history.item)
            found.points.append({k: v for k, v in point.items() if not k.startswith("_")})
        elif kind == "metric":
            name = record.metric.glob_name or record.metric.name
            found.step_metrics[name] = record.metric.step_metric
        elif kind == "artifact":
            artifact = record.artifact
            metadata = json.loads(artifact.metadata)
            entry = (artifact.name, artifact.type, sorted(artifact.aliases), metadata)
            found.artifacts.append(entry)
    found.config.pop("_wandb", None)
    return found


def _items(items: Any) -> dict[str, Any]:
    """Return items by name; a media file comes as one item for each of its fields."""
    found: dict[str, Any] = {}
    for item in items:
        *outer, name = item.nested_key or [item.key]
        place = found
        for key in outer:
            place = place.setdefault(key, {})
        place[name] = json.loads(item.value_json)
    return found


def _messages(data: bytes) -> list[bytes]:
    """Split a file into messages: LevelDB's log format, in which long ones span blocks."""
    messages, position, parts = [], _FILE_HEADER, b""
    while position + _HEADER <= len(data):
        left = _BLOCK - position % _BLOCK
        if left < _HEADER:  # padding
            position += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, position)
        position += _HEADER
        parts += data[position : position + length]
        position += length
        if kind in (_WHOLE, _LAST):
            messages.append(parts)
            parts = b""
    return messages
