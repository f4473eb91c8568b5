"""Recording: what is recorded, that nothing else changes, and what comes out."""

# Some tests hand in what the types forbid; recorded copies have other types of children.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from nnx_ppo.core import ACTIVATION_KEY, StatefulModule, StatefulModuleOutput, UnrollOutput
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
)
from nnx_ppo.networks.graph import PopulationGraph
from nnx_ppo.networks.recording import Recorder, extract_activations, with_recording
from nnx_ppo.networks.residual import Residual
from nnx_ppo.networks.utils import Scale

X = jnp.array([[1.0, -1.0, 0.5], [2.0, 0.0, 0.25]])


def cheap(key, shape, dtype=jnp.float32, out_sharding=None):
    """Initialize without JAX, whose initializers take seconds to compile."""
    return jnp.asarray(np.linspace(-1.0, 1.0, np.prod(shape)).reshape(shape), dtype)


def dense(size_in, size_out, activation=None):
    return Dense(size_in, size_out, nnx.Rngs(0), activation, kernel_init=cheap)


def actor_critic():
    memory = LSTM(3, 3, nnx.Rngs(0), kernel_init=cheap, recurrent_kernel_init=cheap)
    actor = Sequential([dense(3, 4, jnp.tanh), NormalTanhSampler(nnx.Rngs(1), 0.1)])
    critic = Sequential([Residual(dense(3, 3)), dense(3, 1)])
    return Sequential([Normalizer(3), memory, PPOAdapter(action=actor, value=critic)])


def run(net, x=X):
    out = net(net.initialize_state(len(x)), x)
    return out, extract_activations(out.metrics)


def assert_identical(actual, expected):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


def unmarked(metrics):
    """Metrics without the recorded activations and the entries that hold nothing else."""
    if not isinstance(metrics, dict):
        return metrics
    rest = {key: unmarked(part) for key, part in metrics.items() if key != ACTIVATION_KEY}
    return {key: part for key, part in rest.items() if not (isinstance(part, dict) and not part)}


def test_activations_have_the_tree_of_the_containers() -> None:
    net = Sequential([Scale(2.0), Parallel(z=Scale(3.0), a=Sequential([Scale(5.0), Scale(0.1)]))])
    out, activations = run(with_recording(net))
    # 2 x, then 3 · 2 x and 5 · 2 x, then a tenth of that
    assert list(activations) == [0, 1] and list(activations[1]) == ["z", "a"]
    np.testing.assert_array_equal(activations[0], 2 * X)
    np.testing.assert_array_equal(activations[1]["z"], 6 * X)
    np.testing.assert_array_equal(activations[1]["a"][0], 10 * X)
    np.testing.assert_array_equal(activations[1]["a"][1], out.output["a"])


def test_actor_critic() -> None:
    net = actor_critic()
    out, activations = run(with_recording(net))
    shapes = jax.tree.map(jnp.shape, activations)
    assert shapes == {
        0: (2, 3),
        1: (2, 3),
        2: {
            "action": {0: (2, 4), 1: {"action": (2, 2), "log_likelihood": (2,)}},
            "value": {0: {"module": (2, 3)}, 1: (2, 1)},
        },
    }
    np.testing.assert_array_equal(activations[0], X / 10)  # a normalizer that has seen nothing
    np.testing.assert_array_equal(activations[1], out.next_state[1][0])
    np.testing.assert_array_equal(activations[2]["action"][1]["action"], out.output.actions)
    np.testing.assert_array_equal(activations[2]["value"][1][:, 0], out.output.value_estimates)
    assert list(out.metrics[2]["action"][1]) == ["mu", "sigma", ACTIVATION_KEY]
    assert list(out.metrics[2]["action"]) == [0, 1]


def three_steps(net):
    """Run a network on a copy; return all that it returns but recorded activations."""
    live = nnx.merge(*nnx.split(net), copy=True)
    state, outs = live.initialize_state(2), []
    for factor in (1.0, -2.0, 0.5):
        outs.append(live(state, factor * X))
        state = outs[-1].next_state
    plain = [out.replace(metrics=unmarked(out.metrics)) for out in outs]
    window = live.unroll(live.initialize_state(2), X[None], jnp.ones((1, 2), bool))
    counts = jax.tree.leaves(nnx.state(live, nnx.RngCount))
    return plain, window, counts


@pytest.mark.parametrize("compiled", [False, True])
def test_the_forward_pass_is_bit_identical(compiled) -> None:
    net = actor_critic()
    run = nnx.jit(three_steps) if compiled else three_steps
    expected = run(net)
    assert int(expected[2][0]) == 4
    assert_identical(run(with_recording(net)), expected)


