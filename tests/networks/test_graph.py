"""`PopulationGraph`: by hand, over windows, as a module, as a drawing; and messages."""

# Some tests hand in what the types forbid.
# pyright: reportArgumentType=false

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from nnx_ppo.core import (
    ACTIVATION_KEY,
    StatefulModule,
    StatefulModuleOutput,
    reset_where,
    unroll_stepwise,
)
from nnx_ppo.networks import LSTM, Dense, Normalizer, Sequential
from nnx_ppo.networks.graph import Connection, Population, PopulationGraph

TIME, BATCH = 7, 3
DONE = np.array([[0] * 7, [0, 1, 0, 0, 0, 0, 1], [0, 0, 0, 1, 1, 0, 0]], bool).T


def draw(shape, seed=0):
    return np.random.default_rng([seed, *shape]).normal(size=shape).astype(np.float32)


def cheap(key, shape, dtype=jnp.float32, out_sharding=None):
    """Initialize without JAX, whose initializers take seconds to compile."""
    return jnp.asarray(draw(shape) / np.sqrt(shape[0]), dtype)


def dense(size_in, size_out):
    return Dense(size_in, size_out, nnx.Rngs(0), kernel_init=cheap)


def lstm(size_in, size_out):
    return LSTM(size_in, size_out, nnx.Rngs(0), kernel_init=cheap, recurrent_kernel_init=cheap)


def times(weight):
    """A connection between two populations of one unit."""
    return Dense(1, 1, nnx.Rngs(0), kernel_init=nnx.initializers.constant(weight))


class Probe(StatefulModule):
    """The identity, with a carry that counts, and a loss, a metric, extras and a statistic."""

    def __init__(self, loss=0.0):
        self.loss = loss
        self.seen = nnx.Variable(jnp.zeros(()))

    def __call__(self, state, x, rollout_extras=None):
        loss = self.loss * x[..., 0]
        extras = state if rollout_extras is None else rollout_extras
        return StatefulModuleOutput(state + 1, x, loss, {"loss": loss}, extras)

    def initialize_state(self, batch_size):
        return jnp.zeros((batch_size,))

    def reset_state(self, prev_state):
        return jnp.zeros_like(prev_state)

    def update_statistics(self, rollout_extras):
        self.seen[...] = jnp.sum(rollout_extras)


class Noise(StatefulModule):
    """Adds noise of a stream that may be shared."""

    def __init__(self, stream):
        self.stream = stream

    def __call__(self, state, x, rollout_extras=None):
        return StatefulModuleOutput(
            state, x + jax.random.normal(self.stream(), x.shape), jnp.zeros(()), {}
        )


def by_hand(relu=jax.nn.relu):
    """see → think → act → think, with a late reflex from seeing to acting."""
    graph = PopulationGraph(nnx.Rngs(0))
    graph.add_input("see", 1, input_from="light")
    graph.add_population("think", 1, activation=relu)
    graph.add_output("act", 1, output_to="hand")
    graph.connect("see", "think", transform=times(1.0))
    graph.connect("think", "act", transform=times(1.0))
    graph.connect("act", "think", transform=times(-1.0), delay=1)
    graph.connect("see", "act", transform=times(10.0), delay=3)
    graph.finalize()
    return graph


# see = 1, 2, 3, 4, 5, 6 in both environments; the second one's episode ends after step 2.
#   think[t] = relu(see[t] − act[t−1]),   act[t] = think[t] + 10 · see[t−3]
#   t         0          1          2          3              4               5
#   think, 0  1          2−1 = 1    3−1 = 2    4−2 = 2        5−12 → 0        6−20 → 0
#   act, 0    1          1          2          2+10·1 = 12    0+10·2 = 20     0+10·3 = 30
#   think, 1  1          1          2          4              5−4 = 1         6−1 = 5
#   act, 1    1          1          2          4              1               5
LIGHT = np.broadcast_to(np.arange(1.0, 7.0, dtype=np.float32)[:, None, None], (6, 2, 1))
END = np.array([[0, 0], [0, 0], [0, 1], [0, 0], [0, 0], [0, 0]], bool)
THINK = [[1, 1], [1, 1], [2, 2], [2, 4], [0, 1], [0, 5]]
ACT = [[1, 1], [1, 1], [2, 2], [12, 4], [20, 1], [30, 5]]


