"""Observation normalization with running statistics."""

from collections.abc import Iterator, Mapping, Sequence
from functools import reduce
from operator import and_, getitem
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Real

from nnx_ppo.core import StatefulModule, StatefulModuleOutput
from nnx_ppo.networks._checks import check_size

Path: TypeAlias = tuple[str, ...]
Size: TypeAlias = tuple[int, ...]

# No standard deviation counts as less, so that a constant feature gives 0 and not 0/0, and one that
# hardly varies is not blown up.
_LEAST_STD = 1e-3
# The standard deviation that is assumed before anything has been seen.
_FIRST_STD = 10.0
_COUNTER_END = 2**32 - 1


class NormalizerStatistics(nnx.Variable):
    """A running statistic: kept in checkpoints, never trained."""


class NormalizerClip(nnx.Variable):
    """Where outputs are clipped; a variable, so that a checkpoint holds it."""


class Normalizer(StatefulModule):
    """Subtracts the running mean and divides by the running standard deviation.

    The statistics change in `update_statistics` only, once per training iteration, from the
    inputs that the forward pass emitted as `rollout_extras`. Before the first update, inputs are
    divided by 10. A standard deviation below 0.001 counts as 0.001. A sample with a leaf that is
    not finite, or too large to square in float32, is left out of the statistics whole.

    Args:
        shape: Shape of one sample: a number of features, a tuple, or a mapping of these, nested
            or not. Inputs have the same nesting; any kind of mapping will do.
        clip: Outputs are clipped to ±clip; infinity switches it off.

    Attributes:
        clip: The bound, a `NormalizerClip`.
        mean: A `NormalizerStatistics`, or a tree of them in the nesting of `shape`.
        M2: Sums of squared deviations from the mean, likewise. `M2 / counter` is the population
            variance.
        counter: Number of samples seen, an unsigned 32-bit integer: exact up to 4,294,967,295,
            where a float would stop at 16,777,216. There it stays, and `M2` is scaled so that
            `M2 / counter` remains the variance; old samples are slowly forgotten from then on.
        dropped: Number of samples left out, likewise.

    Raises:
        TypeError: `shape` is something else, or a key in it is not a string.
        ValueError: `shape` is empty, a size is below 1, or `clip` is not above 0.

    Example:
        >>> normalizer = Normalizer({"body": 3, "camera": (4, 4)})
        >>> obs = {"body": jnp.ones((2, 3)), "camera": jnp.ones((2, 4, 4))}
        >>> out = normalizer((), obs)
        >>> print(out.output["body"][0])
        [0.1 0.1 0.1]
        >>> normalizer.update_statistics(jax.tree.map(lambda leaf: leaf[None], out.rollout_extras))
        >>> print(normalizer.counter[...], normalizer.mean["body"][...])
        2 [1. 1. 1.]
    """

    def __init__(self, shape: Any, *, clip: float = 10.0) -> None:
        if not clip > 0:
            raise ValueError(f"Normalizer: clip must be above 0, got {clip!r}.")
        self.clip = NormalizerClip(jnp.asarray(clip, jnp.float32))
        self.leaves = tuple(_leaves(shape, ()))
        self.mean = _zeros(shape)
        self.M2 = _zeros(shape)
        self.counter = NormalizerStatistics(jnp.zeros((), jnp.uint32))
        self.dropped = NormalizerStatistics(jnp.zeros((), jnp.uint32))

    def __call__(
        self, state: tuple[()], x: Any, rollout_extras: Any = None
    ) -> StatefulModuleOutput:
        """Normalize `x`, leaves `(batch, *feature)`, and emit it for `update_statistics`.

        Raises:
            ValueError: `x` has not the nesting or the sizes of `shape`.
        """
        del rollout_extras
        parts = self._parts(x, "x")
        normalized = {path: self._normalize(path, value) for path, value in parts.items()}
        return StatefulModuleOutput(state, _nest(normalized), jnp.zeros(()), {}, x)

    def update_statistics(self, rollout_extras: Any) -> None:
        """Fold a rollout's inputs into the statistics, all samples in one merge.

        Args:
            rollout_extras: The emitted inputs, leaves `(time, batch, *feature)`.

        Raises:
            ValueError: `rollout_extras` has not the nesting or the sizes of `shape`.
        """
        parts = self._parts(rollout_extras, "rollout_extras")
        sizes = dict(self.leaves)
        usable = reduce(and_, (_usable(value, sizes[path]) for path, value in parts.items()))
        before = self.counter[...].astype(jnp.uint32)
        for path, value in parts.items():
            mean, m2 = _at(self.mean, path), _at(self.M2, path)
            mean[...], m2[...] = _merge((mean[...], m2[...]), before, value, usable)
        self.counter[...] = _count(before, usable)
        self.dropped[...] = _count(self.dropped[...].astype(jnp.uint32), ~usable)

    def _parts(self, x: Any, argument: str) -> dict[Path, Array]:
        """Return the leaves of an input by path, after checking nesting and sizes."""
        found, expected = set(_paths(x, ())), {path for path, _ in self.leaves}
        if found != expected:
            raise ValueError(
                f"Normalizer: {argument} must have the nesting of shape, with the leaves "
                f"{_names(expected)}, got {_names(found)}; select entries with a Filter before it."
            )
        parts = {path: jnp.asarray(_at(x, path)) for path in expected}
        for path, size in self.leaves:
            have = parts[path].shape
            if len(have) <= len(size) or have[len(have) - len(size) :] != size:
                raise ValueError(
                    f"Normalizer: expected {argument}{_bracketed(path)} of shape "
                    f"(batch, {', '.join(map(str, size))}), got {have}; give its size in shape."
                )
        return {path: parts[path] for path, _ in self.leaves}

    def _normalize(self, path: Path, value: Real[Array, "..."]) -> Float[Array, "..."]:
        mean, m2 = _at(self.mean, path)[...], _at(self.M2, path)[...]
        count = self.counter[...].astype(jnp.float32)
        variance = jnp.maximum(m2, 0.0) / jnp.maximum(count, 1.0)
        std = jnp.where(count > 0, jnp.maximum(jnp.sqrt(variance), _LEAST_STD), _FIRST_STD)
        batch_axes = range(value.ndim - mean.ndim)
        mean, std = jax.lax.stop_gradient(
            (jnp.expand_dims(mean, batch_axes), jnp.expand_dims(std, batch_axes))
        )
        clip = self.clip[...]
        return jnp.clip((value - mean) / std, -clip, clip)


