"""Policies as files: what is saved comes back, and nothing else does."""

import dataclasses
import enum
import functools
import json
import math
import os
import subprocess
import sys
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from nnx_ppo.algorithms import TrainConfig, train_ppo
from nnx_ppo.algorithms._functional import strongly_typed
from nnx_ppo.algorithms.config import EvalConfig, PPOConfig
from nnx_ppo.algorithms.policies import Policy, load_policy, save_policy
from nnx_ppo.algorithms.policies._describe import describe
from nnx_ppo.algorithms.policies._files import read_arrays
from nnx_ppo.algorithms.policies._functions import _NAMES as NAMES
from nnx_ppo.algorithms.policies._functions import functions
from nnx_ppo.algorithms.policies._names import Classes, name_of_class
from nnx_ppo.algorithms.policies._rebuild import rebuild
from nnx_ppo.algorithms.policies.policy import check_observation, converted
from nnx_ppo.core import StatefulModule, StatefulModuleOutput
from nnx_ppo.core.testing import RememberCue, TwoHands
from nnx_ppo.core.testing.blocks import NetworkPlan
from nnx_ppo.core.testing.modules import REFERENCE_BLOCKS, Affine
from nnx_ppo.networks import (
    Dense,
    Lift,
    NormalSampler,
    PPOAdapter,
    Scale,
    Sequential,
    make_mlp_actor_critic,
    with_recording,
)
from nnx_ppo.networks.testing import ACTOR_CRITIC, NETWORK_BLOCKS

from .helpers import CountingNetwork, lstm_network

AFFINE, LEAKY = REFERENCE_BLOCKS[:2]
BLOCKS = (*NETWORK_BLOCKS, *REFERENCE_BLOCKS, ACTOR_CRITIC)


def there_and_back(value, trusted=()):
    """Describe a value, and rebuild it from what JSON makes of the description."""
    arrays = {}
    text = json.dumps(describe(value, "networks", arrays), allow_nan=False)
    return rebuild(json.loads(text), "networks", arrays, Classes(trusted))


def same_networks(one, other):
    """Whether two networks have the same structure, static attributes and bits."""
    (graph, state), (other_graph, other_state) = nnx.split(one), nnx.split(other)
    assert graph == other_graph
    for left, right in zip(jax.tree.leaves(state), jax.tree.leaves(other_state), strict=True):
        assert left.dtype == right.dtype
        if jnp.issubdtype(left.dtype, jax.dtypes.prng_key):
            left, right = jax.random.key_data(left), jax.random.key_data(right)
        np.testing.assert_array_equal(left, right)


def make(block, which):
    """A network of one block, with its first or last options."""
    options = {name: choices[which] for name, choices in block.options.items()}
    parts: Any = () if block.parts is None else block.parts(4, 4, 4)
    inside = tuple(NetworkPlan((AFFINE, LEAKY)[i % 2], *sizes) for i, sizes in enumerate(parts))
    return NetworkPlan(block, 4, 4, options, inside).build()


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.name)
def test_every_module_comes_back_bit_for_bit(block):
    for which in (0, -1):
        network = make(block, which)
        same_networks(network, there_and_back(network))


@pytest.mark.parametrize(
    "layer",
    [
        lambda rngs: nnx.Conv(3, 4, (3, 3), rngs=rngs, param_dtype=jnp.bfloat16),
        lambda rngs: nnx.MultiHeadAttention(2, 4, decode=False, rngs=rngs),
        lambda rngs: nnx.Embed(3, 4, rngs=rngs),
        lambda rngs: nnx.Sequential(nnx.Linear(2, 3, rngs=rngs), nnx.relu, jnp.sin),
    ],
)
def test_lifted_layers_of_flax_come_back(layer):
    network = Lift(layer(nnx.Rngs(0)))
    same_networks(network, there_and_back(network))


def test_a_network_that_records_comes_back():
    network = with_recording(make_mlp_actor_critic(3, 2, [4], [4], nnx.Rngs(0)))
    same_networks(network, there_and_back(network))


