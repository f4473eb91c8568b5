"""`Delay`: the input of some steps ago."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, PyTree

from nnx_ppo.core import StatefulModule, StatefulModuleOutput, UnrollOutput
from nnx_ppo.networks._checks import check_size
from nnx_ppo.networks._history import History, Window, clear, new_history, push, read


class Delay(StatefulModule):
    """Outputs the input of `k_steps` steps ago, and `initial_value` in the first steps.

    Each environment has a buffer of its own, which is filled with `initial_value` anew where an
    episode ends. The carry is a dict: `"buffer"`, a tree like the input with leaves
    `(batch, k_steps, *feature)`, and `"idx"`, the `(batch,)` int32 position of the oldest entry.
    Values keep their dtype, integers and booleans too; gradients pass through.

    Args:
        sample_input: One input without batch axis, e.g. the observation that `env.reset` returns:
            a tree of JAX or NumPy arrays, of Python numbers, or of `jax.ShapeDtypeStruct`. Only
            tree, shapes and dtypes are kept.
        k_steps: Number of steps, at least 1.
        initial_value: Output before there is an input to output, the same for all leaves.

    Raises:
        TypeError: `sample_input` has a leaf that is no number or array of numbers, `k_steps` is
            not an integer, or `initial_value` is not a number.
        ValueError: `sample_input` has no leaves, `k_steps` is below 1, or a leaf's dtype cannot
            hold `initial_value`.

    Example:
        >>> delay = Delay(jnp.zeros(1), k_steps=2)
        >>> carry = delay.initialize_state(1)
        >>> for x in [5.0, 6.0, 7.0, 8.0]:
        ...     out = delay(carry, jnp.full((1, 1), x))
        ...     carry = out.next_state
        ...     print(out.output[0, 0])
        0.0
        0.0
        5.0
        6.0
    """

    def __init__(self, sample_input: Any, k_steps: int, initial_value: float | int = 0.0) -> None:
        leaves, self.tree = jax.tree.flatten(_abstract(sample_input))
        if not leaves:
            raise ValueError(
                f"Delay: sample_input has no leaves, got {sample_input!r}; pass one observation, "
                "without batch axis."
            )
        self.leaves = tuple(leaves)
        self.k_steps = check_size(k_steps, "Delay: k_steps")
        self.initial_value = _number(initial_value)
        for name, leaf in zip(_names(self._sample, "sample_input"), leaves, strict=True):
            if not _can_hold(leaf.dtype, self.initial_value):
                raise ValueError(
                    f"Delay: initial_value={initial_value!r} must fit the dtype of every leaf, "
                    f"but {name} is {leaf.dtype}; choose a value that {leaf.dtype} can hold."
                )

    def __call__(self, state: History, x: Any, rollout_extras: Any = None) -> StatefulModuleOutput:
        """Output the oldest entry and put `x`, leaves `(batch, *feature)`, in its place.

        Raises:
            ValueError: `x` has not the tree, shapes and dtypes of `sample_input`.
        """
        del rollout_extras
        x = self._checked(x, state["idx"].shape)
        output = read(state, self.k_steps)
        return StatefulModuleOutput(push(state, x), output, jnp.zeros(()), {})

    def initialize_state(self, batch_size: int) -> History:
        """Return buffers filled with `initial_value`."""
        return new_history(self._sample, batch_size, self.k_steps, self.initial_value)

    def reset_state(self, prev_state: History) -> History:
        """Return buffers filled with `initial_value`, in the shape of `prev_state`."""
        return clear(prev_state, self.initial_value)

    def unroll(
        self,
        state: History,
        xs: PyTree,
        done: Bool[Array, "time batch"],
        rollout_extras: Any = None,
    ) -> UnrollOutput:
        """Run a window of steps at once: a shift in time that no end of an episode lets pass."""
        del rollout_extras
        window = Window(state, self._checked(xs, done.shape), done, self.initial_value)
        return UnrollOutput(window.next_history(), window.read(self.k_steps), jnp.zeros(done.shape))

    @property
    def _sample(self) -> Any:
        return jax.tree.unflatten(self.tree, self.leaves)

    def _checked(self, x: Any, lead: tuple[int, ...]) -> Any:
        """Return `x` as arrays, after comparing it with the sample.

        Args:
            x: The input, leaves `(*lead, *feature)`.
            lead: `(batch,)` or `(time, batch)`.
        """
        found = jax.tree.structure(x)
        if found != self.tree:
            raise ValueError(
                f"Delay: x must have the tree of sample_input, expected {self.tree}, got {found}; "
                "make the Delay with a sample of what reaches it."
            )
        x = jax.tree.map(jnp.asarray, x)
        for name, value, leaf in zip(_names(x, "x"), jax.tree.leaves(x), self.leaves, strict=True):
            want = f"{leaf.dtype}{[*lead, *leaf.shape]}"
            have = f"{value.dtype}{[*value.shape]}"
            if have != want:
                raise ValueError(
                    f"Delay: expected {name} of dtype and shape {want}, got {have}; sample_input "
                    "must be one input without batch axis, of the same dtype."
                )
        return x


def _abstract(sample: Any) -> Any:
    """Return shapes and dtypes of a sample, in the dtypes that JAX would give its values."""
    try:
        tree = jax.eval_shape(lambda tree: jax.tree.map(jnp.asarray, tree), sample)
    except TypeError as error:
        raise TypeError(
            "Delay: sample_input must be a tree of arrays and numbers, e.g. an observation, got "
            f"{jax.tree.map(type, sample)}."
        ) from error
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree)


def _names(tree: Any, root: str) -> list[str]:
    """Return how one writes each leaf of a tree."""
    return [f"{root}{jax.tree_util.keystr(path)}" for path, _ in jax.tree.leaves_with_path(tree)]


def _number(value: Any) -> float | int:
    if isinstance(value, int):
        return value
    try:
        return float(value)
    except (TypeError, ValueError):
        raise TypeError(
            f"Delay: initial_value must be a number, got {value!r} ({type(value).__name__})."
        ) from None


def _can_hold(dtype: Any, value: float | int) -> bool:
    """Whether a dtype has the value, up to rounding."""
    if dtype == jnp.bool_:
        return value in (0, 1)
    if jnp.issubdtype(dtype, jnp.integer):
        limits = jnp.iinfo(dtype)
        return limits.min <= value <= limits.max and value == int(value)
    if jnp.issubdtype(dtype, jnp.inexact):
        return not math.isfinite(value) or abs(value) <= float(jnp.finfo(dtype).max)
    return False
