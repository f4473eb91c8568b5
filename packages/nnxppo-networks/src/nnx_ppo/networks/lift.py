"""`Lift`: flax's own layers as stateful modules."""

from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Key, PyTree

from nnx_ppo.core import StatefulModule, StatefulModuleOutput, UnrollOutput, fold_time
from nnx_ppo.networks._foreign import call_unchanged, copy_of, describe, find
from nnx_ppo.networks._keys import initial_keys, split_keys, split_keys_over_time

Keys: TypeAlias = Key[Array, "*batch"]


class Lift(StatefulModule):
    """Makes a stateful module of a flax layer that has no carry.

    That is any `nnx.Module` with `module(x) -> y` whose forward pass treats samples alike and
    writes no variable: `nnx.Conv`, `nnx.LayerNorm`, `nnx.Embed`, `nnx.Dropout`,
    `nnx.MultiHeadAttention` made with `decode=False`, an `nnx.Sequential` of such, or one's own.
    `network.train()` and `network.eval()` set the attribute `deterministic` of the layers inside.

    A module that holds random streams, e.g. for dropout, draws noise. `Lift` then keeps one key
    for each environment in the carry, split at each step, in evaluation too, and calls the module
    on each sample with streams made from the key: samples have noise of their own, and the replay
    repeats that of the rollout. The module's own streams stand still. The carry of other modules
    is an empty tuple.

    Args:
        module: The module. It is called with one argument, arrays or a tree of them, `(batch, …)`.

    Raises:
        TypeError: `module` is not a callable `nnx.Module`, has memory, is or holds an
            `nnx.BatchNorm`, or changes its variables. That other modules do not mix samples, only
            `nnx_ppo.core.testing.check_module` finds out.
        ValueError: `module` has an `nnx.Dropout` without a stream.

    Example:
        >>> from nnx_ppo.networks import Dense, Flattener, Sequential
        >>> rngs = nnx.Rngs(0)
        >>> camera = Lift(nnx.Sequential(nnx.Conv(3, 4, (3, 3), rngs=rngs), nnx.relu))
        >>> dropout = Lift(nnx.Dropout(0.1, rngs=rngs))
        >>> net = Sequential([camera, Flattener(), Dense(256, 16, rngs), dropout])
        >>> net(net.initialize_state(2), jnp.ones((2, 8, 8, 3))).output.shape
        (2, 16)
    """

    def __init__(self, module: nnx.Module) -> None:
        self.module = _checked_module(module)
        stream = find(module, nnx.RngStream)
        self.rng = None if stream is None else stream.fork()

    def __call__(
        self, state: tuple[()] | Keys, x: PyTree, rollout_extras: Any = None
    ) -> StatefulModuleOutput:
        """Apply the module to `x`, leaves `(batch, *feature)`.

        Args:
            state: An empty tuple, or the keys `(batch,)` of a module that draws noise.
            x: The input.
            rollout_extras: Ignored.

        Raises:
            TypeError: The module wrote a variable.
        """
        del rollout_extras
        next_state, keys = (state, None) if isinstance(state, tuple) else split_keys(state)
        return StatefulModuleOutput(next_state, self._apply(keys, x), jnp.zeros(()), {})

    def initialize_state(self, batch_size: int) -> tuple[()] | Keys:
        """Return an empty tuple, or keys `(batch_size,)` for a module that draws noise."""
        return () if self.rng is None else initial_keys(self.rng, batch_size)

    def unroll(
        self,
        state: tuple[()] | Keys,
        xs: PyTree,
        done: Bool[Array, "time batch"],
        rollout_extras: Any = None,
    ) -> UnrollOutput:
        """Apply the module to a window at once, with the keys that the steps would have used."""
        del rollout_extras
        fold, unfold = fold_time(done.shape)
        if isinstance(state, tuple):
            keys = None
        else:
            state, keys = split_keys_over_time(state, len(done))
        output = unfold(self._apply(fold(keys), fold(xs)))
        return UnrollOutput(state, output, jnp.zeros(done.shape))

    def _apply(self, keys: Keys | None, x: PyTree) -> PyTree:
        """Return the module's output on samples that have a key each, or none."""
        if keys is None:
            return call_unchanged("Lift: module", copy_of(self.module), x)
        return jax.vmap(self._apply_to_one)(keys, x)

    def _apply_to_one(self, key: Key[Array, ""], x: PyTree) -> PyTree:
        """Return the module's output on one sample, with noise from a key."""
        graphdef, streams, rest = nnx.split(self.module, nnx.RngState, ...)
        live = nnx.merge(graphdef, _seeded(streams, key), rest, copy=True)
        batch_of_one = jax.tree.map(lambda leaf: leaf[None], x)
        output = call_unchanged("Lift: module", live, batch_of_one)
        return jax.tree.map(lambda leaf: leaf[0], output)


def _seeded(streams: PyTree, key: Key[Array, ""]) -> PyTree:
    """Return the state of random streams, all of them started anew from keys made of one."""
    leaves, tree = jax.tree.flatten(streams)
    keys = iter(jax.random.split(key, len(leaves)))

    def start(leaf: Array) -> Array:
        if not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return jnp.zeros_like(leaf)
        own = next(keys)
        return jax.random.split(own, leaf.shape) if leaf.shape else own

    return tree.unflatten([start(leaf) for leaf in leaves])


_REFUSED: tuple[tuple[Any, str], ...] = (
    (StatefulModule, "is a StatefulModule; use it directly, in a Sequential."),
    (nnx.RNNCellBase, "has memory, which belongs into a carry; use Recurrent(cell)."),
    (
        nnx.BatchNorm,
        "mixes the samples of a batch and changes in the forward pass, so that the replay would "
        "differ from the rollout; use Normalizer for observations, nnx.LayerNorm inside.",
    ),
    (
        (nnx.WeightNorm, nnx.SpectralNorm, nnx.BatchStat),
        "changes variables in the forward pass, so that the replay would differ from the rollout; "
        "use nnx.LayerNorm, or normalise weights when they are updated.",
    ),
    (nnx.Cache, "has memory, a cache that outlives episodes; call it with decode=False."),
)


def _checked_module(module: Any) -> nnx.Module:
    """Return `module` if it is one that can be lifted."""
    if not isinstance(module, nnx.Module):
        cure = (
            "pass an instance of it, or an activation function as Dense(..., activation=...)."
            if callable(module)
            else "build the layer first, e.g. Lift(nnx.LayerNorm(features, rngs=rngs))."
        )
        raise TypeError(f"Lift: module must be an nnx.Module, got {describe(module)}: {cure}")
    if not callable(module):
        raise TypeError(f"Lift: module must have __call__(x), which {describe(module)} has not.")
    for kind, reason in _REFUSED:
        part = find(module, kind)
        if part is not None:
            inside = "" if part is module else f" in {describe(module)}"
            raise TypeError(f"Lift: module: {describe(part)}{inside} {reason}")
    _check_dropouts(module)
    return module


def _check_dropouts(module: nnx.Module) -> None:
    for _, node in nnx.iter_graph(module):
        if isinstance(node, nnx.Dropout) and node.rate and node.rngs is None:
            raise ValueError(
                "Lift: module: Dropout has no stream to draw from; write "
                f"nnx.Dropout({node.rate}, rngs=rngs)."
            )
