"""Checkpoints: whole or absent, exact, safe to read, and clear about what does not fit."""

import dataclasses
import enum
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from nnx_ppo.algorithms import (
    EvalConfig,
    LoggingLevel,
    PPOConfig,
    TrainConfig,
    best_checkpoint,
    latest_checkpoint,
    load_checkpoint,
    make_checkpoint_fn,
    new_training_state,
    restart_environments,
    train_ppo,
)
from nnx_ppo.algorithms.checkpointing._unpickling import load_pickle, numpy_array
from nnx_ppo.algorithms.checkpointing._variables import matched_by_role
from nnx_ppo.algorithms.checkpointing.nodes import PlainNode, describe, graft, rebuild
from nnx_ppo.core import JaxDataclass, StatefulModule, StatefulModuleOutput
from nnx_ppo.core.testing import FollowTarget
from nnx_ppo.networks.containers import Sequential

from . import killed_writer
from .helpers import IntegerEnv, IntegerState, lstm_network, mlp_network

CONFIG = TrainConfig(
    ppo=PPOConfig(
        n_envs=2,
        rollout_length=2,
        total_steps=8,
        n_epochs=1,
        n_minibatches=1,
        logging_level=LoggingLevel.LOSSES | LoggingLevel.GRAD_NORM,
        logging_percentiles=(5, 50),
    ),
    eval=EvalConfig(enabled=False),
)


def state_of(network=None, env=None, n_envs=2):
    """A training state that nothing was done to."""
    env = FollowTarget(length=3) if env is None else env
    return new_training_state(env, network or mlp_network(), n_envs, seed=0)


def numbers(tree):
    """The leaves of a tree as NumPy arrays, keys as their data."""

    def raw(leaf):
        is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        return np.asarray(jax.random.key_data(leaf) if is_key else leaf)

    return [raw(leaf) for leaf in jax.tree.leaves(tree)]


def assert_same(one, other):
    for left, right in zip(numbers(one), numbers(other), strict=True):
        assert left.dtype == right.dtype
        assert left.tobytes() == right.tobytes()


def test_what_was_saved_comes_back(tmp_path):
    state = state_of(lstm_network())
    make_checkpoint_fn(tmp_path, CONFIG)(state, 12)
    assert latest_checkpoint(tmp_path) == tmp_path / "step_0000000012"
    names = {path.name for path in (tmp_path / "step_0000000012").iterdir()}
    assert names == {"networks", "optimizer", "metadata.pkl", "metrics.json"}
    other = state_of(lstm_network(seed=5))
    loaded = load_checkpoint(tmp_path / "step_0000000012", other.networks, other.optimizer)
    assert loaded["step"] == 12
    assert loaded["config"] == CONFIG
    found = loaded["training_state"]
    assert found.networks is other.networks
    assert found.optimizer is other.optimizer
    for name in ("network_states", "env_states", "rng_key", "steps_taken", "step_words"):
        assert_same(getattr(state, name), getattr(found, name))
        assert jax.tree.structure(getattr(state, name)) == jax.tree.structure(getattr(found, name))
    assert_same(nnx.state(state.networks), nnx.state(found.networks))
    assert_same(nnx.state(state.optimizer), nnx.state(found.optimizer))


def latest(folder) -> Any:
    return latest_checkpoint(folder)


def best(folder, *arguments) -> Any:
    return best_checkpoint(folder, *arguments)


class Pair(NamedTuple):
    left: jax.Array
    right: jax.Array


@jax.tree_util.register_pytree_with_keys_class
class Odd:
    """A pytree node that is neither dataclass nor named tuple."""

    def __init__(self, child, label):
        self.child, self.label = child, label

    def tree_flatten_with_keys(self):
        return [(jax.tree_util.GetAttrKey("child"), self.child)], self.label

    @classmethod
    def tree_unflatten(cls, label, children):
        return cls(next(iter(children)), label)


class Labelled(JaxDataclass):
    child: jax.Array
    label: str = dataclasses.field(metadata={"static": True})


