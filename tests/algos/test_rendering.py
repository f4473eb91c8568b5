"""What a video is made of: states before each step, over the ends of episodes."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from nnx_ppo.algorithms import (
    SlimData,
    SlimState,
    eval_rollout_for_render_scan,
    unstack_trajectory,
)
from nnx_ppo.core import JaxDataclass
from nnx_ppo.core.testing import TwoHands

from .helpers import CountingNetwork, IntegerEnv, lstm_network

KEY = jax.random.key(0)


class Watched(CountingNetwork):
    """Notes its carry at each step."""

    def __init__(self, seen):
        super().__init__()
        self.note = seen.append

    def __call__(self, module_state, obs, rollout_extras=None):
        jax.debug.callback(lambda carry: self.note(int(carry[0])), module_state, ordered=True)
        return super().__call__(module_state, obs, rollout_extras)


def test_carries_and_environments_start_again_where_episodes_end():
    seen = []
    states, final, total = eval_rollout_for_render_scan(IntegerEnv(3, 4), Watched(seen), 7, KEY)
    jax.effects_barrier()
    assert seen == [0, 1, 2, 0, 1, 2, 0]
    # Each episode counts down from 3; the state at 0 is followed by a new start.
    np.testing.assert_array_equal(states.info["left"], [3, 2, 1, 3, 2, 1, 3])
    assert final.info["left"] == 2
    assert total == 3.0  # one for each step of the first episode


class State(JaxDataclass):
    obs: jax.Array
    reward: jax.Array
    done: jax.Array
    info: dict
    metrics: dict
    data: object


class Physics(JaxDataclass):
    qpos: jax.Array
    qvel: jax.Array
    time: jax.Array
    mocap_pos: jax.Array
    mocap_quat: jax.Array
    xfrc_applied: jax.Array
    contacts: jax.Array


class Falling:
    """A body whose height is a quarter less after each step; never ends."""

    def reset(self, rng):
        zeros = jnp.zeros(1)
        data = Physics(jnp.ones(1), zeros, jnp.zeros(()), zeros, zeros, zeros, jnp.zeros(1000))
        return State(jnp.ones(1), jnp.zeros(()), jnp.zeros(()), {"rng": rng}, {}, data)

    def step(self, state, action):
        data = state.data.replace(qpos=state.data.qpos - 0.25, time=state.data.time + 0.1)
        return state.replace(data=data)


def test_only_what_rendering_needs_is_kept():
    states, final, _ = eval_rollout_for_render_scan(Falling(), CountingNetwork(), 3, KEY)
    assert isinstance(states, SlimState) and isinstance(states.data, SlimData)
    trajectory = unstack_trajectory(states, final, 3)
    assert [float(state.data.qpos[0]) for state in trajectory] == [1.0, 0.75, 0.5, 0.25]
    for state in trajectory:
        assert isinstance(state.data.qpos, np.ndarray)
        assert state.info["rng"].shape == ()


def test_named_rewards_add_up_and_the_network_is_left_as_it_was():
    """Acting 0 in `TwoHands`: each hand loses the square of its targets."""

    class StandStill(CountingNetwork):
        def __call__(self, module_state, obs, rollout_extras=None):
            out = super().__call__(module_state, obs["left"]["target"])
            actions = {"left": jnp.zeros((1, 1)), "right": jnp.zeros((1, 2))}
            return out.replace(output=out.output.replace(actions=actions))

    run = jax.jit(lambda key: eval_rollout_for_render_scan(TwoHands(4), StandStill(), 4, key))
    _, _, total = run(KEY)
    assert 4 * (2 - 3 * 0.25) <= total <= 8.0  # targets are within ±0.5

    network = lstm_network()
    before = nnx.state(network)
    counts = [leaf.copy() for leaf in jax.tree.leaves(before)]
    eval_rollout_for_render_scan(IntegerEnv(), network, 2, KEY)
    for old, new in zip(counts, jax.tree.leaves(nnx.state(network)), strict=True):
        assert bool((old == new).all())
