"""Small layers that select, reshape and scale trees, and two containers that work on dicts."""

from collections.abc import Callable, Mapping
from functools import reduce
from math import isfinite, prod
from numbers import Real
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from nnx_ppo.core import StatefulModule, StatefulModuleOutput
from nnx_ppo.networks.containers import NamedContainer
from nnx_ppo.networks.routed import Runner


class Flattener(StatefulModule):
    """Makes one array `(batch, features)` of a tree of arrays.

    Leaves are flattened and joined in the order of `jax.tree.leaves`, in which dicts are sorted
    by key.

    Args:
        preserve_levels: How many levels of dicts, lists and tuples stay as they are, with each
            subtree below them made one array.

    Raises:
        ValueError: `preserve_levels` is negative.

    Example:
        >>> obs = {"arm": {"angle": jnp.ones((2, 4)), "speed": jnp.ones((2, 4))}}
        >>> Flattener()((), obs).output.shape
        (2, 8)
        >>> Flattener(preserve_levels=1)((), obs).output["arm"].shape
        (2, 8)
    """

    def __init__(self, preserve_levels: int = 0) -> None:
        if preserve_levels < 0:
            raise ValueError(
                f"Flattener: preserve_levels must be 0 or more, got {preserve_levels}."
            )
        self.preserve_levels = preserve_levels

    def __call__(
        self, state: tuple[()], x: Any, rollout_extras: Any = None
    ) -> StatefulModuleOutput:
        """Flatten `x`, leaves `(batch, *feature)`.

        Raises:
            ValueError: `x` has fewer levels than are to be preserved, or no leaves.
        """
        del rollout_extras
        return StatefulModuleOutput(state, self._flatten(x, "x", 0), jnp.zeros(()), {})

    def _flatten(self, x: Any, name: str, level: int) -> Any:
        if level == self.preserve_levels:
            return _join(x, name)
        if isinstance(x, Mapping):
            return {k: self._flatten(v, f"{name}[{k!r}]", level + 1) for k, v in x.items()}
        if isinstance(x, list | tuple):
            parts = [self._flatten(v, f"{name}[{i}]", level + 1) for i, v in enumerate(x)]
            return parts if isinstance(x, list) else tuple(parts)
        raise ValueError(
            f"Flattener(preserve_levels={self.preserve_levels}): {name} must be a dict, list or "
            f"tuple, got {type(x).__name__}: the input is only {level} levels deep; lower "
            "preserve_levels."
        )


def _join(tree: Any, name: str) -> Array:
    """Return the leaves of a tree as one array `(batch, features)`."""
    leaves = jax.tree.leaves(tree)
    if not leaves or any(jnp.ndim(leaf) == 0 for leaf in leaves):
        raise ValueError(
            f"Flattener: {name} must have leaves, each with a batch axis, got "
            f"{jax.tree.map(jnp.shape, tree)}; pass batched observations."
        )
    flat = [jnp.reshape(leaf, (len(leaf), prod(leaf.shape[1:]))) for leaf in leaves]
    return jnp.concatenate(flat, axis=-1)


class Filter(StatefulModule):
    """Makes a dict of parts of its input.

    Args:
        spec: What to put under each name of the output: a string takes that entry of the input;
            a tuple of strings and integers follows a path into it; a function is applied to the
            whole input. The function sees any number of samples at once and must treat them
            alike. What `spec` does not mention is dropped.

    Raises:
        TypeError: `spec` is not a dict, or an entry is none of these.
        ValueError: `spec` is empty, or a path is.

    Example:
        >>> pick = Filter({"value": "v", "angle": ("arm", 0), "sum": lambda x: x["v"] + 1})
        >>> out = pick((), {"v": jnp.zeros(2), "arm": [jnp.ones(2), jnp.ones(2)]}).output
        >>> {name: float(part[0]) for name, part in out.items()}
        {'value': 0.0, 'angle': 1.0, 'sum': 1.0}
    """

    def __init__(self, spec: Mapping[str, str | tuple[str | int, ...] | Callable]) -> None:
        if not isinstance(spec, Mapping):
            raise TypeError(
                f"Filter: spec must be a dict {{output name: what to take}}, got "
                f"{type(spec).__name__}; write Filter({{'value': 'value'}})."
            )
        if not spec:
            raise ValueError("Filter: spec is empty; write Filter({'value': 'value'}).")
        self.spec = tuple((name, _checked_entry(name, entry)) for name, entry in spec.items())

    def __call__(
        self, state: tuple[()], x: Any, rollout_extras: Any = None
    ) -> StatefulModuleOutput:
        """Extract the parts of `x`, leaves `(batch, *feature)`.

        Raises:
            ValueError: `x` has no such part.
        """
        del rollout_extras
        output = {name: _extract(name, entry, x) for name, entry in self.spec}
        return StatefulModuleOutput(state, output, jnp.zeros(()), {})


