"""The small layers: Flattener, Filter, Scale, Map, Merge, Residual, Detach."""

# Some tests hand in what the types forbid.
# pyright: reportArgumentType=false

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from nnx_ppo.core import StatefulModule, StatefulModuleOutput, unroll_stepwise
from nnx_ppo.networks import Dense, Filter, Flattener, Parallel, Sequential, Splitter
from nnx_ppo.networks.residual import Detach, Residual
from nnx_ppo.networks.utils import Map, Merge, Scale

X = jnp.array([[1.0, 2.0], [3.0, 4.0]])


class Total(StatefulModule):
    """Adds its input up over time; the total is its output, its loss, a metric and its extras."""

    def __call__(self, state, x, rollout_extras=None):
        total = state + x
        loss = jnp.sum(total, axis=-1)
        return StatefulModuleOutput(total, total, loss, {"total": total}, total)

    def initialize_state(self, batch_size):
        return jnp.zeros((batch_size, 2))

    def reset_state(self, prev_state):
        return jnp.zeros_like(prev_state)


def tree():
    return {
        "b": {"q": jnp.full((2, 2, 2), 3.0), "p": jnp.full((2,), 2.0)},
        "a": (jnp.full((2, 1), 1.0), [jnp.full((2, 1), 9)]),
    }


def test_flattener_joins_all_leaves_sorted_by_key() -> None:
    out = Flattener()((), tree())
    np.testing.assert_array_equal(out.output, [[1, 9, 2, 3, 3, 3, 3]] * 2)


def test_flattener_preserves_levels() -> None:
    one = Flattener(preserve_levels=1)
    out = one((), tree()).output
    assert jax.tree.map(jnp.shape, out) == {"a": (2, 2), "b": (2, 5)}
    again = one((), out).output
    assert jax.tree.map(jnp.shape, again) == {"a": (2, 2), "b": (2, 5)}
    two = Flattener(preserve_levels=2)((), tree()).output
    assert isinstance(two["a"], tuple)
    assert jax.tree.map(jnp.shape, two) == {
        "a": ((2, 1), (2, 1)),
        "b": {"p": (2, 1), "q": (2, 4)},
    }


@pytest.mark.usefixtures("unchecked")
def test_messages_of_the_flattener() -> None:
    with pytest.raises(ValueError, match="preserve_levels must be 0 or more, got -1"):
        Flattener(-1)
    with pytest.raises(ValueError, match=r"levels=3\): x\['b'\]\['q'\] must be .*only 2 levels"):
        Flattener(3)((), tree())
    with pytest.raises(ValueError, match=r"x must have leaves, each with a batch axis, got \{\}"):
        Flattener()((), {})
    with pytest.raises(ValueError, match=r"each with a batch axis, got \{'a': \(\)\}"):
        Flattener()((), {"a": jnp.ones(())})


def test_filter() -> None:
    x = {"a": jnp.ones((2, 1)), "b": {"c": [jnp.zeros((2, 1)), jnp.full((2, 1), 5.0)]}}
    spec = {"one": "a", "two": ("b", "c", 1), "three": lambda x: x["a"] + 1}
    out = Filter(spec)((), x).output
    assert list(out) == ["one", "two", "three"]
    assert [float(value[0, 0]) for value in out.values()] == [1.0, 5.0, 2.0]


@pytest.mark.usefixtures("unchecked")
def test_messages_of_the_filter() -> None:
    with pytest.raises(TypeError, match=r"spec must be a dict .* got str; write Filter\("):
        Filter("a")
    with pytest.raises(ValueError, match="spec is empty"):
        Filter({})
    for entry in (3, ["a"], ("a", None)):
        with pytest.raises(TypeError, match=r"spec\['x'\] must be a string, a tuple .* got"):
            Filter({"x": entry})
    with pytest.raises(ValueError, match=r"spec\['x'\] is an empty path"):
        Filter({"x": ()})
    for entry, path in {"b": "b", ("a", "c"): "a'\\]\\['c", ("a", 5): "a'\\]\\[5"}.items():
        with pytest.raises(ValueError, match=rf"asks for x\['?{path}.*has the shapes"):
            Filter({"x": entry})((), {"a": jnp.ones((2, 1))})


