"""`nnxppo train … --plan`."""

import functools
from collections.abc import Callable

from rich.console import Console

from nnx_ppo.algorithms.cli.run_config import RunConfig
from nnx_ppo.algorithms.planning import plan_training
from nnx_ppo.core import RLEnv, StatefulModule


def prepare_plan(
    config: RunConfig, env: RLEnv, networks: StatefulModule, console: Console
) -> Callable[[], None]:
    """Plan a run, and return a function that prints the plan. Nothing is trained or written.

    Whatever is wrong with the input comes up here.
    """
    memory = None
    if config.plan_memory_gib is not None:
        memory = int(config.plan_memory_gib * 2**30)
    with console.status("tracing an iteration"):
        plan = plan_training(env, networks, config.train, memory_bytes=memory)
    return functools.partial(console.print, plan)
