"""Derivatives of recurrent layers over a window: of any mode and order, and what they cost."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.extend.core import jaxprs_in_params

from nnx_ppo.core import unroll_stepwise
from nnx_ppo.networks.leaky import LeakyRNN
from nnx_ppo.networks.recurrent import GRU, LSTM, RNN, Recurrent

TIME, BATCH, UNITS = 4, 3, 5
DONE = jnp.array([[0, 1, 0], [1, 0, 0], [0, 0, 0], [1, 1, 0]], bool)


def draw(shape, seed=0):
    return np.random.default_rng([seed, *shape]).normal(size=shape)


def cheap(key, shape, dtype=jnp.float32, out_sharding=None):
    """Initialize without JAX, whose initializers take seconds to compile."""
    return jnp.asarray(draw(shape) / np.sqrt(shape[0]), dtype)


def make(kind, **kwargs):
    inits: dict[str, Any] = {"kernel_init": cheap, "recurrent_kernel_init": cheap}
    kwargs = {"trainable_initial_state": True} | inits | kwargs
    return kind(2, UNITS, nnx.Rngs(0), bias_init=cheap, **kwargs)


LAYERS = {
    "lstm": lambda: make(LSTM),
    "lstm four matrices": lambda: make(LSTM, use_optimized=False),
    "gru": lambda: make(GRU),
    "rnn": lambda: make(RNN),
    "leaky": lambda: make(LeakyRNN, tau=3.0, trainable_tau=True, noise_std=0.5),
    "recurrent lstm": lambda: Recurrent(nnx.OptimizedLSTMCell(2, UNITS, rngs=nnx.Rngs(0))),
}
NAMES = pytest.mark.parametrize("name", LAYERS)


def problem(name):
    """Return a scalar function of parameters, inputs and carry, by a form of unrolling."""
    graphdef, params, rest = nnx.split(LAYERS[name](), nnx.Param, ...)
    carry = nnx.merge(graphdef, params, rest, copy=True).initialize_state(BATCH)
    keys = {"keys": carry.pop("keys")} if isinstance(carry, dict) else {}
    carry = jax.tree.map(lambda leaf: leaf + 0.3, carry)

    def total(form, params, xs, carry):
        state = {**carry, **keys} if keys else carry
        out = form(nnx.merge(graphdef, params, rest, copy=True), state, xs, DONE)
        last = {**out.next_state, "keys": None} if keys else out.next_state
        return sum(
            jnp.vdot(leaf, jnp.cos(jnp.arange(leaf.size, dtype=leaf.dtype)).reshape(leaf.shape))
            for leaf in jax.tree.leaves((out.output, last))
        )

    return total, (params, jnp.asarray(draw((TIME, BATCH, 2)), jnp.float32), carry)


def unrolled(module, *args):
    return module.unroll(*args)


def assert_close(actual, expected, rtol=1e-4, atol=1e-5):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol, atol), actual, expected)


def ones_like(tree):
    return jax.tree.map(lambda leaf: jnp.cos(jnp.arange(leaf.size)).reshape(leaf.shape), tree)


def forward(function, at):
    return jax.jvp(function, at, ones_like(at))[1]


def reverse_over_reverse(function, at):
    def slope(*at):
        gradient = jax.grad(function, range(len(at)))(*at)
        products = jax.tree.map(jnp.vdot, gradient, ones_like(at))
        return sum(jax.tree.leaves(products))

    return jax.grad(slope, range(len(at)))(*at)


def forward_over_reverse(function, at):
    return jax.jvp(jax.grad(function, range(len(at))), at, ones_like(at))[1]


@pytest.mark.parametrize("name", ["gru", "leaky"])
def test_other_derivatives_equal_stepwise(name) -> None:
    total, at = problem(name)

    def derivatives(form):
        def function(*at):
            return total(form, *at)

        return forward_over_reverse(function, at), reverse_over_reverse(function, at)

    both = jax.jit(lambda: (derivatives(unrolled), derivatives(unroll_stepwise)))()
    assert_close(*both)


def test_double_precision_is_kept() -> None:
    with jax.enable_x64(True):
        total, at = problem("lstm")
        at = jax.tree.map(lambda leaf: leaf.astype(jnp.float64), at)

        def gradient(form):
            return jax.grad(lambda *at: total(form, *at), (0, 1, 2))(*at)

        both = jax.jit(lambda: (gradient(unrolled), gradient(unroll_stepwise)))()
        assert_close(*both, rtol=1e-11, atol=1e-13)
        assert all(leaf.dtype == jnp.float64 for leaf in jax.tree.leaves(both))


def test_one_derivative_for_each_of_many_layers() -> None:
    total, at = problem("leaky")
    many = jax.tree.map(lambda leaf: jnp.stack([leaf, 0.5 * leaf]), at)

    def gradient(*at):
        return jax.grad(lambda *at: total(unrolled, *at), (0, 1, 2))(*at)

    at_once, one = jax.jit(lambda: (jax.vmap(gradient)(*many), gradient(*at)))()
    assert_close(jax.tree.map(lambda leaf: leaf[0], at_once), one)


def test_inputs_alone_have_a_gradient() -> None:
    total, (params, xs, carry) = problem("rnn")
    both = jax.jit(
        lambda: [
            jax.grad(lambda xs, form=form: total(form, params, xs, carry))(xs)
            for form in (unrolled, unroll_stepwise)
        ]
    )()
    assert_close(*both)


def equations(jaxpr, in_scan=False):
    """Yield `(equation, in_scan)` for each operation of a program."""
    for equation in jaxpr.eqns:
        yield equation, in_scan
        for inner in jaxprs_in_params(equation.params):
            yield from equations(inner, in_scan or equation.primitive.name == "scan")


def step_operations(name, form):
    """Return what the steps of a gradient compute: name, and sizes of the first result."""
    total, at = problem(name)
    gradient = jax.make_jaxpr(jax.grad(lambda params: total(form, params, *at[1:])))(at[0])
    return [
        (equation.primitive.name, tuple(sorted(equation.outvars[0].aval.shape)))
        for equation, in_scan in equations(gradient.jaxpr)
        if in_scan
    ]


@NAMES
def test_no_step_forms_a_gradient_of_weights(name) -> None:
    kernels = {
        ("dot_general", tuple(sorted(leaf.shape)))
        for leaf in jax.tree.leaves(problem(name)[1][0])
        if leaf.ndim == 2
    }
    operations = step_operations(name, unrolled)
    assert not kernels & set(operations)
    products = sum(operation == "dot_general" for operation, _ in operations)
    assert products == (8 if name == "lstm four matrices" else 2)  # a step's own, forward and back
    assert kernels & set(step_operations(name, unroll_stepwise))


def test_no_step_computes_activations_again() -> None:
    names = [operation for operation, _ in step_operations("lstm", unrolled)]
    assert (names.count("logistic"), names.count("tanh")) == (3, 2)
