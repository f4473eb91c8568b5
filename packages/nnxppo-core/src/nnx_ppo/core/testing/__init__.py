"""Tools for those who test modules and algorithms: the conformance kit, analytic environments."""

from nnx_ppo.core.testing._conformance.findings import ContractError, ContractWarning, Finding
from nnx_ppo.core.testing.conformance import RULES, check_module
from nnx_ppo.core.testing.environments import (
    AnalyticEnvironments,
    AnalyticState,
    Endless,
    FollowTarget,
    PickTarget,
    RememberCue,
    TwoHands,
)

__all__ = [
    "RULES",
    "AnalyticEnvironments",
    "AnalyticState",
    "ContractError",
    "ContractWarning",
    "Endless",
    "Finding",
    "FollowTarget",
    "PickTarget",
    "RememberCue",
    "TwoHands",
    "check_module",
]