def test_the_original_is_left_alone_and_shares_its_parameters() -> None:
    net = actor_critic()
    before, variables = nnx.split(net)
    recorded = with_recording(net)
    run(recorded)
    run(recorded)
    after, still = nnx.split(net)
    assert before == after
    assert jax.tree.leaves(variables)[0] is jax.tree.leaves(still)[0]
    assert not any(isinstance(m, Recorder) for _, m in nnx.iter_modules(net))

    theirs = recorded.layers[2].action.layers
    ours = net.layers[2].action.layers
    assert theirs[0].wrapped.linear.kernel is ours[0].linear.kernel
    assert theirs[1].wrapped.entropy_weight is ours[1].entropy_weight
    # The copy has drawn two keys of its own stream, the original none.
    assert int(theirs[1].wrapped.rng.count[...]) == 2
    assert int(ours[1].rng.count[...]) == 0

    net.update_statistics([X[None], None, None])
    mean = recorded.layers[0].wrapped.mean
    np.testing.assert_array_equal(mean[...], [1.5, -0.5, 0.375])


def test_the_copy_draws_what_the_original_would_draw() -> None:
    net = actor_critic()
    run(net)
    recorded = with_recording(net)
    np.testing.assert_array_equal(run(recorded)[0].output.actions, run(net)[0].output.actions)


def test_the_copy_keeps_the_mode_of_that_moment() -> None:
    net = actor_critic()
    net.eval()
    recorded = with_recording(net)
    net.train()
    sampler = recorded.layers[2].action.layers[1]
    assert sampler.wrapped.deterministic and not net.layers[2].action.layers[1].deterministic
    recorded.train()
    assert not sampler.wrapped.deterministic


def test_a_network_that_is_one_layer() -> None:
    recorded = with_recording(dense(3, 2))
    assert isinstance(recorded, Recorder)
    out, activation = run(recorded)
    assert activation is out.output
    # Kernel rows (−1, −.6), (−.2, .2), (.6, 1): 1 · −1 + −1 · −.2 + .5 · .6 = −.5
    np.testing.assert_allclose(activation[0, 0], -0.5, rtol=1e-6)


def test_a_layer_in_two_places_is_one_recorder() -> None:
    shared = Scale(2.0)
    net = Sequential([shared, Residual(shared), shared])
    recorded = with_recording(net)
    first, inner, last = recorded.layers[0], recorded.layers[1].module, recorded.layers[2]
    assert isinstance(first, Recorder) and first is inner is last
    _, activations = run(recorded)
    # 2 x; 2 · 2 x, to which the block adds 2 x; 2 · 6 x
    np.testing.assert_array_equal(activations[0], 2 * X)
    np.testing.assert_array_equal(activations[1]["module"], 4 * X)
    np.testing.assert_array_equal(activations[2], 12 * X)


def test_containers_keep_the_order_of_their_children() -> None:
    recorded = with_recording(Concat(z=Scale(1.0), a=Scale(2.0)))
    out, activations = run(nnx.merge(*nnx.split(recorded)), {"a": X, "z": X})
    np.testing.assert_array_equal(out.output, np.concatenate([X, 2 * X], axis=-1))
    assert list(activations) == ["z", "a"]


class Tower(StatefulModule):
    """A user's container: children as an attribute, in a list and in a dict; metrics in a list."""

    def __init__(self):
        self.stem = Scale(2.0)
        self.floors = nnx.List([Scale(3.0), dense(3, 2)])
        self.sides = nnx.Dict(left=Scale(5.0))

    def __call__(self, state, x, rollout_extras=None):
        stem = self.stem((), x)
        floors = [floor((), stem.output) for floor in self.floors]
        left = self.sides["left"]((), stem.output)
        assert self.floors[1].out_features == 2  # children are asked for what they know
        return StatefulModuleOutput(
            state,
            left.output,
            jnp.zeros(()),
            {
                "stem": stem.metrics,
                "floors": [floor.metrics for floor in floors],
                "left": left.metrics,
                "mean": jnp.mean(x),
            },
        )


def test_containers_of_users() -> None:
    net = Tower()
    recorded = with_recording(net)
    assert type(recorded) is Tower
    _, activations = run(recorded)
    assert list(activations) == ["stem", "floors", "left"]
    np.testing.assert_array_equal(activations["stem"], 2 * X)
    np.testing.assert_array_equal(activations["floors"][0], 6 * X)
    assert activations["floors"][1].shape == (2, 2)
    np.testing.assert_array_equal(activations["left"], 10 * X)
    assert run(net)[1] is None


class SelfRecording(StatefulModule):
    """A user's module with activations that no child puts out."""

    def __init__(self):
        self.inner = Scale(2.0)
        self.record_activations = False

    def __call__(self, state, x, rollout_extras=None):
        y = self.inner((), x).output
        metrics = {ACTIVATION_KEY: {"half": y / 4}} if self.record_activations else {}
        return StatefulModuleOutput(state, y, jnp.zeros(()), metrics)


def test_a_module_that_records_itself_is_switched_on() -> None:
    net = Sequential([SelfRecording(), Scale(1.0)])
    recorded = with_recording(net)
    assert isinstance(recorded.layers[0].inner, Scale)
    assert recorded.layers[0].record_activations and not net.layers[0].record_activations
    _, activations = run(recorded)
    np.testing.assert_array_equal(activations[0]["half"], X / 2)
    assert isinstance(with_recording(SelfRecording()), SelfRecording)