def test_what_is_shared_stays_shared_and_may_refer_to_its_owner():
    network: Any = Sequential([layer := Dense(3, 3, nnx.Rngs(0)), layer])
    network.owner = network
    loaded = there_and_back(network)
    assert loaded.layers[0] is loaded.layers[1]
    assert loaded.owner is loaded


def test_arrays_of_all_kinds_survive_the_disk(tmp_path):
    network: Any = Scale(1.0)
    values = [
        jnp.arange(6.0).reshape(2, 3).astype(jnp.bfloat16), jnp.zeros((0, 3), jnp.int8),
        jnp.array([True, False]), jnp.uint32(2**32 - 1), jnp.array([jnp.nan, -0.0, jnp.inf]),
    ]  # fmt: skip
    network.values = nnx.List([nnx.Variable(value) for value in values])
    network.keys = nnx.Variable(jax.random.split(jax.random.key(3, impl="rbg"), 2))
    save_policy(tmp_path, network)
    same_networks(load_policy(tmp_path).networks, network)


class Color(enum.Enum):
    RED = "red"


class Pair(NamedTuple):
    left: int
    right: float


@dataclasses.dataclass(frozen=True)
class Settings:
    rate: float
    color: Color


def test_static_attributes_keep_their_types():
    values = [
        None, True, 3, 2**70, 0.1, math.inf, -math.inf, "a", (1, (2,)), [1], {"a": 1}, {1: (2,)},
        jnp.float32, np.float32, np.dtype("bfloat16"), np.float32(0.1), np.int8(3), np.bool_(True),
        jax.lax.Precision.HIGH, Color.RED, Pair(1, 2.0), Settings(math.inf, Color.RED),
        jax.tree.structure({"b": (1, [2, None]), "a": 3}), jax.ShapeDtypeStruct((2,), jnp.bfloat16),
    ]  # fmt: skip
    for value in values:
        found = there_and_back(value, [Color, Pair, Settings])
        assert found == value
        assert type(found) is type(value)
    assert math.isnan(there_and_back(math.nan))
    array = there_and_back(np.arange(3.0))
    assert isinstance(array, np.ndarray)
    assert array.dtype == np.float64


@pytest.mark.parametrize(
    "function",
    [jax.nn.swish, jax.nn.relu, nnx.tanh, jnp.tanh, jnp.add, jax.lax.rsqrt, nnx.softplus, jnp.sin],
)
def test_functions_come_back_by_their_public_name(function):
    assert there_and_back(function) is function


def test_partial_functions_come_back():
    found = there_and_back(functools.partial(jax.nn.leaky_relu, negative_slope=0.2))
    assert found.func is jax.nn.leaky_relu
    assert (found.args, found.keywords) == ((), {"negative_slope": 0.2})


def own_activation(x):
    return x


@pytest.mark.parametrize(
    ("activation", "words"),
    [
        (lambda x: x, "is a lambda"),
        (own_activation, "is the function .*own_activation"),
        (functools.partial(own_activation), "func is the function .*own_activation"),
        (jnp.load, "is the function .*load"),
        (functools.partial(nnx.Linear, 3), "func is the function .*Linear"),
    ],
)
def test_other_functions_fail_when_saving_with_path_and_cure(tmp_path, activation, words):
    rngs = nnx.Rngs(0)
    network = Sequential([Scale(1.0), Dense(3, 2, rngs, activation)])
    with pytest.raises(
        TypeError, match=rf"networks\.layers\[1\]\.activation.*{words}.*Use a function of jax\.nn"
    ):
        save_policy(tmp_path / "policy", network)
    assert not (tmp_path / "policy").exists()


def test_what_cannot_be_described_is_named():
    network: Any = Scale(1.0)
    network.file = object()
    with pytest.raises(TypeError, match=r"networks\.file is a builtins\.object, which a policy"):
        describe(network, "networks", {})


