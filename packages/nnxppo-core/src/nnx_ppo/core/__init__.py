"""The contract of nnxppo: what a stateful module is, and what an environment is."""

from nnx_ppo.core._guard import refuse_regular_package

refuse_regular_package()

from nnx_ppo.core._module import (  # noqa: E402  (the guard comes first)
    StatefulModule,
    check_same_carry,
    fold_time,
    owns_random_stream,
    reset_where,
    scan_module,
    unroll_stepwise,
)
from nnx_ppo.core._types import (  # noqa: E402
    ACTIVATION_KEY,
    JaxDataclass,
    ModuleState,
    PPONetworkOutput,
    StatefulModuleOutput,
    UnrollOutput,
)
from nnx_ppo.core.protocols import (  # noqa: E402
    EnvironmentProvider,
    EnvState,
    Logger,
    RenderableEnv,
    RLEnv,
    StaggeredEnv,
)
from nnx_ppo.core.wrappers import (  # noqa: E402
    EpisodeWrapper,
    RewardScalingWrapper,
    Wrapper,
    time_limit_flag,
)

__all__ = [
    "ACTIVATION_KEY",
    "EnvState",
    "EnvironmentProvider",
    "EpisodeWrapper",
    "JaxDataclass",
    "Logger",
    "ModuleState",
    "PPONetworkOutput",
    "RLEnv",
    "RenderableEnv",
    "RewardScalingWrapper",
    "StaggeredEnv",
    "StatefulModule",
    "StatefulModuleOutput",
    "UnrollOutput",
    "Wrapper",
    "check_same_carry",
    "fold_time",
    "owns_random_stream",
    "reset_where",
    "scan_module",
    "time_limit_flag",
    "unroll_stepwise",
]