def test_steps_by_hand() -> None:
    graph = by_hand()
    graph.record_activations = True
    carry, seen = graph.initialize_state(2), []
    for light, end in zip(LIGHT, END, strict=True):
        out = graph(carry, {"light": light, "unused": light})
        assert out.output.keys() == {"hand"}
        activations = out.metrics[ACTIVATION_KEY]
        assert activations.keys() == {"see", "think", "act"}
        np.testing.assert_array_equal(out.output["hand"], activations["act"])
        seen.append({name: value[:, 0] for name, value in activations.items()})
        carry = reset_where(graph, jnp.asarray(end), out.next_state)
    np.testing.assert_array_equal(np.stack([step["see"] for step in seen]), LIGHT[..., 0])
    np.testing.assert_array_equal(np.stack([step["think"] for step in seen]), THINK)
    np.testing.assert_array_equal(np.stack([step["act"] for step in seen]), ACT)
    # One buffer for each population that is read with a delay, as long as the longest. The next
    # step writes where the oldest entry is: after 6 steps at 6 % 3, after 3 at 3 % 3.
    assert carry["history"].keys() == {"see", "act"}
    np.testing.assert_array_equal(carry["history"]["see"]["buffer"][..., 0], [[4, 5, 6]] * 2)
    np.testing.assert_array_equal(carry["history"]["act"]["buffer"][..., 0], [[30], [5]])
    np.testing.assert_array_equal(carry["history"]["see"]["idx"], [0, 0])


def test_window_by_hand() -> None:
    graph = by_hand()
    assert graph.groups == (("see",), ("think", "act"))
    out = graph.unroll(graph.initialize_state(2), {"light": LIGHT}, jnp.asarray(END))
    np.testing.assert_array_equal(out.output["hand"][..., 0], ACT)
    np.testing.assert_array_equal(out.regularization_loss, np.zeros((6, 2)))


def cortex():
    """Several of all: inputs, outputs, loops, memories, and a population that hears nothing."""
    graph = PopulationGraph(nnx.Rngs(0))
    graph.add_output("z", 2)
    graph.add_input("items", 3, input_from="vision", activation=jnp.tanh)
    graph.add_input("body", 3, input_from="vision")
    graph.add_population("b", 4, activation=jnp.tanh)
    graph.add_population("a", 4, activation=jnp.tanh)
    graph.add_population("silent", 2, activation=jnp.cos)
    graph.add_output("out", 1, output_to="value")
    graph.connect("items", "b", transform=dense(3, 4))
    graph.connect("body", "a", transform=dense(3, 4), delay=2)
    graph.connect("a", "b", transform=lstm(4, 4))
    graph.connect("b", "a", transform=dense(4, 4), delay=1)
    graph.connect("b", "a", transform=dense(4, 4), delay=3)
    graph.connect("a", "a", transform=Sequential([Probe(0.5), dense(4, 4)]), delay=2)
    graph.connect("a", "z", transform=lstm(4, 2), delay=4)
    graph.connect("a", "z", transform=dense(4, 2))
    graph.connect("a", "z", transform=dense(4, 2))
    graph.connect("silent", "z", transform=Probe(0.25), delay=2)
    graph.connect("z", "out", transform=dense(2, 1))
    graph.finalize()
    return graph


def weighted_sum(tree):
    leaves = [leaf for leaf in jax.tree.leaves(tree) if jnp.issubdtype(leaf.dtype, jnp.floating)]
    return sum(jnp.sum(leaf * draw(leaf.shape, i)) for i, leaf in enumerate(leaves))


def assert_close(found, expected):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), found, expected
    )