class Doubled(StatefulModule):
    """A module of a user."""

    def __init__(self):
        self.gain = nnx.Param(jnp.full((), 2.0))

    def __call__(self, module_state, obs, rollout_extras=None):
        return StatefulModuleOutput(module_state, self.gain[...] * obs, jnp.zeros(()), {})


def test_classes_of_users_load_only_if_trusted(tmp_path):
    network = Sequential([Scale(1.0), Doubled()])
    save_policy(tmp_path, network)
    name = f"{__name__}.Doubled"
    with pytest.raises(
        ValueError, match=rf"networks\.layers\[1\]: the class {name} is not tr.*trusted=\[Doubled\]"
    ):
        load_policy(tmp_path)
    same_networks(load_policy(tmp_path, trusted=[Doubled]).networks, network)


@pytest.mark.usefixtures("unchecked")
def test_wrong_arguments_are_said(tmp_path):
    with pytest.raises(TypeError, match="networks must be a StatefulModule, got Linear"):
        linear: Any = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
        save_policy(tmp_path / "policy", linear)
    save_policy(tmp_path, Scale(1.0))
    with pytest.raises(TypeError, match="trusted must hold classes, got Scale"):
        trusted: Any = [Scale(1.0)]
        load_policy(tmp_path, trusted=trusted)


def test_a_class_of_the_script_is_found_in_its_module(tmp_path, monkeypatch):
    monkeypatch.setattr(Doubled, "__module__", "__main__")
    network = Doubled()
    save_policy(tmp_path, network)
    monkeypatch.undo()
    same_networks(load_policy(tmp_path, trusted=[Doubled]).networks, network)


def test_a_trusted_class_does_not_replace_a_shipped_one_of_its_name(tmp_path):
    own: Any = type("Dense", (Doubled,), {"__module__": "__main__"})
    save_policy(tmp_path, Sequential([Dense(2, 3, nnx.Rngs(0)), own()]))
    loaded: Any = load_policy(tmp_path, trusted=[own]).networks
    assert [type(layer) for layer in loaded.layers] == [Dense, own]
    # In another process the script is a module, of which several may have such a class.
    homes = [type("Dense", (Doubled,), {"__module__": name}) for name in ("one", "two")]
    loaded = load_policy(tmp_path, trusted=homes[:1]).networks
    assert [type(layer) for layer in loaded.layers] == [Dense, homes[0]]
    with pytest.raises(ValueError, match=r"may be each of .*one\.Dense.*trust only one Dense"):
        load_policy(tmp_path, trusted=homes)


def test_metadata_of_variables_come_back_whatever_their_value():
    variables = [
        nnx.Param(jnp.asarray(1.0), limit=1.0), nnx.Variable(jnp.ones(2), scale=2.0, frozen=True),
        nnx.Variable(jnp.ones(2), on_get_value=None, scale=np.arange(2.0)),
    ]  # fmt: skip
    for variable in variables:
        own, loaded = variable.get_metadata(), there_and_back(variable).get_metadata()
        assert own.keys() == loaded.keys()
        for name, value in own.items():
            np.testing.assert_array_equal(value, loaded[name])


def test_the_functions_of_a_policy_exist():
    """A name with a slip in it would forbid a function silently."""
    found = functions()
    assert found["jax.numpy.tanh"] is jnp.tanh
    listed = [f"{home.__name__}.{name}" for home, names in NAMES.items() for name in names.split()]
    missing = {*listed} - found.keys()
    assert all(name.startswith("flax.nnx.") for name in missing)  # which has fewer activations


def edit(path, change):
    file = path / "policy.json"
    record = json.loads(file.read_text())
    change(record)
    file.write_text(json.dumps(record))