def test_trees_become_plain_data_and_come_back():
    tree = {
        "keys": jax.random.split(jax.random.key(1), 2),
        "small": jnp.asarray([1.5, -2.0], jnp.bfloat16),
        "list": [None, True, 2, 0.5, "text", (jnp.arange(3, dtype=jnp.uint32), np.ones(2))],
        "level": LoggingLevel.LOSSES | LoggingLevel.WEIGHTS,
        "numpy": np.arange(3.0, dtype=">f8"),
        "empty": jnp.zeros((0, 3)),
    }
    data = pickle.loads(pickle.dumps(describe(tree, "tree")))
    found = rebuild(data)
    assert jax.tree.structure(found) == jax.tree.structure(tree)
    arrays = [leaf for leaf in jax.tree.leaves(tree) if hasattr(leaf, "dtype")]
    assert_same(arrays, [leaf for leaf in jax.tree.leaves(found) if hasattr(leaf, "dtype")])
    assert found["level"] == tree["level"]


@pytest.mark.parametrize(
    "node", [Pair(jnp.ones(2), jnp.zeros(2)), Odd(jnp.ones(2), "a"), Labelled(jnp.ones(2), "a")]
)
def test_nodes_of_unknown_classes_stay_plain_until_grafted(node):
    data = pickle.loads(pickle.dumps(describe([node], "tree")))
    (plain,) = rebuild(data)
    assert isinstance(plain, PlainNode)
    assert_same(plain, node)
    shapes = jax.eval_shape(lambda: node)
    assert type(graft(shapes, plain, "tree")) is type(node)
    assert_same(graft(shapes, plain, "tree"), node)
    (trusted,) = rebuild(data, [Pair, Labelled])
    assert isinstance(trusted, PlainNode if isinstance(node, Odd) else type(node))


def test_a_leaf_that_cannot_be_saved_is_named(tmp_path):
    state = state_of()
    state = state.replace(env_states=state.env_states.replace(info={"made_by": object()}))
    with pytest.raises(TypeError, match=r"env_states\.info\['made_by'\] is a builtins\.object"):
        make_checkpoint_fn(tmp_path)(state, 0)
    assert latest_checkpoint(tmp_path) is None


def test_environments_of_the_users_own_classes_resume_without_trust(tmp_path):
    env, folder = IntegerEnv(), tmp_path / "run"
    straight = train_ppo(
        env, mlp_network(), CONFIG, checkpoint_fn=make_checkpoint_fn(folder), total_steps=8
    )
    blank = state_of(mlp_network(seed=3), env)
    loaded = load_checkpoint(folder / "step_0000000008", blank.networks, blank.optimizer)
    state = loaded["training_state"]
    assert isinstance(state.env_states, PlainNode)
    assert_same(state.env_states.info["left"], straight.training_state.env_states.info["left"])
    trusting = load_checkpoint(
        folder / "step_0000000008", blank.networks, blank.optimizer, trusted=[IntegerState]
    )
    assert isinstance(trusting["training_state"].env_states, IntegerState)

    with pytest.raises(ValueError, match=r"holds 2 environments, but n_envs=4.*restart_environ"):
        more = TrainConfig(ppo=PPOConfig(n_envs=4), eval=CONFIG.eval)
        train_ppo(env, blank.networks, more, initial_state=state)
    more = restart_environments(state, env, n_envs=4, seed=0)
    config = TrainConfig(
        ppo=PPOConfig(n_envs=4, rollout_length=2, n_epochs=1, n_minibatches=1, total_steps=16),
        eval=CONFIG.eval,
    )
    weights = nnx.clone(blank.networks)
    result = train_ppo(env, blank.networks, config, initial_state=more)
    assert (result.total_steps, result.total_iterations) == (16, 1)
    assert int(result.training_state.optimizer.step[...]) == 3  # two updates before, one after
    assert_same(nnx.state(weights), nnx.state(straight.training_state.networks))


def test_a_checkpoint_that_does_not_fit_names_the_first_leaf(tmp_path):
    make_checkpoint_fn(tmp_path)(state_of(mlp_network(obs_size=2), FollowTarget(3)), 0)
    other = state_of(mlp_network())
    before = numbers(nnx.state(other.networks))
    message = r"networks does not fit: expected float32\[1\] at layers/0/M2, found float32\[2\]"
    with pytest.raises(ValueError, match=message):
        load_checkpoint(tmp_path / "step_0000000000", other.networks, other.optimizer)
    deeper = state_of(lstm_network(obs_size=2))
    message = r"expected nothing at layers/1/action/layers/0/linear/bias, found float32\[8\]"
    with pytest.raises(ValueError, match=message):
        load_checkpoint(tmp_path / "step_0000000000", deeper.networks, deeper.optimizer)
    assert_same(before, numbers(nnx.state(other.networks)))
    with pytest.raises(FileNotFoundError, match="no metadata.pkl.*: step_0000000000"):
        load_checkpoint(tmp_path, other.networks, other.optimizer)
    with pytest.raises(ValueError, match=r"tree\.a does not fit: expected int32\[2\], found float"):
        graft({"a": jnp.zeros(2, jnp.int32)}, {"a": jnp.zeros(2)}, "tree")
    with pytest.raises(ValueError, match=r"expected a child 'b' with float32\[2\], found only a"):
        graft({"b": jnp.zeros(2)}, {"a": jnp.zeros(2)}, "tree")


