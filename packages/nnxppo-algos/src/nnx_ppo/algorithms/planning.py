"""What a training will cost, from shapes alone: nothing is compiled, nothing is run."""

import dataclasses
import os
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.extend.core import ClosedJaxpr
from jaxtyping import Array, PyTree

from nnx_ppo.algorithms import chunks
from nnx_ppo.algorithms.bookkeeping import iteration_keys
from nnx_ppo.algorithms.checks import (
    check_discounts,
    check_kind,
    check_module,
    check_network,
    check_training_mode,
)
from nnx_ppo.algorithms.config import PPOConfig, TrainConfig
from nnx_ppo.algorithms.costs import count_flops, estimate_memory, traced_bytes
from nnx_ppo.algorithms.counters import step_words
from nnx_ppo.algorithms.entropy import check_entropy_weight
from nnx_ppo.algorithms.iteration import collect_window, conclude
from nnx_ppo.algorithms.keys import purpose_keys
from nnx_ppo.algorithms.objective import loss_settings
from nnx_ppo.algorithms.optimizers import configured_optimizer
from nnx_ppo.algorithms.programs import traced
from nnx_ppo.algorithms.resets import first_env_states
from nnx_ppo.algorithms.rollout import Collected, distinct_arrays
from nnx_ppo.algorithms.training_plan import PlannedPart, TrainingPlan
from nnx_ppo.algorithms.types import TrainingState
from nnx_ppo.core import RLEnv, StatefulModule

__all__ = ["PlannedPart", "TrainingPlan", "available_memory", "plan_training"]

# Between which sizes memory is taken to grow in a straight line.
_FACTOR = 4
# What largest sizes leave free: by so much the estimate may fall short.
_FREE = 0.35


def plan_training(
    env: RLEnv,
    networks: StatefulModule,
    config: TrainConfig | None = None,
    *,
    optimizer: optax.GradientTransformation | None = None,
    memory_bytes: int | None = None,
) -> TrainingPlan:
    """Work out what `train_ppo` will cost with the same arguments, without running it.

    The function traces an iteration and counts. Operations and the sizes of what is stored are
    exact. What an iteration needs beside that depends on how XLA compiles it: on a CPU, the
    estimate for perceptrons and recurrent networks was 0.65 to 1.2 times what XLA reported.
    Evaluation, videos, the environment's own constants and whatever it keeps outside of its state
    are not part of it.

    Args:
        env: The environment, written for a single instance.
        networks: The network; it is not changed.
        config: The configuration; the default one if None.
        optimizer: Takes the place of Adam, as in `train_ppo`.
        memory_bytes: The memory that an iteration must fit into; that of the first device, or of
            this machine where the device does not say, if None.

    Raises:
        TypeError: As `train_ppo`.
        ValueError: As `train_ppo`; or `memory_bytes` is not above 0.
    """
    config = TrainConfig() if config is None else config
    check_kind("config", config, TrainConfig, "Build it as TrainConfig(ppo=PPOConfig(…)).")
    if memory_bytes is not None and memory_bytes <= 0:
        raise ValueError(f"memory_bytes={memory_bytes} must be above 0, or None.")
    check_module("networks", networks)
    check_training_mode(networks)
    check_entropy_weight(networks, config.ppo)
    env = traced(env)
    check_network(env, networks, config.ppo.combine_advantages)
    check_discounts(env, config.ppo.discounting_factor)
    planner = _Planner(
        env, networks, configured_optimizer(networks, config.ppo, optimizer), config.ppo
    )
    memory_bytes = available_memory() if memory_bytes is None else memory_bytes
    return planner.plan(memory_bytes)


def available_memory() -> int | None:
    """Return the bytes that JAX may use on the first device, None if unknown.

    A device without memory of its own (a CPU) has that of the machine.
    """
    statistics = jax.local_devices()[0].memory_stats() or {}
    if "bytes_limit" in statistics:
        return statistics["bytes_limit"]
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # a system without these
        return None


class _Window(NamedTuple):
    """Shapes of a window.

    Attributes:
        arrays: The different arrays of its transitions, without `next_obs`, leaves
            `(time, batch, …)`.
        next_obs: The observations after the last step, leaves `(1, batch, …)`.
        kept: The carries before some steps, leaves `(kept, batch, …)`, or None.
    """

    arrays: list[Any]
    next_obs: PyTree
    kept: PyTree


class _Learning(NamedTuple):
    """What the second half of an iteration needs.

    Attributes:
        flops: Floating-point operations.
        reads: Which leaves of the window it reads.
        window: Bytes of those.
        peak: Bytes in use at most: window, optimiser, first carry, and all that is made.
    """

    flops: int
    reads: list[bool]
    window: int
    peak: int


