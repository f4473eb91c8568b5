"""Modules of the documented tutorial on custom modules train in a PPO network."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from nnx_ppo.algorithms import new_training_state, ppo_step
from nnx_ppo.core.testing import RememberCue
from nnx_ppo.networks import Dense, NormalTanhSampler, PPOAdapter, Sequential

from ..networks.test_tutorial import PAGE, code_blocks

pytestmark = pytest.mark.skipif(not PAGE.exists(), reason="the documentation is not here")


@pytest.mark.parametrize("name", ["MovingAverage", "MovingAverageWithStats"])
def test_one_ppo_update(name):
    names = {"nnx": nnx, "Dense": Dense, "__name__": "tutorial"}
    for block in code_blocks(PAGE.read_text()):
        exec(block, names)
    average = names[name](feature_size=2, k=3)
    rngs = nnx.Rngs(0)
    actor = Sequential([Dense(2, 2, rngs), NormalTanhSampler(rngs, entropy_weight=1e-3)])
    network = Sequential([average, PPOAdapter(action=actor, value=Dense(2, 1, rngs))])
    state = new_training_state(RememberCue(), network, 4, seed=0)
    before = [np.asarray(leaf) for leaf in jax.tree.leaves(nnx.state(network, nnx.Param))]

    state, metrics = nnx.jit(
        lambda state: ppo_step(RememberCue(), state, 4, 6, 0.95, 0.99, 0.2, True, False, 1, 2)
    )(state)

    assert all(bool(jnp.isfinite(value)) for value in metrics.values())
    after = jax.tree.leaves(nnx.state(network, nnx.Param))
    assert all((a != b).any() for a, b in zip(before, after, strict=True))
    if name == "MovingAverageWithStats":
        assert int(average.count[...]) == 4 * 6