@pytest.mark.parametrize(
    ("attribute", "words"),
    [
        ({"module": "os.system", "attributes": {}}, "the class os.system is not trusted"),
        ({"module": "this.s", "attributes": {}}, "the class this.s is not trusted"),
        ({"module": "flax.nnx.graphlib.np.ndarray", "attributes": {}}, "is not trusted"),
        ({"module": "nnx_ppo.core.nnx.Linear", "attributes": {}}, "is not there"),
        ({"module": "nnx_ppo.networks.testing.this.C", "attributes": {}}, "is not there"),
        ({"module": "jax.lax.Precision", "attributes": {}}, "is not of the kind"),
        ({"class": "jax.numpy.np.lib.npyio.DataSource"}, "is not trusted"),
        ({"class": "nnx_ppo.algorithms.loggers.json_lines.JsonLinesLogger"}, "is not trusted"),
        ({"class": "optax.GradientTransformation"}, "is not trusted"),
        ({"class": "flax.nnx.Linear"}, "is not of the kind"),
        ({"module": "nnx_ppo.networks.Scale", "attributes": {"__array_interface__": None}},
         "networks.factor has the attribute __array_interface__, which a file may not set"),
        ({"variable": "flax.nnx.Param", "value": 1, "metadata": {"__array_interface__": None}},
         "the attribute __array_interface__"),
        ({"named": {"__class__": None}}, "the attribute __class__"),
        ({"function": "os.system"}, "the function os.system is not one of jax.nn"),
        ({"function": "this.s"}, "the function this.s is not one of jax.nn"),
        ({"function": "jax.numpy.load"}, "the function jax.numpy.load is not one of"),
        ({"function": "jax.numpy.__array_namespace_info__"}, "is not one of"),
        ({"function": "jax.numpy.set_printoptions"}, "is not one of"),
        ({"function": "flax.nnx.module.first_from"}, "is not one of"),
        ({"function": "flax.nnx.jit"}, "is not one of"),
        ({"function": "nnx_ppo.networks.describe"}, "is not one of"),
        ({"function": "flax.nnx.Linear"}, "the function flax.nnx.Linear is not one of"),
        ({"partial": {"function": "jax.numpy.load"}, "arguments": [], "keywords": {"dict": {}}},
         "networks.factor.func: the function jax.numpy.load is not one of"),
        ({"reduce": ["os.system", "true"]}, "networks.factor is described as a 'reduce'"),
    ],
)  # fmt: skip
def test_a_file_cannot_name_what_it_likes(tmp_path, attribute, words):
    save_policy(tmp_path, Scale(1.0))
    edit(tmp_path, lambda record: record["networks"]["attributes"].update(factor=attribute))
    with pytest.raises(ValueError, match=words):
        load_policy(tmp_path)
    assert "this" not in sys.modules


def test_public_names_outlive_the_moving_of_a_file():
    assert name_of_class(NormalSampler) == "nnx_ppo.networks.NormalSampler"
    assert name_of_class(nnx.OptimizedLSTMCell) == "flax.nnx.OptimizedLSTMCell"
    assert name_of_class(jax.lax.Precision) == "jax.lax.Precision"
    assert name_of_class(Affine) == "nnx_ppo.core.testing.modules.Affine"


def test_settings_and_specs_come_back(tmp_path):
    env, network = TwoHands(), TwoHandsNetwork()
    config = TrainConfig(ppo=PPOConfig(n_envs=8), seed=3)
    save_policy(
        tmp_path, network, env=env, environment="TwoHands", overrides={"length": 4, "size": (1, 2)},
        config=config, step=2**40,
    )  # fmt: skip
    policy: Any = load_policy(tmp_path, trusted=[TwoHandsNetwork])
    assert (policy.environment, policy.step) == ("TwoHands", 2**40)
    assert policy.overrides == {"length": 4, "size": (1, 2)}
    assert policy.config["ppo"]["n_envs"] == 8
    assert policy.config["eval"]["logging_percentiles"] == [0, 25, 50, 75, 100]
    assert policy.versions["jax"] == jax.__version__
    shapes = jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), policy.observation_spec)
    assert shapes == {
        "left": {"target": ((1,), jnp.float32)},
        "right": {"target": ((2,), jnp.float32), "noise": ((1,), jnp.float32)},
    }
    assert jax.tree.map(jnp.shape, policy.action_spec) == {"left": (1,), "right": (2,)}
    assert not (tmp_path / "policy.json").read_text().count("\n") > 100  # people can read it


