"""Containers: how carries, extras, metrics and losses are routed; and messages."""

# Some tests hand in what the types forbid.
# pyright: reportArgumentType=false

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from nnx_ppo.core import StatefulModule, StatefulModuleOutput, unroll_stepwise
from nnx_ppo.networks import Concat, Parallel, Sequential, Splitter
from nnx_ppo.networks.routed import Name, RoutedModule

X = jnp.array([[1.0], [2.0]])


class Probe(StatefulModule):
    """Adds its carry, which counts up by `step`; reports all that it is given."""

    def __init__(self, step=1.0, loss=0.0, metrics=None):
        self.step = step
        self.loss = loss
        self.metric_names = tuple(metrics or ())
        self.seen = nnx.Variable(jnp.zeros(()))

    def __call__(self, state, x, rollout_extras=None):
        loss = jnp.full((len(x),), self.loss) if self.loss else jnp.zeros(())
        metrics = {name: x for name in self.metric_names}
        extras = state if rollout_extras is None else rollout_extras
        return StatefulModuleOutput(state + self.step, x + state, loss, metrics, extras)

    def initialize_state(self, batch_size):
        return jnp.zeros((batch_size, 1))

    def reset_state(self, prev_state):
        return jnp.zeros_like(prev_state)

    def update_statistics(self, rollout_extras):
        self.seen[...] = jnp.mean(rollout_extras)


class Scalar(StatefulModule):
    """Has no carry, and a loss that is the same for all samples."""

    def __call__(self, state, x, rollout_extras=None):
        return StatefulModuleOutput(state, x, jnp.array(0.25), {})


def test_sequential() -> None:
    net = Sequential([Probe(1.0, loss=0.5, metrics=["m"]), Scalar(), Probe(10.0)])
    state = net.initialize_state(2)
    assert [jnp.shape(part) for part in jax.tree.leaves(state)] == [(2, 1), (2, 1)]
    assert isinstance(state, list) and state[1] == ()
    first = net(state, X)
    second = net(first.next_state, X)
    np.testing.assert_array_equal(first.output, X)
    np.testing.assert_array_equal(second.output, X + 11)
    np.testing.assert_array_equal(second.regularization_loss, [0.75, 0.75])
    assert list(second.metrics) == [0] and list(second.metrics[0]) == ["m"]
    assert isinstance(second.rollout_extras, list) and second.rollout_extras[1] is None
    np.testing.assert_array_equal(second.rollout_extras[2], np.full((2, 1), 10.0))
    np.testing.assert_array_equal(net.reset_state(second.next_state)[0], np.zeros((2, 1)))


def test_an_empty_sequential_is_the_identity() -> None:
    net = Sequential([])
    out = net(net.initialize_state(2), X)
    np.testing.assert_array_equal(out.output, X)
    assert (out.next_state, out.rollout_extras, out.metrics) == ([], [], {})


def test_documented_parameter_names() -> None:
    net = Sequential([Probe()])
    net(network_state=net.initialize_state(2), obs=X, rollout_extras=None)
    heads = Parallel(a=Probe())
    heads(state=heads.initialize_state(2), x=X, rollout_extras=None)


def test_extras_reach_the_child_they_came_from() -> None:
    net = Parallel(a=Probe(), b=Sequential([Scalar(), Probe()]))
    state = net.initialize_state(2)
    extras = {"a": X + 1, "b": [None, X + 2]}
    out = net(state, X, extras)
    assert jax.tree.structure(out.rollout_extras) == jax.tree.structure(extras)
    np.testing.assert_array_equal(out.rollout_extras["b"][1], X + 2)
    net.update_statistics({"a": jnp.full((4, 2, 1), 5.0), "b": [None, jnp.full((4, 2, 1), 7.0)]})
    seen = [module.seen for _, module in nnx.iter_modules(net) if isinstance(module, Probe)]
    assert sorted(float(value[...]) for value in seen) == [5.0, 7.0]


