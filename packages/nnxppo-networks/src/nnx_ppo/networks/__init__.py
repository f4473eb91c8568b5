"""Stateful layers, containers, samplers and actor-critic factories."""

from nnx_ppo.networks.adapter import PPOAdapter
from nnx_ppo.networks.containers import Concat, Parallel, Sequential, Splitter
from nnx_ppo.networks.factories import (
    make_lstm_actor_critic,
    make_mlp,
    make_mlp_actor_critic,
    make_mlp_layers,
)
from nnx_ppo.networks.feedforward import Dense
from nnx_ppo.networks.normalizer import Normalizer, NormalizerStatistics
from nnx_ppo.networks.recurrent import LSTM
from nnx_ppo.networks.routed import RoutedModule, Runner
from nnx_ppo.networks.sampling_layers import ActionSampler, EntropyWeight, NormalTanhSampler
from nnx_ppo.networks.types import (
    ACTIVATION_KEY,
    JaxDataclass,
    ModuleState,
    PPONetworkOutput,
    StatefulModule,
    StatefulModuleOutput,
    UnrollOutput,
)
from nnx_ppo.networks.utils import Filter, Flattener

__all__ = [
    "ACTIVATION_KEY",
    "LSTM",
    "ActionSampler",
    "Concat",
    "Dense",
    "EntropyWeight",
    "Filter",
    "Flattener",
    "JaxDataclass",
    "ModuleState",
    "NormalTanhSampler",
    "Normalizer",
    "NormalizerStatistics",
    "PPOAdapter",
    "PPONetworkOutput",
    "Parallel",
    "RoutedModule",
    "Runner",
    "Sequential",
    "Splitter",
    "StatefulModule",
    "StatefulModuleOutput",
    "UnrollOutput",
    "make_lstm_actor_critic",
    "make_mlp",
    "make_mlp_actor_critic",
    "make_mlp_layers",
]
