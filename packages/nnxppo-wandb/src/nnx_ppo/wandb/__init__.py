"""Weights & Biases logging for nnxppo."""

from nnx_ppo.wandb.callbacks import wandb_checkpoint_fn, wandb_log_fn, wandb_video_fn
from nnx_ppo.wandb.logger import WandbLogger

__all__ = ["WandbLogger", "wandb_checkpoint_fn", "wandb_log_fn", "wandb_video_fn"]