def test_scale() -> None:
    tree = {"a": X, "b": [jnp.array([[2], [4]], jnp.uint8), jnp.ones((2, 1), jnp.bfloat16)]}
    out = Scale(-0.5)((), tree).output
    np.testing.assert_array_equal(out["a"], [[-0.5, -1.0], [-1.5, -2.0]])
    np.testing.assert_array_equal(out["b"][0], [[-1.0], [-2.0]])
    assert [leaf.dtype for leaf in jax.tree.leaves(out)] == ["float32", "float32", "bfloat16"]
    assert not any(leaf.weak_type for leaf in jax.tree.leaves(out))
    mask = Scale(np.float32(3))((), jnp.array([True, False])).output
    np.testing.assert_array_equal(mask, [3.0, 0.0])


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("factor", "error", "message"),
    [
        ("2", TypeError, r"factor must be a real number, got '2' \(str\); write Scale\(0.5\)"),
        (True, TypeError, r"factor must be a real number, got True \(bool\)"),
        (1j, TypeError, r"factor must be a real number, got 1j"),
        (jnp.ones(2), TypeError, r"factor must be a real number, got Array"),
        (float("nan"), ValueError, r"factor must be finite, got nan"),
        (float("inf"), ValueError, r"factor must be finite, got inf"),
    ],
)
def test_messages_of_scale(factor, error, message) -> None:
    with pytest.raises(error, match=message):
        Scale(factor)


def test_map_dispatches_by_key_in_the_order_given() -> None:
    net = nnx.merge(*nnx.split(Map({"z": Scale(2.0), "not an identifier": Total(), "a": Total()})))
    inputs = {"a": X, "not an identifier": 10 * X, "z": X, "unused": X}
    state = net.initialize_state(2)
    assert list(state) == ["z", "not an identifier", "a"]
    out = net(net(state, inputs).next_state, inputs)
    assert list(out.output) == list(out.next_state) == ["z", "not an identifier", "a"]
    np.testing.assert_array_equal(out.output["z"], 2 * X)
    np.testing.assert_array_equal(out.output["not an identifier"], 20 * X)  # two steps
    np.testing.assert_array_equal(out.output["a"], 2 * X)
    # 20 (1 + 2) + 2 (1 + 2), and 20 (3 + 4) + 2 (3 + 4)
    np.testing.assert_array_equal(out.regularization_loss, [66.0, 154.0])
    assert list(out.metrics) == ["not an identifier", "a"]


def test_merge_makes_one_dict_of_all() -> None:
    net = Merge(
        right=Splitter(second=1, first=1),
        left=Sequential([Total(), Filter({"total": lambda x: x})]),
    )
    state = net.initialize_state(2)
    assert list(state) == ["right", "left"]
    out = net(state, X)
    assert list(out.output) == ["second", "first", "total"]
    np.testing.assert_array_equal(out.output["second"], [[1.0], [3.0]])
    np.testing.assert_array_equal(out.output["total"], X)
    assert list(out.metrics) == ["left"]
    assert list(out.rollout_extras) == ["right", "left"]
    np.testing.assert_array_equal(out.regularization_loss, [3.0, 7.0])


def test_residual_adds_its_input() -> None:
    block = Residual(Total())
    state = block.initialize_state(2)
    assert list(state) == ["module"]
    out = block(state, X)
    again = block(out.next_state, X)
    np.testing.assert_array_equal(out.output, 2 * X)  # x + x
    np.testing.assert_array_equal(again.output, 3 * X)  # x + (x + x)
    assert list(again.metrics) == ["module"]
    tree = {"a": X, "b": jnp.ones((2, 1))}
    both = Residual(Scale(0.5))
    doubled = both(both.initialize_state(2), tree).output
    np.testing.assert_array_equal(doubled["a"], 1.5 * X)
    np.testing.assert_array_equal(doubled["b"], [[1.5], [1.5]])


