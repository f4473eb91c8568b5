"""Description of networks: numbers counted by hand, shapes, and messages."""

# Some tests hand in what the types forbid.
# pyright: reportArgumentType=false

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.core import Tracer
from rich.console import Console

from nnx_ppo.core import StatefulModule, StatefulModuleOutput
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
from nnx_ppo.networks.describe import describe
from nnx_ppo.networks.graph import PopulationGraph
from nnx_ppo.networks.recording import extract_activations, with_recording
from nnx_ppo.networks.residual import Residual
from nnx_ppo.networks.utils import Map, Scale


def cheap(key, shape, dtype=jnp.float32, out_sharding=None):
    """Initialize without JAX, whose initializers take seconds to compile."""
    return jnp.zeros(shape, dtype)


def dense(size_in, size_out):
    return Dense(size_in, size_out, nnx.Rngs(0), kernel_init=cheap)


def lstm(size_in, size_out, **kwargs):
    return LSTM(
        size_in, size_out, nnx.Rngs(0), kernel_init=cheap, recurrent_kernel_init=cheap, **kwargs
    )


def actor_critic():
    actor = Sequential([dense(4, 6), NormalTanhSampler(nnx.Rngs(1), 0.1)])
    heads = PPOAdapter(action=Parallel(arm=actor), value=Residual(dense(4, 4)))
    return Sequential([Normalizer(3), lstm(3, 4, trainable_initial_state=True), heads])


def shapes(tree):
    return jax.tree.map(lambda leaf: leaf.shape, tree)


def by_path(description):
    return {row.path: row for row in description.rows}


def test_numbers_of_an_actor_critic() -> None:
    description = describe(actor_critic(), np.zeros(3))
    rows = by_path(description)
    # LSTM: 3·16 + 4·16 + 16 and 2·4 initial; actor: 4·6 + 6; critic: 4·4 + 4. Statistics and the
    # entropy weight are not trained. The carry is h and c.
    assert {path: row.parameters for path, row in rows.items()} == {
        "": 186,
        "0": 0,
        "1": 136,
        "2": 50,
        "2/action": 30,
        "2/action/arm": 30,
        "2/action/arm/0": 30,
        "2/action/arm/1": 0,
        "2/value": 20,
        "2/value/module": 20,
    }
    assert {path: row.carry_size for path, row in rows.items() if row.carry_size} == {"": 8, "1": 8}
    assert (description.parameters, description.carry_size) == (186, 8)
    assert rows["2/action/arm/1"].type_name == "NormalTanhSampler"
    assert rows["1"].output.shape == (4,) and rows["1"].output.dtype == jnp.float32
    sampled = {"action": (3,), "log_likelihood": ()}
    assert shapes(rows["2/action/arm/1"].output) == sampled
    assert shapes(rows["2/action"].output) == {"arm": sampled}
    assert shapes(rows[""].output.actions) == {"arm": (3,)}
    assert shapes(rows[""].output.value_estimates) == (4,)
    assert all(row.shared_with is None for row in rows.values())


def test_paths_are_those_of_recorded_activations() -> None:
    net = Map(b=Sequential([Scale(2.0), dense(3, 2)]), a=Residual(Scale(1.0)))
    recorded = with_recording(net)
    sample = {"a": jnp.zeros(3), "b": jnp.zeros(3)}
    out = recorded(recorded.initialize_state(1), jax.tree.map(lambda leaf: leaf[None], sample))
    recorded_at = jax.tree_util.tree_leaves_with_path(extract_activations(out.metrics))
    paths = {"/".join(str(key.key) for key in path): leaf.shape[1:] for path, leaf in recorded_at}
    assert paths == {"b/0": (3,), "b/1": (2,), "a/module": (3,)}
    rows = by_path(describe(net, sample))
    assert list(rows) == ["", "b", "b/0", "b/1", "a", "a/module"]
    assert {path: rows[path].output.shape for path in paths} == paths


