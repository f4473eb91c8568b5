"""The vocabulary of networks, under its documented path; it is defined in `nnx_ppo.core`."""

from nnx_ppo.core import (
    ACTIVATION_KEY,
    JaxDataclass,
    ModuleState,
    PPONetworkOutput,
    StatefulModule,
    StatefulModuleOutput,
    UnrollOutput,
)

__all__ = [
    "ACTIVATION_KEY",
    "JaxDataclass",
    "ModuleState",
    "PPONetworkOutput",
    "StatefulModule",
    "StatefulModuleOutput",
    "UnrollOutput",
]
