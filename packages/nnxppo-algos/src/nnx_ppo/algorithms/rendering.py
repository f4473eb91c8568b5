"""What rendering needs of an episode: a slim state for each frame."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree, Shaped

from nnx_ppo.algorithms._functional import functional_copy, strongly_typed
from nnx_ppo.core import RLEnv, StatefulModule, reset_where, scan_module, time_limit_flag


class SlimData(NamedTuple):
    """The fields of MuJoCo's data that a renderer reads; contacts and the like are left out."""

    qpos: Any
    qvel: Any
    time: Any
    mocap_pos: Any
    mocap_quat: Any
    xfrc_applied: Any


class SlimState(NamedTuple):
    """An environment state without what only physics needs.

    `data` is a `SlimData`, or None for an environment without MuJoCo; the others are those of the
    environment's state.
    """

    data: Any
    done: Any
    info: Any
    metrics: Any


def eval_rollout_for_render_scan(
    env: RLEnv, networks: StatefulModule, max_episode_length: int, key: Shaped[Array, "..."]
) -> tuple[SlimState, SlimState, Float[Array, ""]]:
    """Run one environment for a number of steps, and keep what rendering needs of each.

    Where an episode ends, the carry and the environment are reset, and the next one follows. The
    network acts in its current mode and is not changed: its random streams stay where they are.

    Args:
        env: The environment, written for a single instance.
        networks: The network.
        max_episode_length: Number of steps.
        key: Key that the environment is reset from.

    Returns:
        The state before each step, leaves `(max_episode_length, …)`; the state after the last
        one; and the return of the first episode, all rewards added up.
    """
    keys = jax.random.split(key, 1 + max_episode_length)
    live = functional_copy(networks)
    env_state = strongly_typed(env.reset(keys[0]))
    start = (live.initialize_state(1), env_state, jnp.ones((), bool), jnp.zeros(()))

    def step(live: StatefulModule, carry: Any, key: Array) -> Any:
        network_state, env_state, is_first, total = carry
        out = live(network_state, _batch_of_one(env_state.obs))
        action = jax.tree.map(lambda leaf: leaf[0], out.output.actions)
        stepped = strongly_typed(env.step(env_state, action))
        ended = jnp.asarray(stepped.done).astype(bool) | time_limit_flag(stepped)
        reward = sum(jnp.asarray(leaf, jnp.float32) for leaf in jax.tree.leaves(stepped.reward))
        following = jax.lax.cond(ended, lambda: strongly_typed(env.reset(key)), lambda: stepped)
        network_state = reset_where(live, ended[None], out.next_state)
        total = total + jnp.where(is_first, reward, 0.0)
        return (network_state, following, is_first & ~ended, total), _slim(env_state)

    (_, env_state, _, total), states = scan_module(live, step, start, keys[1:])
    return states, _slim(env_state), total


def unstack_trajectory(
    stacked_states: SlimState, final_state: SlimState, max_episode_length: int
) -> list[SlimState]:
    """Return a stacked trajectory as a list, which renderers take. Not for use inside of `jit`.

    Args:
        stacked_states: What `eval_rollout_for_render_scan` returned, leaves
            `(max_episode_length, …)`.
        final_state: The state after the last step.
        max_episode_length: Number of steps.

    Returns:
        `max_episode_length + 1` states with NumPy arrays.
    """
    host = jax.tree.map(_on_host, stacked_states)
    states = [jax.tree.map(lambda leaf, t=t: leaf[t], host) for t in range(max_episode_length)]
    return [*states, jax.tree.map(_on_host, final_state)]


def frame_rate(env: RLEnv, default: float = 30.0) -> float:
    """Return the frames per second at which a video plays at the speed of the simulation.

    Args:
        env: The environment; `dt`, if it has one, is the time of a step in seconds.
        default: What to return where it has none.
    """
    dt = getattr(env, "dt", None)
    return default if dt is None else 1.0 / dt


def _slim(env_state: Any) -> SlimState:
    data = getattr(env_state, "data", None)
    if data is not None:
        data = SlimData(*(getattr(data, field) for field in SlimData._fields))
    return SlimState(data, env_state.done, env_state.info, env_state.metrics)


def _batch_of_one(tree: PyTree) -> Any:
    return jax.tree.map(lambda leaf: jnp.asarray(leaf)[None], tree)


def _on_host(leaf: Any) -> Any:
    """Return a NumPy array; random keys stay with JAX, since NumPy has none."""
    is_key = jnp.issubdtype(jnp.result_type(leaf), jax.dtypes.prng_key)
    return leaf if is_key else np.asarray(leaf)
