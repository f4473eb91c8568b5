"""The variables of a module as arrays on disk, and back."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from flax import nnx

from nnx_ppo.algorithms.checkpointing.nodes import summary

VariablePath = tuple[str, ...]
"""Where a variable is: the attributes, names and positions that lead to it, and into its value."""


def split_variables(module: nnx.Pytree) -> tuple[dict[VariablePath, Any], dict[VariablePath, Any]]:
    """Return a module's variables by path: arrays, and random keys apart.

    Raises:
        TypeError: Two of them have the same path, or one is no array.
    """
    arrays: dict[VariablePath, Any] = {}
    keys: dict[VariablePath, Any] = {}
    for path, leaf in _with_paths(nnx.state(module)):
        if path in arrays or path in keys:
            raise TypeError(f"Two variables are called {'/'.join(path)}; rename one.")
        try:
            array = leaf if isinstance(leaf, jax.Array) else jnp.asarray(leaf)
        except TypeError as error:
            raise TypeError(
                f"The variable {'/'.join(path)} holds a {type(leaf).__name__}, which a checkpoint "
                "cannot hold; make it an array, or a static attribute."
            ) from error
        is_key = jnp.issubdtype(array.dtype, jax.dtypes.prng_key)
        (keys if is_key else arrays)[path] = array
    return arrays, keys


def write_arrays(folder: Path, arrays: Mapping[VariablePath, Any]) -> None:
    """Write arrays with orbax, nested as their paths are. Empty ones have nothing to write."""
    tree: dict[str, Any] = {}
    for path, array in arrays.items():
        if 0 in array.shape:
            continue
        branch = tree
        for name in path[:-1]:
            branch = branch.setdefault(_file_name(name), {})
        branch[_file_name(path[-1])] = array
    if not tree:  # orbax refuses to write nothing
        folder.mkdir()
        return
    with ocp.PyTreeCheckpointer() as writer:
        writer.save(folder, tree)


def read_arrays(folder: Path) -> dict[VariablePath, np.ndarray]:
    """Return the arrays of a folder by path, their names as `write_arrays` spelled them.

    Raises:
        ValueError: The folder is damaged.
    """
    try:
        if not any(folder.iterdir()):
            return {}
        with ocp.PyTreeCheckpointer() as reader:
            tree: Any = reader.metadata(folder).item_metadata.tree
            as_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), tree)
            args = ocp.args.PyTreeRestore(restore_args=as_numpy)
            return dict(_with_paths(reader.restore(folder, args=args)))
    except Exception as error:  # orbax and tensorstore have many of their own
        raise ValueError(f"{folder} is damaged and cannot be read: {error}") from error


def with_variables(
    module: nnx.Pytree, arrays: Mapping[VariablePath, Any], keys: Mapping[VariablePath, Any]
) -> Any:
    """Return a module's state with the values that `checked` or `matched_by_role` returned."""
    state = nnx.state(module)
    values = {**arrays, **keys}
    leaves = [jnp.asarray(values[path]) for path, _ in _with_paths(state)]
    return jax.tree.unflatten(jax.tree.structure(state), leaves)


def checked(
    where: str, wanted: Mapping[VariablePath, Any], found: Mapping[VariablePath, Any]
) -> dict[VariablePath, Any]:
    """Return an array for each wanted variable.

    Args:
        where: What the arrays belong to, for messages.
        wanted: The variables of a module, by path.
        found: The arrays of a file, by path, in the spelling of the file.

    Raises:
        ValueError: They differ in paths, shapes or dtypes; names the first that does.
    """
    spelled = {as_in_file(path): path for path in wanted}
    chosen = {}
    for name in sorted(spelled.keys() | found.keys()):
        path = spelled.get(name)
        want, have = None if path is None else wanted[path], found.get(name)
        if have is None and 0 in getattr(want, "shape", ()):
            have = want  # empty arrays are not in the file
        if summary(want) != summary(have):
            raise _misfit(where, name, summary(want), summary(have))
        if path is not None:
            chosen[path] = have
    return chosen


