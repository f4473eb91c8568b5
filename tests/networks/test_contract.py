"""Every module that we ship keeps the contract: a new one is one line in `CASES`."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import nnx_ppo.networks
from nnx_ppo.core import StatefulModule, StatefulModuleOutput, unroll_stepwise
from nnx_ppo.core.testing import check_module
from nnx_ppo.networks import (
    GRU,
    LSTM,
    RNN,
    AR1VariationalBottleneck,
    CategoricalSampler,
    Concat,
    Delay,
    Dense,
    Detach,
    Filter,
    Flattener,
    LeakyRNN,
    Lift,
    Map,
    Merge,
    MultiCategoricalSampler,
    Normalizer,
    NormalSampler,
    NormalTanhSampler,
    Parallel,
    PopulationGraph,
    PPOAdapter,
    Recorder,
    Recurrent,
    Residual,
    Scale,
    Sequential,
    Splitter,
    VariationalBottleneck,
    make_lstm_actor_critic,
    make_mlp_actor_critic,
    with_recording,
)


def cheap(key, shape, dtype=jnp.float32, out_sharding=None):
    """Initialize without JAX, whose initializers take seconds to compile."""
    draw = np.random.default_rng([0, *shape]).normal(size=shape)
    return jnp.asarray(draw / np.sqrt(shape[0]), dtype)


INITS = {"kernel_init": cheap, "recurrent_kernel_init": cheap}
R = nnx.Rngs(0)
FOUR = jnp.zeros(4)
TWO = {"a": jnp.zeros(4), "b": jnp.zeros(2)}
MASKED = {"logits": jnp.zeros(4), "mask": jnp.zeros(4, bool)}


def dense(size_in=4, size_out=4, activation=jnp.tanh):
    return Dense(size_in, size_out, R, activation, kernel_init=cheap)


def lstm(**kwargs):
    return LSTM(4, 4, R, **INITS, **kwargs)


def sampler(**kwargs):
    return NormalTanhSampler(R, entropy_weight=0.3, **kwargs)


def normalizer():
    module = Normalizer(4)
    module.update_statistics(np.random.default_rng(0).normal(size=(2, 3, 4)).astype(np.float32))
    return module


class Noisy(StatefulModule):
    """A user's module that draws noise in its forward pass, from keys in the carry."""

    def __init__(self):
        self.stream = R.noise.fork()

    def __call__(self, state, x, rollout_extras=None):
        pairs = jax.vmap(jax.random.split)(state)
        noise = jax.vmap(lambda key: jax.random.normal(key, x.shape[1:]))(pairs[:, 1])
        loss = jnp.sum(jnp.square(noise), axis=-1)
        return StatefulModuleOutput(pairs[:, 0], x + noise, loss, {"loss": loss})

    def initialize_state(self, batch_size):
        return jax.random.split(self.stream(), batch_size)


def graph(edge=None):
    """Two loops, one of them through a delay, and an edge of one's own."""
    made = PopulationGraph(R)
    made.add_input("eye", 4, input_from="a")
    made.add_input("ear", 2, input_from="b", activation=jnp.tanh)
    made.add_population("hub", 3, activation=jnp.tanh)
    made.add_output("arm", 2, output_to="command")
    made.add_output("leg", 2, activation=jnp.tanh)
    made.connect("eye", "hub", transform=edge and Sequential([edge, dense(4, 3)]))
    made.connect("ear", "hub", delay=2)
    made.connect("hub", "hub", delay=1)
    made.connect("hub", "arm", delay=1, reciprocal=True)
    made.connect("hub", "leg")
    made.connect("eye", "leg", delay=3)
    made.finalize()
    return made


def two_memories():
    """The same LSTM twice: one set of weights, two carries."""
    shared = lstm()
    return Sequential([shared, dense(), shared])


def actor_critic():
    """Everything at once: nested containers, both kinds of memory, three action heads."""
    trunk = Sequential([normalizer(), Sequential([dense(), lstm()])])
    heads = Parallel(
        arm=Sequential([dense(), sampler()]), leg=sampler(), choice=CategoricalSampler(R, 0.1)
    )
    values = Parallel(run=Sequential([lstm(), Splitter(v=1), Filter({"v": "v"})]), eat=Noisy())
    return Sequential([trunk, PPOAdapter(action=heads, value=values)])


def leaky(**kwargs):
    return LeakyRNN(4, 3, R, tau=[2.0, 3.0, 4.0], noise_std=0.2, **kwargs)


def masked(key):
    logits, allowed = jax.random.normal(key, (2, 4))
    return {"logits": logits, "mask": allowed > jnp.min(allowed)}


