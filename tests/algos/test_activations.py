"""Activations of whole episodes."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from nnx_ppo.algorithms import record_activations_rollout
from nnx_ppo.algorithms.activations import RecordedEpisodes, _as_data_tree, save_activations
from nnx_ppo.core.testing import FollowTarget

from .helpers import CountingNetwork, IntegerEnv, lstm_network

TIME, ENVS = 5, 2


def test_activations_are_those_of_a_deterministic_episode():
    network = lstm_network()
    before = [leaf.copy() for leaf in jax.tree.leaves(nnx.state(network))]
    env, key = IntegerEnv(3, 4), jax.random.key(0)
    record = jax.jit(lambda key: record_activations_rollout(env, network, ENVS, TIME, key))
    activations, dones = record(key)

    # Episodes last 3 steps, counting down from 3, and are not started again.
    np.testing.assert_array_equal(dones, np.arange(TIME)[:, None].repeat(ENVS, 1) >= 3)
    # The layers: 0 the normaliser (which divides by 10 at first), 1 the LSTM, 2 the heads.
    assert set(activations) == {0, 1, 2}
    np.testing.assert_allclose(
        activations[0], np.broadcast_to([[[0.3]], [[0.2]], [[0.1]], [[0.0]], [[-0.1]]], (5, 2, 1)),
        rtol=1e-6, atol=1e-7,
    )  # fmt: skip
    lstm, state = network.layers[1], network.layers[1].initialize_state(ENVS)
    for t in range(TIME):
        out = lstm(state, activations[0][t])
        state = out.next_state
        np.testing.assert_allclose(activations[1][t], out.output, rtol=1e-5, atol=1e-6)
    heads = activations[2]["action"]
    np.testing.assert_allclose(
        heads[1]["action"], jnp.tanh(heads[0][..., :1]), rtol=1e-5, atol=1e-6
    )  # the mean, no noise

    assert not network.layers[2].action.layers[1].deterministic
    for old, new in zip(before, jax.tree.leaves(nnx.state(network)), strict=True):
        assert bool((old == new).all())


class Dictated(FollowTarget):
    """Episodes of 3 steps, then a time limit; knows the length of a step."""

    dt = 0.02

    def step(self, state, action):
        stepped = super().step(state, action)
        late = (stepped.info["age"] >= 3).astype(jnp.float32)
        return stepped.replace(info={**stepped.info, "truncation": late})

    def reset(self, rng):
        state = super().reset(rng)
        return state.replace(info={**state.info, "truncation": jnp.zeros(())})


def test_a_file_has_named_axes_and_what_goes_with_the_activations(tmp_path):
    xarray = pytest.importorskip("xarray")
    network, env, key = lstm_network(), Dictated(), jax.random.key(3)
    path = tmp_path / "new" / "episodes.nc"
    save_activations(path, env, network, ENVS, TIME, key, environment="Dictated")
    assert [entry.name for entry in path.parent.iterdir()] == ["episodes.nc"]

    with xarray.open_datatree(path) as tree:
        tree = tree.load()
    activations, dones = record_activations_rollout(env, network, ENVS, TIME, key)
    assert tree.sizes == {"time": TIME, "env": ENVS}
    np.testing.assert_array_equal(tree["valid"], ~dones)
    # The third step ends the episode, and only that one.
    for flag in ("ended", "truncated"):
        np.testing.assert_array_equal(tree[flag].isel(env=1), [False, False, True, False, False])

    lstm = tree["activations/1/values"]
    assert lstm.dims == ("time", "env", "unit") and lstm.shape == (TIME, ENVS, 8)
    np.testing.assert_allclose(lstm, activations[1], rtol=1e-5, atol=1e-6)
    assert list(lstm.coords["time"]) == list(range(TIME))  # the root's axes reach the groups

    observations, actions = tree["observations/values"], tree["actions/values"]
    assert observations.dims == actions.dims == ("time", "env", "feature")
    # The normaliser is new and divides by 10.
    np.testing.assert_allclose(
        tree["activations/0/values"].values, observations.values / 10, rtol=1e-5
    )
    np.testing.assert_array_equal(actions, tree["activations/2/action/1/action/values"])
    rewards = tree["rewards/values"]
    assert rewards.dims == ("time", "env")
    error = np.square(actions.values - observations.values)[..., 0]
    np.testing.assert_allclose(rewards, 1.0 - error, rtol=1e-5)

    assert tree.attrs["step_length"] == 0.02 and tree.attrs["environment"] == "Dictated"
    assert f"jax {jax.__version__}" in tree.attrs["versions"]


def test_what_cannot_be_written_leaves_the_file_that_was_there(tmp_path, monkeypatch):
    xarray = pytest.importorskip("xarray")
    path = tmp_path / "episodes.nc"
    path.write_text("earlier")

    def fail(tree, path, **options):
        path.write_text("half of it")
        raise OSError("disk full")

    monkeypatch.setattr(xarray.DataTree, "to_netcdf", fail)
    with pytest.raises(OSError, match="disk full"):
        save_activations(path, IntegerEnv(), CountingNetwork(), 1, 1, jax.random.key(0))
    assert [entry.read_text() for entry in tmp_path.iterdir()] == ["earlier"]


def test_names_with_slashes_must_not_meet():
    xarray = pytest.importorskip("xarray")
    flag, values = jnp.ones((2, 1), bool), jnp.ones((2, 1, 3))
    trees = {"a/b": values, "a": {"b": values}}
    record = RecordedEpisodes(trees, values, values, values[..., 0], flag, flag, flag)
    with pytest.raises(ValueError, match="Two arrays have the path 'activations/a/b'"):
        _as_data_tree(xarray, record)
    record = record.replace(activations={"a/b": values[..., None].astype(jnp.bfloat16)})
    image = _as_data_tree(xarray, record)["activations/a/b/values"]
    assert image.dims == ("time", "env", "unit_0", "unit_1") and image.dtype == np.float32


def test_the_extra_is_named_where_xarray_is_missing(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "xarray", None)
    with pytest.raises(ModuleNotFoundError, match=r'pip install "nnxppo-algos\[analysis\]"'):
        save_activations(
            tmp_path / "x.nc", IntegerEnv(), CountingNetwork(), 1, 1, jax.random.key(0)
        )