class TwoHandsNetwork(CountingNetwork):
    """Acts on each hand's target."""

    def __call__(self, module_state, obs, rollout_extras=None):
        out = super().__call__(module_state, obs["left"]["target"], rollout_extras)
        actions = {hand: module_state[:, None] + obs[hand]["target"] for hand in ("left", "right")}
        return out.replace(output=out.output.replace(actions=actions))


def test_a_policy_carries_its_memory_and_hides_the_batch(monkeypatch):
    traced = []
    call = TwoHandsNetwork.__call__
    monkeypatch.setattr(TwoHandsNetwork, "__call__", lambda *args: traced.append(0) or call(*args))
    policy = Policy(TwoHandsNetwork())
    with pytest.raises(RuntimeError, match=r"call policy\.reset\(\) before"):
        policy({})
    with pytest.raises(ValueError, match="batch_size must be at least 1, got 0"):
        policy.reset(batch_size=0)
    obs = {"left": {"target": np.ones(1)}, "right": {"target": np.array([2.0, 3.0])}}
    policy.reset()
    for step in range(2):  # the action is the number of steps so far + the target
        action = policy(obs)
        np.testing.assert_array_equal(action["right"], [step + 2.0, step + 3.0])
    policy.reset_where(True)
    np.testing.assert_array_equal(policy(obs)["left"], [1.0])
    policy.reset()
    np.testing.assert_array_equal(policy(obs)["left"], [1.0])
    assert len(traced) == 1  # compiled once, over episodes too

    policy.reset(batch_size=2)
    obs = jax.tree.map(lambda leaf: np.stack([leaf, 10 * leaf]), obs)
    policy(obs)
    policy.reset_where(np.array([False, True]))
    np.testing.assert_array_equal(policy(obs)["right"], [[3.0, 4.0], [20.0, 30.0]])
    with pytest.raises(ValueError, match=r"done must have shape \(2,\), got \(\)"):
        policy.reset_where(True)


def test_a_policy_says_which_observation_it_wants(tmp_path):
    save_policy(tmp_path, TwoHandsNetwork(), env=TwoHands())
    policy: Any = load_policy(tmp_path, trusted=[TwoHandsNetwork])
    good = {
        "left": {"target": np.zeros(1)},
        "right": {"target": np.zeros(2), "noise": np.zeros(1)},
    }
    policy.reset()
    policy(good)
    bad = {**good, "right": {"target": np.zeros(2), "sound": np.zeros(1)}}
    with pytest.raises(
        ValueError,
        match=r"must have the leaves \['left'\]\['target'\] \(1,\), \['right'\]\['noise'\] \(1,\)"
        r".*got .*'sound'.*\['right'\]\['noise'\] missing; \['right'\]\['sound'\] not known to it",
    ):
        policy(bad)
    batch = jax.tree.map(lambda leaf: np.stack([leaf] * 3), good)
    with pytest.raises(ValueError, match=r"call policy\.reset\(batch_size=3\)"):
        policy(batch)
    with pytest.raises(ValueError, match="not the observation that it was trained on"):
        policy({**good, "left": {"target": np.zeros(4)}})
    policy.reset(batch_size=3)
    policy(batch)
    with pytest.raises(ValueError, match=r"call policy\.reset\(\) without"):
        policy(good)


def test_integers_are_taken_for_floats_but_not_the_reverse():
    spec = jax.ShapeDtypeStruct((1,), jnp.float32)
    policy = Policy(CountingNetwork(), observation_spec=spec)
    policy.reset()
    assert policy(np.array([3])).dtype == jnp.float32
    policy = Policy(CountingNetwork(), observation_spec=jax.ShapeDtypeStruct((1,), jnp.int32))
    policy.reset()
    with pytest.raises(ValueError, match="obs must be int32, got float32 with values that would"):
        policy(np.array([3.0], np.float32))