# (how to make the module, a sample input[, how to draw one])
CASES = {
    "dense": (dense, FOUR),
    "lstm": (lstm, FOUR),
    "lstm, four matrices, trainable": (
        lambda: lstm(use_optimized=False, trainable_initial_state=True),
        FOUR,
    ),
    "gru": (lambda: GRU(4, 3, R, trainable_initial_state=True), FOUR),
    "rnn": (lambda: RNN(4, 3, R), FOUR),
    "leaky rnn": (lambda: leaky(trainable_tau=True, trainable_initial_state=True), FOUR),
    "leaky rnn, fixed": (leaky, FOUR),
    "recurrent": (
        lambda: Recurrent(nnx.LSTMCell(4, 3, rngs=R), trainable_initial_state=True),
        FOUR,
    ),
    "lift layer norm": (lambda: Lift(nnx.LayerNorm(4, rngs=R)), FOUR),
    "lift dropout": (lambda: Lift(nnx.Dropout(0.5, rngs=R)), FOUR),
    "lift embedding": (lambda: Lift(nnx.Embed(5, 3, rngs=R)), jnp.full(2, 4)),
    "lift convolution": (lambda: Lift(nnx.Conv(2, 3, 2, rngs=R)), jnp.zeros((4, 2))),
    "normalizer": (normalizer, FOUR),
    "normalizer of a tree": (lambda: Normalizer({"a": 4, "b": 2}), TWO),
    "delay": (lambda: Delay(TWO, 2, initial_value=0.5), TWO),
    "delay of integers": (lambda: Delay(jnp.full(2, 3), 3), jnp.full(2, 3)),
    "bottleneck": (lambda: VariationalBottleneck(2, R), FOUR),
    "ar1 bottleneck": (lambda: AR1VariationalBottleneck(2, R), FOUR),
    "ar1 bottleneck, cut": (
        lambda: AR1VariationalBottleneck(2, R, backprop_through_time=False),
        FOUR,
    ),
    "tanh sampler": (sampler, FOUR),
    "tanh sampler, free std": (lambda: sampler(free_std=[0.5] * 4), FOUR),
    "normal sampler": (lambda: NormalSampler(R, 0.3), FOUR),
    "normal sampler, free std": (lambda: NormalSampler(R, 0.3, free_std=[0.5] * 4), FOUR),
    "categorical sampler": (lambda: CategoricalSampler(R, 0.3), FOUR),
    "categorical sampler, masked": (lambda: CategoricalSampler(R, 0.3), MASKED, masked),
    "multi-categorical sampler": (lambda: MultiCategoricalSampler(R, [2, 2], 0.3), FOUR),
    "splitter": (lambda: Splitter(x=1, y=2), FOUR),
    "flattener": (Flattener, TWO),
    "filter": (lambda: Filter({"first": "a", "sum": lambda x: x["a"] + 1}), TWO),
    "scale": (lambda: Scale(-0.5), TWO),
    "detach": (lambda: Sequential([Detach(), dense()]), FOUR),
    "concat": (lambda: Concat(b=dense(2, 4), a=Sequential([lstm(), Noisy()])), TWO),
    "map": (lambda: Map(b=dense(2, 4), a=Sequential([lstm(), sampler()])), TWO),
    "merge": (lambda: Merge(q=sampler(), p=Sequential([lstm(), Splitter(x=1)])), FOUR),
    "residual": (lambda: Residual(Sequential([dense(), lstm()])), FOUR),
    "recorder": (lambda: Recorder(AR1VariationalBottleneck(2, R)), FOUR),
    "graph": (graph, TWO),
    "graph of memories": (lambda: graph(Sequential([normalizer(), lstm(), Noisy()])), TWO),
    "shared weights": (two_memories, FOUR),
    "actor-critic": (actor_critic, FOUR),
    "actor-critic, recording": (lambda: with_recording(actor_critic()), FOUR),
    "mlp actor-critic": (lambda: make_mlp_actor_critic({"a": 4, "b": 2}, 2, [4], [4], R), TWO),
    "lstm actor-critic": (
        lambda: make_lstm_actor_critic(4, 2, [4], [4], R, lstm_features=3),
        FOUR,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_contract_is_kept(name) -> None:
    make, sample_input, *draw_input = CASES[name]
    check_module(make(), sample_input, draw_input=draw_input[0] if draw_input else None)


def test_no_module_is_left_out() -> None:
    shipped = {
        cls.__name__
        for cls in vars(nnx_ppo.networks).values()
        if inspect.isclass(cls) and issubclass(cls, StatefulModule) and not inspect.isabstract(cls)
    }
    tried = {
        type(node).__name__ for make, *_ in CASES.values() for _, node in nnx.iter_graph(make())
    }
    assert shipped <= tried


class SharedNoise(StatefulModule):
    """A user's module that keeps the `Rngs` it was given, as others do, and a scalar loss."""

    def __init__(self, rngs):
        self.rngs = rngs

    def __call__(self, state, x, rollout_extras=None):
        y = x + jax.random.normal(self.rngs.noise(), x.shape)
        return StatefulModuleOutput(state, y, jnp.array(0.5), {})


def test_a_shared_stream_is_dealt_out_as_step_by_step() -> None:
    """Its noise breaks the replay rule, but no draw may depend on the form of the window."""
    rngs = nnx.Rngs(0)
    net = Sequential([SharedNoise(rngs), Parallel(a=SharedNoise(rngs), b=SharedNoise(rngs))])
    graphdef, state = nnx.split(net)
    xs, done = jnp.zeros((5, 3, 4)), jnp.zeros((5, 3), bool)

    @jax.jit
    def both():
        fast, slow = (nnx.merge(graphdef, state, copy=True) for _ in range(2))
        carry = net.initialize_state(3)
        outs = fast.unroll(carry, xs, done), unroll_stepwise(slow, carry, xs, done)
        return outs, (nnx.state(fast), nnx.state(slow))

    for fast, slow in both():
        for a, b in zip(jax.tree.leaves(fast), jax.tree.leaves(slow), strict=True):
            assert a.dtype == b.dtype and bool(jnp.all(a == b))
