"""The least time that the matrix products of a gradient phase can take on this machine."""

import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array

from nnx_ppo.core import StatefulModule


def kernels(network: StatefulModule) -> list[Array]:
    """Return the weight matrices of a network."""
    return [leaf for leaf in jax.tree.leaves(nnx.state(network, nnx.Param)) if leaf.ndim == 2]


def gradient_flops(network: StatefulModule, obs_size: int, n_samples: int) -> int:
    """Return the floating-point operations in the matrix products of a gradient.

    A product of `(n, a)` and `(a, b)` takes `2 * n * a * b`. Each weight matrix takes part in
    three of that size: forward, for its own gradient, and for that of its input. A matrix that
    reads the observation has no use for the third. Everything else is left out: biases,
    activation functions, the loss, the optimiser.

    Args:
        network: The network; no layer but the first may have `obs_size` inputs.
        obs_size: Features of an observation.
        n_samples: Steps times environments, over all updates.
    """
    products = ((2 if k.shape[0] == obs_size else 3) * k.size for k in kernels(network))
    return 2 * n_samples * sum(products)


def product_rate(network: StatefulModule, n_samples: int, least: float) -> Callable[[], float]:
    """Return a function that measures how fast this machine multiplies matrices, in FLOP/s.

    It does with the largest weight matrix what a gradient does with each: multiply forward, by
    the transpose for the gradient of the input, and the input's transpose for its own. Only
    these three products are in the loop.

    Args:
        network: The network.
        n_samples: Rows of the input, steps times environments of a minibatch.
        least: Seconds that a measurement takes at least.
    """
    shape = max(kernels(network), key=lambda kernel: kernel.size).shape
    x = jax.random.normal(jax.random.key(0), (n_samples, shape[0]))
    # With orthonormal rows or columns the input stays finite, however often it goes round.
    kernel = nnx.initializers.orthogonal()(jax.random.key(1), shape)

    @jax.jit
    def rounds(x: Array, kernel: Array, number: Array) -> tuple[Array, Array]:
        def one(_: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
            x, kernel = carry
            y = x @ kernel
            return y @ kernel.T, kernel - 1e-12 * (x.T @ y)

        return jax.lax.fori_loop(0, number, one, (x, kernel))

    def seconds_of(number: int) -> float:
        start = time.perf_counter()
        jax.block_until_ready(rounds(x, kernel, jnp.int32(number)))
        return time.perf_counter() - start

    seconds_of(1)  # compiles
    number = 1
    while seconds_of(number) < least:
        number *= 2

    def measure() -> float:
        return 6 * n_samples * shape[0] * shape[1] * number / seconds_of(number)

    return measure