def test_detach_stops_the_gradient_and_nothing_else() -> None:
    heads = Parallel(trains=Scale(2.0), reads=Sequential([Detach(), Scale(3.0)]))
    state = heads.initialize_state(2)

    def both(x):
        out = heads(state, x).output
        return jnp.sum(out["trains"]) + jnp.sum(out["reads"])

    # d/dx (2 x + 3 stop(x)) = 2
    np.testing.assert_array_equal(jax.grad(both)(X), np.full((2, 2), 2.0))
    tree = {"x": X, "count": jnp.array([1, 2])}
    out = Detach()((), tree)
    assert out.next_state == ()
    jax.tree.map(np.testing.assert_array_equal, out.output, tree)


def test_windows_equal_steps() -> None:
    net = Sequential(
        [
            Residual(Total()),
            Filter({"a": lambda x: x, "b": lambda x: -x}),
            Map(b=Sequential([Total(), Detach()]), a=Scale(0.5)),
            Merge(same=Filter({"a": "a"}), other=Sequential([Filter({"c": "b"}), Map(c=Total())])),
        ]
    )
    xs = jnp.arange(12.0).reshape(3, 2, 2)
    done = jnp.array([[True, False], [False, False], [False, True]])
    state = net.initialize_state(2)
    window, steps = net.unroll(state, xs, done), unroll_stepwise(net, state, xs, done)
    assert jax.tree.structure(window) == jax.tree.structure(steps)
    jax.tree.map(np.testing.assert_array_equal, window, steps)
    # Environment 0 is reset after step 0. x = 4, 8: a = (x + Σx) / 2 = 4, 10.
    np.testing.assert_array_equal(window.output["a"][1:, 0, 0], [4.0, 10.0])


def narrow():
    return Dense(2, 1, nnx.Rngs(0), kernel_init=nnx.initializers.zeros_init())


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("make", "x", "error", "message"),
    [
        (lambda: Map(), X, ValueError, "Map needs at least one module"),
        (lambda: Map({"a": Total()}, b=Total()), X, ValueError, "one dict or keywords, not both"),
        (lambda: Merge(), X, ValueError, "Merge needs at least one module"),
        (lambda: Merge({"a": Total()}, b=Total()), X, ValueError, "one dict or keywords, not both"),
        (lambda: Merge(a=jnp.tanh), X, TypeError, "Merge: a must be a StatefulModule"),
        (lambda: Residual(Total), X, TypeError, r"Residual: module must be .* make an instance"),
        (
            lambda: Map(a=Total(), b=Total()),
            {"b": X, "c": X},
            ValueError,
            r"keys \['a', 'b'\], got keys \['b', 'c'\]; 'a' is missing",
        ),
        (lambda: Map(a=Total()), X, ValueError, r"Map: x must be a mapping"),
        (
            lambda: Merge(p=Splitter(a=1, b=1), q=Splitter(b=2)),
            X,
            ValueError,
            r"the outputs of 'p' and 'q' both have the key 'b'; rename one .* Filter",
        ),
        (
            lambda: Merge(p=Splitter(a=1), q=Total()),
            X,
            TypeError,
            r"the output of 'q' must be a dict, got .*Array.*; .*Filter\(\{\"q\": lambda x: x\}\)",
        ),
        (
            lambda: Residual(narrow()),
            X,
            ValueError,
            r"of Dense must have .* x, expected \(2, 2\), got \(2, 1\); put a layer in front",
        ),
        (
            lambda: Residual(Filter({"b": "a"})),
            {"a": X},
            ValueError,
            r"expected \{'a': \(2, 2\)\}, got \{'b': \(2, 2\)\}",
        ),
    ],
)
def test_messages_of_the_containers(make, x, error, message) -> None:
    with pytest.raises(error, match=message):
        module = make()
        module(module.initialize_state(2), x)


def test_filter_enters_no_numpy_array() -> None:
    """Its first axis is the batch: an index would pick a sample."""
    with pytest.raises(ValueError, match="which is not there"):
        Filter({"a": ("v", 0)})((), {"v": np.ones((2, 3))})