def scrambled(leaf):
    return (
        jnp.asarray(draw(leaf.shape)) if leaf.dtype == jnp.float32 else leaf + jnp.arange(BATCH) % 2
    )


def test_a_window_is_its_steps_in_values_and_gradients() -> None:
    graph, xs, done = cortex(), {"vision": draw((TIME, BATCH, 3))}, jnp.asarray(DONE)
    # A carry as from the middle of an episode, with environments at different places, and extras.
    carry = jax.tree.map(scrambled, graph.initialize_state(BATCH))
    emitted = jax.eval_shape(graph, carry, {"vision": xs["vision"][0]}).rollout_extras
    extras = jax.tree.map(lambda leaf: jnp.asarray(draw((TIME, *leaf.shape))), emitted)
    graphdef, params, rest = nnx.split(graph, nnx.Param, ...)

    @jax.jit
    def run(params, carry, xs):
        def outcome(unroll, params, carry, xs):
            live = nnx.merge(graphdef, params, rest, copy=True)
            out = unroll(live, carry, xs, done, extras)
            return weighted_sum(out), out

        forms = type(graph).unroll, unroll_stepwise
        grad = [jax.value_and_grad(outcome, (1, 2, 3), True, allow_int=True) for _ in forms]
        return [g(form, params, carry, xs) for g, form in zip(grad, forms, strict=True)]

    (found, found_grads), (expected, expected_grads) = run(params, carry, xs)
    assert_close(found, expected)
    for some, others in zip(found_grads, expected_grads, strict=True):
        floats = [
            (a, b)
            for a, b in zip(jax.tree.leaves(some), jax.tree.leaves(others), strict=True)
            if a.dtype == jnp.float32
        ]
        assert floats
        for a, b in floats:
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


def test_gradients_reach_back_through_delays() -> None:
    graph, light = by_hand(relu=None), jnp.asarray(LIGHT)
    grad = jax.grad(
        lambda light: (
            graph.unroll(graph.initialize_state(2), {"light": light}, jnp.asarray(END))
            .output["hand"][5]
            .sum()
        )
    )(light)
    # Without the relu, act[t] = see[t] − act[t−1] + 10 · see[t−3], so d act[5] / d see[t] is
    # (−1)^(5−t) for the path through think, and 10 · (−1)^(5−(t+3)) from t + 3 <= 5 on for the
    # reflex: −1+10, 1−10, −1+10, 1, −1, 1. The second environment's episode began at step 3.
    np.testing.assert_array_equal(grad[:, 0, 0], [9, -9, 9, 1, -1, 1])
    np.testing.assert_array_equal(grad[:, 1, 0], [0, 0, 0, 1, -1, 1])


def jitted_unroll(graph, done):
    graphdef, variables = nnx.split(graph)

    @jax.jit
    def run(xs):
        live = nnx.merge(graphdef, variables, copy=True)
        return live.unroll(live.initialize_state(BATCH), {"vision": xs}, done)

    return run


def test_environments_do_not_see_each_other() -> None:
    graph, xs, done = cortex(), draw((TIME, BATCH, 3)), jnp.asarray(DONE)
    run = jitted_unroll(graph, done)
    others = xs.copy()
    others[:, [0, 2]] = np.nan
    found, expected = run(others), run(xs)
    for name, output in expected.output.items():
        np.testing.assert_array_equal(found.output[name][:, 1], output[:, 1])
    np.testing.assert_array_equal(
        found.regularization_loss[:, 1], expected.regularization_loss[:, 1]
    )


