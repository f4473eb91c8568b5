"""`StatefulModule`, and how carries are reset and unrolled over time."""

import abc
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, PyTree

from nnx_ppo.core._types import ModuleState, StatefulModuleOutput, UnrollOutput

# A module's meaning over time is made of these; whoever changes one of them has changed `unroll`.
_STEP_METHODS = ("__call__", "initialize_state", "reset_state")

Module = TypeVar("Module", bound=nnx.Module)


class StatefulModule(nnx.Module, abc.ABC):
    """A network module with an explicit carry.

    Two kinds of state live in a module. **NNX state** (parameters, running statistics, random
    streams) hangs on `self` and outlives episodes. The **carry** (hidden activations, buffers,
    per-environment keys) goes in and out of `__call__`, has a leading batch axis on every leaf,
    and is reset for an environment when its episode ends.

    The forward pass is pure and per sample: it may not write NNX variables that influence its
    output, and no sample may see another one. Running statistics are folded in by
    `update_statistics`, once per training iteration.

    Example:
        >>> class Leak(StatefulModule):
        ...     def __call__(self, module_state, obs, rollout_extras=None):
        ...         level = 0.5 * module_state + obs
        ...         return StatefulModuleOutput(level, level, jnp.zeros(()), {})
        ...
        ...     def initialize_state(self, batch_size):
        ...         return jnp.zeros((batch_size, 1))
        ...
        ...     def reset_state(self, prev_state):
        ...         return jnp.zeros_like(prev_state)
        >>> leak = Leak()
        >>> leak(leak.initialize_state(2), jnp.ones((2, 1))).output.shape
        (2, 1)
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        owner = _provider(cls, "unroll")
        # Not by `issubclass`: an abstract class under construction answers from its parent's cache.
        if not all(_provider(cls, name) in owner.__mro__ for name in _STEP_METHODS):
            cls.unroll = StatefulModule.unroll

    @abc.abstractmethod
    def __call__(
        self, module_state: ModuleState, obs: Any, rollout_extras: Any = None
    ) -> StatefulModuleOutput:
        """Run one step for a batch.

        Args:
            module_state: The carry, leaves `(batch, …)`.
            obs: The input, leaves `(batch, *feature)`.
            rollout_extras: None while collecting data and in inference: sample afresh. In the
                gradient phase, what this module returned in the same field at this step.

        Returns:
            The next carry, the output, the loss, metrics and what to store for the replay.
        """

    def initialize_state(self, batch_size: int) -> ModuleState:
        """Return the carry at the start of an episode, leaves `(batch_size, …)`.

        The default is a module without memory: an empty tuple.
        """
        del batch_size
        return ()

    def reset_state(self, prev_state: ModuleState) -> ModuleState:
        """Return the carry that replaces `prev_state` where an episode ended.

        Called on the whole batched carry (the caller selects per environment); it must also
        accept the carry of one environment, without a batch axis. The default keeps the carry.
        """
        return prev_state

    def update_statistics(self, rollout_extras: Any) -> None:
        """Fold one rollout into running statistics. The default does nothing.

        Called once per training iteration, after the gradient phase.

        Args:
            rollout_extras: What `__call__` emitted during the rollout, leaves
                `(time, batch, *feature)`.
        """
        del rollout_extras

    def unroll(
        self,
        state: ModuleState,
        xs: PyTree,
        done: Bool[Array, "time batch"],
        rollout_extras: Any = None,
    ) -> UnrollOutput:
        """Run a window of steps; the result is that of `unroll_stepwise`, up to rounding.

        The default folds time into the batch when that cannot be told apart: the carry has no
        leaves, so no step knows the one before it, and the module owns no random stream, whose
        draws would come out in another shape. Otherwise it goes step by step. Override it where
        a module knows a faster way. A subclass that overrides `__call__`, `initialize_state` or
        `reset_state` without overriding `unroll` gets this default back.

        Args:
            state: The carry before the first step, leaves `(batch, …)`.
            xs: The inputs, leaves `(time, batch, *feature)`.
            done: Where an episode ended; the carry is reset *after* that step.
            rollout_extras: None, or the rollout's extras, leaves `(time, batch, …)`.

        Returns:
            The final carry, the outputs and the loss of each sample.
        """
        if jax.tree.leaves(state) or owns_random_stream(self):
            return unroll_stepwise(self, state, xs, done, rollout_extras)
        return _unroll_folded(self, state, xs, done, rollout_extras)


def _provider(cls: type, name: str) -> type:
    """Return the class that a class has a method from."""
    return next(base for base in cls.__mro__ if name in vars(base))


def owns_random_stream(module: nnx.Module) -> bool:
    """Whether a module or one of its children holds NNX random state."""
    return bool(jax.tree.leaves(nnx.state(module, nnx.RngState)))


def reset_where(
    module: StatefulModule, done: Bool[Array, " *batch"], state: ModuleState
) -> ModuleState:
    """Reset the carry of those environments whose episode ended.

    Args:
        module: The module that the carry belongs to.
        done: Which environments to reset.
        state: The carry, leaves `(*batch, …)`.

    Returns:
        The carry, equal to `module.reset_state(state)` where `done` and to `state` elsewhere.

    Raises:
        ValueError: `reset_state` returns another tree, shape or dtype than it was given.
    """
    if not jax.tree.leaves(state):
        return state
    fresh = module.reset_state(state)
    check_same_carry(f"{type(module).__name__}.reset_state", state, fresh)

    def select(new: Array, old: Array) -> Array:
        if new is old:  # keys go on; to the key checker, one that comes in twice is used twice
            return old
        return jnp.where(done.reshape(done.shape + (1,) * (jnp.ndim(old) - done.ndim)), new, old)

    return jax.tree.map(select, fresh, state)


def check_same_carry(source: str, expected: ModuleState, found: ModuleState) -> None:
    """Raise if two carries differ in tree, shape or dtype.

    Args:
        source: Who made `found`, for the message.
        expected: The carry that went in.
        found: The carry that came out.

    Raises:
        ValueError: Names the first leaf that differs, with what was expected and found.
    """
    want, want_tree = jax.tree.flatten_with_path(expected)
    have, have_tree = jax.tree.flatten_with_path(found)
    if want_tree != have_tree:
        raise ValueError(
            f"{source} must return a carry of the same tree as it was given, "
            f"expected {want_tree}, got {have_tree}."
        )
    for (path, old), (_, new) in zip(want, have, strict=True):
        old_type, new_type = (f"{jnp.result_type(v)}{list(jnp.shape(v))}" for v in (old, new))
        if old_type != new_type:
            raise ValueError(
                f"{source} changes the carry leaf 'state{jax.tree_util.keystr(path)}': expected "
                f"{old_type}, got {new_type}. A carry keeps its shapes and dtypes from step to "
                "step; make them in initialize_state as __call__ returns them."
            )


def per_sample_loss(loss: Float[Array, "..."], shape: tuple[int, ...]) -> Float[Array, "..."]:
    """Broadcast a module's scalar loss to one value per sample."""
    return jnp.broadcast_to(loss, shape)