class Malicious:
    """Would run a command when unpickled."""

    def __reduce__(self):
        return os.system, ("exit 1",)


def test_a_pickle_that_would_run_code_is_refused(tmp_path):
    state = state_of()
    make_checkpoint_fn(tmp_path)(state, 0)
    path = tmp_path / "step_0000000000"
    metadata = pickle.loads((path / "metadata.pkl").read_bytes())
    (path / "metadata.pkl").write_bytes(pickle.dumps(metadata | {"config": Malicious()}))
    with pytest.raises(pickle.UnpicklingError, match=r"names (posix|nt)\.system"):
        load_checkpoint(path, state.networks, state.optimizer)
    # NumPy's own types could be told to take numbers for addresses of objects.
    dtype = b"cnumpy\ndtype\n(X\x02\x00\x00\x00O8I00\nI01\ntR"
    pointer = b"cnumpy._core.multiarray\nscalar\n(" + dtype + b"C\x08AAAAAAAAtR."
    with pytest.raises(pickle.UnpicklingError, match="array of 'O8', which are no numbers"):
        numpy_array(load_pickle(pointer))
    # A description cannot name anything but data either, nor reach through a module of ours.
    evil = {"node": "object", "class": "nnx_ppo.algorithms.types:enum.Enum", "children": {"0": 1}}
    (path / "metadata.pkl").write_bytes(pickle.dumps(metadata | {"config": evil}))
    config = load_checkpoint(path, state.networks, state.optimizer)["config"]
    assert isinstance(config, PlainNode)
    (path / "metadata.pkl").write_bytes(pickle.dumps(metadata)[:-20])
    with pytest.raises(
        pickle.UnpicklingError, match="metadata.pkl cannot be read: pickle data was truncated"
    ):
        load_checkpoint(path, state.networks, state.optimizer)


class Side(enum.StrEnum):
    LEFT = "left"


class Keeper(StatefulModule):
    """Keeps a tree in one variable, and a number in another."""

    def __init__(self, first):
        self.pair = nnx.Variable(Pair(jnp.full(1, first), jnp.full(1, first + 1.0)))
        self.number = nnx.Variable(first)

    def __call__(self, module_state, obs, rollout_extras=None):
        return StatefulModuleOutput(module_state, obs, jnp.zeros(()), {})


def test_trees_numbers_and_keys_of_any_kind_survive(tmp_path):
    state = state_of(Sequential([Keeper(1.0), mlp_network()]))
    info = {Side.LEFT: jnp.ones(2), "values": {1: jnp.zeros(2), (2, None): jnp.ones(2)}}
    make_checkpoint_fn(tmp_path)(state.replace(env_states={"info": info}), 0)
    keeper = Keeper(5.0)
    other = state_of(Sequential([keeper, mlp_network(seed=3)]))
    found = load_checkpoint(tmp_path / "step_0000000000", other.networks, other.optimizer)
    pair = keeper.pair.get_value()
    assert (float(pair.left[0]), float(pair.right[0]), float(keeper.number[...])) == (1.0, 2.0, 1.0)
    assert list(found["training_state"].env_states["info"]) == ["left", "values"]
    assert_same(
        info["values"][2, None], found["training_state"].env_states["info"]["values"][2, None]
    )


def test_settings_that_a_file_cannot_hold_come_back_with_a_warning(tmp_path):
    video = {"scene": lambda: None}
    config = TrainConfig(eval=CONFIG.eval)
    object.__setattr__(config.video, "render_kwargs", video)
    state = state_of()
    make_checkpoint_fn(tmp_path, config)(state, 0)
    with pytest.warns(UserWarning, match="VideoConfig.render_kwargs is left out: it was a dict"):
        loaded = load_checkpoint(tmp_path / "step_0000000000", state.networks, state.optimizer)
    assert loaded["config"].video.render_kwargs == {}


def steps_in(folder):
    return sorted(int(path.name[5:]) for path in folder.glob("step_*"))


