"""Spiking neurons that remember, for nnxppo, and a task that needs them."""

from spiking_memory.environments import AccumulateEvidence, EvidenceEnvironments, EvidenceState
from spiking_memory.neurons import AdaptiveLIF, NeuronState, spike

__all__ = [
    "AccumulateEvidence",
    "AdaptiveLIF",
    "EvidenceEnvironments",
    "EvidenceState",
    "NeuronState",
    "spike",
]
