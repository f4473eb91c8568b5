"""The precision of matrix products: that of the network's is chosen, the environment keeps its."""

import contextlib
from typing import Any, Literal

import jax

from nnx_ppo.core import RLEnv, Wrapper

MatmulPrecision = Literal["float32", "tensorfloat32", "bfloat16"]

# JAX's own "bfloat16" lets the back end choose: on a GPU that is TensorFloat-32.
_NAMES = {"float32": "float32", "tensorfloat32": "tensorfloat32", "bfloat16": "BF16_BF16_F32"}


def matmul_precision(precision: MatmulPrecision | None) -> contextlib.AbstractContextManager[Any]:
    """Return a context in which products of float32 matrices are traced with a precision.

    Inputs of the products are rounded to it; sums, outputs and everything else stay float32.
    Layers that ask for a precision of their own get that.

    Args:
        precision: The precision, or None for whatever JAX is configured for.
    """
    if precision is None:
        return contextlib.nullcontext()
    return jax.default_matmul_precision(_NAMES[precision])


class OwnPrecision(Wrapper):
    """An environment whose products are traced with the precision in force when it was wrapped.

    Physics goes wrong in ways that nobody notices where its products are rounded.

    Args:
        env: The environment to wrap.
    """

    def __init__(self, env: RLEnv) -> None:
        super().__init__(env)
        self._precision = jax.config.jax_default_matmul_precision  # pyright: ignore[reportAttributeAccessIssue]

    def reset(self, rng: Any) -> Any:
        """Reset the wrapped environment."""
        with jax.default_matmul_precision(self._precision):
            return self.env.reset(rng)

    def step(self, state: Any, action: Any) -> Any:
        """Step the wrapped environment."""
        with jax.default_matmul_precision(self._precision):
            return self.env.step(state, action)
