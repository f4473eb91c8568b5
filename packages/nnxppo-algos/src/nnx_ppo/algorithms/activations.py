"""Recording what every unit of a network does during an episode, and keeping it in a file."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, PyTree, Shaped

from nnx_ppo.algorithms._functional import functional_copy, strongly_typed
from nnx_ppo.algorithms._optional import optional_module
from nnx_ppo.algorithms._versions import installed_versions
from nnx_ppo.core import JaxDataclass, RLEnv, StatefulModule, scan_module, time_limit_flag
from nnx_ppo.networks.recording import extract_activations, with_recording


class RecordedEpisodes(JaxDataclass):
    """One episode in each environment, step by step; all leaves are `(time, env, …)`.

    Attributes:
        activations: The output of every layer, a tree as `extract_activations` returns.
        observations: What the network saw, a tree like the environment's.
        actions: What it did, a tree like the environment's.
        rewards: Rewards of the steps, a tree like the environment's.
        valid: Whether the step belongs to the episode; what follows its end does not.
        ended: Whether the episode ended with this step, for whatever reason.
        truncated: Whether it ended by time limit.
    """

    activations: PyTree
    observations: PyTree
    actions: PyTree
    rewards: PyTree
    valid: Bool[Array, "*time env"]
    ended: Bool[Array, "*time env"]
    truncated: Bool[Array, "*time env"]


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

    def see(env_state: Any, out: Any, stepped: Any, over: Array, ends: Array) -> Any:
        return extract_activations(out.metrics), over

    return _recorded(env, networks, n_envs, max_episode_length, key, see)


def record_episodes(
    env: RLEnv,
    networks: StatefulModule,
    n_envs: int,
    max_episode_length: int,
    key: Shaped[Array, "..."],
) -> RecordedEpisodes:
    """Run one episode in each environment, and return activations and all that goes with them.

    As `record_activations_rollout`, with the same arguments, but observations, actions, rewards
    and the ends of episodes come along.

    Args:
        env: The environment, written for a single instance.
        networks: The network.
        n_envs: Number of episodes.
        max_episode_length: Number of steps.
        key: Key that the environments are reset from.
    """

    def see(env_state: Any, out: Any, stepped: Any, over: Array, ends: Array) -> RecordedEpisodes:
        return RecordedEpisodes(
            activations=extract_activations(out.metrics),
            observations=env_state.obs,
            actions=out.output.actions,
            rewards=stepped.reward,
            valid=~over,
            ended=ends & ~over,
            truncated=time_limit_flag(stepped) & ~over,
        )

    return _recorded(env, networks, n_envs, max_episode_length, key, see)


def _recorded(
    env: RLEnv,
    networks: StatefulModule,
    n_envs: int,
    max_episode_length: int,
    key: Shaped[Array, "..."],
    see: Callable[[Any, Any, Any, Array, Array], Any],
) -> Any:
    """Run episodes, and stack what `see` keeps of each step.

    `see` gets the environment states, the network's output, the states after the step, whose
    episode was over before the step, and whose ends with it or is over.
    """
    live = functional_copy(with_recording(networks))
    live.eval()
    env_state = strongly_typed(jax.vmap(env.reset)(jax.random.split(key, n_envs)))
    start = (live.initialize_state(n_envs), env_state, jnp.zeros(n_envs, bool))

    def step(live: StatefulModule, carry: Any, _: Any) -> Any:
        network_state, env_state, over = carry
        out = live(network_state, env_state.obs)
        stepped = strongly_typed(jax.vmap(env.step)(env_state, out.output.actions))
        ends = jnp.asarray(stepped.done).astype(bool) | time_limit_flag(stepped)
        return (out.next_state, stepped, over | ends), see(env_state, out, stepped, over, ends)

    _, seen = scan_module(live, step, start, jnp.arange(max_episode_length))
    return seen


def save_activations(
    path: str | os.PathLike[str],
    env: RLEnv,
    networks: StatefulModule,
    n_envs: int,
    max_episode_length: int,
    key: Shaped[Array, "..."],
    *,
    environment: str | None = None,
) -> None:
    """Run one episode in each environment, and write everything to a netCDF file.

    `xarray.open_datatree(path)` opens it. Beside the axes `time` and `env` the root has the
    variables `valid`, `ended` and `truncated`, as in `RecordedEpisodes`. Every array is the
    variable `values` of a group of its own, whose path leads through the network or the tree:
    `activations/…` with the axes `(time, env, unit)`, `observations/…` and `actions/…` with
    `(time, env, feature)`, and `rewards/…` with `(time, env)`. Several further axes are
    `unit_0`, `unit_1`, …

    The root's attributes are `versions`, `step_length` in seconds (the environment's `dt`) and
    `environment`; the latter two only if they are known.

    Args:
        path: The file; replaced if it is there, and complete or not there whatever happens. Its
            folder is made if it is missing.
        env: The environment, written for a single instance.
        networks: The network, which is left as it is.
        n_envs: Number of episodes.
        max_episode_length: Number of steps.
        key: Key that the environments are reset from.
        environment: Name of the environment, to keep in the file.

    Raises:
        ModuleNotFoundError: The extra `nnxppo-algos[analysis]` is not installed.
        ValueError: Two arrays have the same path, because names have slashes in them.
    """
    xarray, *_ = (
        optional_module(name, "analysis", "save_activations")
        for name in ("xarray", "h5netcdf", "h5py")  # the latter two write the file
    )
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    graphdef, variables = nnx.split(networks)

    @jax.jit
    def record(variables: Any, key: Array) -> RecordedEpisodes:
        live = nnx.merge(graphdef, variables, copy=True)
        return record_episodes(env, live, n_envs, max_episode_length, key)

    tree = _as_data_tree(xarray, record(variables, key))
    tree.attrs["versions"] = ", ".join(" ".join(pair) for pair in installed_versions().items())
    step_length = getattr(env, "dt", None)
    if step_length is not None:
        tree.attrs["step_length"] = float(step_length)
    if environment is not None:
        tree.attrs["environment"] = environment

    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        tree.to_netcdf(part, engine="h5netcdf")
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def _as_data_tree(xarray: Any, episodes: RecordedEpisodes) -> Any:
    """Return episodes as an `xarray.DataTree`."""
    time, n_envs = episodes.valid.shape
    flags = {name: getattr(episodes, name) for name in ("valid", "ended", "truncated")}
    groups = {
        "/": xarray.Dataset(
            {name: (("time", "env"), np.asarray(flag)) for name, flag in flags.items()},
            {"time": np.arange(time), "env": np.arange(n_envs)},
        )
    }
    axes = {"activations": "unit", "observations": "feature", "actions": "feature"}
    for name in (*axes, "rewards"):
        for group, array in _named_leaves(name, getattr(episodes, name)):
            if group in groups:
                raise ValueError(
                    f"Two arrays have the path {group!r}: a slash in a name reads like two names."
                )
            further = _axis_names(axes.get(name, "feature"), array.ndim - 2)
            groups[group] = xarray.Dataset({"values": (("time", "env", *further), array)})
    return xarray.DataTree.from_dict(groups)


def _named_leaves(name: str, tree: PyTree) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the group and the values of each array of a tree."""
    for path, leaf in jax.tree.leaves_with_path(tree):
        array = np.asarray(leaf)
        # netCDF has no floats of 16 bits.
        short = jnp.issubdtype(array.dtype, jnp.floating) and array.dtype.itemsize < 4
        inner = jax.tree_util.keystr(path, simple=True, separator="/")
        yield f"{name}/{inner}".rstrip("/"), array.astype(np.float32) if short else array


def _axis_names(name: str, number: int) -> list[str]:
    """Return names for the axes behind time and environment."""
    return [name] if number == 1 else [f"{name}_{index}" for index in range(number)]
