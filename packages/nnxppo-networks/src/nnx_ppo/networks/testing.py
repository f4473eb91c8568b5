"""Building blocks of random networks, for `nnx_ppo.core.testing.strategies.module_strategies`."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax.numpy as jnp
from flax import nnx

from nnx_ppo.core import StatefulModule
from nnx_ppo.core.testing.blocks import Block, quick_normal, same_size
from nnx_ppo.core.testing.modules import can_be_joined, in_sequence, side_by_side
from nnx_ppo.networks.adapter import PPOAdapter
from nnx_ppo.networks.containers import Concat, Parallel, Sequential, Splitter
from nnx_ppo.networks.delay import Delay
from nnx_ppo.networks.feedforward import Dense
from nnx_ppo.networks.graph import PopulationGraph
from nnx_ppo.networks.leaky import LeakyRNN
from nnx_ppo.networks.lift import Lift
from nnx_ppo.networks.normalizer import Normalizer
from nnx_ppo.networks.recording import Recorder
from nnx_ppo.networks.recurrent import GRU, LSTM, RNN, Recurrent
from nnx_ppo.networks.residual import Detach, Residual
from nnx_ppo.networks.sampling_layers import (
    CategoricalSampler,
    MultiCategoricalSampler,
    NormalSampler,
    NormalTanhSampler,
)
from nnx_ppo.networks.utils import Filter, Flattener, Map, Merge, Scale
from nnx_ppo.networks.variational import AR1VariationalBottleneck, VariationalBottleneck

_INITS = {"kernel_init": quick_normal, "recurrent_kernel_init": quick_normal}
_INITIAL_STATE = {"trainable_initial_state": (False, True)}

# Name of a head: its sampler, and the number of parameters that this takes. A narrow Gaussian would
# magnify rounding: its log-likelihood has slopes of 1 / std².
_HEADS: dict[str, tuple[Callable[..., StatefulModule], int]] = {
    "tanh": (partial(NormalTanhSampler, min_std=0.5), 4),
    "normal": (partial(NormalSampler, min_std=0.5), 2),
    "choice": (CategoricalSampler, 3),
    "choices": (partial(MultiCategoricalSampler, sizes=(2, 3)), 5),
}


def actor_critic(
    trunk: StatefulModule,
    actor: StatefulModule,
    critic: StatefulModule,
    *,
    sizes: tuple[int, int],
    rngs: nnx.Rngs,
    heads: Sequence[str] = ("tanh",),
    values: int = 1,
) -> Sequential:
    """Put action heads and values on networks, so that PPO can train them.

    Dense layers lead past trunk and actor, so that the heads see the input also if these delay or
    stop it.

    Args:
        trunk: What actor and critic share, from `(batch, in_size)` to `(batch, width)`.
        actor: What is between trunk and heads, `(batch, width)` to `(batch, width)`.
        critic: What is between trunk and values, likewise.
        sizes: `in_size` and `width`.
        rngs: Of the layers that are added.
        heads: A sampler for each: `"tanh"`, `"normal"`, `"choice"` or `"choices"`. The actions are
            one array for a single head, else a dict by position and name, such as `"0_tanh"`.
        values: Number of values; they are a dict if there are several.

    Example:
        >>> import jax
        >>> rngs = nnx.Rngs(0)
        >>> parts = [Dense(3, 2, rngs), Scale(1.0), Scale(1.0)]
        >>> network = actor_critic(*parts, sizes=(3, 2), rngs=rngs, heads=["tanh", "choice"])
        >>> out = network(network.initialize_state(5), jnp.ones((5, 3))).output
        >>> jax.tree.map(jnp.shape, out.actions), out.value_estimates.shape
        ({'0_tanh': (5, 2), '1_choice': (5,)}, (5,))
    """
    in_size, width = sizes
    named_heads = {f"{i}_{name}": _head(name, width, rngs) for i, name in enumerate(heads)}
    named_values = {f"value_{i}": _dense(width, 1, rngs) for i in range(values)}
    action = [_with_way_past(actor, width, width, rngs), _together(named_heads)]
    value = [critic, _together(named_values)]
    adapter = PPOAdapter(action=Sequential(action), value=Sequential(value))
    return Sequential([_with_way_past(trunk, in_size, width, rngs), adapter])


def _with_way_past(
    module: StatefulModule, in_size: int, out_size: int, rngs: nnx.Rngs
) -> Sequential:
    both = Parallel(module=module, past=_dense(in_size, out_size, rngs))
    return Sequential([both, Flattener(), _dense(2 * out_size, out_size, rngs)])


def _head(name: str, width: int, rngs: nnx.Rngs) -> Sequential:
    if name not in _HEADS:
        raise ValueError(f"actor_critic: heads must be of {list(_HEADS)}, got {name!r}.")
    sampler, size = _HEADS[name]
    return Sequential([_dense(width, size, rngs), sampler(rngs, entropy_weight=0.1)])


def _together(modules: dict[str, Any]) -> StatefulModule:
    return next(iter(modules.values())) if len(modules) == 1 else Parallel(modules)


def _dense(in_size: int, out_size: int, rngs: nnx.Rngs, activation: Any = None) -> Dense:
    return Dense(in_size, out_size, rngs, activation, kernel_init=quick_normal)


def _of_cell(in_size: int, out_size: int, rngs: nnx.Rngs, cell: Any, **options: Any) -> Recurrent:
    return Recurrent(cell(in_size, out_size, rngs=rngs, **_INITS), **options)


def _bottleneck(
    in_size: int, out_size: int, rngs: nnx.Rngs, *, kind: Any, **options: Any
) -> Sequential:
    return Sequential([_dense(in_size, 2 * out_size, rngs), kind(out_size, rngs, **options)])


def _layer_norm(in_size: int, out_size: int, rngs: nnx.Rngs) -> Lift:
    return Lift(nnx.LayerNorm(in_size, rngs=rngs))


def _dropout(in_size: int, out_size: int, rngs: nnx.Rngs, rate: float) -> Lift:
    return Lift(nnx.Dropout(rate, rngs=rngs))


def _normalizer(in_size: int, out_size: int, rngs: nnx.Rngs, clip: float) -> Normalizer:
    return Normalizer(in_size, clip=clip)


def _delay(in_size: int, out_size: int, rngs: nnx.Rngs, **options: Any) -> Delay:
    return Delay(jnp.zeros(in_size), **options)


def _named(name: str, part: StatefulModule) -> Sequential:
    return Sequential([part, Filter({name: nnx.identity})])


def _sequential(in_size: int, out_size: int, rngs: nnx.Rngs, *parts: Any) -> Sequential:
    return Sequential(parts)


def _twice(in_size: int, out_size: int, rngs: nnx.Rngs, part: Any) -> Sequential:
    return Sequential([part, part])


def _residual(in_size: int, out_size: int, rngs: nnx.Rngs, part: Any) -> Residual:
    return Residual(part)


def _recorder(in_size: int, out_size: int, rngs: nnx.Rngs, part: Any) -> Recorder:
    return Recorder(part)


def _parallel(in_size: int, out_size: int, rngs: nnx.Rngs, b: Any, a: Any) -> Sequential:
    return Sequential([Parallel(b=b, a=a), Flattener()])


def _merge(in_size: int, out_size: int, rngs: nnx.Rngs, b: Any, a: Any) -> Sequential:
    return Sequential([Merge(b=_named("y", b), a=_named("x", a)), Flattener()])


def _concat(in_size: int, out_size: int, rngs: nnx.Rngs, b: Any, a: Any) -> Sequential:
    return Sequential([_halves(in_size), Concat(b=b, a=a)])


def _map(in_size: int, out_size: int, rngs: nnx.Rngs, b: Any, a: Any) -> Sequential:
    return Sequential([_halves(in_size), Map(b=b, a=a), Flattener()])


def _halves(size: int) -> Splitter:
    return Splitter(b=size - size // 2, a=size // 2)


def _by_halves(in_size: int, out_size: int, width: int) -> list[tuple[int, int]]:
    del width
    ins, outs = ((size - size // 2, size // 2) for size in (in_size, out_size))
    return list(zip(ins, outs, strict=True))


def _have_halves(in_size: int, out_size: int) -> bool:
    return min(in_size, out_size) >= 2


def _graph(
    in_size: int, out_size: int, rngs: nnx.Rngs, *transforms: Any, loop: int, delay: int
) -> Sequential:
    """Make a graph in which one population feeds itself, and the output feeds the input."""
    into, around, out, back = transforms
    graph = PopulationGraph(rngs)
    graph.add_input("in", in_size, input_from="x")
    graph.add_population("middle", out_size, activation=nnx.tanh)
    graph.add_output("out", out_size)
    graph.connect("in", "middle", transform=into)
    graph.connect("middle", "middle", transform=around, delay=loop)
    graph.connect("middle", "out", transform=out, delay=delay)
    graph.connect("out", "in", transform=back, delay=1)
    graph.finalize()
    return Sequential([Splitter(x=in_size), graph, Flattener()])


def _connections(in_size: int, out_size: int, width: int) -> list[tuple[int, int]]:
    del width
    return [(in_size, out_size), (out_size, out_size), (out_size, out_size), (out_size, in_size)]


def _actor_critic(
    in_size: int, out_size: int, rngs: nnx.Rngs, *parts: StatefulModule, **options: Any
) -> Sequential:
    return actor_critic(*parts, sizes=(in_size, out_size), rngs=rngs, **options)


def _inside(in_size: int, out_size: int, width: int) -> list[tuple[int, int]]:
    """Return the sizes of a single module inside of another one."""
    del width
    return [(in_size, out_size)]


NETWORK_BLOCKS: tuple[Block, ...] = (
    Block("Dense", _dense, {"activation": (None, nnx.tanh)}),
    Block("Scale", lambda m, n, rngs: Scale(0.5), accepts=same_size),
    Block("Detach", lambda m, n, rngs: Detach(), accepts=same_size),
    Block("Normalizer", _normalizer, {"clip": (10.0, 1.0)}, accepts=same_size),
    Block("LayerNorm", _layer_norm, accepts=same_size),
    Block("Dropout", _dropout, {"rate": (0.5,)}, accepts=same_size),
    Block("Delay", _delay, {"k_steps": (1, 2), "initial_value": (0.0, 0.5)}, accepts=same_size),
    Block("RNN", partial(RNN, **_INITS), _INITIAL_STATE),
    Block("GRU", partial(GRU, **_INITS), _INITIAL_STATE),
    Block("LSTM", partial(LSTM, **_INITS), _INITIAL_STATE | {"use_optimized": (True, False)}),
    Block(
        "LeakyRNN",
        partial(LeakyRNN, **_INITS),
        _INITIAL_STATE | {"noise_std": (0.0, 0.3), "trainable_tau": (False, True)},
    ),
    Block(
        "Recurrent",
        _of_cell,
        _INITIAL_STATE | {"cell": (nnx.SimpleCell, nnx.GRUCell, nnx.OptimizedLSTMCell)},
    ),
    Block("VariationalBottleneck", partial(_bottleneck, kind=VariationalBottleneck)),
    Block(
        "AR1VariationalBottleneck",
        partial(_bottleneck, kind=AR1VariationalBottleneck),
        {"backprop_through_time": (True, False)},
    ),
    Block("Sequential", _sequential, parts=in_sequence),
    Block("Recorder", _recorder, parts=_inside),
    Block("Residual", _residual, parts=_inside, accepts=same_size),
    Block("Twice", _twice, parts=_inside, accepts=same_size),
    Block("Parallel", _parallel, parts=side_by_side, accepts=can_be_joined),
    Block("Merge", _merge, parts=side_by_side, accepts=can_be_joined),
    Block("Concat", _concat, parts=_by_halves, accepts=_have_halves),
    Block("Map", _map, parts=_by_halves, accepts=_have_halves),
    Block("PopulationGraph", _graph, {"loop": (1, 2), "delay": (0, 2)}, parts=_connections),
)
"""A block for each kind of module that the library ships, and one that is used in two places."""

ACTOR_CRITIC = Block(
    "actor_critic",
    _actor_critic,
    {"heads": (("tanh",), ("normal", "choice"), ("choices", "tanh")), "values": (1, 2)},
    parts=lambda in_size, width, _: [(in_size, width), (width, width), (width, width)],
)
"""An `actor_critic` of three networks: the `root` that makes a strategy one of networks for PPO.

The output size of the plan is the width between its parts.
"""
