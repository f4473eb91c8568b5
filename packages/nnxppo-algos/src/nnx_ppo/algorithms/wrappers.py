"""Environment wrappers, under their documented path."""

from nnx_ppo.core.wrappers import EpisodeWrapper, RewardScalingWrapper

__all__ = ["EpisodeWrapper", "RewardScalingWrapper"]
