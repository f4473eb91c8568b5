"""Recording what every unit of a network does during an episode."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, PyTree, Shaped

from nnx_ppo.algorithms._functional import functional_copy, strongly_typed
from nnx_ppo.core import RLEnv, StatefulModule, scan_module, time_limit_flag
from nnx_ppo.networks.recording import extract_activations, with_recording


def record_activations_rollout(
    env: RLEnv,
    networks: StatefulModule,
    n_envs: int,
    max_episode_length: int,
    key: Shaped[Array, "..."],
) -> tuple[PyTree, Bool[Array, "time batch"]]:
    """Run one episode in each environment, and return the activations of every layer.

    A recording copy of the network runs in evaluation mode; the network itself, its mode and its
    random streams stay as they are. Environments are not reset: what follows the end of an
    episode is to be masked out with the second result. All of it is kept on the device, which
    takes `max_episode_length · n_envs` times the number of units.

    Args:
        env: The environment, written for a single instance.
        networks: The network.
        n_envs: Number of episodes.
        max_episode_length: Number of steps.
        key: Key that the environments are reset from.

    Returns:
        The activations, a tree as `extract_activations` returns, leaves
        `(max_episode_length, n_envs, …)`; and `(max_episode_length, n_envs)`, whether the episode
        had ended before that step.
    """
    live = functional_copy(with_recording(networks))
    live.eval()
    env_state = strongly_typed(jax.vmap(env.reset)(jax.random.split(key, n_envs)))
    start = (live.initialize_state(n_envs), env_state, jnp.zeros(n_envs, bool))

    def step(live: StatefulModule, carry: Any, _: Any) -> Any:
        network_state, env_state, ended = carry
        out = live(network_state, env_state.obs)
        stepped = strongly_typed(jax.vmap(env.step)(env_state, out.output.actions))
        ends = jnp.asarray(stepped.done).astype(bool) | time_limit_flag(stepped)
        return (out.next_state, stepped, ended | ends), (extract_activations(out.metrics), ended)

    _, (activations, dones) = scan_module(live, step, start, jnp.arange(max_episode_length))
    return activations, dones
