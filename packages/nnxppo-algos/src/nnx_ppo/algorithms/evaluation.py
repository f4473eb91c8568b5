"""Evaluating a policy over whole episodes."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, PyTree, Shaped

from nnx_ppo.algorithms._functional import functional_copy, strongly_typed
from nnx_ppo.algorithms.metrics import mean_and_std, write_tree
from nnx_ppo.algorithms.types import LoggingLevel
from nnx_ppo.core import JaxDataclass, RLEnv, StatefulModule, time_limit_flag


class Episodes(JaxDataclass):
    """Episodes under way, one per environment.

    Attributes:
        step: Steps taken.
        variables: The network's variables other than parameters.
        network_state: Its carry.
        env_state: Environment states.
        alive: Whose episode has not ended yet.
        returns: Return so far, a tree like the reward.
        lifespan: Steps so far.
        sums: Sums over the steps that were alive, of the metrics asked for.
    """

    step: Int[Array, ""]
    variables: Any
    network_state: PyTree
    env_state: Any
    alive: Bool[Array, " batch"]
    returns: PyTree[Float[Array, " batch"]]
    lifespan: Int[Array, " batch"]
    sums: PyTree[Float[Array, "batch ..."]]


def eval_rollout(  # noqa: PLR0917  (documented)
    env: RLEnv,
    networks: StatefulModule,
    n_envs: int,
    max_episode_length: int,
    key: Shaped[Array, "..."],
    logging_percentiles: tuple[int, ...] | None = None,
    logging_level: LoggingLevel = LoggingLevel.NONE,
) -> dict[str, Any]:
    """Run one episode in each of `n_envs` environments and report on them.

    The network acts in its current mode (call `networks.eval()` for deterministic actions) and
    is not changed: its random streams stay where they are. The run ends as soon as every
    episode has ended.

    Args:
        env: The environment, written for a single instance.
        networks: The network.
        n_envs: Number of episodes.
        max_episode_length: Steps after which an episode is cut.
        key: Key that the environments are reset from.
        logging_percentiles: Percentiles to log, or None for mean and std.
        logging_level: `ENV_METRICS` and `NETWORK_METRICS` add the averages of those metrics over
            the steps of each episode.

    Returns:
        Scalars by name: `eval/episode_reward` (the sum over named rewards, which follow as
        `eval/episode_reward/<name>`) and `eval/lifespan`, with their endings;
        `eval/episode_reward/mean` and `/std` always.
    """
    episodes = run_episodes(env, networks, n_envs, max_episode_length, key, logging_level)
    return report(episodes, logging_percentiles)


def run_episodes(
    env: RLEnv,
    networks: StatefulModule,
    n_envs: int,
    max_episode_length: int,
    key: Shaped[Array, "..."],
    logging_level: LoggingLevel,
) -> Episodes:
    """Run one episode in each environment; arguments as in `eval_rollout`."""
    graphdef, params, variables = nnx.split(functional_copy(networks), nnx.Param, ...)

    def step(now: Episodes) -> Episodes:
        live = nnx.merge(graphdef, params, now.variables, copy=True)
        out = live(now.network_state, now.env_state.obs)
        stepped = strongly_typed(jax.vmap(env.step)(now.env_state, out.output.actions))
        ended = jnp.asarray(stepped.done).astype(bool) | time_limit_flag(stepped)
        seen = _asked_metrics(stepped.metrics, out.metrics, logging_level)
        return Episodes(
            step=now.step + 1,
            variables=nnx.state(live, nnx.Not(nnx.Param)),
            network_state=out.next_state,
            env_state=stepped,
            alive=now.alive & ~ended,
            returns=_add_where(now.alive, now.returns, stepped.reward),
            lifespan=now.lifespan + now.alive,
            sums=_add_where(now.alive, now.sums, seen),
        )

    live = nnx.merge(graphdef, params, variables, copy=True)
    first = _first_episodes(env, live, n_envs, key)
    after = jax.eval_shape(step, first)
    # Only shapes are known of what a step reports, and they suffice for sums that start at 0.
    first = first.replace(sums=jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), after.sums))
    return jax.lax.while_loop(
        lambda now: now.alive.any() & (now.step < max_episode_length), step, first
    )


def _first_episodes(env: RLEnv, live: StatefulModule, n_envs: int, key: Array) -> Episodes:
    """Return episodes before their first step; `sums` is still missing."""
    env_state = strongly_typed(jax.vmap(env.reset)(jax.random.split(key, n_envs)))
    network_state = live.initialize_state(n_envs)
    zeros = jnp.zeros(n_envs, jnp.float32)
    return Episodes(
        step=jnp.zeros((), jnp.int32),
        variables=nnx.state(live, nnx.Not(nnx.Param)),
        network_state=network_state,
        env_state=env_state,
        alive=jnp.ones(n_envs, bool),
        returns=jax.tree.map(lambda _: zeros, env_state.reward),
        lifespan=jnp.zeros(n_envs, jnp.int32),
        sums=None,
    )


def _asked_metrics(env_metrics: PyTree, net_metrics: PyTree, level: LoggingLevel) -> PyTree:
    """Return those metrics of a step that the logging level asks for."""
    asked = {}
    if LoggingLevel.ENV_METRICS in level:
        asked["env"] = env_metrics
    if LoggingLevel.NETWORK_METRICS in level:
        asked["net"] = net_metrics
    return asked


def _add_where(alive: Bool[Array, " batch"], sums: PyTree, values: PyTree) -> Any:
    """Add values to sums where alive. A value that is shared by the batch counts for each."""

    def add(total: Array | None, value: Array) -> Array:
        value = jnp.asarray(value, jnp.float32)
        if value.ndim == 0:
            value = jnp.broadcast_to(value, alive.shape)
        mask = alive.reshape((-1,) + (1,) * (value.ndim - 1))
        return jnp.where(mask, value, 0.0) + (0.0 if total is None else total)

    if sums is None:
        return jax.tree.map(lambda value: add(None, value), values)
    return jax.tree.map(add, sums, values)


def report(episodes: Episodes, percentile_levels: tuple[int, ...] | None) -> dict[str, Any]:
    """Reduce finished episodes to scalars."""
    total = jnp.asarray(sum(jax.tree.leaves(episodes.returns)))
    parts: list[tuple[str, PyTree]] = [("episode_reward", total), ("lifespan", episodes.lifespan)]
    if jax.tree.structure(episodes.returns) != jax.tree.structure(total):
        parts.append(("episode_reward", episodes.returns))
    for name, sums in episodes.sums.items():
        parts.append((name, jax.tree.map(lambda leaf: _per_step(leaf, episodes.lifespan), sums)))
    metrics: dict[str, Any] = mean_and_std("eval/episode_reward", total)
    for name, tree in parts:
        write_tree(metrics, f"eval/{name}", tree, percentile_levels)
    return metrics


def _per_step(sums: Array, lifespan: Array) -> Array:
    """Divide the sums of each episode by its length."""
    return sums / lifespan.reshape((-1,) + (1,) * (sums.ndim - 1))
