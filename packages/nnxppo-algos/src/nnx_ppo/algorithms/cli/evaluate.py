"""`nnxppo eval`."""

import dataclasses
import json
import math
import re
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import jax
import tyro
from flax import nnx
from rich.console import Console

from nnx_ppo.algorithms._validation import (
    check_fields,
    frozen_config,
    integer,
    optional,
    percentiles,
    tuples_for_lists,
)
from nnx_ppo.algorithms.cli.acting import Acting, load_acting
from nnx_ppo.algorithms.config import EvalConfig
from nnx_ppo.algorithms.evaluation import report, run_episodes
from nnx_ppo.algorithms.types import LoggingLevel

_STATISTIC = re.compile(r"(?P<name>.*)/(?P<statistic>mean|std|p\d+)")


@frozen_config
class Evaluate:
    """Evaluate the policy of a run over whole episodes, without noise.

    Attributes:
        run: The run folder, or the folder of a policy.
        checkpoint: Which checkpoint: latest, best, or its step.
        n_envs: Episodes.
        max_episode_length: Steps after which an episode is cut; as in the training if not given.
        seed: Seed of the episodes.
        percentiles: Percentiles to show beside mean and standard deviation.
        env: Name of another environment to act in.
        overrides: Settings of the environment, as pairs of name and value, beside the run's.
        json: Whether to print JSON in place of a table.
    """

    run: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="RUN")]
    checkpoint: str = "latest"
    n_envs: int = 128
    max_episode_length: int | None = None
    seed: int = 0
    percentiles: tuple[int, ...] = (0, 25, 50, 75, 100)
    env: str | None = None
    overrides: dict[str, str] = dataclasses.field(default_factory=dict)
    json: bool = False

    def __post_init__(self) -> None:
        tuples_for_lists(self, "percentiles")
        rules = {
            "n_envs": integer(1),
            "max_episode_length": optional(integer(1)),
            "seed": integer(0, 2**32 - 1),
            "percentiles": percentiles(),
        }
        check_fields(self, rules)


def prepare_evaluate(command: Evaluate, console: Console) -> Callable[[], None]:
    """Load what is to be evaluated, and return a function that does it."""
    acting = load_acting(command.run, command.checkpoint, command.env, command.overrides)
    length = command.max_episode_length
    if length is None:
        config = EvalConfig() if acting.settings is None else acting.settings.train.eval
        length = config.max_episode_length

    def evaluate() -> None:
        # What is waited for goes where JSON is not.
        with Console(stderr=True).status(f"{command.n_envs} episodes of {acting.env_name}"):
            metrics = _evaluated(acting, command, length)
        if command.json:
            print(_as_json(acting, command, metrics))
        else:
            _print_table(acting, command, metrics, console)

    return evaluate


def _evaluated(acting: Acting, command: Evaluate, length: int) -> dict[str, float]:
    """Return the metrics of an evaluation by name, as mean and std and as percentiles."""
    graphdef, variables = nnx.split(acting.networks)
    level = LoggingLevel.ENV_METRICS | LoggingLevel.NETWORK_METRICS

    @jax.jit
    def run(variables: Any, key: jax.Array) -> dict[str, jax.Array]:
        networks = nnx.merge(graphdef, variables, copy=True)
        episodes = run_episodes(acting.env, networks, command.n_envs, length, key, level)
        return {**report(episodes, None), **report(episodes, command.percentiles)}

    metrics = jax.device_get(run(variables, jax.random.key(command.seed)))
    return {name: float(value) for name, value in metrics.items()}


def _as_json(acting: Acting, command: Evaluate, metrics: Mapping[str, float]) -> str:
    """Return metrics and what they are of as a JSON object; NaN and infinity are null."""
    known = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
    about = {"run": command.run, "env": acting.env_name, "step": acting.step}
    about |= {"n_envs": command.n_envs, "seed": command.seed}
    return json.dumps({**about, **known}, indent=2)


def _print_table(
    acting: Acting, command: Evaluate, metrics: Mapping[str, float], console: Console
) -> None:
    """Print a line for each metric and a column for each statistic."""
    rows: dict[str, dict[str, float]] = {"episode_reward": {}, "lifespan": {}}
    for full_name, value in sorted(metrics.items()):
        match = _STATISTIC.fullmatch(full_name)
        name, statistic = (match["name"], match["statistic"]) if match else (full_name, "mean")
        rows.setdefault(name.removeprefix("eval/"), {})[statistic] = value
    step = "" if acting.step is None else f" after {acting.step:,} steps"
    title = f"{command.run}: {acting.env_name}{step}, {command.n_envs} episodes"
    columns = ["mean", "std", *(f"p{level}" for level in command.percentiles)]
    width = console.width if console.is_terminal else None
    for line in [title, *_table(rows, columns, width)]:
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _table(
    rows: Mapping[str, Mapping[str, float]], columns: list[str], width: int | None
) -> list[str]:
    """Return the lines of a table, names and numbers whole.

    Args:
        rows: Values by name of row and of column.
        columns: Names of the columns.
        width: Characters that a line may have, if there is a limit. From the third column on, those
            that do not fit are left out, which a line at the end says.
    """
    names = ["", *rows]
    lines = [name.ljust(max(map(len, names))) for name in names]
    for place, column in enumerate(columns):
        values = (row.get(column) for row in rows.values())
        cells = [column, *("" if value is None else f"{value:.4g}" for value in values)]
        size = max(map(len, cells)) + 2
        if place >= 2 and width is not None and len(lines[0]) + size > width:
            left_out = f"no room for {', '.join(columns[place:])}; --json has all"
            return [*lines, left_out]
        lines = [line + cell.rjust(size) for line, cell in zip(lines, cells, strict=True)]
    return lines
