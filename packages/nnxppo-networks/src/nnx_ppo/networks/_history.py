"""Circular buffers of the latest inputs, one for each environment.

A history is a dict `{"buffer", "idx"}`: a tree of arrays `(batch, length, *feature)`, and the
`(batch,)` int32 position that is written next, which holds the oldest entry until then.
"""

from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, PyTree

History: TypeAlias = dict[str, Any]


def new_history(like: PyTree, batch_size: int, length: int, fill: float | int = 0.0) -> History:
    """Return a history in which every entry is `fill`.

    Args:
        like: What an entry of one environment looks like: leaves with a shape and a dtype.
        batch_size: Number of environments.
        length: Number of entries that are kept.
        fill: The value before anything has been pushed.
    """

    def full(leaf: Any) -> Array:
        return jnp.full((batch_size, length, *leaf.shape), fill, leaf.dtype)

    return {"buffer": jax.tree.map(full, like), "idx": jnp.zeros((batch_size,), jnp.int32)}


def clear(history: History, fill: float | int = 0.0) -> History:
    """Return the history at the start of an episode, in the shape of `history`."""
    return {
        "buffer": jax.tree.map(lambda leaf: jnp.full_like(leaf, fill), history["buffer"]),
        "idx": jnp.zeros_like(history["idx"]),
    }


def read(history: History, delay: int) -> Any:
    """Return what was pushed `delay` pushes ago, 1 being the last; leaves `(batch, *feature)`."""

    def entry(buffer: Array, idx: Array) -> Array:
        return buffer[(idx - delay) % len(buffer)]

    return jax.tree.map(lambda leaf: jax.vmap(entry)(leaf, history["idx"]), history["buffer"])


def push(history: History, x: PyTree) -> History:
    """Return the history with `x` in place of the oldest entry."""

    def write(buffer: Array, idx: Array, value: Array) -> Array:
        return buffer.at[idx].set(value.astype(buffer.dtype))

    idx = history["idx"]
    buffer = jax.tree.map(lambda b, v: jax.vmap(write)(b, idx, v), history["buffer"], x)
    return {"buffer": buffer, "idx": (idx + 1) % _length(history)}


class Window:
    """What `read`, `push` and `clear` give over a window of steps, without going step by step.

    The entries of the history and the inputs of the window form one line in time. A read is a
    piece of that line, except that nothing crosses the end of an episode.

    Args:
        history: The history before the first step.
        xs: What each step pushes, leaves `(time, batch, *feature)`.
        done: Where the history is cleared, after the step.
        fill: What it is cleared to.
    """

    def __init__(
        self, history: History, xs: PyTree, done: Bool[Array, "time batch"], fill: float | int = 0.0
    ) -> None:
        self._idx, self._length, self._time = history["idx"], _length(history), len(done)
        self._fill = fill
        self._first = _first_visible(done, self._length)

        def join(buffer: Array, x: Array) -> Array:
            oldest_first = jax.vmap(lambda b, idx: jnp.roll(b, -idx, axis=0))(buffer, self._idx)
            return jnp.concatenate([jnp.moveaxis(oldest_first, 1, 0), x.astype(buffer.dtype)])

        # Entry i was pushed at step i - length.
        self._line = jax.tree.map(join, history["buffer"], xs)

    def read(self, delay: int) -> Any:
        """Return what each step reads, before it pushes; leaves `(time, batch, *feature)`."""
        return self._piece(-delay, self._first[:-1])

    def next_history(self) -> History:
        """Return the history after the last step."""
        last = self._first[-1]
        # A clear puts the position back to 0; without one it goes on from where it was.
        idx = jnp.where(last < 0, self._idx + self._time, self._time - last) % self._length
        first = jnp.broadcast_to(last, (self._length, *last.shape))
        oldest_first = self._piece(self._time - self._length, first)

        def wrap(leaf: Array) -> Array:
            return jax.vmap(lambda b, i: jnp.roll(b, i, axis=0))(jnp.moveaxis(leaf, 0, 1), idx)

        return {"buffer": jax.tree.map(wrap, oldest_first), "idx": idx}

    def _piece(self, start: int, first: Int[Array, "n batch"]) -> Any:
        """Return what was pushed from step `start` on, or `fill` where that is before `first`."""
        stop = start + len(first)
        visible = jnp.arange(start, stop)[:, None] >= first

        def select(leaf: Array) -> Array:
            values = leaf[start + self._length : stop + self._length]
            mask = jnp.expand_dims(visible, range(2, values.ndim))
            return jnp.where(mask, values, jnp.asarray(self._fill, values.dtype))

        return jax.tree.map(select, self._line)


def _first_visible(done: Array, length: int) -> Int[Array, "time_and_1 batch"]:
    """Return, before each step and after the last, the first step that is not forgotten.

    That is the step after the latest end of an episode in the window; before one it is
    `-length`, the step of the oldest entry of the history that the window began with.
    """
    none = jnp.full_like(done[:1], -length, jnp.int32)
    after = 1 + jnp.arange(len(done), dtype=jnp.int32)[:, None]
    return jax.lax.cummax(jnp.concatenate([none, jnp.where(done, after, -length)]))


def _length(history: History) -> int:
    return jax.tree.leaves(history["buffer"])[0].shape[1]
