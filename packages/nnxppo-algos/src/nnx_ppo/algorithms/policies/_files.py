"""The folder of a policy: `policy.json`, and a folder with the arrays that it names.

`policy.json` is put in place last and at one stroke, so a policy is there as a whole or not at
all, and one that is replaced can be loaded until the new one can.
"""

import json
import os
import re
import shutil
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from nnx_ppo.algorithms._disk import reach_the_disk, sync

_RECORD = "policy.json"
_ARRAYS = re.compile(r"arrays-[0-9a-f]{12}")
# Arrays, or a record that was under way.
_OURS = re.compile(rf"({re.escape(_RECORD)}\.)?{_ARRAYS.pattern}")
_WIDTH = 100


def write_folder(path: Path, record: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> None:
    """Write a policy, in the place of another one if there is one.

    Args:
        path: The folder; made if it is not there. Other files in it are left alone.
        record: What goes into `policy.json`.
        arrays: Arrays by name.
    """
    path = path.resolve()  # orbax wants an absolute path
    path.mkdir(parents=True, exist_ok=True)
    name = f"arrays-{uuid.uuid4().hex[:12]}"
    draft = path / f"{_RECORD}.{name}"
    try:
        # orbax saves neither empty arrays nor an empty tree.
        filled = {key: array for key, array in arrays.items() if array.size}
        if filled:
            with ocp.StandardCheckpointer() as writer:
                writer.save(path / name, filled)
                writer.wait_until_finished()
            reach_the_disk(path / name)
        with draft.open("w") as file:
            types = {key: [array.dtype.name, *array.shape] for key, array in arrays.items()}
            file.write(_written_out({**record, "arrays": {name: types}}) + "\n")
            file.flush()
            os.fsync(file.fileno())
        sync(path)
        os.replace(draft, path / _RECORD)
        sync(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        shutil.rmtree(path / name, ignore_errors=True)
        raise
    for other in path.iterdir():  # of the policy before, or of a killed writer
        if not _OURS.fullmatch(other.name) or other.name == name:
            continue
        if other.is_dir():
            shutil.rmtree(other, ignore_errors=True)
        else:
            other.unlink(missing_ok=True)


def read_record(path: Path) -> dict[str, Any]:
    """Return what is in `policy.json`.

    Raises:
        FileNotFoundError: There is no policy; says which are near.
        ValueError: The file is damaged.
    """
    try:
        record = json.loads((path / _RECORD).read_text())
    except FileNotFoundError:
        raise FileNotFoundError(
            f"There is no policy in {path}: it has no {_RECORD}. {_what_is_near(path)}"
        ) from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise damaged(path, str(error)) from None
    if not isinstance(record, dict):
        raise damaged(path, f"it holds a {type(record).__name__}, not an object")
    return record


def read_arrays(path: Path, record: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Return the arrays of a policy by name.

    Raises:
        ValueError: They are not there, or damaged, or another writer has just removed them.
    """
    try:
        ((name, types),) = record["arrays"].items()
        kinds = {key: (tuple(shape), jnp.dtype(dtype)) for key, (dtype, *shape) in types.items()}
        arrays = {key: np.zeros(shape, dtype) for key, (shape, dtype) in kinds.items()}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise damaged(path, f"it does not say which arrays there are: {error!r}") from None
    if not _ARRAYS.fullmatch(name):
        raise damaged(path, f"it names the arrays {name!r}, which is no name that we give")
    filled = {key: array for key, array in arrays.items() if array.size}
    if not filled:
        return arrays
    try:
        with ocp.StandardCheckpointer() as reader:
            return arrays | reader.restore(path.resolve() / name, filled)
    except Exception as error:  # of many kinds, from the libraries below
        raise ValueError(
            f"The arrays of a policy, {path / name}, are damaged or not there: {error!r}. Copy the "
            "folder of the policy again, as a whole, or save it again."
        ) from error


def damaged(path: Path, what: str) -> ValueError:
    """Return the error that the record of a policy is no good."""
    return ValueError(f"{path / _RECORD} is damaged: {what}.")


def _written_out(data: Any, indent: int = 0) -> str:
    """Return JSON in which what fits on a line stands on one."""
    line = json.dumps(data, allow_nan=False)
    if len(line) + indent <= _WIDTH or not isinstance(data, dict | list):
        return line
    margin = "\n" + " " * (indent + 1)
    if isinstance(data, list):
        return "[" + ",".join(margin + _written_out(item, indent + 1) for item in data) + "]"
    parts = (
        f"{margin}{json.dumps(name)}: {_written_out(part, indent + 1)}"
        for name, part in data.items()
    )
    return "{" + ",".join(parts) + "}"


def _what_is_near(path: Path) -> str:
    near = [file.parent for pattern in ("*", "*/*") for file in path.glob(f"{pattern}/{_RECORD}")]
    near += [file.parent for file in path.parent.glob(f"*/{_RECORD}")]
    if not near:
        return "save_policy writes one."
    return f"Policies are in {', '.join(map(str, sorted(set(near))[:8]))}."
