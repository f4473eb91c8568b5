"""`AccumulateEvidence` pays what its page says, and `nnxppo` finds it."""

import importlib.metadata
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nnx_ppo.core import EnvironmentProvider, RLEnv
from spiking_memory import AccumulateEvidence, EvidenceEnvironments

KEY = jax.random.key(0)


def play(env, cues):
    """Return observations, rewards and ends of an episode in which the last cue is acted on."""

    def step(carry, _):
        state, remembered = carry
        cue = state.obs[0]
        remembered = jnp.where(cue == 0.0, remembered, cue)
        after = env.step(state, remembered[None])
        return (after, remembered), (state.obs, after.reward, after.done)

    start = env.reset(KEY)
    start = start.replace(obs=start.obs.at[0].set(cues[0]), info={**start.info, "cues": cues})
    length = env.num_cues + env.delay
    return jax.lax.scan(step, (start, jnp.zeros(())), length=length)[1]


def test_an_episode():
    cues = jnp.array([1.0, 1.0, -1.0])
    obs, rewards, ends = play(AccumulateEvidence(num_cues=3, delay=2), cues)
    np.testing.assert_array_equal(obs, [[1, 0], [1, 0], [-1, 0], [0, 0], [0, 1]])
    # Acting on the last cue, −1, is wrong: the majority is 1.
    np.testing.assert_array_equal(rewards, [0, 0, 0, 0, -1])
    np.testing.assert_array_equal(ends, [0, 0, 0, 0, 1])


def test_one_cue_is_worth_what_the_docstring_says():
    sequences = jnp.array(list(itertools.product([-1.0, 1.0], repeat=5)))
    env = AccumulateEvidence(num_cues=5, delay=1)
    rewards = jax.vmap(lambda cues: play(env, cues)[1].sum())(sequences)
    # C(4, 2) / 2^4 = 6 / 16.
    assert rewards.mean() == 0.375


def test_sides_are_equally_likely():
    cues = jax.vmap(lambda key: AccumulateEvidence().reset(key).info["cues"])(
        jax.random.split(KEY, 4000)
    )
    # The mean of 20 000 signs has a standard deviation of 1 / √20 000 = 0.007.
    assert set(np.unique(cues)) == {-1.0, 1.0} and abs(float(cues.mean())) < 0.028


def test_states_keep_their_types():
    env = AccumulateEvidence()
    first = jax.eval_shape(env.reset, KEY)
    second = jax.eval_shape(env.step, first, jnp.zeros(1))
    assert jax.tree.structure(first) == jax.tree.structure(second)
    types = [
        [(leaf.shape, leaf.dtype, leaf.weak_type) for leaf in jax.tree.leaves(state)]
        for state in (first, second)
    ]
    assert types[0] == types[1]


@pytest.mark.parametrize("options", [{"num_cues": 4}, {"num_cues": -1}, {"delay": 0}])
def test_mistakes_are_named(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        AccumulateEvidence(**options)


def test_the_entry_point_leads_to_the_environment():
    points = importlib.metadata.entry_points(group="nnx_ppo.environments", name="spiking_memory")
    (point,) = points
    provider = point.load()()
    assert isinstance(provider, EvidenceEnvironments) and isinstance(provider, EnvironmentProvider)
    assert list(provider.names()) == ["AccumulateEvidence"]
    env = provider.load("AccumulateEvidence", num_cues=7)
    assert isinstance(env, RLEnv) and env.num_cues == 7
    assert set(provider.preset("AccumulateEvidence")) == {"network", "train"}
