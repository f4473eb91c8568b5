"""`nnxppo train`."""

import functools
from collections.abc import Callable

from flax import nnx
from rich.console import Console

from nnx_ppo.algorithms.checks import check_video
from nnx_ppo.algorithms.cli.environments import load_environment
from nnx_ppo.algorithms.cli.network_config import make_network
from nnx_ppo.algorithms.cli.plan import prepare_plan
from nnx_ppo.algorithms.cli.run_config import RunConfig
from nnx_ppo.algorithms.cli.training import find_start, prepare_training
from nnx_ppo.algorithms.ppo import train_ppo


def prepare_train(config: RunConfig, console: Console) -> Callable[[], None]:
    """Make the parts of a run, and return a function that runs it.

    Whatever is wrong with the input comes up here.
    """
    env = load_environment(config.env, config.overrides)
    networks = make_network(env, config.network, nnx.Rngs(config.train.seed))
    check_video(config.train.video, env)
    if config.plan:
        return prepare_plan(config, env, networks, console)
    start = find_start(config, env, networks, console)
    learn = functools.partial(train_ppo, env, networks, config.train, initial_state=start.state)
    return prepare_training(config, env, learn, start, console)
