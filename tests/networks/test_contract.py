"""What holds for every module: one line in `CASES` puts a new one under all of these tests."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from nnx_ppo.core import StatefulModule, StatefulModuleOutput, unroll_stepwise
from nnx_ppo.networks import (
    LSTM,
    Concat,
    Dense,
    Filter,
    Flattener,
    Normalizer,
    NormalTanhSampler,
    Parallel,
    PPOAdapter,
    Sequential,
    Splitter,
    make_lstm_actor_critic,
    make_mlp_actor_critic,
)

TIME, BATCH = 5, 3
DONE = np.array([[0, 1, 0], [1, 0, 0], [0, 0, 0], [1, 1, 0], [0, 1, 0]], bool)


def draw(shape, seed=0):
    return np.random.default_rng([seed, *shape]).normal(size=shape).astype(np.float32)


def cheap(key, shape, dtype=jnp.float32, out_sharding=None):
    """Initialize without JAX, whose initializers take seconds to compile."""
    return jnp.asarray(draw(shape) / np.sqrt(shape[0]), dtype)


INITS = {"kernel_init": cheap, "recurrent_kernel_init": cheap}


def dense(size_in, size_out, activation=jnp.tanh):
    return Dense(size_in, size_out, nnx.Rngs(0), activation, kernel_init=cheap)


def lstm(size_in=4, size_out=4, **kwargs):
    module = LSTM(size_in, size_out, nnx.Rngs(0), **INITS, **kwargs)
    if module.trainable_initial_state:
        module.initial_h[...] = jnp.asarray(draw((size_out,), 1))
        module.initial_c[...] = jnp.asarray(draw((size_out,), 2))
    return module


def sampler(seed=0):
    return NormalTanhSampler(nnx.Rngs(seed), entropy_weight=0.3)


def normalizer():
    module = Normalizer(4)
    module.update_statistics(draw((2, 3, 4)))
    return module


class Buffer(StatefulModule):
    """A user's module with an integer in its carry and a loss and metrics of its own."""

    def __call__(self, state, x, rollout_extras=None):
        count = state["count"] + 1
        mean = (state["mean"] * state["count"][:, None] + x) / count[:, None]
        loss = jnp.sum(jnp.square(mean), axis=-1)
        return StatefulModuleOutput({"mean": mean, "count": count}, mean, loss, {"loss": loss})

    def initialize_state(self, batch_size):
        return {
            "mean": jnp.zeros((batch_size, 4)),
            "count": jnp.zeros((batch_size,), jnp.int32),
        }

    def reset_state(self, prev_state):
        return jax.tree.map(jnp.zeros_like, prev_state)


class SharedNoise(StatefulModule):
    """A user's module that keeps the `Rngs` it was given, as others do, and a scalar loss."""

    def __init__(self, rngs):
        self.rngs = rngs

    def __call__(self, state, x, rollout_extras=None):
        y = x + jax.random.normal(self.rngs.noise(), x.shape)
        return StatefulModuleOutput(state, y, jnp.array(0.5), {})


def shared_noise():
    rngs = nnx.Rngs(0)
    return Sequential([SharedNoise(rngs), Parallel(a=SharedNoise(rngs), b=Buffer())])


def two_memories():
    """The same LSTM twice: one set of weights, two carries."""
    shared = lstm()
    return Sequential([shared, dense(4, 4), shared])


def actor_critic():
    """Everything at once: nested containers, both kinds of memory, two action heads."""
    trunk = Sequential([normalizer(), Sequential([dense(4, 4), lstm()])])
    heads = Parallel(arm=Sequential([dense(4, 4), sampler(1)]), leg=sampler(2))
    values = Parallel(run=Sequential([lstm(), Splitter(v=1), Filter({"v": "v"})]), eat=Buffer())
    return Sequential([trunk, PPOAdapter(action=heads, value=values)])


TWO = {"a": (4,), "b": (2,)}

