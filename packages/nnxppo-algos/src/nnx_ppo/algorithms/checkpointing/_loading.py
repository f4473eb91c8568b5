"""Reading checkpoints, our own and those of earlier implementations."""

import pickle
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from flax import nnx

from nnx_ppo.algorithms.checkpointing._earlier import IMPLIED, in_our_form
from nnx_ppo.algorithms.checkpointing._folders import METADATA, checkpoints_in
from nnx_ppo.algorithms.checkpointing._saving import FORMAT, NETWORK_FIELDS
from nnx_ppo.algorithms.checkpointing._unpickling import load_pickle
from nnx_ppo.algorithms.checkpointing._variables import (
    VariablePath,
    as_in_file,
    checked,
    matched_by_role,
    read_arrays,
    split_variables,
    with_variables,
)
from nnx_ppo.algorithms.checkpointing.nodes import rebuild
from nnx_ppo.algorithms.counters import step_words


def load_checkpoint(
    path: str | Path, networks: Any, optimizer: nnx.Optimizer, *, trusted: Iterable[type] = ()
) -> dict[str, Any]:
    """Load a checkpoint into a network and an optimiser of the same structure.

    Nothing in a checkpoint can run code. Environment states and carries of classes that are
    neither ours nor JAX's, Flax's, MuJoCo's or Playground's come back as plain nodes;
    `train_ppo(initial_state=…)` puts them into the structure that the environment makes.

    Checkpoints of earlier implementations of this API load too; their variables are found by role
    and place where attribute names differ.

    Args:
        path: The folder of a step, such as `latest_checkpoint(directory)`.
        networks: Takes the variables, in place; which values it has does not matter. In a
            distillation the student.
        optimizer: Takes the optimiser's, in place; of `new_training_state` or
            `new_distillation_state`.
        trusted: Classes of environment states and carries that may be made again. Those of an
            earlier implementation's file are then unpickled by their own code.

    Returns:
        A dict with `"training_state"`, the `TrainingState` or `DistillationState`; `"step"`, its
        environment steps; and `"config"`, the configuration if one was stored, else None.

    Raises:
        FileNotFoundError: There is no checkpoint; says which there are.
        pickle.UnpicklingError: The file names a class that may not be loaded, or is damaged.
        ValueError: It does not fit; names the first leaf that differs, expected and found. Or it is
            damaged. `networks` and `optimizer` are unchanged.
    """
    path = Path(path).absolute()
    _check_folder(path)
    trusted = tuple(trusted)
    metadata = _read_metadata(path / METADATA, trusted)
    modules = {"networks": networks, "optimizer": optimizer}
    kind = next(kind for kind in NETWORK_FIELDS if kind.__name__ == metadata["kind"])
    fields = {name: rebuild(value, trusted) for name, value in metadata["state"].items()}
    fields.setdefault("step_words", step_words(metadata["step"]))
    config = rebuild(metadata["config"])
    variables = {
        name: _variables(
            path / name,
            module,
            {tuple(path): rebuild(key) for path, key in metadata["keys"][name]},
            exact=metadata["format"] > 0,
        )
        for name, module in modules.items()
    }
    for name, module in modules.items():
        nnx.update(module, variables[name])
    fields[NETWORK_FIELDS[kind]] = networks
    state = kind(**fields, optimizer=optimizer)
    return {"training_state": state, "step": metadata["step"], "config": config}


def _read_metadata(file: Path, trusted: tuple[type, ...]) -> dict[str, Any]:
    """Return the metadata of a checkpoint, those of an earlier implementation in our form."""
    try:
        metadata = load_pickle(file.read_bytes(), trusted)
    except pickle.UnpicklingError as error:
        raise pickle.UnpicklingError(f"{file} cannot be read: {error}") from error
    try:
        if "format" not in metadata:
            metadata = in_our_form(metadata)
        if metadata["format"] > FORMAT:
            raise ValueError(
                f"{file} has format {metadata['format']}, but this version of nnxppo-algos reads "
                f"formats up to {FORMAT}; it was written by {metadata.get('versions')}."
            )
        missing = {"kind", "state", "keys", "step", "config"} - metadata.keys()
    except (AttributeError, LookupError, StopIteration, TypeError) as error:
        raise ValueError(f"{file} is no checkpoint's ({error!r}).") from error
    if missing:
        raise ValueError(f"{file} is no checkpoint's: it lacks {', '.join(sorted(missing))}.")
    return metadata


def _variables(
    folder: Path, module: nnx.Pytree, keys: dict[VariablePath, Any], *, exact: bool
) -> Any:
    """Return a module's state with the values of a folder."""
    wanted, wanted_keys = split_variables(module)
    name, found = folder.name, read_arrays(folder)
    if exact:
        arrays = checked(name, wanted, found)
        keys = {as_in_file(path): key for path, key in keys.items()}
        return with_variables(module, arrays, checked(name, wanted_keys, keys))
    found = {path[:-1]: array for path, array in found.items()}  # all end in "value"
    # An optimiser of ours counts its updates twice, for itself and for its schedule.
    implied = {"n_updates": found[("step",)]} if ("step",) in found else IMPLIED
    arrays = matched_by_role(name, wanted, found, implied)
    return with_variables(module, arrays, matched_by_role(name, wanted_keys, keys, {}))


def _check_folder(path: Path) -> None:
    """Raise unless a path is a checkpoint."""
    if (path / METADATA).is_file():
        return
    here = checkpoints_in(path) or checkpoints_in(path.parent)
    there = ", ".join(folder.name for folder in here.values()) or "none"
    raise FileNotFoundError(
        f"{path} is no checkpoint: it has no {METADATA}. Give the folder of a step; those in "
        f"{path if checkpoints_in(path) else path.parent}: {there}."
    )