def test_parallel_keys_everything_by_name() -> None:
    net = Parallel({"not an identifier": Probe(metrics=["m"]), "b": Probe(loss=2.0)})
    out = net(net.initialize_state(2), X)
    assert set(out.output) == set(out.next_state) == {"not an identifier", "b"}
    assert list(out.metrics) == ["not an identifier"]
    np.testing.assert_array_equal(out.regularization_loss, [2.0, 2.0])


def test_concat_joins_in_the_order_given_also_after_split_and_merge() -> None:
    net = nnx.merge(*nnx.split(Concat(z=Probe(), keys=Probe(), a=Probe())))
    inputs = {"a": X, "z": X + 10, "keys": X + 20, "unused": X}
    out = net(net.initialize_state(2), inputs)
    np.testing.assert_array_equal(out.output, [[11, 21, 1], [12, 22, 2]])


def test_splitter() -> None:
    out = Splitter(b=1, a=2)((), jnp.array([[1.0, 2.0, 3.0, 4.0]]))
    assert list(out.output) == ["b", "a"]
    np.testing.assert_array_equal(out.output["b"], [[1.0]])
    np.testing.assert_array_equal(out.output["a"], [[2.0, 3.0]])  # the 4 is left over


def test_parameters_of_children_are_found() -> None:
    net = Sequential([Parallel(a=Probe()), Splitter(a=1)])
    assert len(jax.tree.leaves(nnx.state(net, nnx.Variable))) == 1
    assert sum(isinstance(m, Probe) for _, m in nnx.iter_modules(net)) == 1


def test_a_subclass_that_changes_the_call_is_unrolled_step_by_step() -> None:
    class Doubled(Sequential):
        def __call__(self, network_state, obs, rollout_extras=None):
            out = super().__call__(network_state, obs, rollout_extras)
            return out.replace(output=2 * out.output)

    net, xs, done = Doubled([Probe()]), jnp.stack([X, X]), jnp.zeros((2, 2), bool)
    unrolled = net.unroll(net.initialize_state(2), xs, done)
    expected = unroll_stepwise(net, net.initialize_state(2), xs, done)
    np.testing.assert_array_equal(unrolled.output, [2 * X, 2 * (X + 1)])
    np.testing.assert_array_equal(unrolled.output, expected.output)
    assert Sequential.unroll is RoutedModule.unroll


class Broken(RoutedModule):
    """Runs its child as often as told."""

    def __init__(self, times):
        self.child = Probe()
        self.times = times

    def _children(self) -> dict[Name, StatefulModule]:
        return {"child": self.child}

    def _route(self, x, run):
        for _ in range(self.times):
            x = run("child", x)
        return x


def test_each_child_runs_once() -> None:
    with pytest.raises(RuntimeError, match="Child 'child' was run twice"):
        Broken(2)({"child": jnp.zeros((2, 1))}, X)
    with pytest.raises(RuntimeError, match=r"Children \['child'\] were not run"):
        Broken(0)({"child": jnp.zeros((2, 1))}, X)


@pytest.mark.usefixtures("unchecked")
def test_messages_about_children() -> None:
    linear = nnx.Linear(1, 1, rngs=nnx.Rngs(0))
    with pytest.raises(TypeError, match=r"layers\[1\] must be a StatefulModule, got Linear: use D"):
        Sequential([Probe(), linear])
    with pytest.raises(TypeError, match=r"layers\[0\] .* got the class Probe: make an instance"):
        Sequential([Probe])
    with pytest.raises(TypeError, match=r"layers\[0\] .* got function: .*activation=\.\.\.\)"):
        Sequential([lambda x: x])
    with pytest.raises(TypeError, match=r"layers\[0\] .* got Dropout: use Lift"):
        Sequential([nnx.Dropout(0.5)])
    with pytest.raises(TypeError, match="Parallel: a must be a StatefulModule, got NoneType: buil"):
        Parallel(a=None)
    with pytest.raises(TypeError, match="layers must be a list of modules, got Probe"):
        Sequential(Probe())
    with pytest.raises(TypeError, match="layers must be a list of modules, got dict"):
        Sequential({"a": Probe()})


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("container", [Parallel, Concat])
def test_messages_about_names(container) -> None:
    name = container.__name__
    with pytest.raises(ValueError, match=rf"{name} takes one dict or keywords, not both.*\['a'\]"):
        container({"a": Probe()}, b=Probe())
    for empty in ((), ({},)):
        with pytest.raises(ValueError, match=f"{name} needs at least one module"):
            container(*empty)
    with pytest.raises(TypeError, match=f"{name}: expected a dict .* got list"):
        container([Probe()])
    with pytest.raises(TypeError, match=f"{name}: module names must be strings, got 1"):
        container({1: Probe()})


