"""What a run has learned: its network, and the environment to act in."""

import dataclasses
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from flax import nnx

from nnx_ppo.algorithms.checkpointing import best_checkpoint, latest_checkpoint, load_checkpoint
from nnx_ppo.algorithms.checks import check_network
from nnx_ppo.algorithms.cli.environments import as_text, load_environment
from nnx_ppo.algorithms.cli.network_config import make_network
from nnx_ppo.algorithms.cli.run_config import RunConfig, Settings, read_settings
from nnx_ppo.algorithms.cli.run_folder import CHECKPOINTS, is_run
from nnx_ppo.algorithms.optimizers import configured_optimizer, make_optimizer
from nnx_ppo.algorithms.policies import load_policy
from nnx_ppo.core import RLEnv, StatefulModule

LATEST = "latest"
BEST = "best"


@dataclasses.dataclass(frozen=True)
class Acting:
    """A network that acts in an environment.

    Attributes:
        env_name: Name of the environment.
        overrides: Its settings.
        env: The environment.
        networks: The network, in evaluation mode.
        step: Environment steps it was trained for, None if unknown.
        settings: Settings of its run, None if it came from the folder of a policy.
    """

    env_name: str
    overrides: dict[str, str]
    env: RLEnv
    networks: StatefulModule
    step: int | None
    settings: Settings | None


def load_acting(
    run: str, checkpoint: str, env_name: str | None, overrides: Mapping[str, str]
) -> Acting:
    """Load what a run has learned.

    Args:
        run: A run folder, or a folder that `save_policy` wrote.
        checkpoint: "latest", "best" or the step of a checkpoint.
        env_name: Another environment to act in; that of the run if None.
        overrides: Settings of the environment, beside those of the run if it is the run's.

    Raises:
        FileNotFoundError: There is no such run or checkpoint; says which there are.
        ValueError: They cannot be read, or the network does not fit the environment.
    """
    path = Path(run)
    is_policy = (path / "policy.json").is_file() and not is_run(path)
    learned = _from_policy(path, checkpoint) if is_policy else _from_run(path, checkpoint)
    name = env_name or learned.env_name
    if name is None:
        raise ValueError(f"{path} does not say its environment; name it with --env.")
    own = learned.overrides if name == learned.env_name else {}
    settings = {**own, **overrides}
    env = learned.env
    if env is None or (name, settings) != (learned.env_name, own):
        env = load_environment(name, settings)
        check_network(env, learned.networks, combine_advantages=True, name=run, values=False)
    learned.networks.eval()
    return Acting(name, settings, env, learned.networks, learned.step, learned.settings)


def load_saved(
    folder: Path, settings: Settings, networks: StatefulModule, cure: str
) -> dict[str, Any]:
    """Load a checkpoint of a run, as `load_checkpoint` does.

    Args:
        folder: The checkpoint.
        settings: The run.
        networks: Takes the weights, in place.
        cure: What to do if it is damaged, where there are others.
    """
    try:
        return load_checkpoint(folder, networks, _optimizer(settings, networks))
    except (ValueError, pickle.UnpicklingError) as error:
        others = [path.name for path in sorted(folder.parent.glob("step_*")) if path != folder]
        if others and "cannot be read" in str(error):
            error.add_note(f"{folder} is damaged; {cure}. There are also {', '.join(others)}.")
        raise


def _optimizer(settings: Settings, networks: StatefulModule) -> nnx.Optimizer:
    """Return the optimiser of a run."""
    if isinstance(settings, RunConfig):
        return configured_optimizer(networks, settings.learning)
    learning = settings.learning
    return make_optimizer(
        networks, learning.learning_rate, learning.gradient_clipping, learning.weight_decay
    )


class _Learned(NamedTuple):
    """A network, and as much as is known of its own environment."""

    env_name: str | None
    overrides: dict[str, str]
    env: RLEnv | None
    networks: StatefulModule
    step: int | None
    settings: Settings | None


def _from_policy(path: Path, checkpoint: str) -> _Learned:
    if checkpoint != LATEST:
        raise ValueError(f"{path} is a policy and has no checkpoints; leave --checkpoint out.")
    policy = load_policy(path)
    overrides = as_text(policy.overrides)
    return _Learned(policy.environment, overrides, None, policy.networks, policy.step, None)


def _from_run(path: Path, checkpoint: str) -> _Learned:
    settings = read_settings(path)
    folder = _checkpoint_folder(path, checkpoint)
    if settings.env is None:
        raise ValueError(f"{path} does not say its environment.")
    env = load_environment(settings.env, settings.overrides)
    networks = make_network(env, settings.network, nnx.Rngs(settings.train.seed))
    loaded = load_saved(folder, settings, networks, "choose another by --checkpoint STEP")
    return _Learned(settings.env, settings.overrides, env, networks, loaded["step"], settings)


def _checkpoint_folder(run: Path, which: str) -> Path:
    """Return the folder of a checkpoint; one that is asked for by its step may be missing.

    Raises:
        FileNotFoundError: The run has none, or none of them was evaluated.
        ValueError: `which` is none of the three.
    """
    folder = run / CHECKPOINTS
    if which.isdecimal():
        return folder / f"step_{int(which):010d}"
    if which not in (LATEST, BEST):
        raise ValueError(f"--checkpoint {which} must be {LATEST}, {BEST} or a step.")
    latest = latest_checkpoint(folder)
    if latest is None:
        raise FileNotFoundError(
            f"{run} has no checkpoint. Its training ended before it wrote one; start it again "
            f"with --resume {run}."
        )
    found = latest if which == LATEST else best_checkpoint(folder)
    if found is None:
        raise FileNotFoundError(
            f"No checkpoint of {run} has a return to be best by; the latest is {latest.name}."
        )
    return found