class _Planner:
    """Traces the two halves of an iteration, the second one at different sizes of the window."""

    def __init__(
        self, env: RLEnv, networks: StatefulModule, optimizer: nnx.Optimizer, config: PPOConfig
    ) -> None:
        self._env, self._config = env, config
        self._network_def, variables = nnx.split(networks)
        self._optimizer_def, optimizer_variables = nnx.split(optimizer)
        self._parts = _parts(nnx.state(networks, nnx.Param))
        self._variables, self._optimizer = _shapes((variables, optimizer_variables))
        self._key = jax.eval_shape(lambda: purpose_keys(0).training)
        self._carry, self._env_states = jax.eval_shape(self._first, self._variables)
        self._layout: tuple[Any, list[int]] = (None, [])

    def plan(self, memory: int | None) -> TrainingPlan:
        """Plan a training that has so much memory."""
        n_envs, length = self._config.n_envs, self._config.rollout_length
        jaxpr, window = self._collect()
        here = self._learn(window, n_envs, length)
        leaves = len(jax.tree.leaves((self._variables, self._carry)))
        states = len(jax.tree.leaves(self._env_states))
        collecting = estimate_memory(
            jaxpr,
            wanted=here.reads + [True] * (len(jaxpr.out_avals) - len(here.reads)),
            given_away=[False] * leaves + [True] * states + [False],
        )
        variables, optimizer, carry, env_states = map(
            traced_bytes, (self._variables, self._optimizer, self._carry, self._env_states)
        )

        def needs(learning: _Learning, more_envs: int) -> tuple[int, int]:
            """Return the bytes of the two halves of an iteration."""
            beside_window = (collecting.peak - here.window + carry) * more_envs
            first = variables + optimizer + beside_window + learning.window
            return first, variables + (env_states + carry) * more_envs + learning.peak

        largest: list[int | None] = [None, None]
        if memory is not None:
            budget = memory * (1 - _FREE)
            wider = needs(self._learn(window, _FACTOR * n_envs, length), _FACTOR)
            longer = needs(self._learn(window, n_envs, _FACTOR * length), 1)
            largest = [
                _largest(n_envs, needs(here, 1), wider, budget, self._config.n_minibatches),
                _largest(length, needs(here, 1), longer, budget, self._config.chunk_length or 1),
            ]
        return TrainingPlan(
            n_envs=n_envs,
            rollout_length=length,
            updates=self._config.n_epochs * self._config.n_minibatches,
            parts=self._parts,
            optimizer_bytes=optimizer,
            carry_bytes=carry // n_envs,
            env_state_bytes=env_states // n_envs,
            rollout_flops=length * self._step_flops(),
            learning_flops=here.flops,
            window_bytes=here.window,
            learning_bytes=here.peak - here.window - optimizer - carry,
            iteration_bytes=max(needs(here, 1)),
            memory_bytes=memory,
            largest_n_envs=largest[0],
            largest_rollout_length=largest[1],
        )

    def _network(self, variables: Any) -> StatefulModule:
        return nnx.merge(self._network_def, variables, copy=True)

    def _first(self, variables: Any) -> tuple[PyTree, Any]:
        """Traced: return the first carry and the first environment states."""
        n_envs = self._config.n_envs
        carry = self._network(variables).initialize_state(n_envs)
        return carry, first_env_states(self._env, n_envs, purpose_keys(0))

    def _step_flops(self) -> int:
        """Return the operations of one step of the network."""

        def step(variables: Any, carry: PyTree, obs: PyTree) -> Any:
            out = self._network(variables)(carry, obs)
            return out.next_state, out.output

        obs = self._env_states.obs
        return count_flops(jax.make_jaxpr(step)(self._variables, self._carry, obs))

    def _collect(self) -> tuple[ClosedJaxpr, _Window]:
        """Trace the first half; outputs are the leaves of the window, and then the states."""

        def collect(variables: Any, carry: PyTree, env_states: Any, key: Array) -> Any:
            state = self._state(variables, carry, env_states, None, key)
            collected = collect_window(self._env, state, self._config, key)
            transitions = collected.rollout.replace(next_obs=None)
            arrays, tree, places = distinct_arrays(transitions)
            self._layout = (tree, places)
            window = _Window(arrays, collected.rollout.next_obs, collected.kept)
            return window, collected.network_state, collected.env_state, nnx.state(state.networks)

        arguments = (self._variables, self._carry, self._env_states, self._key)
        jaxpr, (window, *_) = jax.make_jaxpr(collect, return_shape=True)(*arguments)
        return jaxpr, window

    def _learn(self, window: _Window, n_envs: int, length: int) -> _Learning:
        """Trace the second half at some size of the window."""
        config = dataclasses.replace(self._config, n_envs=n_envs, rollout_length=length)
        tree, places = self._layout

        def learn(
            window: _Window, optimizer: Any, carry: PyTree, variables: Any, end: PyTree, key: Array
        ) -> Any:
            rollout = jax.tree.unflatten(tree, [window.arrays[place] for place in places])
            rollout = rollout.replace(next_obs=window.next_obs)
            live_optimizer = nnx.merge(self._optimizer_def, optimizer, copy=True)
            state = self._state(variables, carry, (), live_optimizer, key)
            collected = Collected(end, (), rollout, window.kept)
            settings = loss_settings(config)
            state, metrics = conclude(state, collected, config, settings, iteration_keys(key))
            return nnx.state(state.networks), nnx.state(live_optimizer), metrics

        resized = self._resized(window, n_envs, length)
        carry = _with_batch(self._carry, self._config.n_envs, n_envs)
        given = (resized, self._optimizer, carry)
        jaxpr = jax.make_jaxpr(learn)(*given, self._variables, carry, self._key)
        number = len(jax.tree.leaves(given))
        memory = estimate_memory(jaxpr, given_away=[i < number for i in range(len(jaxpr.in_avals))])
        leaves = jax.tree.leaves(resized)
        reads = memory.reads[: len(leaves)]
        stored = sum(traced_bytes(leaf) for leaf, read in zip(leaves, reads, strict=True) if read)
        return _Learning(count_flops(jaxpr), reads, stored, memory.peak)

    def _state(
        self, variables: Any, carry: PyTree, env_states: Any, optimizer: Any, key: Array
    ) -> TrainingState:
        steps = jnp.zeros((), jnp.float32)
        return TrainingState(
            self._network(variables), carry, env_states, optimizer, key, steps, step_words(0)
        )

    def _resized(self, window: _Window, n_envs: int, length: int) -> _Window:
        """Return the shapes of a window of another size."""
        config = dataclasses.replace(self._config, n_envs=n_envs, rollout_length=length)
        window = _with_batch(window, self._config.n_envs, n_envs, axis=1)
        kept = len(chunks.kept_steps(config))
        return window._replace(
            arrays=_with_first_axis(window.arrays, length),
            kept=_with_first_axis(window.kept, kept),
        )


