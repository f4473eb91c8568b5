"""`nnxppo distill`."""

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path

from flax import nnx
from rich.console import Console

from nnx_ppo.algorithms.checks import check_video
from nnx_ppo.algorithms.cli.acting import LATEST, Acting, load_acting
from nnx_ppo.algorithms.cli.environments import literals
from nnx_ppo.algorithms.cli.network_config import make_network
from nnx_ppo.algorithms.cli.run_config import DistillConfig
from nnx_ppo.algorithms.cli.run_folder import TEACHER
from nnx_ppo.algorithms.cli.training import find_start, prepare_training
from nnx_ppo.algorithms.distillation import train_distillation
from nnx_ppo.algorithms.policies import save_policy


def prepare_distill(config: DistillConfig, console: Console) -> Callable[[], None]:
    """Make the parts of a distillation, and return a function that runs it.

    Whatever is wrong with the input comes up here.
    """
    teacher = _load_teacher(config)
    config = dataclasses.replace(config, env=teacher.env_name, overrides=teacher.overrides)
    env = teacher.env
    student = make_network(env, config.network, nnx.Rngs(config.train.seed))
    check_video(config.train.video, env)
    carries = {"student_states": student, "teacher_states": teacher.networks}
    start = find_start(config, env, student, console, carries)
    learn = functools.partial(
        train_distillation, env, teacher.networks, student, config.train, initial_state=start.state
    )

    def keep_teacher(folder: Path) -> None:
        save_policy(
            folder / TEACHER,
            teacher.networks,
            env=env,
            environment=teacher.env_name,
            overrides=literals(teacher.overrides),
            step=teacher.step,
        )

    return prepare_training(config, env, learn, start, console, prepare_folder=keep_teacher)


def _load_teacher(config: DistillConfig) -> Acting:
    """Return the teacher: that which the run has kept, or else that of the teacher's run.

    A run keeps its teacher, whose own run may go on, so that it can go on itself.
    """
    source, checkpoint = config.teacher, config.checkpoint
    if config.resume is not None and (Path(config.resume) / TEACHER).exists():
        source, checkpoint = str(Path(config.resume) / TEACHER), LATEST
    return load_acting(source, checkpoint, config.env, config.overrides)