def unroll_stepwise(
    module: StatefulModule,
    state: ModuleState,
    xs: PyTree,
    done: Bool[Array, "time batch"],
    rollout_extras: Any = None,
) -> UnrollOutput:
    """Run a window step by step. This is what `StatefulModule.unroll` means.

    Each step calls the module, then resets the carry where `done`. Random streams (and any
    variable that is not a parameter) go on from step to step and are left on `module` as the
    last step left them.

    Args:
        module: The module to run.
        state: The carry before the first step, leaves `(batch, …)`.
        xs: The inputs, leaves `(time, batch, *feature)`.
        done: Where an episode ended; the carry is reset *after* that step.
        rollout_extras: None, or the rollout's extras, leaves `(time, batch, …)`.

    Returns:
        The final carry, the outputs and the loss of each sample.
    """

    def step(live: StatefulModule, state: ModuleState, inputs: tuple[Any, Array, Any]) -> Any:
        x, ended, extras = inputs
        out = live(state, x, extras)
        check_same_carry(f"{type(module).__name__}.__call__", state, out.next_state)
        loss = per_sample_loss(out.regularization_loss, ended.shape)
        return reset_where(live, ended, out.next_state), (out.output, loss)

    state, (outputs, loss) = scan_module(module, step, state, (xs, done, rollout_extras))
    return UnrollOutput(state, outputs, loss)


def scan_module(
    module: Module, step: Callable[[Module, Any, Any], tuple[Any, Any]], carry: Any, xs: PyTree
) -> tuple[Any, Any]:
    """`jax.lax.scan` whose step gets a live module.

    The module crosses the scan as data: parameters are constants of the loop, all other variables
    (random streams among them) go on from step to step and are left on `module` as the last step
    left them.

    Args:
        module: The module; the scan works on copies of it.
        step: `(module, carry, x) -> (carry, y)`.
        carry: The carry before the first step.
        xs: Inputs with a leading time axis.

    Returns:
        The final carry, and the stacked `y`.
    """
    graphdef, params, variables = nnx.split(module, nnx.Param, ...)
    written: set[tuple[Any, ...]] = set()

    def body(loop: tuple[Any, Any], x: Any) -> tuple[tuple[Any, Any], Any]:
        variables, carry = loop
        live = nnx.merge(graphdef, params, variables, copy=True)
        carry, y = step(live, carry, x)
        after = nnx.state(live, nnx.Not(nnx.Param))
        before = dict(nnx.to_flat_state(variables))
        for path, leaf in nnx.to_flat_state(after):
            if path not in before or _value(leaf) is not _value(before[path]):
                written.add(path)
        return (after, carry), y

    (variables, carry), ys = jax.lax.scan(body, (variables, carry), xs)
    # Only what was written: a module that only reads may be closed over by a transform.
    flat = [(path, leaf) for path, leaf in nnx.to_flat_state(variables) if path in written]
    if flat:
        nnx.update(module, nnx.from_flat_state(flat))
    return carry, ys


def _value(leaf: Any) -> Any:
    return leaf.get_value() if isinstance(leaf, nnx.Variable) else leaf


def _unroll_folded(
    module: StatefulModule, state: ModuleState, xs: PyTree, done: Array, rollout_extras: Any
) -> UnrollOutput:
    """Run a window as one call on `(time * batch, …)`."""
    fold, unfold = fold_time(done.shape)
    out = module(state, fold(xs), fold(rollout_extras))
    loss = per_sample_loss(out.regularization_loss, (done.size,))
    return UnrollOutput(out.next_state, unfold(out.output), unfold(loss))


def fold_time(shape: tuple[int, ...]) -> tuple[Callable[[PyTree], Any], Callable[[PyTree], Any]]:
    """Return two functions: trees of `(time, batch, …)` to `(time * batch, …)`, and back.

    Args:
        shape: `(time, batch)`.
    """
    time, batch = shape

    def fold(tree: PyTree) -> Any:
        return jax.tree.map(lambda leaf: leaf.reshape((time * batch, *leaf.shape[2:])), tree)

    def unfold(tree: PyTree) -> Any:
        return jax.tree.map(lambda leaf: leaf.reshape((time, batch, *leaf.shape[1:])), tree)

    return fold, unfold
