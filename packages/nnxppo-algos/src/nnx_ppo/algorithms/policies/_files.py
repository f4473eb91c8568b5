"""The folder of a policy: `policy.json`, and a folder with the arrays that it names.

`policy.json` is put in place last and at one stroke, so a policy is there as a whole or not at
all, and one that is replaced can be loaded until the new one can.
"""

import json
import os
import shutil
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

_RECORD = "policy.json"
_ARRAYS = "arrays-"
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
    name = f"{_ARRAYS}{uuid.uuid4().hex[:12]}"
    draft = path / f"{_RECORD}.{name}"
    try:
        # orbax saves neither empty arrays nor an empty tree.
        filled = {key: array for key, array in arrays.items() if array.size}
        if filled:
            with ocp.StandardCheckpointer() as writer:
                writer.save(path / name, filled)
                writer.wait_until_finished()
        with draft.open("w") as file:
            types = {key: [array.dtype.name, *array.shape] for key, array in arrays.items()}
            file.write(_written_out({**record, "arrays": {name: types}}) + "\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path / _RECORD)
    except BaseException:
        draft.unlink(missing_ok=True)
        shutil.rmtree(path / name, ignore_errors=True)
        raise
    for other in path.glob(f"{_ARRAYS}*"):  # those of the policy before, or of a killed writer
        if other.name != name:
            shutil.rmtree(other, ignore_errors=True)


def read_record(path: Path) -> dict[str, Any]:
    """Return what is in `policy.json`.

    Raises:
        FileNotFoundError: There is no policy; says which are near.
        ValueError: The file is damaged.
    """
    try:
        return json.loads((path / _RECORD).read_text())
    except FileNotFoundError:
        raise FileNotFoundError(
            f"There is no policy in {path}: it has no {_RECORD}. {_what_is_near(path)}"
        ) from None
    except json.JSONDecodeError as error:
        raise ValueError(f"{path / _RECORD} is damaged: {error}.") from None


def read_arrays(path: Path, record: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Return the arrays of a policy by name."""
    ((name, types),) = record["arrays"].items()
    if Path(name).name != name:
        raise ValueError(f"{path / _RECORD} names arrays outside of its folder: {name}.")
    arrays = {
        key: np.zeros(tuple(shape), jnp.dtype(dtype)) for key, (dtype, *shape) in types.items()
    }
    filled = {key: array for key, array in arrays.items() if array.size}
    if filled:
        with ocp.StandardCheckpointer() as reader:
            arrays |= reader.restore(path.resolve() / name, filled)
    return arrays


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
