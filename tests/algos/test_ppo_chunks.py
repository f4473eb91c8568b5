"""PPO's loss of chunks, against one that is written out step by step in NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from nnx_ppo.algorithms import LoggingLevel, PPOConfig
from nnx_ppo.algorithms import chunks as chunked
from nnx_ppo.algorithms.objective import estimate_from_rollout, loss_settings, objective
from nnx_ppo.algorithms.ppo import new_training_state
from nnx_ppo.algorithms.rollout import collect
from nnx_ppo.core import EpisodeWrapper, reset_where
from nnx_ppo.core.testing import AnalyticState
from nnx_ppo.networks import (
    LSTM,
    Delay,
    Dense,
    NormalTanhSampler,
    Parallel,
    PPOAdapter,
    Sequential,
)

HEADS = ("a", "b")
DISCOUNTS = {"b": 0.9, "a": 0.5}
ROWS = np.array([3, 1])
TIME = 6
CONFIG = PPOConfig(
    n_envs=4,
    rollout_length=TIME,
    n_minibatches=2,
    chunk_length=2,
    burn_in=3,
    advantages="window",
    discounting_factor=DISCOUNTS,
    gae_lambda=0.8,
    value_clip_range=0.1,
    huber_delta=0.7,
    target_kl=0.05,
    critic_loss_weight=0.3,
    logging_level=LoggingLevel.LOSSES,
)


class Noise:
    """Two rewards that depend on action and observation; episodes end at random or after 3."""

    action_size = {"a": 1, "b": 1}

    def reset(self, rng):
        rng, key = jax.random.split(rng)
        reward = {name: jnp.zeros(()) for name in HEADS}
        obs = jax.random.normal(key, (2,))
        return AnalyticState(obs, reward, jnp.zeros(()), {"rng": rng}, {})

    def step(self, state, action):
        rng, obs_key, done_key = jax.random.split(state.info["rng"], 3)
        return state.replace(
            obs=jax.random.normal(obs_key, (2,)),
            reward={
                "a": 2.0 * state.obs[1] - action["a"].sum(),
                "b": 3.0 * jnp.abs(action["b"]).sum() + state.obs[0],
            },
            done=(jax.random.uniform(done_key) < 0.2).astype(jnp.float32),
            info={**state.info, "rng": rng},
        )


def network():
    rngs = nnx.Rngs(0)
    action = Parallel(
        **{name: Sequential([Dense(4, 2, rngs), NormalTanhSampler(rngs, 1e-2)]) for name in HEADS}
    )
    value = Parallel(**{name: Dense(4, 1, rngs) for name in HEADS})
    memory = [Delay(jnp.zeros(2), k_steps=2), LSTM(2, 4, rngs)]
    return Sequential([*memory, PPOAdapter(action=action, value=value)])


def moved(old):
    """The network after some learning."""
    new = nnx.clone(old)
    rng = np.random.default_rng(7)
    params = nnx.state(new, nnx.Param)
    noise = jax.tree.map(lambda p: rng.normal(scale=0.15, size=p.shape).astype(p.dtype), params)
    nnx.update(new, jax.tree.map(jnp.add, params, noise))
    return new


@nnx.jit
def step(net, carry, obs, extras, next_obs, done):
    """One step, the value of what came next, and the carry after it, before and after a reset."""
    out = net(carry, obs, extras)
    after = nnx.clone(net)(out.next_state, next_obs).output.value_estimates
    carry = reset_where(net, done, out.next_state)
    return out.output.loglikelihoods, out.output.value_estimates, after, carry


def replayed(net, carry, rollout, start, stop):
    """Log-likelihoods, values, values afterwards and next carries of some steps, one by one."""
    found = []
    for i in range(start, stop):
        inputs = (rollout.obs, rollout.rollout_extras, rollout.next_obs, rollout.done)
        found.append(step(nnx.clone(net), carry, *jax.tree.map(lambda leaf, i=i: leaf[i], inputs)))
        carry = found[-1][-1]
    return found


def of(found, place, head):
    """One head of one result of `replayed`, `(time, batch)`."""
    return np.array([entry[place][head] for entry in found], float)


def advantages_of(head, rollout, values, after):
    """Generalised advantages of one head, each environment by itself."""
    done, truncated = np.asarray(rollout.done), np.asarray(rollout.truncated)
    rewards, gamma = np.asarray(rollout.rewards[head], float), DISCOUNTS[head]
    advantages = np.zeros_like(values)
    for env in range(CONFIG.n_envs):
        later = 0.0
        for t in reversed(range(TIME)):
            terminated = done[t, env] and not truncated[t, env]
            worth = 0.0 if terminated else after[t, env]
            delta = rewards[t, env] + gamma * worth - values[t, env]
            later = delta + gamma * 0.8 * (0.0 if done[t, env] else later)
            advantages[t, env] = later
    return advantages


def huber(error):
    size = np.abs(error)
    return np.where(size <= 0.7, 0.5 * size**2, 0.7 * (size - 0.35))


def test_the_loss_of_chunks_is_that_of_its_formulas():
    """Two of four environments; chunks of 2 steps with a burn-in of 0, 2 and 3 steps."""
    env, old = EpisodeWrapper(Noise(), 3), network()
    new = moved(old)
    start = new_training_state(env, old, CONFIG.n_envs, seed=0)
    kept = chunked.kept_steps(CONFIG)

    @nnx.jit
    def window_of(net, env_states, carry, key):
        return collect(env, env_states, net, carry, TIME, key, keep=kept)

    # The second of two windows begins in mid-episode.
    first = window_of(old, start.env_states, start.network_states, jax.random.key(1))
    window = window_of(old, first.env_state, first.network_state, jax.random.key(2))
    rollout = window.rollout
    done, truncated = np.asarray(rollout.done), np.asarray(rollout.truncated)
    assert truncated.any() and (done & ~truncated).any() and not done.all()

    acted = replayed(old, first.network_state, rollout, 0, TIME)
    carries = [first.network_state, *(entry[-1] for entry in acted)]
    learned = []
    for begin in range(0, TIME, 2):
        early = max(0, begin - 3)
        learned += replayed(new, carries[early], rollout, early, begin + 2)[begin - early :]

    @nnx.jit
    def loss_of(old, new):
        settings = loss_settings(CONFIG)
        estimates = estimate_from_rollout(old, window.network_state, rollout, settings)
        states, parts = chunked.cut(rollout, (rollout, estimates), window.kept, CONFIG)
        states = jax.tree.map(lambda leaf: leaf[ROWS], states)
        parts = jax.tree.map(lambda leaf: leaf[:, ROWS], parts)
        carry, (steps, estimates) = chunked.joined(new, states, parts)
        return objective(new, carry, steps, estimates, settings)

    loss, metrics = loss_of(old, nnx.clone(new))
    expected, divergence = float(metrics["losses/regularization"]), 0.0
    for head in HEADS:
        old_values = of(acted, 1, head)
        advantages = advantages_of(head, rollout, old_values, of(acted, 2, head))
        targets = (advantages + old_values)[:, ROWS]
        advantages = advantages[:, ROWS]
        advantages = (advantages - advantages.mean()) / advantages.std()
        ratio = np.exp(of(learned, 0, head) - of(acted, 0, head))[:, ROWS]
        actor = -np.minimum(ratio * advantages, np.clip(ratio, 0.8, 1.2) * advantages).mean()
        values, old_values = of(learned, 1, head)[:, ROWS], old_values[:, ROWS]
        near = old_values + np.clip(values - old_values, -0.1, 0.1)
        critic = np.maximum(huber(values - targets), huber(near - targets)).mean()
        np.testing.assert_allclose(metrics["losses/actor"][head], actor, rtol=1e-3, atol=1e-4)
        np.testing.assert_allclose(metrics["losses/critic"][head], critic, rtol=1e-3)
        expected += actor + 0.3 * critic
        divergence += (ratio - 1.0 - np.log(ratio)).mean()
    np.testing.assert_allclose(loss, expected, rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(metrics["divergence"], divergence, rtol=1e-3)
    assert divergence > 1e-3