@pytest.mark.parametrize(
    ("want", "value", "passes"),
    [
        (jnp.float32, np.float64(0.5), True),
        (jnp.bfloat16, np.float64(0.5), True),
        (jnp.float32, jnp.bfloat16(0.5), True),
        (jnp.float32, 2**40, True),  # 32 bits would make 0 of it
        (jnp.float32, np.complex64(1j), False),
        (jnp.float32, True, False),
        (jnp.uint8, np.int32(255), True),
        (jnp.uint8, np.int32(300), False),
        (jnp.uint8, -1, False),
        (jnp.int32, 2**40, False),
        (jnp.int32, np.uint8(3), True),
        (jnp.uint8, True, False),
        (jnp.uint8, np.float32(1.0), False),
        (jnp.bool_, 1, False),
        (jnp.bool_, np.True_, True),
    ],
)
def test_observations_are_converted_only_where_their_values_stay(want, value, passes):
    spec, obs = jax.ShapeDtypeStruct((1,), want), {"x": np.asarray(value)[None]}
    if not passes:
        with pytest.raises(ValueError, match=r"obs\['x'\] must be .*, got .* convert it"):
            check_observation(obs, {"x": spec}, None)
        return
    check_observation(obs, {"x": spec}, None)
    found = converted(obs, {"x": spec})["x"]
    assert found.dtype == want
    assert float(found[0]) == float(value)


def test_noise_goes_on_from_episode_to_episode(tmp_path):
    # The action is noise of deviation 1 around the observation.
    network = PPOAdapter(NormalSampler(nnx.Rngs(0), 0.0, free_std=[1.0]), Scale(1.0))
    save_policy(tmp_path, network)
    policies = [load_policy(tmp_path) for _ in range(2)]
    policies[0].reset()
    np.testing.assert_array_equal(policies[0](np.full(1, 3.0)), [3.0])  # evaluation mode
    drawn = []
    for policy in policies:
        policy.networks.train()
        for _ in range(2):
            policy.reset()
            drawn.append([float(policy(np.zeros(1))[0]) for _ in range(2)])
    assert len({x for episode in drawn[:2] for x in episode}) == 4
    assert drawn[:2] == drawn[2:]


def test_streams_that_were_reseeded_count_from_the_next_reset():
    policy = Policy(PPOAdapter(NormalSampler(nnx.Rngs(0), 0.0, free_std=[1.0]), Scale(1.0)))

    def draws():
        return [float(policy(np.zeros(1))[0]) for _ in range(2)]

    (tag,) = {node.tag for _, node in nnx.iter_graph(policy.networks) if is_key(node)}
    keys: Any = {seed: {tag: seed} for seed in (5, 6)}
    drawn = []
    for _ in range(2):
        nnx.reseed(policy.networks, **keys[5])
        policy.reset()
        drawn.append(draws())
        nnx.reseed(policy.networks, **keys[6])
        draws()  # goes on in this episode, and leaves the new streams alone
    policy.reset()
    drawn.append(draws())
    policy.reset()
    drawn.append(draws())
    assert drawn[0] == drawn[1]
    assert len({x for episode in drawn[1:] for x in episode}) == 6


def is_key(node):
    return isinstance(node, nnx.RngKey)


def test_a_network_without_actions_is_refused(tmp_path):
    policy = Policy(Scale(1.0))
    policy.reset()
    with pytest.raises(TypeError, match="must return a PPONetworkOutput, got .*PPOAdapter"):
        policy(np.zeros(1))
    with pytest.raises(TypeError, match="must return a PPONetworkOutput"):
        save_policy(tmp_path / "policy", Scale(1.0), env=RememberCue())


