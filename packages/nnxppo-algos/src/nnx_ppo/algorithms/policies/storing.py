"""`save_policy` and `load_policy`."""

import os
from collections.abc import Iterable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from nnx_ppo.algorithms._plain import to_plain
from nnx_ppo.algorithms._versions import installed_versions
from nnx_ppo.algorithms.policies._describe import describe
from nnx_ppo.algorithms.policies._files import damaged, read_arrays, read_record, write_folder
from nnx_ppo.algorithms.policies._names import Classes
from nnx_ppo.algorithms.policies._rebuild import rebuild
from nnx_ppo.algorithms.policies.policy import Policy, actions_of
from nnx_ppo.core import RLEnv, StatefulModule

_FORMAT = 1
# What is described in `policy.json` by itself, in this order.
_DESCRIBED = ("overrides", "config", "observation_spec", "action_spec", "networks")


def save_policy(
    path: str | os.PathLike[str],
    networks: StatefulModule,
    *,
    env: RLEnv | None = None,
    environment: str | None = None,
    overrides: Mapping[str, Any] | None = None,
    config: Any = None,
    step: int | None = None,
) -> None:
    """Write a network to a folder from which `load_policy` makes it again, without your script.

    The folder holds `policy.json`, which people can read, and the arrays. It is there as a whole
    or not at all; a policy that is in its place already is replaced at one stroke.

    Args:
        path: The folder.
        networks: The network, which is left as it is.
        env: The environment it acts in, from which the file learns what observations and actions
            look like: without it a loaded policy cannot check what it is shown.
        environment: Name of the environment, for who loads the policy.
        overrides: Settings that the environment was loaded with, plain data.
        config: Settings of the training, such as a `TrainConfig`; they are stored as plain data.
        step: Environment steps of the training.

    Raises:
        TypeError: `networks` is not a `StatefulModule`, does not return a `PPONetworkOutput` on
            the observations of `env`, or holds something that cannot be described, such as a
            lambda; says where it is and what to do.

    Example:
        >>> import tempfile
        >>> from nnx_ppo.networks import make_mlp_actor_critic
        >>> folder = tempfile.mkdtemp()
        >>> save_policy(folder, make_mlp_actor_critic(3, 2, [8], [8], nnx.Rngs(0)))
        >>> policy = load_policy(folder)
        >>> policy.reset()
        >>> policy(np.zeros(3)).shape
        (2,)
    """
    if not isinstance(networks, StatefulModule):
        raise TypeError(
            f"save_policy: networks must be a StatefulModule, got {type(networks).__name__}."
        )
    observation_spec = action_spec = None
    if env is not None:
        key = jax.eval_shape(lambda: jax.random.key(0))
        observation_spec = _spec_of(jax.eval_shape(env.reset, key).obs)
        action_spec = _action_spec(networks, observation_spec)
    arrays: dict[str, np.ndarray] = {}
    parts = {
        "overrides": dict(overrides or {}),
        "config": None if config is None else to_plain(config),
        "observation_spec": observation_spec,
        "action_spec": action_spec,
        "networks": networks,
    }
    record = {
        "format": _FORMAT,
        "versions": installed_versions(),
        "environment": environment,
        "step": None if step is None else int(step),
        **{name: describe(parts[name], name, arrays) for name in _DESCRIBED},
    }
    write_folder(Path(path), record, arrays)


def load_policy(path: str | os.PathLike[str], trusted: Iterable[type] = ()) -> Policy:
    """Load a policy that `save_policy` wrote, in evaluation mode.

    A file can run no code: it names classes and functions, and finds only the modules of
    `flax.nnx` and `nnx_ppo`, functions that turn arrays into arrays, and the classes in `trusted`.

    Args:
        path: The folder.
        trusted: Classes of others that the network is made of. A file gives them what attributes
            it likes, so trust none that would do harm with some.

    Raises:
        FileNotFoundError: There is no policy; says which are near.
        ValueError: The file names a class that is not trusted, comes from a newer version, is
            damaged, or its network no longer fits the specs it was saved with.
    """
    path = Path(path)
    record, arrays = _read(path)
    classes = Classes(trusted)
    try:
        parts = {name: rebuild(record[name], name, arrays, classes) for name in _DESCRIBED}
        facts = {name: record[name] for name in ("environment", "step", "versions")}
        networks = parts["networks"]
        if not isinstance(networks, StatefulModule):
            raise ValueError(
                f"{path} holds a {type(networks).__name__}, which is no StatefulModule."
            )
        policy = Policy(**facts, **parts)
    except (AttributeError, KeyError, TypeError) as error:
        raise damaged(path, f"it describes no policy: {error!r}") from error
    networks.eval()
    _check_that_it_runs(policy, path)
    return policy


def _read(path: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Return what a folder holds, of one policy even if another takes its place meanwhile."""
    record = read_record(path)
    _check_format(path, record)
    try:
        return record, read_arrays(path, record)
    except ValueError:
        if read_record(path) == record:
            raise
    return _read(path)


def _spec_of(tree: Any) -> Any:
    """Return shapes and dtypes alone."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree)


def _action_spec(networks: StatefulModule, observation_spec: Any) -> Any:
    """Return shapes and dtypes of an action, without batch axis."""
    graphdef, variables = nnx.split(networks)

    def act(variables: Any) -> Any:
        live = nnx.merge(graphdef, variables, copy=True)
        obs = jax.tree.map(lambda leaf: jnp.zeros((1, *leaf.shape), leaf.dtype), observation_spec)
        actions = actions_of(live(live.initialize_state(1), obs).output)
        return jax.tree.map(lambda leaf: leaf[0], actions)

    return _spec_of(jax.eval_shape(act, variables))


def _check_format(path: Path, record: Mapping[str, Any]) -> None:
    found = record.get("format")
    if found == _FORMAT:
        return
    if isinstance(found, int) and found > _FORMAT:
        raise ValueError(
            f"{path} has the format {found}, written by nnxppo-algos "
            f"{_saved_by(record)}; this version, "
            f"{version('nnxppo-algos')}, reads up to {_FORMAT}. Install the newer one."
        )
    raise ValueError(f"{path}: policy.json has the format {found!r}, which is none of ours.")


def _saved_by(record: Mapping[str, Any]) -> Any:
    versions = record.get("versions")
    return versions.get("nnxppo-algos") if isinstance(versions, dict) else None


def _check_that_it_runs(policy: Policy, path: Path) -> None:
    """Raise if the network, tried on shapes alone, no longer does what it did when it was saved."""
    if policy.observation_spec is None:
        return
    try:
        found = _action_spec(policy.networks, policy.observation_spec)
    except Exception as error:
        changed = {
            name: f"{saved}, now {installed}"
            for name, installed in installed_versions().items()
            if (saved := policy.versions.get(name)) != installed
        }
        error.add_note(
            f"while trying the network of {path}. Other versions than those that saved it: "
            f"{changed or 'none'}."
        )
        raise
    if found != policy.action_spec:
        raise ValueError(
            f"{path}: the network returns other actions than when it was saved, expected "
            f"{policy.action_spec}, got {found}. Has one of its classes changed?"
        )