def test_the_latest_and_the_best_are_kept(tmp_path):
    state = state_of()
    save: Any = make_checkpoint_fn(tmp_path, keep_last=2, keep_best=1, best_metric="score")
    scores = [1.0, 9.0, 3.0, float("nan"), 2.0]
    for step, score in enumerate(scores):
        save.observe({"score": score, "other": 0.0}, step)
        save(state, step)
    assert steps_in(tmp_path) == [1, 3, 4]
    assert best(tmp_path, "score").name == "step_0000000001"
    assert best(tmp_path, "score", "min").name == "step_0000000004"
    assert best_checkpoint(tmp_path, "unknown") is None
    assert json.loads((tmp_path / "step_0000000003" / "metrics.json").read_text())["score"] is None
    # A resumed run saves the step again that it started from, and knows its score still.
    again: Any = make_checkpoint_fn(tmp_path, keep_last=2, keep_best=1, best_metric="score")
    again.observe({"other": 1.0}, 4)
    again(state, 4)
    assert steps_in(tmp_path) == [1, 3, 4]
    assert best(tmp_path, "score", "min").name == "step_0000000004"
    # Another run in the same folder knows the scores of this one.
    make_checkpoint_fn(tmp_path, keep_last=1, keep_best=1, best_metric="score")(state, 7)
    assert steps_in(tmp_path) == [1, 7]
    assert not list(tmp_path.glob(".*"))


def test_a_checkpoint_is_ranked_by_its_own_step(tmp_path):
    """The evaluation of step 0 says nothing of step 5."""
    state = state_of()
    save: Any = make_checkpoint_fn(tmp_path)
    save.observe({"score": 9.0}, 0)
    save(state, 0)
    save(state, 5)
    save.observe({"score": 8.0}, 10)
    save(state, 10)
    assert best(tmp_path, "score").name == "step_0000000000"
    assert json.loads((tmp_path / "step_0000000005" / "metrics.json").read_text()) == {"step": 5}


