"""Flax's own cells, run over a window as the ready-made layers are: `unroll_as_twin`."""

from typing import Any

from flax import nnx
from jaxtyping import Array

from nnx_ppo.core import ModuleState, StatefulModule, UnrollOutput
from nnx_ppo.networks.recurrent._base import RecurrentLayer
from nnx_ppo.networks.recurrent.gru import GRU
from nnx_ppo.networks.recurrent.lstm import LSTM
from nnx_ppo.networks.recurrent.rnn import RNN


class _Twin(RecurrentLayer):
    """A layer that runs the cell of another module, whose carries are in flax's order."""

    def __init__(self, owner: StatefulModule, cell: nnx.RNNCellBase) -> None:
        self.owner = owner
        self.cell = cell

    def reset_state(self, prev_state: ModuleState) -> ModuleState:
        return _turn(self.owner.reset_state(_turn(prev_state)))


class _LSTMTwin(_Twin, LSTM):
    """Of `nnx.LSTMCell` and `nnx.OptimizedLSTMCell`."""


class _GRUTwin(_Twin, GRU):
    """Of `nnx.GRUCell`."""


class _RNNTwin(_Twin, RNN):
    """Of `nnx.SimpleCell`."""


_TWINS: dict[type[nnx.RNNCellBase], type[_Twin]] = {
    nnx.LSTMCell: _LSTMTwin,
    nnx.OptimizedLSTMCell: _LSTMTwin,
    nnx.GRUCell: _GRUTwin,
    nnx.SimpleCell: _RNNTwin,
}


def has_twin(cell: nnx.RNNCellBase) -> bool:
    """Whether one of our layers computes exactly what a cell does."""
    return type(cell) in _TWINS and not getattr(cell, "residual", False)


def unroll_as_twin(
    owner: StatefulModule, cell: Any, state: ModuleState, xs: Array, done: Array
) -> UnrollOutput:
    """Run a window of steps of a cell that has a twin.

    Args:
        owner: The module that the cell belongs to, which resets its carries.
        cell: The cell.
        state: The cell's carry, leaves `(batch, …)`.
        xs: The inputs, `(time, batch, …)`.
        done: Where an episode ended, `(time, batch)`.
    """
    twin = _TWINS[type(cell)](owner, cell)
    out = twin._unroll_drives(_turn(state), twin._project_window(xs), done)
    return out.replace(next_state=_turn(out.next_state))


def _turn(carry: ModuleState) -> ModuleState:
    """Turn an LSTM's carry from flax's order `(c, h)` into ours, or back; leave others alone."""
    return carry[::-1] if isinstance(carry, tuple) else carry