def _largest(
    size: int, needs: tuple[int, int], needs_more: tuple[int, int], limit: float, step: int
) -> int:
    """Return the largest multiple of `step` that fits, on straight lines through two sizes.

    Args:
        size: The smaller size.
        needs: Bytes of the two halves of an iteration there.
        needs_more: Bytes at `_FACTOR` times that size.
        limit: Bytes that there are.
        step: What the size must be a multiple of.
    """
    found = []
    for low, high in zip(needs, needs_more, strict=True):
        slope = (high - low) / (_FACTOR * size - size)
        found.append(size + (limit - low) / slope)
    return max(0, int(min(found) // step) * step)


def _with_batch(tree: Any, old: int, new: int, axis: int = 0) -> Any:
    """Return shapes with another number of environments."""

    def change(leaf: Any) -> Any:
        shape = list(leaf.shape)
        if len(shape) > axis and shape[axis] == old:  # metrics may be one for all
            shape[axis] = new
        return jax.ShapeDtypeStruct(shape, leaf.dtype)

    return jax.tree.map(change, tree)


def _with_first_axis(tree: Any, length: int) -> Any:
    """Return shapes with another first axis."""
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct((length, *leaf.shape[1:]), leaf.dtype), tree
    )


def _shapes(tree: Any) -> Any:
    """Return the shapes of arrays."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree)


def _parts(params: Any) -> tuple[PlannedPart, ...]:
    """Return the parameters by the highest parts of a network that it has several of."""
    found = {
        # Where containers keep their children says nothing.
        tuple(str(name) for name in path if name != "layers"): leaf[...]
        for path, leaf in nnx.to_flat_state(params)
    }
    shared = len(os.path.commonprefix(list(found))) if len(found) > 1 else 0
    parts: dict[str, list[Any]] = {}
    for path, leaf in found.items():
        parts.setdefault("/".join(path[: shared + 1]), []).append(leaf)
    return tuple(
        PlannedPart(path, sum(leaf.size for leaf in leaves), traced_bytes(leaves))
        for path, leaves in parts.items()
    )
