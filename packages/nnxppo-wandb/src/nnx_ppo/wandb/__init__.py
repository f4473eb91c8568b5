"""Weights & Biases logging for nnxppo."""

from nnx_ppo.wandb.logger import WandbLogger

__all__ = ["WandbLogger"]