def test_losses_metrics_and_extras_of_connections() -> None:
    graph = PopulationGraph(nnx.Rngs(0))
    graph.add_input("z", 2, input_from="x")
    graph.add_output("a", 2)
    graph.connect("z", "a", transform=Probe(loss=1.0))
    graph.connect("z", "a", transform=Probe(loss=10.0))
    graph.connect("z", "a", transform=Normalizer(2), delay=1)
    graph.finalize()
    x = jnp.array([[1.0, 2.0], [3.0, 4.0]])
    carry = graph.initialize_state(2)
    out = graph(graph(carry, {"x": 10 * x}).next_state, {"x": x})
    # Each Probe passes x on; the normalizer, not updated yet, divides the last 10 x by 10.
    np.testing.assert_allclose(out.output["a"], 3 * x)
    np.testing.assert_array_equal(out.regularization_loss, [11.0, 33.0])
    assert out.metrics.keys() == {"z->a", "z->a#2"}
    np.testing.assert_array_equal(out.metrics["z->a#2"]["loss"], [10.0, 30.0])

    extras = out.rollout_extras
    assert extras.keys() == out.next_state.keys() == carry.keys() == {"connections", "history"}
    assert extras["history"] is None
    np.testing.assert_array_equal(extras["connections"]["z->a"], [1.0, 1.0])
    np.testing.assert_array_equal(extras["connections"]["z->a@1"], 10 * x)
    given = {**extras["connections"], "z->a#2": jnp.array([7.0, 8.0])}
    replay = graph(carry, {"x": x}, {"connections": given, "history": None})
    np.testing.assert_array_equal(replay.rollout_extras["connections"]["z->a#2"], [7.0, 8.0])

    graph.update_statistics(jax.tree.map(lambda leaf: leaf[None], extras))
    np.testing.assert_allclose(graph.connections["z->a@1"].transform.mean[...], [20.0, 30.0])
    assert float(graph.connections["z->a#2"].transform.seen[...]) == 2.0


def test_recording_changes_nothing_else() -> None:
    graph, obs = cortex(), {"vision": draw((BATCH, 3))}
    plain = graph(graph.initialize_state(BATCH), obs)
    graph.record_activations = True
    recorded = graph(graph.initialize_state(BATCH), obs)
    activations = recorded.metrics.pop(ACTIVATION_KEY)
    assert jax.tree.structure(plain) == jax.tree.structure(recorded)
    jax.tree.map(np.testing.assert_array_equal, plain, recorded)
    shapes = {name: value.shape for name, value in activations.items()}
    assert shapes == {population.name: (BATCH, population.size) for population in graph.populations}
    np.testing.assert_array_equal(activations["silent"], np.ones((BATCH, 2)))  # cos(0)


def test_a_merged_copy_is_the_same_graph() -> None:
    graph, xs = cortex(), draw((TIME, BATCH, 3))
    copy = nnx.merge(*nnx.split(graph))
    assert (copy.connection_names, copy.groups) == (graph.connection_names, graph.groups)
    assert copy.to_dot() == graph.to_dot()
    found, expected = (jitted_unroll(g, jnp.asarray(DONE))(xs) for g in (copy, graph))
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_default_transforms_are_linear_and_of_their_own() -> None:
    graph = PopulationGraph(nnx.Rngs(0))
    graph.add_population("z", 2)
    graph.add_output("a", 3)
    graph.connect("z", "a", delay=1, reciprocal=True)
    graph.connect("a", "a", delay=2)
    graph.finalize()
    assert list(graph.connection_names) == ["z->a@1", "a->z@1", "a->a@2"]
    params = nnx.to_flat_state(nnx.state(graph))
    shapes = {(str(path[1]), str(path[-1])): leaf.shape for path, leaf in params}
    assert shapes == {
        ("z->a@1", "kernel"): (2, 3),
        ("z->a@1", "bias"): (3,),
        ("a->z@1", "kernel"): (3, 2),
        ("a->z@1", "bias"): (2,),
        ("a->a@2", "kernel"): (3, 3),
        ("a->a@2", "bias"): (3,),
    }
    nodes = [node for _, node in nnx.iter_graph(graph) if isinstance(node, nnx.Param)]
    assert len(nodes) == len({id(node) for node in nodes}) == 6
    kernels = [c.transform.linear.kernel[...] for c in graph.connections.values()]
    assert not np.allclose(kernels[0], kernels[1].T)
    # Nothing random is left in it, so it does not look like a module that draws noise.
    assert not jax.tree.leaves(nnx.state(graph, nnx.RngState))
    # Without inputs, anything with a batch axis will do, the carry too.
    assert graph(graph.initialize_state(5), {}).output["a"].shape == (5, 3)


