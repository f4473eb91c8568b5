"""Tools for those who test modules and algorithms: small analytic environments."""

from nnx_ppo.core.testing.environments import (
    AnalyticEnvironments,
    AnalyticState,
    Endless,
    FollowTarget,
    RememberCue,
    TwoHands,
)

__all__ = [
    "AnalyticEnvironments",
    "AnalyticState",
    "Endless",
    "FollowTarget",
    "RememberCue",
    "TwoHands",
]
