"""The gradient phase, shared by all algorithms: epochs of minibatches over environments."""

from collections.abc import Callable
from typing import Any

import jax
import optax
from flax import nnx
from jaxtyping import Array, Int, PyTree, Shaped

from nnx_ppo.core import StatefulModule

LossFunction = Callable[[StatefulModule, PyTree, PyTree], tuple[Array, dict[str, PyTree]]]
"""`(networks, network_state, rollout) -> (loss, metrics)`, on the environments of a minibatch."""


def make_optimizer(
    networks: StatefulModule,
    learning_rate: float | optax.Schedule,
    gradient_clipping: float | None = None,
    weight_decay: float | None = None,
) -> nnx.Optimizer:
    """Return Adam, or AdamW with `weight_decay`, behind global-norm clipping if asked for.

    Its state has the same tree whatever the settings, so that a run can go on with others.
    """
    clip, decay = optax.identity(), optax.identity()
    if gradient_clipping is not None:
        clip = optax.clip_by_global_norm(gradient_clipping)
    if weight_decay is not None:
        decay = optax.add_decayed_weights(weight_decay)
    schedule = learning_rate if callable(learning_rate) else optax.constant_schedule(learning_rate)
    adam = (optax.scale_by_adam(), decay, optax.scale_by_learning_rate(schedule))
    return nnx.Optimizer(networks, optax.chain(clip, *adam), wrt=nnx.Param)


def learn(
    networks: StatefulModule,
    optimizer: nnx.Optimizer,
    data: tuple[PyTree, PyTree],
    loss_fn: LossFunction,
    key: Shaped[Array, "..."],
    *,
    n_epochs: int,
    n_minibatches: int,
) -> dict[str, PyTree]:
    """Take `n_epochs * n_minibatches` gradient steps; network and optimiser change in place.

    Each minibatch holds whole windows of some environments: time is never cut or shuffled.

    Args:
        networks: The network.
        optimizer: Its optimiser.
        data: `(network_state, rollout)`: the carry at the window's start, leaves `(batch, …)`,
            and the window, leaves `(time, batch, …)`.
        loss_fn: The loss of a minibatch.
        key: Key that deals the environments to minibatches.
        n_epochs: Passes over the data.
        n_minibatches: Minibatches per pass.

    Returns:
        The loss metrics and `"grad_norm"`, leaves `(n_epochs * n_minibatches, …)`.
    """
    net_def, params, variables = nnx.split(networks, nnx.Param, ...)
    opt_def, opt_variables = nnx.split(optimizer)
    network_state, rollout = data

    def step(carry: tuple[Any, Any, Any], rows: Int[Array, " part"]) -> tuple[Any, dict[str, Any]]:
        params, variables, opt_variables = carry
        part_state = jax.tree.map(lambda leaf: leaf[rows], network_state)
        part = jax.tree.map(lambda leaf: leaf[:, rows], rollout)

        def loss(params: Any) -> tuple[Array, tuple[Any, dict[str, PyTree]]]:
            live = nnx.merge(net_def, params, variables, copy=True)
            value, metrics = loss_fn(live, part_state, part)
            return value, (nnx.state(live, nnx.Not(nnx.Param)), metrics)

        gradient, (variables, metrics) = jax.grad(loss, has_aux=True)(params)
        live = nnx.merge(net_def, params, variables, copy=True)
        live_optimizer = nnx.merge(opt_def, opt_variables, copy=True)
        live_optimizer.update(live, gradient)
        carry = (nnx.state(live, nnx.Param), variables, nnx.state(live_optimizer))
        return carry, {**metrics, "grad_norm": optax.tree.norm(gradient)}

    n_envs = jax.tree.leaves(rollout)[0].shape[1]
    rows = jax.vmap(lambda k: jax.random.permutation(k, n_envs))(jax.random.split(key, n_epochs))
    rows = rows.reshape(n_epochs * n_minibatches, n_envs // n_minibatches)
    carry, metrics = jax.lax.scan(step, (params, variables, opt_variables), rows)
    params, variables, opt_variables = carry
    nnx.update(networks, params, variables)
    nnx.update(optimizer, opt_variables)
    return metrics
