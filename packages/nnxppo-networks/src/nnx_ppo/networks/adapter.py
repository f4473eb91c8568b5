"""`PPOAdapter`: from a network's output to what PPO reads."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from nnx_ppo.core import PPONetworkOutput, StatefulModule
from nnx_ppo.networks._checks import check_module
from nnx_ppo.networks.routed import Name, RoutedModule, Runner


class PPOAdapter(RoutedModule):
    """Runs an action port and a value port on the same input, and makes a `PPONetworkOutput`.

    Args:
        action: Its output must be a sampler's dict `{"action", "log_likelihood"}`, or a tree of
            them with one for each action head; `actions` and `loglikelihoods` have that tree.
        value: Its output, an array or a tree of one array for each reward head, becomes the
            value estimates. Trailing axes of length 1 are squeezed; the batch axis never is.

    Raises:
        TypeError: A port is not a `StatefulModule`.

    Example:
        >>> from flax import nnx
        >>> from nnx_ppo.networks import Dense, NormalTanhSampler, Sequential
        >>> rngs = nnx.Rngs(0)
        >>> actor = Sequential([Dense(3, 4, rngs), NormalTanhSampler(rngs, entropy_weight=0.0)])
        >>> net = PPOAdapter(action=actor, value=Dense(3, 1, rngs))
        >>> out = net(net.initialize_state(5), jnp.ones((5, 3))).output
        >>> out.actions.shape, out.loglikelihoods.shape, out.value_estimates.shape
        ((5, 2), (5,), (5,))
    """

    def __init__(self, action: StatefulModule, value: StatefulModule) -> None:
        self.action = check_module(action, "PPOAdapter: action")
        self.value = check_module(value, "PPOAdapter: value")

    def _children(self) -> Mapping[Name, StatefulModule]:
        return {"action": self.action, "value": self.value}

    def _route(self, x: Any, run: Runner) -> PPONetworkOutput:
        heads, values = run("action", x), run("value", x)
        _check_heads(heads)
        _check_values(values)
        return PPONetworkOutput(
            actions=_pick(heads, "action"),
            loglikelihoods=_pick(heads, "log_likelihood"),
            value_estimates=jax.tree.map(lambda v: _squeeze(v, run.leading_axes), values),
        )


def _is_sampler_dict(node: Any) -> bool:
    return isinstance(node, Mapping) and "action" in node and "log_likelihood" in node


def _pick(heads: Any, field: str) -> Any:
    return jax.tree.map(lambda head: head[field], heads, is_leaf=_is_sampler_dict)


def _check_heads(heads: Any) -> None:
    leaves = jax.tree_util.tree_leaves_with_path(heads, is_leaf=_is_sampler_dict)
    cure = "end the action port with an action sampler, e.g. NormalTanhSampler(rngs, 1e-2)."
    if not leaves:
        raise TypeError(f"PPOAdapter: the output of the action port is empty: {heads!r}; {cure}")
    for path, leaf in leaves:
        if not _is_sampler_dict(leaf):
            found = f"an array of shape {jnp.shape(leaf)}" if hasattr(leaf, "shape") else repr(leaf)
            raise TypeError(
                "PPOAdapter: the output of the action port must be a tree of dicts "
                f"{{'action', 'log_likelihood'}}, got {found} at "
                f"output{jax.tree_util.keystr(path)}; {cure}"
            )


def _check_values(values: Any) -> None:
    if not jax.tree.leaves(values):
        raise TypeError(
            f"PPOAdapter: the output of the value port is empty: {values!r}; it must be an array "
            "of values or a tree of them, e.g. that of Dense(in_features, 1, rngs)."
        )


def _squeeze(value: jax.Array, leading_axes: int) -> jax.Array:
    while value.ndim > leading_axes and value.shape[-1] == 1:
        value = jnp.squeeze(value, -1)
    return value
