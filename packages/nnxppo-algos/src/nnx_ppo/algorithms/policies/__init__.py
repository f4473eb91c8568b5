"""Policies as files: a network that loads and acts without the script that made it."""

from nnx_ppo.algorithms.policies.policy import Policy
from nnx_ppo.algorithms.policies.storing import load_policy, save_policy

__all__ = ["Policy", "load_policy", "save_policy"]
