"""Stateful layers, containers, samplers and actor-critic factories."""

from nnx_ppo.networks.adapter import PPOAdapter
from nnx_ppo.networks.containers import Concat, Parallel, Sequential, Splitter
from nnx_ppo.networks.delay import Delay
from nnx_ppo.networks.describe import Description, ModuleRow, describe
from nnx_ppo.networks.distributions import (
    Categorical,
    Distribution,
    MultiCategorical,
    Normal,
    TanhNormal,
)
from nnx_ppo.networks.factories import (
    make_lstm_actor_critic,
    make_mlp,
    make_mlp_actor_critic,
    make_mlp_layers,
)
from nnx_ppo.networks.feedforward import Dense
from nnx_ppo.networks.graph import Connection, Population, PopulationGraph
from nnx_ppo.networks.leaky import LeakyRNN, TimeConstant
from nnx_ppo.networks.lift import Lift
from nnx_ppo.networks.normalizer import Normalizer, NormalizerStatistics
from nnx_ppo.networks.recording import Recorder, extract_activations, with_recording
from nnx_ppo.networks.recurrent import GRU, LSTM, RNN, InitialCarry, Recurrent
from nnx_ppo.networks.residual import Detach, Residual
from nnx_ppo.networks.routed import RoutedModule, Runner
from nnx_ppo.networks.sampling_layers import (
    ActionSampler,
    CategoricalSampler,
    DistributionSampler,
    EntropyWeight,
    MultiCategoricalSampler,
    NormalSampler,
    NormalTanhSampler,
)
from nnx_ppo.networks.types import (
    ACTIVATION_KEY,
    JaxDataclass,
    ModuleState,
    PPONetworkOutput,
    StatefulModule,
    StatefulModuleOutput,
    UnrollOutput,
)
from nnx_ppo.networks.utils import Filter, Flattener, Map, Merge, Scale
from nnx_ppo.networks.variational import (
    AR1VariationalBottleneck,
    LossWeight,
    VariationalBottleneck,
)

__all__ = [
    "ACTIVATION_KEY",
    "GRU",
    "LSTM",
    "RNN",
    "AR1VariationalBottleneck",
    "ActionSampler",
    "Categorical",
    "CategoricalSampler",
    "Concat",
    "Connection",
    "Delay",
    "Dense",
    "Description",
    "Detach",
    "Distribution",
    "DistributionSampler",
    "EntropyWeight",
    "Filter",
    "Flattener",
    "InitialCarry",
    "JaxDataclass",
    "LeakyRNN",
    "Lift",
    "LossWeight",
    "Map",
    "Merge",
    "ModuleRow",
    "ModuleState",
    "MultiCategorical",
    "MultiCategoricalSampler",
    "Normal",
    "NormalSampler",
    "NormalTanhSampler",
    "Normalizer",
    "NormalizerStatistics",
    "PPOAdapter",
    "PPONetworkOutput",
    "Parallel",
    "Population",
    "PopulationGraph",
    "Recorder",
    "Recurrent",
    "Residual",
    "RoutedModule",
    "Runner",
    "Scale",
    "Sequential",
    "Splitter",
    "StatefulModule",
    "StatefulModuleOutput",
    "TanhNormal",
    "TimeConstant",
    "UnrollOutput",
    "VariationalBottleneck",
    "describe",
    "extract_activations",
    "make_lstm_actor_critic",
    "make_mlp",
    "make_mlp_actor_critic",
    "make_mlp_layers",
    "with_recording",
]