def test_the_table() -> None:
    net = Sequential([dense(30, 64), Filter({"x": lambda x: x, "n": lambda x: x[..., 0] > 0})])
    lines = str(describe(net, jnp.zeros(30))).split("\n")
    assert [line.split() for line in lines if "─" not in line] == [
        ["module", "type", "output", "parameters", "carry"],
        ["(network)", "Sequential", "{n:", "bool(),", "x:", "(64,)}", "1,984", "0"],
        ["0", "Dense", "(64,)", "1,984", "0"],
        ["1", "Filter", "{n:", "bool(),", "x:", "(64,)}", "0", "0"],
    ]
    without = str(describe(net)).split("\n")
    assert without[0].split() == ["module", "type", "parameters", "carry"]
    assert without[2].split() == ["(network)", "Sequential", "1,984", "0"]
    assert not any(line.endswith(" ") for line in lines)


def test_rich_shows_it_and_takes_no_brackets_for_markup() -> None:
    description = describe(Filter({"[bold]": lambda x: [x, (x, None)]}), jnp.zeros((2, 3)))
    console = Console(width=200, color_system=None)
    with console.capture() as capture:
        console.print(description)
    assert "{[bold]: [(2, 3), ((2, 3), None)]}" in capture.get()


def test_long_dicts_are_cut_short() -> None:
    net = Filter({f"k{i}": lambda x: x for i in range(9)})
    text = str(describe(net, jnp.zeros(1)))
    assert "k5: (1,)" in text and "k6" not in text and "3 more}" in text
    assert max(map(len, text.split("\n"))) < 100  # and wrapped


def test_a_shared_module_counts_once_and_is_marked() -> None:
    memory = lstm(4, 4)
    block = Residual(Sequential([memory]))
    description = describe(Sequential([memory, Flattener(), memory, block, block]), jnp.zeros(4))
    # 4·16 + 4·16 + 16 weights; four carries of 8
    assert (description.parameters, description.carry_size) == (144, 32)
    assert [(row.path, row.shared_with) for row in description.rows] == [
        ("", None),
        ("0", None),
        ("1", None),
        ("2", "0"),
        ("3", None),
        ("3/module", None),
        ("3/module/0", "0"),
        ("4", "3"),
    ]
    assert all(row.output.shape == (4,) for row in description.rows)
    lines = str(description).split("\n")
    assert lines[5].split() == ["2", "LSTM,", "same", "as", "0", "(4,)", "(144)", "8"]


def test_each_call_of_a_shared_module_has_its_own_output() -> None:
    flat = Flattener()
    net = Sequential([Map(a=flat, b=flat), Filter({"a": "a"}), flat])
    rows = by_path(describe(net, {"a": jnp.zeros((2, 3)), "b": jnp.zeros(4)}))
    assert {path: rows[path].output.shape for path in ("0/a", "0/b", "2")} == {
        "0/a": (6,),
        "0/b": (4,),
        "2": (6,),
    }


class Tower(StatefulModule):
    """A user's container, with a child that it does not use, tied weights and integer carry."""

    def __init__(self):
        ground, first = dense(3, 3), dense(3, 3)
        first.linear.kernel = ground.linear.kernel
        self.floors = nnx.List([ground, Residual(first)])
        self.attic = Scale(1.0)
        self.calls = 3  # as other modules name it

    def __call__(self, state, x, rollout_extras=None):
        assert isinstance(x, Tracer)
        y = self.floors[0]((), x).output
        y = self.floors[1]({"module": ()}, y).output
        return StatefulModuleOutput(state + self.calls, y, jnp.zeros(()), {})

    def initialize_state(self, batch_size):
        return jnp.zeros((batch_size, 2, 5), jnp.int32)


def test_containers_of_users_go_by_attribute() -> None:
    rows = by_path(describe(Sequential([Tower()]), jnp.zeros(3)))
    assert list(rows) == ["", "0", "0/attic", "0/floors/0", "0/floors/1", "0/floors/1/module"]
    # Each layer has 9 + 3; the tied kernel of 9 counts once.
    assert [row.parameters for row in rows.values()] == [15, 15, 0, 12, 12, 12]
    assert rows["0"].carry_size == 10
    assert rows["0/attic"].output is None and rows["0/floors/1/module"].output.shape == (3,)
    assert "not called" in str(describe(Tower(), jnp.zeros(3)))


