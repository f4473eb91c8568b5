"""Flax's own layers, lifted: values, noise of each sample, evaluation, and what is refused."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from nnx_ppo.core import owns_random_stream, unroll_stepwise
from nnx_ppo.networks import LSTM, Dense, Sequential
from nnx_ppo.networks.lift import Lift

TIME, BATCH = 4, 3
DONE = np.array([[0, 1, 0], [1, 0, 0], [0, 0, 0], [1, 1, 0]], bool)


def draw(shape, seed=0):
    return jnp.asarray(np.random.default_rng([seed, *shape]).normal(size=shape), jnp.float32)


def cheap(key, shape, dtype=jnp.float32, out_sharding=None):
    """Initialize without JAX, whose initializers take seconds to compile."""
    return draw(shape) / np.sqrt(np.prod(shape[:-1]))


def linear(size_in, size_out):
    return nnx.Linear(size_in, size_out, kernel_init=cheap, rngs=nnx.Rngs(0))


def dropout(rate=0.5, seed=0):
    return nnx.Dropout(rate, rngs=nnx.Rngs(seed))


def as_numbers(keys):
    return np.asarray(jax.random.key_data(keys))


PLAIN = {
    "norms": (
        lambda rngs: nnx.Sequential(
            linear(4, 6), nnx.relu, nnx.LayerNorm(6, rngs=rngs), nnx.RMSNorm(6, rngs=rngs)
        ),
        lambda: draw((TIME, BATCH, 4)),
    ),
    "conv": (
        lambda rngs: nnx.Conv(2, 3, (3, 3), kernel_init=cheap, rngs=rngs),
        lambda: draw((TIME, BATCH, 5, 4, 2)),
    ),
    "embed": (
        lambda rngs: nnx.Embed(7, 3, embedding_init=cheap, rngs=rngs),
        lambda: jnp.arange(TIME * BATCH).reshape(TIME, BATCH) % 7,
    ),
    "attention": (
        lambda rngs: nnx.MultiHeadAttention(
            2, 4, kernel_init=cheap, rngs=rngs, decode=False, deterministic=False
        ),
        lambda: draw((TIME, BATCH, 5, 4)),
    ),
}


@pytest.mark.parametrize("name", PLAIN)
def test_layers_without_noise_are_called_as_they_are(name) -> None:
    build, inputs = PLAIN[name]
    module, xs = build(nnx.Rngs(0)), inputs()
    lift = Lift(module)
    assert lift.initialize_state(BATCH) == () and not owns_random_stream(lift)
    out = lift((), xs[0])
    expected = [module(x) for x in xs]
    np.testing.assert_allclose(out.output, expected[0], rtol=1e-6)
    assert (out.next_state, out.metrics, out.rollout_extras) == ((), {}, None)
    unrolled = lift.unroll((), xs, jnp.asarray(DONE))
    np.testing.assert_allclose(unrolled.output, np.stack(expected), rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(unrolled.regularization_loss, np.zeros((TIME, BATCH)))


def test_the_module_may_take_a_tree() -> None:
    class Both(nnx.Module):
        def __call__(self, x):
            return {"sum": x["a"] + x["b"], "first": x["a"]}

    x = {"a": draw((BATCH, 2)), "b": draw((BATCH, 2), 1)}
    out = Lift(Both())((), x).output
    np.testing.assert_array_equal(out["sum"], x["a"] + x["b"])
    np.testing.assert_array_equal(out["first"], x["a"])


def test_dropout_gives_each_sample_its_own_mask_and_repeats_it() -> None:
    lift = Lift(dropout(0.75))
    keys, x = lift.initialize_state(BATCH), jnp.ones((BATCH, 64))
    out = lift(keys, x)
    assert set(np.unique(out.output)) == {0.0, 4.0}  # dropped, or divided by 1 - 0.75
    # 192 draws: the kept fraction is 1/4, with a deviation of sqrt(3/16 / 192) = 0.031
    assert abs(float((out.output > 0).mean()) - 0.25) < 5 * 0.031
    later = lift(out.next_state, x).output
    assert len({row.tobytes() for row in map(np.asarray, [*out.output, *later])}) == 2 * BATCH
    # the same carry, the same masks: the replay's
    again = lift(keys, x)
    np.testing.assert_array_equal(again.output, out.output)
    np.testing.assert_array_equal(as_numbers(again.next_state), as_numbers(out.next_state))
    # a sample's mask is its own, whatever its neighbours
    rows = np.array([2, 0])
    np.testing.assert_array_equal(lift(keys[rows], x[rows]).output, out.output[rows])


def test_streams_inside_stand_still_and_differ_from_each_other() -> None:
    inside: list[Any] = [dropout(seed=1), dropout(seed=1)]
    module = nnx.Sequential(*inside)
    lift = Lift(module)

    def counts():
        return [int(layer.rngs.count[...]) for layer in inside]

    keys = lift.initialize_state(BATCH)
    before = counts()
    x = jnp.ones((BATCH, 64))
    twice = lift(keys, x).output
    # equal masks would keep about 1/2, independent ones keep 1/4 (deviation 0.031)
    assert set(np.unique(twice)) == {0.0, 4.0}
    assert abs(float((twice > 0).mean()) - 0.25) < 5 * 0.031
    after = counts()
    assert before == after
    # other environments, other keys: also in two layers of the same module
    others = [lift.initialize_state(BATCH), Lift(module).initialize_state(BATCH)]
    assert len({row.tobytes() for k in (keys, *others) for row in as_numbers(k)}) == 3 * BATCH


NOISY = {
    "dropout": lambda: nnx.Sequential(linear(4, 5), dropout(), nnx.tanh, dropout(0.2), nnx.tanh),
    "attention": lambda: nnx.Sequential(
        lambda x: x[:, :, None],
        linear(1, 4),
        nnx.MultiHeadAttention(
            2, 4, dropout_rate=0.5, broadcast_dropout=False, decode=False, deterministic=False,
            kernel_init=cheap, rngs=nnx.Rngs(0),
        ),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", NOISY)
def test_unroll_equals_stepwise_with_noise(name) -> None:
    lift = Lift(NOISY[name]())
    graphdef, params, rest = nnx.split(lift, nnx.Param, ...)
    keys, xs = lift.initialize_state(BATCH), draw((TIME, BATCH, 4))

    def run(form, params, xs):
        def loss(params, xs):
            out = form(nnx.merge(graphdef, params, rest, copy=True), keys, xs, jnp.asarray(DONE))
            weights = jnp.cos(jnp.arange(out.output.size)).reshape(out.output.shape)
            return jnp.sum(weights * out.output), (out.output, out.next_state)

        return jax.value_and_grad(loss, (0, 1), has_aux=True)(params, xs)

    unrolled, stepwise = jax.jit(
        lambda *args: (run(lambda m, *rest: m.unroll(*rest), *args), run(unroll_stepwise, *args))
    )(params, xs)
    ((_, (output, carry)), gradients), ((_, (output2, carry2)), gradients2) = unrolled, stepwise
    np.testing.assert_allclose(output, output2, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(as_numbers(carry), as_numbers(carry2))
    for gradient, other in zip(
        jax.tree.leaves(gradients), jax.tree.leaves(gradients2), strict=True
    ):
        np.testing.assert_allclose(gradient, other, rtol=1e-4, atol=1e-5)


def test_train_and_eval_reach_the_layers_inside() -> None:
    network = Sequential([Lift(nnx.Sequential(nnx.relu, dropout())), Dense(8, 2, nnx.Rngs(0))])
    lift, x = network.layers[0], draw((BATCH, 8))
    keys = lift.initialize_state(BATCH)
    trained = lift(keys, x)
    network.eval()
    evaluated = lift(keys, x)
    np.testing.assert_array_equal(evaluated.output, np.maximum(x, 0.0))
    np.testing.assert_array_equal(as_numbers(evaluated.next_state), as_numbers(trained.next_state))
    network.train()
    np.testing.assert_array_equal(lift(keys, x).output, trained.output)
    assert (trained.output != evaluated.output).any()
    # keys go on at the end of an episode
    np.testing.assert_array_equal(as_numbers(lift.reset_state(keys)), as_numbers(keys))


class Counting(nnx.Module):
    def __init__(self):
        self.calls = nnx.Variable(jnp.zeros(()))

    def __call__(self, x):
        self.calls[...] += 1.0
        return x


class Sowing(nnx.Module):
    def __call__(self, x):
        self.seen = nnx.Intermediate(x)
        return x


@pytest.mark.parametrize(("module", "name"), [(Counting, "calls"), (Sowing, "seen")])
def test_a_forward_pass_that_writes_is_refused_when_it_is_called(module, name) -> None:
    lift = Lift(module())
    with pytest.raises(TypeError, match=rf"Lift: module writes \['{name}'\] in its forward pass"):
        jax.jit(lambda x: lift((), x).output)(jnp.ones((2, 3)))
    noisy = Lift(nnx.Sequential(dropout(), module()))
    with pytest.raises(TypeError, match=rf"writes \['layers/1/{name}'\] in its forward"):
        noisy(noisy.initialize_state(2), jnp.ones((2, 3)))


def cached():
    attention = nnx.MultiHeadAttention(2, 4, kernel_init=cheap, rngs=nnx.Rngs(0), decode=True)
    attention.init_cache((1, 5, 4))
    return attention


RNGS = nnx.Rngs(0)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("module", "error", "message"),
    [
        (lambda: nnx.BatchNorm(3, rngs=RNGS), TypeError, "BatchNorm mixes .* use Normalizer"),
        (
            lambda: nnx.Sequential(nnx.relu, nnx.BatchNorm(3, rngs=RNGS)),
            TypeError,
            "BatchNorm in Sequential mixes the samples",
        ),
        (
            lambda: nnx.SpectralNorm(linear(2, 3), rngs=RNGS),
            TypeError,
            "SpectralNorm changes variables .* use nnx.LayerNorm",
        ),
        (lambda: nnx.WeightNorm(linear(2, 3), rngs=RNGS), TypeError, "WeightNorm changes"),
        (cached, TypeError, "Cache in MultiHeadAttention has memory"),
        (
            lambda: nnx.RNN(nnx.SimpleCell(2, 3, kernel_init=cheap, rngs=RNGS)),
            TypeError,
            r"SimpleCell in RNN has memory.*use Recurrent\(cell\)",
        ),
        (
            lambda: LSTM(2, 3, RNGS, kernel_init=cheap, recurrent_kernel_init=cheap),
            TypeError,
            "LSTM is a StatefulModule; use it directly",
        ),
        (lambda: nnx.Dropout(0.5), ValueError, r"no stream .* nnx.Dropout\(0.5, rngs=rngs\)"),
        (lambda: nnx.LayerNorm, TypeError, "got the class LayerNorm: pass an instance"),
        (lambda: nnx.relu, TypeError, r"activation function as Dense\(..., activation=...\)"),
        (lambda: 3, TypeError, "got int: build the layer first"),
        (lambda: nnx.List([]), TypeError, r"must have __call__\(x\), which List has not"),
    ],
)
def test_refusals(module, error, message) -> None:
    with pytest.raises(error, match=f"Lift: module.*{message}"):
        Lift(module())