@pytest.mark.usefixtures("unchecked")
def test_messages_about_the_call() -> None:
    heads = Parallel(a=Probe(), b=Probe())
    good = heads.initialize_state(2)
    with pytest.raises(ValueError, match=r"Parallel: state must .* \['a', 'b'\], got \['a'\]"):
        heads({"a": good["a"]}, X)
    with pytest.raises(ValueError, match="rollout_extras must have one entry .* got ArrayImpl"):
        heads(good, X, X)
    with pytest.raises(ValueError, match=r"Sequential: state must .* \[0\], got \[0, 1\]"):
        Sequential([Probe()])([good["a"], good["b"]], X)
    concat = Concat(a=Probe(), b=Probe())
    with pytest.raises(ValueError, match=r"keys \['a', 'b'\], got keys \['a'\]; 'b' is missing"):
        concat(good, {"a": X})
    with pytest.raises(ValueError, match=r"got ArrayImpl; 'a' is missing"):
        concat(good, X)
    with pytest.raises(ValueError, match=r"Concat: the output of 'a' .* got dict; a Flattener"):
        nested = Concat(a=Parallel(x=Probe()))
        nested(nested.initialize_state(2), {"a": X})
    with pytest.raises(ValueError, match=r"the output of 'a' .* feature axis .* got shape \(2,\)"):
        Concat(a=Scalar())({"a": ()}, {"a": X[:, 0]})


@pytest.mark.usefixtures("unchecked")
def test_message_about_a_loss_with_a_feature_axis() -> None:
    class Wide(StatefulModule):
        def __call__(self, state, x, rollout_extras=None):
            return StatefulModuleOutput(state, x, x, {})

    with pytest.raises(ValueError, match=r"Child 0 \(Wide\) .* of shape \(2, 1\); expected one"):
        Sequential([Wide()])([()], X)


@pytest.mark.usefixtures("unchecked")
def test_messages_of_the_splitter() -> None:
    with pytest.raises(ValueError, match="Splitter needs at least one size"):
        Splitter()
    with pytest.raises(ValueError, match="Splitter: a must be at least 1, got 0"):
        Splitter(a=0)
    with pytest.raises(TypeError, match="Splitter: a must be an integer, got 'x'"):
        Splitter(a="x")
    with pytest.raises(ValueError, match=r"Splitter\(a=2, b=3\) needs 5 features, .* \(2, 1\)"):
        Splitter(a=2, b=3)((), X)


def test_names_that_python_uses_are_refused() -> None:
    with pytest.raises(ValueError, match="'__class__' cannot be the name of a module"):
        Parallel({"__class__": Splitter(a=1)})


def test_layers_of_flax_are_sent_to_their_wrappers(unchecked) -> None:
    rngs = nnx.Rngs(0)
    with pytest.raises(TypeError, match=r"use Lift\(module\)"):
        Sequential([nnx.LayerNorm(3, rngs=rngs)])
    with pytest.raises(TypeError, match=r"use Recurrent\(cell\)"):
        Sequential([nnx.GRUCell(3, 3, rngs=rngs)])