# (how to make the module, shape of one input sample)
CASES = {
    "dense": (lambda: dense(4, 2), (4,)),
    "lstm": (lstm, (4,)),
    "lstm four matrices": (lambda: lstm(use_optimized=False), (4,)),
    "lstm trainable": (lambda: lstm(trainable_initial_state=True), (4,)),
    "normalizer": (normalizer, (4,)),
    "sampler": (sampler, (4,)),
    "splitter": (lambda: Splitter(x=1, y=2), (4,)),
    "flattener": (Flattener, TWO),
    "filter": (lambda: Filter({"first": "a", "sum": lambda x: x["a"] + 1}), TWO),
    "concat": (lambda: Concat(b=dense(2, 4), a=Sequential([lstm(), Buffer()])), TWO),
    "shared stream": (shared_noise, (4,)),
    "shared weights": (two_memories, (4,)),
    "actor-critic": (actor_critic, (4,)),
}
NAMES = pytest.mark.parametrize("name", CASES)


def make(name):
    build, sizes = CASES[name]
    xs = jax.tree.map(
        lambda size: draw((TIME, BATCH, *size)), sizes, is_leaf=lambda s: isinstance(s, tuple)
    )
    return build(), xs


def first(xs):
    return jax.tree.map(lambda leaf: jnp.asarray(leaf[0]), xs)


def weighted_sum(tree):
    """Return a number in which every element of every leaf counts differently."""
    leaves = [leaf for leaf in jax.tree.leaves(tree) if jnp.issubdtype(leaf.dtype, jnp.floating)]
    return sum(
        jnp.sum(leaf * jnp.cos(jnp.arange(leaf.size)).reshape(leaf.shape)) for leaf in leaves
    )


def assert_close(actual, expected, rtol=2e-5, atol=2e-6):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for (path, have), want in zip(
        jax.tree_util.tree_leaves_with_path(actual), jax.tree.leaves(expected), strict=True
    ):
        if jnp.issubdtype(have.dtype, jax.dtypes.prng_key):
            have, want = jax.random.key_data(have), jax.random.key_data(want)
        if have.dtype == jax.dtypes.float0:
            continue
        assert (have.shape, have.dtype) == (want.shape, want.dtype), path
        np.testing.assert_allclose(have, want, rtol=rtol, atol=atol, err_msg=str(path))


def stored_extras(module, state, x):
    """Return a window of made-up rollout extras in the form that the module emits."""
    emitted = jax.eval_shape(lambda s, x: module_copy(module)(s, x).rollout_extras, state, x)
    return jax.tree.map(lambda leaf: draw((TIME, *leaf.shape), 3), emitted)


def module_copy(module):
    return nnx.merge(*nnx.split(module), copy=True)


@NAMES
def test_unroll_equals_stepwise(name) -> None:
    """Outputs, loss, carry, random streams and gradients, fresh and in the replay."""
    module, xs = make(name)
    graphdef, params, rest = nnx.split(module, nnx.Param, ...)
    carry = module.initialize_state(BATCH)

    def run(form, done, extras, *inputs):
        def loss(params, carry, xs):
            live = nnx.merge(graphdef, params, rest, copy=True)
            out = form(live, carry, xs, done, extras)
            return weighted_sum(out), (out, nnx.state(live, nnx.Not(nnx.Param)))

        return jax.value_and_grad(loss, (0, 1, 2), has_aux=True, allow_int=True)(*inputs)

    @jax.jit
    def both(*args):
        return run(lambda m, *rest: m.unroll(*rest), *args), run(unroll_stepwise, *args)

    replay = stored_extras(module, carry, first(xs))
    for extras in {"sampler": (None, replay), "actor-critic": (replay,)}.get(name, (None,)):
        unrolled, stepwise = both(DONE, extras, params, carry, xs)
        assert unrolled[0][1][0].regularization_loss.shape == (TIME, BATCH)
        assert_close(unrolled, stepwise, rtol=1e-4, atol=1e-5)


