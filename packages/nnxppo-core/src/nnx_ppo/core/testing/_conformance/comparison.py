"""Comparing trees leaf by leaf, with the path of what differs."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class Difference:
    """A leaf that is not what it should be: where, what was wanted, what came."""

    path: str
    want: str
    have: str


def differences(want: Any, have: Any, root: str, tolerance: float = 0.0) -> Iterator[Difference]:
    """Yield what differs between two trees, in tree, shape, dtype and values; NaN equals NaN.

    Args:
        want: The tree that is right.
        have: The tree to judge.
        root: What to call the tree.
        tolerance: Relative to the leaf's largest magnitude (at least 1). Integers, booleans and
            keys must be equal.
    """
    if jax.tree.structure(want) != jax.tree.structure(have):
        yield Difference(root, str(jax.tree.structure(want)), str(jax.tree.structure(have)))
        return
    pairs = zip(leaves_with_paths(want, root), jax.tree.leaves(have), strict=True)
    for (path, old), new in pairs:
        if describe(old) != describe(new):
            yield Difference(path, describe(old), describe(new))
        elif not leaf_equal(old, new, tolerance):
            yield Difference(path, *_show(as_numpy(old), as_numpy(new)))


def leaves_with_paths(tree: Any, root: str) -> Iterator[tuple[str, Any]]:
    """Yield the leaves of a tree with their paths, as one would write them."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        yield root + jax.tree_util.keystr(path), leaf


def leaf_equal(want: Any, have: Any, tolerance: float) -> bool:
    """Whether two arrays of one shape and dtype are equal, up to the tolerance if floating."""
    old, new = as_numpy(want), as_numpy(have)
    if not jnp.issubdtype(old.dtype, jnp.inexact):
        return bool(np.array_equal(old, new))
    finite = np.abs(old[np.isfinite(old)])
    scale = max(1.0, float(finite.max(initial=0.0)))
    return bool(np.allclose(new, old, rtol=0.0, atol=tolerance * scale, equal_nan=True))


def is_key(leaf: Any) -> bool:
    """Whether a leaf is an array of random keys."""
    return jnp.issubdtype(jnp.result_type(leaf), jax.dtypes.prng_key)


def as_numpy(leaf: Any) -> np.ndarray:
    """Return an array, or the data of keys, on the host; bfloat16 and the like as float32."""
    array = np.asarray(jax.random.key_data(leaf) if is_key(leaf) else leaf)
    return array.astype(np.float32) if array.dtype.kind == "V" else array


def describe(leaf: Any) -> str:
    """Return dtype and shape as `float32[3, 4]`; of what is no array, its type."""
    if not is_array(leaf):
        return type(leaf).__name__
    return f"{jnp.result_type(leaf)}{list(jnp.shape(leaf))}"


def is_array(leaf: Any) -> bool:
    """Whether a leaf can cross a JAX transform: an array, its abstract form, or a number."""
    return hasattr(leaf, "shape") or isinstance(leaf, int | float | complex)


def type_of(leaf: Any) -> str:
    """Return dtype, shape and whether the type is weak."""
    return f"{describe(leaf)}{' (weak type)' if getattr(leaf, 'weak_type', False) else ''}"


def select(tree: Any, choose: Callable[[Any], bool]) -> Any:
    """Return the tree with None in place of the leaves that are not chosen."""
    return jax.tree.map(lambda leaf: leaf if choose(leaf) else None, tree)


def _show(want: np.ndarray, have: np.ndarray) -> tuple[str, str]:
    """Return two values as text: those of the first element that differs most."""
    if want.size == 0:
        return str(want), str(have)
    with np.errstate(invalid="ignore"):
        gap = np.where(np.isnan(want) & np.isnan(have), 0.0, np.abs(have * 1.0 - want * 1.0))
    index = np.unravel_index(int(np.argmax(np.where(np.isnan(gap), np.inf, gap))), want.shape)
    place = f" at {list(map(int, index))}" if index else ""
    return f"{want[index]:.6g}{place}", f"{have[index]:.6g}{place}"