def _checked_entry(name: str, entry: Any) -> Any:
    """Return an entry of a spec as a function or a non-empty path."""
    path = (entry,) if isinstance(entry, str) else entry
    if callable(path):
        return path
    if not isinstance(path, tuple) or not all(isinstance(key, str | int) for key in path):
        raise TypeError(
            f"Filter: spec[{name!r}] must be a string, a tuple of strings and integers, or a "
            f"function, got {entry!r} ({type(entry).__name__})."
        )
    if not path:
        raise ValueError(
            f"Filter: spec[{name!r}] is an empty path; for the whole input write lambda x: x."
        )
    return path


def _extract(name: str, entry: tuple[str | int, ...] | Callable, x: Any) -> Any:
    if callable(entry):
        return entry(x)
    try:
        return reduce(_enter, entry, x)
    except (KeyError, IndexError, TypeError):
        shapes = jax.tree.map(jnp.shape, x)
        raise ValueError(
            f"Filter: spec[{name!r}] asks for x{''.join(f'[{key!r}]' for key in entry)}, which is "
            f"not there; x has the shapes {shapes}."
        ) from None


def _enter(node: Any, key: str | int) -> Any:
    if isinstance(node, jax.Array | np.ndarray):
        raise TypeError("an index into an array would pick a sample of the batch")
    return node[key]


class Scale(StatefulModule):
    """Multiplies its input by a fixed number.

    Args:
        factor: The number. It is not trained.

    Raises:
        TypeError: `factor` is not a real number.
        ValueError: `factor` is not finite.

    Example:
        >>> pixels = jnp.full((2, 3), 255, jnp.uint8)
        >>> print(Scale(1 / 255)((), pixels).output[0])
        [1. 1. 1.]
    """

    def __init__(self, factor: float | Real) -> None:
        if not isinstance(factor, Real) or isinstance(factor, bool):
            raise TypeError(
                f"Scale: factor must be a real number, got {factor!r} ({type(factor).__name__}); "
                "write Scale(0.5)."
            )
        if not isfinite(factor):
            raise ValueError(f"Scale: factor must be finite, got {factor!r}.")
        self.factor = float(factor)

    def __call__(
        self, state: tuple[()], x: Any, rollout_extras: Any = None
    ) -> StatefulModuleOutput:
        """Multiply each leaf of `x`, `(batch, *feature)`.

        Floating-point leaves keep their dtype; integers and booleans become float32.
        """
        del rollout_extras
        return StatefulModuleOutput(state, jax.tree.map(self._scaled, x), jnp.zeros(()), {})

    def _scaled(self, leaf: Any) -> Array:
        leaf = jnp.asarray(leaf)
        if not jnp.issubdtype(leaf.dtype, jnp.inexact):
            leaf = leaf.astype(jnp.float32)
        return leaf * jnp.asarray(self.factor, leaf.dtype)


class Map(NamedContainer):
    """Runs each module on the input's entry of the same name; the output is a dict of theirs.

    Entries of the input without a module are dropped.

    Args:
        modules: The children by name; for names that are no Python identifiers.
        **kwargs: The children by name, instead of `modules`.

    Example:
        >>> from flax import nnx
        >>> from nnx_ppo.networks import Dense
        >>> rngs = nnx.Rngs(0)
        >>> encoders = Map(body=Dense(3, 4, rngs), goal=Dense(2, 1, rngs))
        >>> obs = {"body": jnp.ones((2, 3)), "goal": jnp.ones((2, 2)), "time": jnp.ones((2, 1))}
        >>> out = encoders(encoders.initialize_state(2), obs).output
        >>> {name: code.shape for name, code in out.items()}
        {'body': (2, 4), 'goal': (2, 1)}
    """

    def _route(self, x: Any, run: Runner) -> dict[str, Any]:
        return {name: run(name, self._entry(x, name)) for name in self.names}


class Merge(NamedContainer):
    """Runs several modules on the same input, and merges the dicts that they return into one.

    Args:
        modules: The children by name; for names that are no Python identifiers. The names appear
            in the carry and in the metrics, not in the output.
        **kwargs: The children by name, instead of `modules`.

    Example:
        >>> from flax import nnx
        >>> from nnx_ppo.networks import Dense, Sequential, Splitter
        >>> policy = Sequential([Dense(3, 6, nnx.Rngs(0)), Splitter(arm=4, leg=2)])
        >>> net = Merge(policy=policy, skip=Filter({"raw": lambda x: x}))
        >>> out = net(net.initialize_state(2), jnp.ones((2, 3))).output
        >>> {name: part.shape for name, part in out.items()}
        {'arm': (2, 4), 'leg': (2, 2), 'raw': (2, 3)}
    """

    def _route(self, x: Any, run: Runner) -> dict[Any, Any]:
        merged: dict[Any, Any] = {}
        origins: dict[Any, str] = {}
        for name in self.names:
            output = run(name, x)
            if not isinstance(output, Mapping):
                raise TypeError(
                    f"Merge: the output of {name!r} must be a dict, got {type(output).__name__}; "
                    f'give it a name with Sequential([..., Filter({{"{name}": lambda x: x}})]).'
                )
            for key, value in output.items():
                if key in merged:
                    raise ValueError(
                        f"Merge: the outputs of {origins[key]!r} and {name!r} both have the key "
                        f"{key!r}; rename one of them with a Filter, or keep them apart with "
                        "Parallel."
                    )
                merged[key], origins[key] = value, name
        return merged