def _merge(
    moments: tuple[Array, Array], before: Array, value: Array, usable: Bool[Array, "*batch"]
) -> tuple[Array, Array]:
    """Return mean and M2 of the samples so far and those in `value` together.

    Chan, Golub and LeVeque (1983), Algorithms for computing the sample variance, The American
    Statistician 37(3), eq. 2.1. Deviations are taken from the old mean and then from the new
    ones' own, so that a large offset costs no digits.
    """
    mean, m2 = moments
    axes = tuple(range(usable.ndim))
    mask = jnp.expand_dims(usable, range(usable.ndim, value.ndim))
    seen, new = before.astype(jnp.float32), jnp.sum(usable, dtype=jnp.float32)
    total = jnp.maximum(seen + new, 1.0)

    deviation = jnp.where(mask, value - jnp.expand_dims(mean, axes), 0.0)
    shift = jnp.sum(deviation, axes, keepdims=True) / jnp.maximum(new, 1.0)
    new_m2 = jnp.sum(jnp.square(jnp.where(mask, deviation - shift, 0.0)), axes)
    shift = jnp.squeeze(shift, axes)
    m2 = m2 + new_m2 + jnp.square(shift) * (seen * (new / total))
    return mean + shift * (new / total), m2 * jnp.minimum(float(_COUNTER_END) / total, 1.0)


def _count(counter: Array, which: Bool[Array, "*batch"]) -> Array:
    """Add to a counter, which stays at its end instead of starting over."""
    after = counter + jnp.sum(which, dtype=jnp.uint32)
    return jnp.where(after < counter, jnp.asarray(_COUNTER_END, jnp.uint32), after)


def _usable(value: Array, size: Size) -> Bool[Array, "*batch"]:
    """Which samples have finite squares in float32."""
    features = tuple(range(value.ndim - len(size), value.ndim))
    return jnp.all(jnp.isfinite(jnp.square(value.astype(jnp.float32))), axis=features)


def _leaves(shape: Any, path: Path) -> Iterator[tuple[Path, Size]]:
    """Yield path and size of each leaf of `shape`."""
    argument = f"Normalizer: shape{_bracketed(path)}"
    if isinstance(shape, Mapping):
        if not shape:
            raise ValueError(f"{argument} is an empty mapping; give it an entry per input.")
        for key, inner in shape.items():
            if not isinstance(key, str):
                raise TypeError(f"{argument} must have strings as keys, got {key!r}.")
            yield from _leaves(inner, (*path, key))
    elif isinstance(shape, Sequence) and not isinstance(shape, str):
        yield path, tuple(check_size(n, f"{argument}[{i}]") for i, n in enumerate(shape))
    else:
        yield path, (check_size(shape, argument),)


def _zeros(shape: Any) -> Any:
    """Return statistics in the nesting of a valid `shape`."""
    if isinstance(shape, Mapping):
        return nnx.Dict({key: _zeros(inner) for key, inner in shape.items()})
    return NormalizerStatistics(jnp.zeros(shape))


def _paths(tree: Any, path: Path) -> Iterator[Path]:
    """Yield the paths of the leaves of nested mappings."""
    if not isinstance(tree, Mapping):
        yield path
        return
    for key, inner in tree.items():
        yield from _paths(inner, (*path, key))


def _at(tree: Any, path: Path) -> Any:
    return reduce(getitem, path, tree)


def _nest(parts: Mapping[Path, Array]) -> Any:
    """Return nested dicts made of leaves by path; the inverse of flattening."""
    if () in parts:
        return parts[()]
    tree: dict[str, Any] = {}
    for path, value in parts.items():
        *parents, last = path
        reduce(lambda node, key: node.setdefault(key, {}), parents, tree)[last] = value
    return tree


def _bracketed(path: Path) -> str:
    return "".join(f"[{key!r}]" for key in path)


def _names(paths: set[Path]) -> str:
    if paths == {()}:
        return "one array"
    return ", ".join(sorted(map(_bracketed, paths))) or "none"
