"""The command `nnxppo`."""

from nnx_ppo.algorithms.cli.main import main

__all__ = ["main"]
