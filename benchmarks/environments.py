"""The environments of the benchmarks. Needs nnxppo-core and, for physics, nnxppo-mujoco only."""

from typing import Any

import jax

from nnx_ppo.core.testing import AnalyticEnvironments


def load(name: str) -> Any:
    """Return an environment whose episodes end by time limit.

    Args:
        name: One of `cases.ENVIRONMENTS`.
    """
    if name == "FollowTarget":
        return AnalyticEnvironments().load(name, length=1000, max_len=100)
    from nnx_ppo import mujoco  # noqa: PLC0415  (takes seconds, and is not always installed)

    return mujoco.load(name)


def sizes(env: Any) -> tuple[int, int]:
    """Return the numbers of features of an observation and of an action, both vectors."""
    (obs_size,) = jax.eval_shape(env.reset, jax.random.key(0)).obs.shape
    return obs_size, env.action_size