def test_a_graph_without_memory_needs_an_observation_to_count_environments() -> None:
    graph = PopulationGraph(nnx.Rngs(0))
    graph.add_output("a", 3, activation=jnp.cos)
    graph.finalize()
    np.testing.assert_array_equal(graph(graph.initialize_state(4), jnp.zeros(4)).output["a"], 1.0)
    with pytest.raises(ValueError, match="number of environments is unknown"):
        graph(graph.initialize_state(4), {})


def noisy(shared):
    graph, rngs = PopulationGraph(nnx.Rngs(0)), nnx.Rngs(5)
    graph.add_input("x", 2, input_from="x")
    graph.add_population("y", 2)
    graph.add_output("z", 2)
    for src, dst, delay in [("y", "z", 0), ("x", "y", 0), ("y", "y", 1), ("x", "z", 2)]:
        stream = rngs.noise if shared else rngs.noise.fork()
        graph.connect(src, dst, transform=Noise(stream), delay=delay)
    graph.finalize()
    return graph


@pytest.mark.parametrize("shared", [False, True])
def test_noise_in_a_window_is_that_of_its_steps(shared) -> None:
    fast, slow = noisy(shared), noisy(shared)
    counts = [leaf for leaf in jax.tree.leaves(nnx.state(fast, nnx.RngCount))]
    assert not any(map(int, counts))  # finalize tried the transforms without drawing
    xs, done = {"x": jnp.zeros((TIME, BATCH, 2))}, jnp.asarray(DONE)
    found = fast.unroll(fast.initialize_state(BATCH), xs, done)
    expected = unroll_stepwise(slow, slow.initialize_state(BATCH), xs, done)
    assert_close(found, expected)
    assert_close(nnx.state(fast, nnx.RngCount), nnx.state(slow, nnx.RngCount))


def test_a_shared_transform_has_one_set_of_weights_and_two_carries() -> None:
    graph, memory = PopulationGraph(nnx.Rngs(0)), Probe()
    graph.add_input("x", 2, input_from="x")
    graph.add_output("y", 2)
    graph.connect("x", "y", transform=memory)
    graph.connect("x", "y", transform=memory, delay=1)
    graph.finalize()
    assert len(jax.tree.leaves(nnx.state(graph))) == 1
    assert len(graph.initialize_state(2)["connections"]) == 2


def test_integers_and_float64_are_read_as_floats() -> None:
    graph = by_hand()
    for dtype in (np.uint8, np.float64, bool):
        out = graph(graph.initialize_state(2), {"light": np.ones((2, 1), dtype)})
        np.testing.assert_array_equal(out.output["hand"], np.ones((2, 1), np.float32))
        assert out.next_state["history"]["see"]["buffer"].dtype == jnp.float32


def test_drawings() -> None:
    graph = PopulationGraph(nnx.Rngs(0))
    graph.add_input('a "b"\\', 1, input_from="eye")
    graph.add_population("end", 1)
    graph.add_output("[x]", 1)
    graph.connect('a "b"\\', "end", transform=times(1.0))
    graph.connect("end", "end", transform=Probe(), delay=2)
    graph.connect("end", "[x]", transform=times(1.0), delay=1)
    assert graph.to_mermaid().splitlines() == [
        "flowchart LR",
        '    n0(["a #34;b#34;#92;<br/>1<br/>from eye"])',
        '    n1["end<br/>1"]',
        '    n2[["#91;x#93;<br/>1"]]',
        "    n0 --> n1",
        '    n1 -.->|"Probe, delay 2"| n1',
        '    n1 -.->|"delay 1"| n2',
    ]
    assert graph.to_dot().splitlines() == [
        "digraph PopulationGraph {",
        "    rankdir=LR;",
        r'    n0 [label="a \"b\"\\\n1\nfrom eye", shape=ellipse];',
        r'    n1 [label="end\n1", shape=box];',
        r'    n2 [label="[x]\n1", shape=doubleoctagon];',
        '    n0 -> n1 [label=""];',
        '    n1 -> n1 [label="Probe, delay 2", style=dashed];',
        '    n1 -> n2 [label="delay 1", style=dashed];',
        "}",
    ]