def test_a_policy_is_replaced_at_one_stroke(tmp_path, monkeypatch):
    def gain():
        network: Any = load_policy(tmp_path, trusted=[Doubled]).networks
        return float(network.gain[...])

    network = Doubled()
    save_policy(tmp_path, network)
    network.gain[...] = jnp.asarray(3.0)
    (tmp_path / "note.txt").touch()
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", fail)
        with pytest.raises(OSError, match="disk full"):
            save_policy(tmp_path, network)
    assert gain() == 2.0
    (tmp_path / "arrays-0123456789ab").mkdir()  # what a killed writer left
    (tmp_path / "policy.json.arrays-0123456789ab").touch()
    (tmp_path / "arrays-mine").mkdir()
    save_policy(tmp_path, network)
    assert gain() == 3.0
    names = {path.name for path in tmp_path.iterdir()}
    assert {"note.txt", "arrays-mine", "policy.json"} < names
    assert len(names) == 4


def test_a_policy_that_is_saved_over_while_it_is_loaded_loads_as_the_new_one(tmp_path, monkeypatch):
    save_policy(tmp_path, Doubled())

    def read_late(path, record):
        monkeypatch.undo()
        network = Doubled()
        network.gain[...] = jnp.asarray(3.0)
        save_policy(path, network)
        return read_arrays(path, record)

    monkeypatch.setattr("nnx_ppo.algorithms.policies.storing.read_arrays", read_late)
    network: Any = load_policy(tmp_path, trusted=[Doubled]).networks
    assert float(network.gain[...]) == 3.0


def test_what_reaches_the_disk_does_so_before_the_record(tmp_path, monkeypatch):
    done, fsync, replace = [], os.fsync, os.replace

    def record_sync(descriptor):
        done.append(os.fstat(descriptor).st_ino)
        fsync(descriptor)

    def record_replace(source, target):
        done.append("replace")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", record_sync)
    monkeypatch.setattr(os, "replace", record_replace)
    save_policy(folder := tmp_path / "policy", Doubled())
    before, after = done[: (at := done.index("replace"))], done[at + 1 :]
    assert {path.stat().st_ino for path in (folder, *folder.rglob("*"))} <= {*before}
    assert after == [folder.stat().st_ino]


def fail(*args):
    raise OSError("disk full")


def test_what_is_missing_damaged_or_too_new_is_said(tmp_path):
    save_policy(tmp_path / "run" / "policy", Scale(1.0))
    for path in (tmp_path / "run", tmp_path / "run" / "polic"):
        with pytest.raises(FileNotFoundError, match=r"no policy in .*Policies are in .*run/policy"):
            load_policy(path)
    with pytest.raises(FileNotFoundError, match="save_policy writes one"):
        load_policy(tmp_path / "elsewhere" / "policy")
    path = tmp_path / "run" / "policy"
    edit(path, lambda record: record.update(format=2))
    with pytest.raises(ValueError, match="has the format 2, written by nnxppo-algos .*reads up to"):
        load_policy(path)
    save_policy(path, Doubled())
    good = (path / "policy.json").read_text()
    (arrays,) = json.loads(good)["arrays"]
    texts = [
        "{", "[]", "3", '{"format": 1}', good.replace('"networks":', '"nets":'),
        good.replace('"array": "0"', '"array": "9"'),
        good.replace(arrays, ".."), good.replace("float32", "floaty"),
        good.replace('"attributes"', '"traits"'),
    ]  # fmt: skip
    for text in texts:
        assert text != good
        (path / "policy.json").write_text(text)
        with pytest.raises(ValueError, match=r"policy\.json is damaged"):
            load_policy(path, trusted=[Doubled])
    (path / "policy.json").write_text(good)
    (path / arrays / "_METADATA").write_text('{"tree_m')
    with pytest.raises(ValueError, match=rf"arrays of a policy, .*{arrays}, are damaged or not th"):
        load_policy(path, trusted=[Doubled])