@NAMES
def test_samples_do_not_see_each_other(name) -> None:
    """In evaluation, neither the order nor the number of samples changes a sample's result."""
    module, xs = make(name)
    if name == "shared stream":
        pytest.skip("draws noise in evaluation too")
    module.eval()
    order = np.array([2, 0, 1])

    def step(rows):
        carry = jax.tree.map(lambda leaf: leaf + draw(leaf.shape).astype(leaf.dtype), start)
        carry, x = jax.tree.map(lambda leaf: leaf[rows], (carry, first(xs)))
        out = module_copy(module)(carry, x)
        loss = jnp.broadcast_to(out.regularization_loss, (len(rows),))
        return out.output, out.next_state, loss, out.rollout_extras

    start = module.initialize_state(BATCH)
    everyone, permuted, alone = jax.jit(
        lambda: (step(np.arange(BATCH)), step(order), step(np.array([1])))
    )()
    assert_close(permuted, jax.tree.map(lambda leaf: leaf[order], everyone))
    assert_close(alone, jax.tree.map(lambda leaf: leaf[1:2], everyone))


@NAMES
def test_reset_gives_the_initial_carry(name) -> None:
    module, _ = make(name)
    initial = module.initialize_state(BATCH)
    used = jax.tree.map(lambda leaf: leaf + 1, initial)
    assert_close(module.reset_state(used), initial)
    one, first_row = (jax.tree.map(lambda leaf: leaf[0], tree) for tree in (used, initial))
    assert_close(module.reset_state(one), first_row)  # also without a batch axis


@NAMES
def test_calls_change_nothing_but_random_streams(name) -> None:
    module, xs = make(name)
    fixed = nnx.Not(nnx.RngState)
    before = jax.tree.map(jnp.copy, nnx.state(module, fixed))
    out = nnx.jit(lambda m, carry, x: m(carry, x))(
        module, module.initialize_state(BATCH), first(xs)
    )
    jax.block_until_ready(out)
    assert_close(nnx.state(module, fixed), before, rtol=0, atol=0)


@pytest.mark.parametrize("make_network", [make_mlp_actor_critic, make_lstm_actor_critic])
def test_replay_with_unchanged_weights_has_ratio_one(make_network) -> None:
    """Also across episode boundaries, and in the windowed form."""
    if make_network is make_lstm_actor_critic:
        make_network = functools.partial(make_network, lstm_features=6)
    network = make_network({"a": 4, "b": 2}, 2, [8], [8], nnx.Rngs(0))
    xs = {name: draw((TIME, BATCH, *size)) for name, size in TWO.items()}
    graphdef, state = nnx.split(network)

    def collect(carry, inputs):
        rest, carry = carry
        live = nnx.merge(graphdef, rest, copy=True)
        x, ended = inputs
        out = live(carry, x)
        reset = live.reset_state(out.next_state)
        carry = jax.tree.map(
            lambda new, old: jnp.where(ended[:, None], new, old), reset, out.next_state
        )
        return (nnx.state(live), carry), (out.output, out.rollout_extras)

    @jax.jit
    def rollout_and_replay(start, xs, done):
        _, (output, extras) = jax.lax.scan(collect, (state, start), (xs, done))
        live = nnx.merge(graphdef, state, copy=True)
        return output, live.unroll(start, xs, done, extras).output

    rolled, replayed = rollout_and_replay(network.initialize_state(BATCH), xs, DONE)
    ratio = np.exp(replayed.loglikelihoods - rolled.loglikelihoods)
    np.testing.assert_allclose(ratio, np.ones((TIME, BATCH)), rtol=0, atol=1e-5)
    np.testing.assert_allclose(replayed.actions, rolled.actions, rtol=1e-6)
    assert rolled.value_estimates.shape == (TIME, BATCH)
    np.testing.assert_allclose(replayed.value_estimates, rolled.value_estimates, atol=1e-6)