def open_graph():
    graph = PopulationGraph(nnx.Rngs(0))
    graph.add_input("in", 3, input_from="x")
    graph.add_population("mid", 2)
    graph.add_output("out", 2, output_to="y")
    return graph


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("build", "error", "message"),
    [
        (lambda g: PopulationGraph(0), TypeError, "rngs must be an nnx.Rngs, got int"),
        (lambda g: g.add_population("mid", 2), ValueError, "a population 'mid' already"),
        (lambda g: g.add_input("out", 2, input_from="x"), ValueError, "a population 'out' already"),
        (lambda g: g.add_population("", 2), ValueError, "name must not be empty"),
        (lambda g: g.add_population(3, 2), TypeError, "name must be a string, got 3"),
        (lambda g: g.add_population("p", 0), ValueError, "Population 'p': size must be at least 1"),
        (lambda g: g.add_population("p", 2.0), TypeError, "'p': size must be an integer, got 2.0"),
        (lambda g: g.add_population("p", 2, activation="relu"), TypeError, "got 'relu'; pass the"),
        (lambda g: g.add_input("p", 2, input_from=None), TypeError, "input 'p' needs the key"),
        (lambda g: g.add_input("p", 2, input_from=1), TypeError, "input_from must be a string"),
        (lambda g: g.add_output("y", 2), ValueError, "'y' would go to the key 'y', where 'out'"),
        (lambda g: g.add_output("p", 2, output_to="y"), ValueError, "'y', where 'out' goes"),
        (lambda g: g.connect("in", "?"), ValueError, r"'\?', only \['in', 'mid', 'out'\]"),
        (lambda g: g.connect("?", "in"), ValueError, r"no population '\?'"),
        (
            lambda g: g.connect("in", "mid", delay=-1),
            ValueError,
            "delay of 'in' -> 'mid' must be at least 0",
        ),
        (lambda g: g.connect("in", "mid", delay=0.5), TypeError, "must be an integer, got 0.5"),
        (
            lambda g: g.connect("in", "mid", transform=nnx.Linear(3, 2, rngs=nnx.Rngs(0))),
            TypeError,
            "in -> mid: transform must be a StatefulModule, got Linear: use Dense",
        ),
        (
            lambda g: g.connect("in", "mid", transform=dense(3, 2), reciprocal=True, delay=1),
            ValueError,
            "reciprocal=True between 'in' and 'mid' makes default transforms both ways, got a",
        ),
        (
            lambda g: g.connect("mid", "mid", reciprocal=True, delay=1),
            ValueError,
            "is one connection, not two",
        ),
    ],
)
def test_messages_of_the_builder(build, error, message) -> None:
    graph = open_graph()
    with pytest.raises(error, match=message):
        build(graph)
    assert (len(graph.populations), graph.connection_names) == (3, ())  # nothing half done


def cycle(g):
    g.add_population("late", 2)
    for src, dst in [("out", "mid"), ("in", "mid"), ("mid", "late"), ("late", "out")]:
        g.connect(src, dst, transform=dense(3 if src == "in" else 2, 2))