def test_populations_of_a_graph() -> None:
    graph = PopulationGraph(nnx.Rngs(0))
    graph.add_input("eye", 3, input_from="vision")
    graph.add_output("hand", 3)
    graph.connect("eye", "hand", transform=Scale(2.0))
    graph.finalize()
    recorded = with_recording(Sequential([Filter({"vision": lambda x: x}), graph]))
    out, activations = run(recorded)
    assert sorted(activations[1]) == ["eye", "hand"]
    np.testing.assert_array_equal(activations[1]["eye"], X)
    np.testing.assert_array_equal(activations[1]["hand"], 2 * X)
    assert list(out.output) == ["hand"] and not graph.record_activations
    assert not any(isinstance(m, Recorder) for _, m in nnx.iter_modules(recorded.layers[1]))


def test_recording_twice_warns() -> None:
    recorded = with_recording(Sequential([Scale(2.0)]))
    with pytest.warns(UserWarning, match="records already and is returned as it is"):
        assert with_recording(recorded) is recorded


OWN_METRICS = {"m": X}


class Stateful(StatefulModule):
    def __init__(self):
        self.seen = nnx.Variable(jnp.zeros(()))

    def __call__(self, state, x, rollout_extras=None):
        return StatefulModuleOutput(state + 1, x + state, jnp.sum(x, -1), OWN_METRICS, x)

    def initialize_state(self, batch_size):
        return jnp.full((batch_size, 1), 5.0)

    def reset_state(self, prev_state):
        return jnp.full_like(prev_state, 5.0)

    def update_statistics(self, rollout_extras):
        self.seen[...] = jnp.sum(rollout_extras)

    def unroll(self, state, xs, done, rollout_extras=None):
        return UnrollOutput(state, "the module's own", jnp.zeros(done.shape))


def test_a_recorder_delegates_everything() -> None:
    module = Stateful()
    recorder = Recorder(module)
    state = recorder.initialize_state(2)
    np.testing.assert_array_equal(state, [[5.0], [5.0]])
    out = recorder(state, X)
    assert list(OWN_METRICS) == ["m"]  # a copy has been marked
    assert list(out.metrics) == ["m", ACTIVATION_KEY]
    assert_identical(out.replace(metrics={}), module(state, X).replace(metrics={}))
    np.testing.assert_array_equal(recorder.reset_state(out.next_state), state)
    recorder.update_statistics(X)
    assert float(module.seen[...]) == 2.75
    assert recorder.unroll(state, X[None], jnp.ones((1, 2), bool)).output == "the module's own"
    assert recorder.seen is module.seen
    with pytest.raises(AttributeError, match="'Stateful' object has no attribute 'missing'"):
        recorder.missing  # noqa: B018
    with pytest.raises(AttributeError, match="object has no attribute '_hidden'"):
        recorder._hidden  # noqa: B018


def test_extraction_takes_no_part_of_other_metrics() -> None:
    assert extract_activations({}) is None
    assert extract_activations({"loss": X, 0: {"mu": X, "deeper": {}}}) is None
    marked = {0: {ACTIVATION_KEY: X, "mu": X}, "b": {"mu": X}, "c": [{}, {ACTIVATION_KEY: 2 * X}]}
    activations = extract_activations(marked)
    assert set(activations) == {0, "c"} and list(activations["c"]) == [1]
    np.testing.assert_array_equal(activations["c"][1], 2 * X)


class Parent(StatefulModule):
    def __init__(self, children):
        self.children = children

    def __call__(self, state, x, rollout_extras=None):
        raise NotImplementedError


@pytest.mark.usefixtures("unchecked")
def test_messages() -> None:
    with pytest.raises(TypeError, match="Recorder: wrapped must be a StatefulModule, got Linear"):
        Recorder(nnx.Linear(1, 1, kernel_init=cheap, rngs=nnx.Rngs(0)))
    with pytest.raises(TypeError, match="with_recording: net must be .* got the class Flattener"):
        with_recording(Flattener)
    with pytest.raises(ValueError, match=r"with_recording cannot rebuild .* nnx.List or in an nnx"):
        with_recording(Parent(nnx.data((Scale(1.0),))))
    loop = Parent(Parent(Scale(1.0)))
    loop.children.children = loop
    with pytest.raises(ValueError, match=r"cycle.*without references to their parents"):
        with_recording(loop)


def test_a_recorder_passes_attributes_on_both_ways() -> None:
    recorder = Recorder(NormalTanhSampler(nnx.Rngs(0), 0.1))
    recorder.deterministic = True
    assert recorder.wrapped.deterministic and recorder.deterministic
    recorder.train()
    assert not recorder.wrapped.deterministic and not recorder.deterministic


def test_the_metrics_of_a_recorded_sequence_are_a_tree() -> None:
    """Its layers have numbers for names, which JAX cannot sort among strings."""
    net = Recorder(Sequential([Dense(2, 2, nnx.Rngs(0)), NormalTanhSampler(nnx.Rngs(0), 0.1)]))
    metrics = net(net.initialize_state(1), jnp.ones((1, 2))).metrics
    assert len(jax.tree.leaves(metrics)) == 4  # mean, deviation, action, likelihood
