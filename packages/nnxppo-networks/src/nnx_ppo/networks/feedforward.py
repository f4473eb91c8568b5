"""Feedforward layers."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Shaped

from nnx_ppo.core import StatefulModule, StatefulModuleOutput
from nnx_ppo.networks._checks import check_size


class Dense(StatefulModule):
    """One dense layer: `activation(x @ kernel + bias)`, by `nnx.Linear`.

    Args:
        in_features: Number of input features.
        out_features: Number of output features.
        rngs: Draws the initial parameters.
        activation: Applied to the result, or None.
        **linear_kwargs: Passed on to `nnx.Linear`, e.g. `kernel_init` or `use_bias`.

    Raises:
        TypeError: A size is not an integer, or `activation` is not a function.
        ValueError: A size is below 1.

    Example:
        >>> dense = Dense(3, 8, nnx.Rngs(0), activation=nnx.relu)
        >>> dense((), jnp.ones((2, 3))).output.shape
        (2, 8)
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        rngs: nnx.Rngs,
        activation: Callable[[Array], Array] | None = None,
        **linear_kwargs: Any,
    ) -> None:
        self.in_features = check_size(in_features, "Dense: in_features")
        self.out_features = check_size(out_features, "Dense: out_features")
        if activation is not None and not callable(activation):
            raise TypeError(
                f"Dense: activation must be a function or None, got {activation!r}; pass the "
                "function itself, e.g. jax.nn.relu."
            )
        self.activation = activation
        self.linear = nnx.Linear(self.in_features, self.out_features, rngs=rngs, **linear_kwargs)

    def __call__(
        self, state: tuple[()], x: Shaped[Array, "*batch features"], rollout_extras: Any = None
    ) -> StatefulModuleOutput:
        """Apply the layer to the last axis of `x`.

        Raises:
            ValueError: The last axis has not `in_features` entries.
        """
        del rollout_extras
        if x.shape[-1:] != (self.in_features,):
            raise ValueError(
                f"Dense: x must have in_features={self.in_features} features on its last axis, "
                f"got shape {x.shape}; give in_features the width of the layer before."
            )
        y = self.linear(x)
        output = y if self.activation is None else self.activation(y)
        return StatefulModuleOutput(state, output, jnp.zeros(()), {})