def activation(g):
    g.add_population("p", 2, activation=lambda x: x.sum(-1))


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("build", "message"),
    [
        (cycle, "without delay form the cycle mid -> late -> out -> mid, in which"),
        (lambda g: g.connect("mid", "mid", transform=dense(2, 2)), "the cycle mid -> mid,"),
        (
            lambda g: g.connect("in", "mid", transform=dense(3, 5), delay=2),
            r"'in->mid@2' needs a transform from 'in' of size 3 to 'mid' of size 2, got Dense, "
            r"which makes float32\[batch, 5\] of float32\[batch, 3\]",
        ),
        (
            lambda g: g.connect("in", "mid", transform=dense(4, 2)),
            r"Dense fails on an input float32\[batch, 3\]: Dense: x must have in_features=4",
        ),
        (
            lambda g: g.connect("in", "mid", transform=Shapeless()),
            "which makes a dict of",
        ),
        (activation, r"activation of 'p' must .* float32\[batch, 2\], got float32\[batch\]"),
    ],
)
def test_messages_of_finalize(build, message) -> None:
    graph = open_graph()
    build(graph)
    with pytest.raises(ValueError, match=message):
        graph.finalize()


class Shapeless(StatefulModule):
    def __call__(self, state, x, rollout_extras=None):
        return StatefulModuleOutput(state, {"x": x}, jnp.zeros(()), {})


def test_messages_about_empty_graphs() -> None:
    graph = PopulationGraph(nnx.Rngs(0))
    with pytest.raises(ValueError, match="no populations; call add_population"):
        graph.finalize()
    graph.add_population("p", 1)
    with pytest.raises(ValueError, match="no outputs, .* add_output"):
        graph.finalize()


def test_messages_about_the_order_of_calls() -> None:
    graph = open_graph()
    calls = [
        lambda: graph.initialize_state(2),
        lambda: graph((), {"x": jnp.zeros((2, 3))}),
        lambda: graph.unroll((), {"x": jnp.zeros((1, 2, 3))}, jnp.zeros((1, 2), bool)),
        lambda: graph.reset_state(()),
        lambda: graph.update_statistics(None),
    ]
    for call in calls:
        with pytest.raises(RuntimeError, match=r"not finalized; call finalize\(\)"):
            call()
    graph.finalize()
    changes = [
        lambda: graph.add_population("p", 1),
        lambda: graph.add_input("p", 1, input_from="x"),
        lambda: graph.add_output("p", 1),
        lambda: graph.connect("in", "mid"),
        lambda: graph.finalize(),
    ]
    for change in changes:
        with pytest.raises(RuntimeError, match="the graph is finalized"):
            change()


@pytest.mark.usefixtures("unchecked")
def test_messages_about_the_call() -> None:
    graph = by_hand()
    carry, light = graph.initialize_state(2), jnp.zeros((2, 1))
    with pytest.raises(ValueError, match=r"key 'light', which population 'see' .* \['a', 'b'\]"):
        graph(carry, {"b": light, "a": light})
    with pytest.raises(ValueError, match="key 'light', .* got ArrayImpl"):
        graph(carry, light)
    with pytest.raises(ValueError, match=r"shape \(2, 1\), .* size 1, got shape \(2, 3\)"):
        graph(carry, {"light": jnp.zeros((2, 3))})
    with pytest.raises(ValueError, match=r"shape \(2, 1\), .* got shape \(1, 1\)"):
        graph(carry, {"light": light[:1]})
    with pytest.raises(ValueError, match=r"shape \(2, 1\), .* got dict"):
        graph(carry, {"light": {"left": light}})
    with pytest.raises(ValueError, match=r"shape \(6, 2, 1\), .* got shape \(2, 1\)"):
        graph.unroll(carry, {"light": light}, jnp.asarray(END))
    with pytest.raises(ValueError, match=r"state must be a dict .* got \['connections'\]; pass"):
        graph({"connections": {}}, {"light": light})
    with pytest.raises(ValueError, match=r"state must be a dict .* got tuple; pass"):
        graph.reset_state(())


def test_nodes_and_edges_can_be_looked_at() -> None:
    graph = by_hand()
    see = graph.populations[0]
    assert isinstance(see, Population) and (see.name, see.size, see.input_from) == (
        "see",
        1,
        "light",
    )
    reflex = graph.connections["see->act@3"]
    assert isinstance(reflex, Connection) and (reflex.src, reflex.dst, reflex.delay) == (
        "see",
        "act",
        3,
    )