def test_a_graph() -> None:
    graph = PopulationGraph(nnx.Rngs(0))
    graph.add_input("eye", 3, input_from="vision")
    graph.add_output("hand", 2)
    graph.connect("eye", "hand", transform=dense(3, 2), delay=2)
    graph.finalize()
    text = str(describe(Sequential([Filter({"vision": lambda x: x}), graph]), jnp.zeros(3)))
    assert "1/eye->hand@2" in text
    assert "The graph at '1' has the populations eye (3), hand (2)." in text
    assert "to_mermaid() and to_dot()" in text
    description = describe(graph, {"vision": jnp.zeros(3)})
    assert description.parameters == 8
    # A buffer of two steps of three units, and its position
    assert description.carry_size == 7
    assert "The graph has the populations" in str(description)


def test_nothing_changes_in_the_network() -> None:
    net = actor_critic()
    before, variables = nnx.split(net)
    old = [np.asarray(leaf) for leaf in jax.tree.leaves(nnx.state(net, nnx.Not(nnx.RngKey)))]
    del variables
    describe(net, jnp.zeros(3))
    after, _ = nnx.split(net)
    assert before == after
    new = jax.tree.leaves(nnx.state(net, nnx.Not(nnx.RngKey)))
    jax.tree.map(np.testing.assert_array_equal, new, old)


def test_samples_of_any_kind() -> None:
    net = Concat(a=Flattener(), b=Flattener())
    sample = {"a": jax.ShapeDtypeStruct((2, 2), jnp.float32), "b": [1.0, np.zeros(3, np.int8)]}
    assert describe(net, sample).rows[0].output.shape == (8,)


class Broken(StatefulModule):
    def __call__(self, state, x, rollout_extras=None):
        raise KeyError("velocity")


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("make", "sample", "error", "message"),
    [
        (
            lambda: Sequential([Map(a=Sequential([dense(3, 2), dense(3, 2)]))]),
            {"a": jnp.zeros(3)},
            ValueError,
            r"^describe: Dense at '0/a/1' cannot take an input of shape \(2, 2\): ValueError: "
            r"Dense: x must have in_features=3 .*sample_input is one sample without batch axis",
        ),
        (
            lambda: Map(a=Scale(1.0)),
            {"b": jnp.zeros(3, jnp.int32)},
            ValueError,
            r"describe: the network cannot take .* \{b: int32\(2, 3\)\}: .* 'a' is missing",
        ),
        (lambda: Residual(Broken()), jnp.zeros(1), ValueError, r"Broken at 'module'.* 'velocity'"),
        (
            lambda: Scale(1.0),
            {"a": ["text"]},
            TypeError,
            r"sample_input\['a'\]\[0\] must be an array or a number, got str",
        ),
        (lambda: Dense, None, TypeError, r"describe: network must be a StatefulModule, got the c"),
    ],
)
def test_messages(make, sample, error, message) -> None:
    with pytest.raises(error, match=message):
        describe(make(), sample)


def test_private_attributes_of_modules_are_their_own() -> None:
    class Named(StatefulModule):
        """Has attributes called like those that `describe` uses itself."""

        def __init__(self, width):
            self._path, self._calls = width, 2

        def __call__(self, state, x, rollout_extras=None):
            output = jnp.tile(x[:, :1], (1, self._path * self._calls))
            return StatefulModuleOutput(state, output, jnp.zeros(()), {})

    net = with_recording(Sequential([Named(3), Named(1)]))
    outputs = {row.path: row.output for row in describe(net, jnp.zeros(1)).rows}
    assert {path: output.shape for path, output in outputs.items()} == {
        "": (2,),
        "0": (6,),
        "0/wrapped": (6,),
        "1": (2,),
        "1/wrapped": (2,),
    }