def test_a_class_that_has_changed_is_said_when_loading(tmp_path):
    save_policy(tmp_path, make_mlp_actor_critic(2, 1, [4], [4], nnx.Rngs(0)), env=RememberCue())

    def age(record):
        record["versions"]["nnxppo-networks"] = "0.0.1"
        del record["networks"]["attributes"]["layers"]["list"][0]["attributes"]["clip"]

    edit(tmp_path, age)
    with pytest.raises(AttributeError, match="no attribute 'clip'") as caught:
        load_policy(tmp_path)
    notes = " ".join(caught.value.__notes__)
    assert "Other versions than those that saved it: {'nnxppo-networks': '0.0.1, now" in notes


# Every import of this script is the library's: it stands for a user who has the folder alone.
FRESH_PROCESS = """
import json, sys
import jax, numpy as np
jax.config.update("jax_compilation_cache_dir", sys.argv[2])
jax.config.update("jax_disable_most_optimizations", True)
from flax import nnx
from nnx_ppo.algorithms.discovery import find_environment
from nnx_ppo.algorithms.keys import at_step, purpose_keys
from nnx_ppo.algorithms.policies import load_policy
from nnx_ppo.algorithms.rollout import eval_rollout

policy = load_policy(sys.argv[1])
env = find_environment(policy.environment).load(policy.environment, **policy.overrides)
settings = policy.config["eval"]
key = at_step(purpose_keys(policy.config["seed"]).evaluation, policy.step)
graphdef, variables = nnx.split(policy.networks)

@jax.jit
def evaluate(variables, key):
    live = nnx.merge(graphdef, variables, copy=True)
    return eval_rollout(env, live, settings["n_envs"], settings["max_episode_length"], key)

metrics = {name: float(value) for name, value in evaluate(variables, key).items()}
actions = []
policy.reset()
for obs in np.load(sys.argv[1] + "/obs.npy"):
    actions.append(np.asarray(policy(obs)).tolist())
print(json.dumps({"metrics": metrics, "actions": actions}))
"""


@pytest.mark.slow
def test_a_fresh_process_reproduces_the_evaluation_of_training(tmp_path):
    env, network = RememberCue(delay=2), lstm_network(2)
    config = TrainConfig(
        ppo=PPOConfig(n_envs=4, rollout_length=4, total_steps=32, n_minibatches=2, n_epochs=1),
        eval=EvalConfig(n_envs=5, max_episode_length=8, every_steps=32, logging_percentiles=None),
        seed=3,
    )
    result = train_ppo(env, network, config)
    save_policy(
        tmp_path, network, env=env, environment="RememberCue", overrides={"delay": 2},
        config=config, step=result.total_steps,
    )  # fmt: skip
    observations, actions = record(env, network)
    np.save(tmp_path / "obs.npy", observations)

    cache = jax.config.values["jax_compilation_cache_dir"]
    command = [sys.executable, "-W", "error", "-c", FRESH_PROCESS, str(tmp_path), str(cache)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    last = result.eval_history[-1]
    assert last["step"] == 32
    assert found["metrics"] == {name: value for name, value in last.items() if name != "step"}
    np.testing.assert_allclose(found["actions"], actions, rtol=0, atol=1e-5)


def record(env, network, steps=3, n_envs=4):
    """Observations and actions of one of several episodes that run side by side."""
    graphdef, variables = nnx.split(network)

    @jax.jit
    def run(variables):
        live = nnx.merge(graphdef, variables, copy=True)
        live.eval()
        state = strongly_typed(jax.vmap(env.reset)(jax.random.split(jax.random.key(0), n_envs)))
        carry, seen, taken = live.initialize_state(n_envs), [], []
        for _ in range(steps):
            out = live(carry, state.obs)
            seen.append(state.obs[1])
            taken.append(out.output.actions[1])
            carry, state = out.next_state, jax.vmap(env.step)(state, out.output.actions)
        return jnp.stack(seen), jnp.stack(taken)

    return run(variables)
