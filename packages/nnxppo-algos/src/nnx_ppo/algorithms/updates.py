"""The gradient phase, shared by all algorithms: epochs of minibatches over environments."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, PyTree, Shaped

from nnx_ppo.core import StatefulModule

LossFunction = Callable[[StatefulModule, PyTree, PyTree], tuple[Array, dict[str, PyTree]]]
"""`(networks, network_state, rollout) -> (loss, metrics)`, on the environments of a minibatch."""

DIVERGENCE = "divergence"
"""Where a loss puts the divergence of the policy from the one that acted, among its metrics."""

TAKEN = "taken"
"""Where `learn` says which updates took place, among the metrics."""


_Carry = tuple[Any, Any, Any]
"""Parameters, other variables, optimiser."""


def learn(
    networks: StatefulModule,
    optimizer: nnx.Optimizer,
    data: tuple[PyTree, PyTree],
    loss_fn: LossFunction,
    key: Shaped[Array, "..."],
    *,
    n_epochs: int,
    n_minibatches: int,
    learning_rates: Float[Array, " updates"] | None = None,
    max_divergence: float | None = None,
) -> dict[str, PyTree]:
    """Take `n_epochs * n_minibatches` gradient steps; network and optimiser change in place.

    Each minibatch holds whole windows of some environments: time is never cut or shuffled.

    A loss may report a `DIVERGENCE`. The optimiser then gets it with each update but the first,
    where the policy is still the one that acted and NaN stands for it.

    Args:
        networks: The network.
        optimizer: Its optimiser.
        data: `(network_state, rollout)`: the carry at the window's start, leaves `(batch, …)`,
            and the window, leaves `(time, batch, …)`.
        loss_fn: The loss of a minibatch.
        key: Key that deals the environments to minibatches.
        n_epochs: Passes over the data.
        n_minibatches: Minibatches per pass.
        learning_rates: What the optimiser gets as `learning_rate` with each update, if given.
        max_divergence: The first minibatch whose `DIVERGENCE` exceeds it, or is NaN, ends
            learning: neither it nor what follows changes parameters or optimiser. The first
            update always takes place.

    Returns:
        The loss metrics and `"grad_norm"`, leaves `(n_epochs * n_minibatches, …)`; with
        `max_divergence` also `TAKEN`, which updates took place. The metrics of others mean nothing.
    """
    net_def, params, variables = nnx.split(networks, nnx.Param, ...)
    opt_def, opt_variables = nnx.split(optimizer)
    network_state, rollout = data

    def gradient_of(params: Any, variables: Any, rows: Array) -> tuple[Any, tuple[Any, Any]]:
        part_state = jax.tree.map(lambda leaf: leaf[rows], network_state)
        part = jax.tree.map(lambda leaf: leaf[:, rows], rollout)

        def loss(params: Any) -> tuple[Array, tuple[Any, dict[str, PyTree]]]:
            live = nnx.merge(net_def, params, variables, copy=True)
            value, metrics = loss_fn(live, part_state, part)
            return value, (nnx.state(live, nnx.Not(nnx.Param)), metrics)

        return jax.grad(loss, has_aux=True)(params)

    def updated(
        params: Any, variables: Any, opt_variables: Any, gradient: Any, known: dict[str, Array]
    ) -> tuple[Any, Any]:
        live = nnx.merge(net_def, params, variables, copy=True)
        live_optimizer = nnx.merge(opt_def, opt_variables, copy=True)
        live_optimizer.update(live, gradient, **known)
        return nnx.state(live, nnx.Param), nnx.state(live_optimizer)

    def step(
        carry: _Carry, inputs: tuple[Int[Array, " part"], Bool[Array, ""], dict[str, Array]]
    ) -> Any:
        params, variables, opt_variables = carry
        rows, first, known = inputs
        gradient, (variables, metrics) = gradient_of(params, variables, rows)
        metrics["grad_norm"] = optax.tree.norm(gradient)
        divergence = metrics.pop(DIVERGENCE, None)
        if divergence is not None:
            known = {**known, DIVERGENCE: jnp.where(first, jnp.nan, divergence)}
        if max_divergence is None:
            params, opt_variables = updated(params, variables, opt_variables, gradient, known)
            return (params, variables, opt_variables), metrics
        metrics[TAKEN] = first | (jnp.asarray(divergence) <= max_divergence)
        params, opt_variables = jax.lax.cond(
            metrics[TAKEN],
            lambda: updated(params, variables, opt_variables, gradient, known),
            lambda: (params, opt_variables),
        )
        return (params, variables, opt_variables), metrics

    n_envs = jax.tree.leaves(rollout)[0].shape[1]
    rows = jax.vmap(lambda k: jax.random.permutation(k, n_envs))(jax.random.split(key, n_epochs))
    rows = rows.reshape(n_epochs * n_minibatches, n_envs // n_minibatches)
    known = {} if learning_rates is None else {"learning_rate": learning_rates}
    inputs = (rows, jnp.arange(len(rows)) == 0, known)
    scan = jax.lax.scan if max_divergence is None else _scan_while_taken
    carry, metrics = scan(step, (params, variables, opt_variables), inputs)
    params, variables, opt_variables = carry
    nnx.update(networks, params, variables)
    nnx.update(optimizer, opt_variables)
    return metrics


def _scan_while_taken(step: Callable[[Any, Any], Any], carry: Any, xs: Any) -> tuple[Any, Any]:
    """`jax.lax.scan` that leaves out the steps after the first that was not `TAKEN`."""
    first = jax.tree.map(lambda leaf: leaf[0], xs)
    shapes = jax.eval_shape(lambda carry, x: step(carry, x)[1], carry, first)

    def maybe(loop: tuple[Any, Array], x: Any) -> tuple[Any, Any]:
        carry, going = loop
        carry, metrics = jax.lax.cond(
            going,
            lambda: step(carry, x),
            lambda: (carry, jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)),
        )
        return (carry, metrics[TAKEN]), metrics

    (carry, _), metrics = jax.lax.scan(maybe, (carry, jnp.asarray(True)), xs)
    return carry, metrics
