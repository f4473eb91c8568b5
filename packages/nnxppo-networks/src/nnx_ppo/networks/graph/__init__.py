"""Graphs of neural populations."""

from nnx_ppo.networks.graph._spec import Connection, Population
from nnx_ppo.networks.graph.graph import PopulationGraph

__all__ = ["Connection", "Population", "PopulationGraph"]