def matched_by_role(
    where: str,
    wanted: Mapping[VariablePath, Any],
    found: Mapping[VariablePath, Any],
    implied: Mapping[str, Any],
) -> dict[VariablePath, Any]:
    """Return an array for each wanted variable from a file that may use other attribute names.

    A variable keeps its place and its last name; between them, names may differ. So
    `layers/3/rng/count` is found at `layers/3/rng/default/count`. Of those arrays that have the
    last name and the shape, the one is taken that shares most names, in order. A single number that
    earlier implementations did not have (an entropy weight that can be set, the number of dropped
    samples) keeps its value, or gets the one that they implied.

    Args:
        where: What the arrays belong to, for messages.
        wanted: The variables of a module, by path.
        found: The arrays of a file, by path.
        implied: Values of numbers that may be missing, by last name.

    Raises:
        ValueError: An array has no place in the module, or a variable no array in the file.
    """
    left = dict(found)
    chosen = {path: left.pop(path) for path in wanted if path in left}
    for path, template in wanted.items():
        if path in chosen:
            continue
        rank = {
            other: _shared(path, other)
            for other, array in left.items()
            if other[-1] == path[-1] and array.shape == template.shape
        }
        best = [other for other in rank if rank[other] == max(rank.values())]
        if len(best) == 1:
            chosen[path] = left.pop(best[0])
        elif not best and template.shape == ():
            chosen[path] = implied.get(path[-1], template)
        else:
            candidates = " or ".join("/".join(other) for other in best)
            raise _misfit(where, path, summary(template), candidates or "nothing")
    for path, array in left.items():
        raise _misfit(where, path, "nothing", summary(array))
    return {path: _as(wanted[path], array, where, path) for path, array in chosen.items()}


def as_in_file(path: VariablePath) -> VariablePath:
    """Return a path with its names as they are spelled in a file."""
    return tuple(map(_file_name, path))


def _as(template: Any, array: Any, where: str, path: VariablePath) -> Any:
    """Return an array with the dtype of its template, whose shape it must have."""
    array = jnp.asarray(array)
    if array.shape != template.shape:
        raise _misfit(where, path, summary(template), summary(array))
    return array if array.dtype == template.dtype else jnp.asarray(array, template.dtype)


def _misfit(where: str, path: VariablePath, expected: str, found: str) -> ValueError:
    return ValueError(
        f"{where} does not fit: expected {expected} at {'/'.join(path)}, found {found}. Build "
        "network and optimiser with the settings that they were saved with."
    )


def _shared(path: VariablePath, other: VariablePath) -> int:
    """Return the length of the longest common subsequence of two paths."""
    row = [0] * (len(other) + 1)
    for name in path:
        previous = row
        row = [0]
        for i, candidate in enumerate(other):
            same = previous[i] + 1 if candidate == name else 0
            row.append(max(same, previous[i + 1], row[i]))
    return row[-1]


def _with_paths(tree: Any) -> list[tuple[VariablePath, Any]]:
    """Return the leaves of a module's state, or of one read from a file, by path, in JAX's order.

    The path leads to the variable and, where its value is a tree, on into it.
    """
    named = []
    variables = jax.tree.leaves_with_path(tree, is_leaf=lambda x: isinstance(x, nnx.Variable))
    for path, variable in variables:
        value = variable.get_value() if isinstance(variable, nnx.Variable) else variable
        for inner, leaf in jax.tree.leaves_with_path(value):
            names = (jax.tree_util.keystr((key,), simple=True) for key in (*path, *inner))
            named.append((tuple(names), leaf))
    return named


def _file_name(name: str) -> str:
    """Return a name that orbax can tell from others: it joins those of nested arrays with dots."""
    return quote(name, safe=" ").replace(".", "%2E")