def test_nothing_is_deleted_by_mistake(tmp_path):
    state = state_of()
    save = make_checkpoint_fn(tmp_path, keep_best=1, best_metric="scoer")
    save(state, 0)
    with pytest.warns(UserWarning, match="no checkpoint in .* has the metric 'scoer' yet"):
        save(state, 1)
    assert steps_in(tmp_path) == [0, 1]
    # Another run, in the folder of one that came further.
    for keep_last in (1, None):
        again = make_checkpoint_fn(tmp_path, keep_last=keep_last)
        with pytest.warns(UserWarning, match="holds step_0000000001, above step_0000000000 that"):
            again(state, 0)
        again(state, 0)  # said once
        assert steps_in(tmp_path) == [0, 1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"keep_last": 0}, "keep_last=0 must be None or a whole number of at least 1"),
        ({"keep_best": -1}, "keep_best=-1 must be"),
        ({"best_mode": "most"}, "best_mode='most' must be one of 'max', 'min'"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_bad_arguments(tmp_path, arguments, message):
    with pytest.raises(ValueError, match=message):
        make_checkpoint_fn(tmp_path, **arguments)
    with pytest.raises(ValueError, match="mode='Max' must be 'max' or 'min'"):
        best_checkpoint(tmp_path, "score", "Max")  # pyright: ignore[reportArgumentType]


def test_the_loop_tells_what_it_logs_and_waits_at_the_end(tmp_path):
    config = TrainConfig(
        ppo=CONFIG.ppo, eval=EvalConfig(n_envs=2, max_episode_length=3), checkpoint_every_steps=4
    )
    save = make_checkpoint_fn(tmp_path, config, keep_best=1, keep_last=1, asynchronous=True)
    train_ppo(FollowTarget(length=3), mlp_network(), config, checkpoint_fn=save)
    assert latest(tmp_path).name == "step_0000000008"
    stored = json.loads((latest(tmp_path) / "metrics.json").read_text())
    assert stored["step"] == 8
    assert {"eval/episode_reward/mean", "losses/actor/p50"} <= stored.keys()


def test_what_fails_in_the_background_comes_up(tmp_path):
    save: Any = make_checkpoint_fn(tmp_path / "run", asynchronous=True)
    (tmp_path / "run").rmdir()
    (tmp_path / "run").write_text("in the way")
    save(state_of(), 0)
    with pytest.raises(OSError, match="run"):
        save.wait()


def test_a_step_that_is_there_is_replaced(tmp_path):
    first, second = state_of(mlp_network(seed=1)), state_of(mlp_network(seed=2))
    save = make_checkpoint_fn(tmp_path)
    save(first, 0)
    save(second, 0)
    load_checkpoint(tmp_path / "step_0000000000", first.networks, first.optimizer)
    assert_same(nnx.state(first.networks), nnx.state(second.networks))
    # Killed between the two renames of a replacement, the old one is still found, and put back.
    (tmp_path / "step_0000000000").rename(tmp_path / ".replaced-step_0000000000")
    left = latest(tmp_path)
    assert load_checkpoint(left, first.networks, first.optimizer)["step"] == 0
    make_checkpoint_fn(tmp_path)
    assert latest(tmp_path).name == "step_0000000000"
    # Killed after them, what was replaced is gone for good.
    shutil.copytree(tmp_path / "step_0000000000", tmp_path / ".replaced-step_0000000000")
    (tmp_path / ".writing-step_0000000007").mkdir()
    save = make_checkpoint_fn(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["step_0000000000"]
    save(second, 0)


def test_an_exception_changes_nothing(tmp_path, monkeypatch):
    state = state_of()
    save = make_checkpoint_fn(tmp_path)
    save(state, 0)
    rename = Path.rename

    def fail(path, target):
        if path.name.startswith(".writing"):
            raise OSError("disk full")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(OSError, match="disk full"):
        save(state, 0)
    assert [path.name for path in tmp_path.iterdir()] == ["step_0000000000"]


def test_what_is_damaged_is_said(tmp_path):
    state = state_of()
    make_checkpoint_fn(tmp_path)(state, 0)
    path = tmp_path / "step_0000000000"
    for content, message in (([1], "is no checkpoint's"), ({"format": 1}, "it lacks config, keys")):
        whole = (path / "metadata.pkl").read_bytes()
        (path / "metadata.pkl").write_bytes(pickle.dumps(content))
        with pytest.raises(ValueError, match=message):
            load_checkpoint(path, state.networks, state.optimizer)
        (path / "metadata.pkl").write_bytes(whole)
    (path / "networks" / "_METADATA").write_text("{")
    with pytest.raises(ValueError, match="networks is damaged and cannot be read"):
        load_checkpoint(path, state.networks, state.optimizer)


@pytest.mark.slow
def test_a_process_killed_while_writing_leaves_the_step_before(tmp_path):
    """Killed at 20 places, from the first folder to the rename that publishes the step."""
    (tmp_path / "run").mkdir()
    command = [sys.executable, "-W", "ignore", killed_writer.__file__, str(tmp_path / "run")]
    found = json.loads(subprocess.check_output(command))
    assert len(found["places"]) == 20
    assert found["ends"] == [-signal.SIGKILL] * 20
    assert found["latest"] == ["step_0000000000"] * 20
    assert found["whole"] == [0, 0]
    # What the killed processes left behind is no obstacle, and is gone.
    assert found["left"] == ["step_0000000000", "step_0000000001"]


def test_names_may_differ_where_place_and_role_agree():
    # Two layers of the same shapes: `linear` became `dense`, and a level was added to the stream.
    wanted = {
        ("layers", "0", "dense", "kernel"): jnp.zeros((2, 2)),
        ("layers", "1", "dense", "kernel"): jnp.zeros((2, 2)),
        ("layers", "1", "rng", "count"): jnp.zeros((), jnp.uint32),
        ("layers", "1", "entropy_weight"): jnp.full((), 0.25),
    }
    found = {
        ("layers", "0", "linear", "kernel"): np.full((2, 2), 1.0, np.float32),
        ("layers", "1", "linear", "kernel"): np.full((2, 2), 2.0, np.float32),
        ("layers", "1", "rng", "default", "count"): np.asarray(7, np.uint32),
    }
    chosen = matched_by_role("networks", wanted, found, {})
    assert [float(np.ravel(value)[0]) for value in chosen.values()] == [1.0, 2.0, 7.0, 0.25]
    # With the positions gone nobody can tell the two layers apart.
    lost = {("a", "kernel"): found["layers", "0", "linear", "kernel"]}
    lost["b", "kernel"] = found["layers", "1", "linear", "kernel"]
    with pytest.raises(ValueError, match="found a/kernel or b/kernel"):
        matched_by_role("networks", wanted, lost, {})
    with pytest.raises(ValueError, match="expected nothing at x, found float32"):
        matched_by_role("networks", wanted, found | {("x",): np.ones(3, np.float32)}, {})
