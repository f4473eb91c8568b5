"""Recurrent layers: ready-made ones, and `Recurrent` for any cell of flax."""

from nnx_ppo.networks.recurrent.cell import InitialCarry, Recurrent
from nnx_ppo.networks.recurrent.gru import GRU
from nnx_ppo.networks.recurrent.lstm import LSTM
from nnx_ppo.networks.recurrent.rnn import RNN

__all__ = ["GRU", "LSTM", "RNN", "InitialCarry", "Recurrent"]
