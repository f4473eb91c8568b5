"""The plain form of an iteration: what the fast one is compared with, in results and in time.

It replays a window step by step, and at every step it resets every environment and asks for the
value of every last observation, to select what is needed afterwards.
"""

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, PyTree, Shaped

from nnx_ppo.algorithms import rollout
from nnx_ppo.algorithms._functional import clone_keys, query_values, strongly_typed
from nnx_ppo.algorithms.resets import batched_leaves
from nnx_ppo.core import RLEnv, StatefulModule, StatefulModuleOutput, UnrollOutput, unroll_stepwise


class Stepwise(StatefulModule):
    """A network that is replayed step by step, whatever it knows of faster ways.

    Args:
        inner: The network. Parameters, statistics and random streams remain its own.
    """

    def __init__(self, inner: StatefulModule) -> None:
        self.inner = inner

    def __call__(
        self, module_state: Any, obs: Any, rollout_extras: Any = None
    ) -> StatefulModuleOutput:
        """Run one step of the network."""
        return self.inner(module_state, obs, rollout_extras)

    def initialize_state(self, batch_size: int) -> Any:
        """Return the network's carry at the start of an episode."""
        return self.inner.initialize_state(batch_size)

    def reset_state(self, prev_state: Any) -> Any:
        """Return the network's carry after the end of an episode."""
        return self.inner.reset_state(prev_state)

    def update_statistics(self, rollout_extras: Any) -> None:
        """Fold a rollout into the network's statistics."""
        self.inner.update_statistics(rollout_extras)

    def unroll(
        self,
        state: Any,
        xs: PyTree,
        done: Bool[Array, "time batch"],
        rollout_extras: Any = None,
    ) -> UnrollOutput:
        """Run a window by core's definition of it."""
        return unroll_stepwise(self, state, xs, done, rollout_extras)


@contextlib.contextmanager
def plain_form() -> Iterator[None]:
    """Trace rollouts in their plain form.

    Only what is traced in this context is changed: a function that is compiled already stays as it
    is, and one that is compiled here stays plain. Wrap the network in `Stepwise` as well; then the
    fast form's compiled iterations do not fit it.
    """
    with mock.patch.multiple(
        rollout, reset_finished=reset_all_and_select, values_before_reset=all_values_before_reset
    ):
        yield


def reset_all_and_select(
    env: RLEnv,
    env_state: Any,
    ended: Bool[Array, " batch"],
    keys: Shaped[Array, "batch ..."],
    actions: PyTree = None,
) -> Any:
    """Do what `reset_finished` does by resetting every environment."""
    del actions
    fresh = strongly_typed(jax.vmap(env.reset)(clone_keys(keys)))
    return jax.tree.map(
        lambda new, old, per_env: _select(ended, new, old) if per_env else old,
        fresh,
        env_state,
        batched_leaves(env, keys),
    )


def all_values_before_reset(
    networks: StatefulModule,
    network_state: PyTree,
    obs: PyTree,
    template: PyTree,
    truncated: Bool[Array, " batch"],
) -> Any:
    """Do what `values_before_reset` does by querying the values of all environments."""
    del template
    found = query_values(networks, network_state, obs)
    return jax.tree.map(lambda value: _select(truncated, value, jnp.zeros_like(value)), found)


def _select(cond: Bool[Array, " batch"], on_true: Array, on_false: Array) -> Array:
    """Select between two arrays along their first axis."""
    return jnp.where(cond.reshape((-1,) + (1,) * (on_true.ndim - 1)), on_true, on_false)
