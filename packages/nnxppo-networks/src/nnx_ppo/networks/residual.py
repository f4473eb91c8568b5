"""Layers that steer the gradient: a way past a module, and a barrier."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from nnx_ppo.core import StatefulModule, StatefulModuleOutput
from nnx_ppo.networks._checks import check_module
from nnx_ppo.networks.routed import Name, RoutedModule, Runner


class Residual(RoutedModule):
    """Adds a module's output to its input: `x + module(x)` (He et al., 2016, arXiv:1512.03385).

    Inputs may be trees, which are added leaf by leaf.

    Args:
        module: Its output must have the tree and the shapes of its input.

    Raises:
        TypeError: `module` is not a `StatefulModule`.

    Example:
        >>> from nnx_ppo.networks.utils import Scale
        >>> block = Residual(Scale(0.5))
        >>> print(block(block.initialize_state(2), jnp.ones((2, 3))).output[0])
        [1.5 1.5 1.5]
    """

    def __init__(self, module: StatefulModule) -> None:
        self.module = check_module(module, "Residual: module")

    def _children(self) -> Mapping[Name, StatefulModule]:
        return {"module": self.module}

    def _route(self, x: Any, run: Runner) -> Any:
        y = run("module", x)
        if jax.tree.structure(x) != jax.tree.structure(y) or _shapes(x) != _shapes(y):
            raise ValueError(
                f"Residual: the output of {type(self.module).__name__} must have the shapes of "
                f"its input x, expected {_shapes(x)}, got {_shapes(y)}; put a layer in front that "
                "is as wide as the output, or end the module with one as wide as x."
            )
        return jax.tree.map(jnp.add, x, y)


class Detach(StatefulModule):
    """Passes its input on and stops the gradient.

    What comes before it is not trained by what comes after it, such as a trunk by one of the
    heads that it feeds.

    Example:
        >>> barrier = Detach()
        >>> jax.grad(lambda x: x * barrier((), x).output)(3.0).item()
        3.0
    """

    def __call__(
        self, state: tuple[()], x: Any, rollout_extras: Any = None
    ) -> StatefulModuleOutput:
        """Return `x`, leaves `(batch, *feature)`, as a constant."""
        del rollout_extras
        return StatefulModuleOutput(state, jax.lax.stop_gradient(x), jnp.zeros(()), {})


def _shapes(tree: Any) -> Any:
    return jax.tree.map(jnp.shape, tree)
