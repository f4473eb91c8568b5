"""Small environments whose best return is known on paper."""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array

from nnx_ppo.core._types import JaxDataclass
from nnx_ppo.core.wrappers import EpisodeWrapper


class AnalyticState(JaxDataclass):
    """State of an analytic environment.

    Attributes:
        obs: Observation.
        reward: Reward of the last step, a scalar or a dict of them.
        done: 1.0 where the episode has ended, else 0.0.
        info: Further state; always holds the key `"rng"`.
        metrics: Scalars to log.
    """

    obs: Any
    reward: Any
    done: Array
    info: dict[str, Any]
    metrics: dict[str, Array]


class FollowTarget:
    """Observe a target, act on it: reward 1 − (action − target)², a new target every step.

    Targets are uniform on [−0.5, 0.5]. The best return of an episode of `length` steps is
    `length`, by action = target. Always acting 0 earns 11/12 a step, since E[target²] = 1/12.
    Episodes end by themselves after `length` steps.

    Args:
        length: Steps of an episode.
    """

    action_size = 1

    def __init__(self, length: int = 10) -> None:
        self.length = length

    def reset(self, rng: Array) -> AnalyticState:
        """Draw the first target."""
        rng, key = jax.random.split(rng)
        info = {"rng": rng, "age": jnp.zeros((), jnp.int32)}
        return AnalyticState(
            _uniform(key), jnp.zeros(()), jnp.zeros(()), info, {"error": jnp.zeros(())}
        )

    def step(self, state: AnalyticState, action: Array) -> AnalyticState:
        """Reward the action for the target seen, draw the next target."""
        error = jnp.square(action - state.obs).sum()
        rng, key = jax.random.split(state.info["rng"])
        age = state.info["age"] + 1
        return state.replace(
            obs=_uniform(key),
            reward=1.0 - error,
            done=(age >= self.length).astype(float),
            info={**state.info, "rng": rng, "age": age},
            metrics={"error": error},
        )


class RememberCue:
    """See a cue of −1 or 1 once, and act on it `delay` steps later.

    The observation is `[cue, go]`: the cue is shown at the first step only (0 afterwards), `go`
    is 1 at the step that is rewarded, with cue · action; the episode ends there. With actions in
    [−1, 1] the best return is 1. Without memory the action at the go signal cannot depend on the
    cue, whose mean is 0, so the expected return is 0 whatever the policy.

    Args:
        delay: Steps from the cue to the go signal, at least 1.
    """

    action_size = 1

    def __init__(self, delay: int = 4) -> None:
        if delay < 1:
            raise ValueError(f"delay={delay} must be at least 1: at 0 no memory is needed.")
        self.delay = delay

    def reset(self, rng: Array) -> AnalyticState:
        """Draw the cue and show it."""
        rng, key = jax.random.split(rng)
        cue = jax.random.rademacher(key, (), float)
        info = {"rng": rng, "cue": cue, "age": jnp.zeros((), jnp.int32)}
        obs = jnp.stack([cue, jnp.zeros(())])
        return AnalyticState(obs, jnp.zeros(()), jnp.zeros(()), info, {})

    def step(self, state: AnalyticState, action: Array) -> AnalyticState:
        """Reward the action if it was due."""
        due = state.info["age"] == self.delay
        age = state.info["age"] + 1
        go = (age == self.delay).astype(float)
        return state.replace(
            obs=jnp.stack([jnp.zeros(()), go]),
            reward=jnp.where(due, state.info["cue"] * action.sum(), 0.0),
            done=due.astype(float),
            info={**state.info, "age": age},
        )


class TwoHands:
    """Two action heads, two reward heads, nested observations.

    The observation is `{"left": {"target": (1,)}, "right": {"target": (2,), "noise": (1,)}}`, the
    actions `{"left": (1,), "right": (2,)}`, and each hand's reward 1 − ‖action − target‖². The
    best return is `length` for each hand.

    Args:
        length: Steps of an episode.
    """

    action_size: Mapping[str, int] = {"left": 1, "right": 2}

    def __init__(self, length: int = 10) -> None:
        self.length = length

    def reset(self, rng: Array) -> AnalyticState:
        """Draw the first targets."""
        rng, key = jax.random.split(rng)
        reward = {"left": jnp.zeros(()), "right": jnp.zeros(())}
        info = {"rng": rng, "age": jnp.zeros((), jnp.int32)}
        return AnalyticState(self._observe(key), reward, jnp.zeros(()), info, {})

    def step(self, state: AnalyticState, action: Mapping[str, Array]) -> AnalyticState:
        """Reward each hand, draw the next targets."""
        rng, key = jax.random.split(state.info["rng"])
        age = state.info["age"] + 1
        reward = {
            hand: 1.0 - jnp.square(action[hand] - state.obs[hand]["target"]).sum()
            for hand in ("left", "right")
        }
        return state.replace(
            obs=self._observe(key),
            reward=reward,
            done=(age >= self.length).astype(float),
            info={**state.info, "rng": rng, "age": age},
        )

    def _observe(self, key: Array) -> dict[str, dict[str, Array]]:
        values = _uniform(key, 4)
        return {
            "left": {"target": values[:1]},
            "right": {"target": values[1:3], "noise": values[3:]},
        }


class PickTarget:
    """Observe one of several targets, pick it: reward 1 for the right one, 0 for others.

    The observation is the target, one-hot, and the action its index, an integer scalar. Targets
    are drawn anew at every step, all equally likely. The best return of an episode is `length`;
    picking at random earns `1 / num_actions` a step. Episodes end by themselves after `length`
    steps. As the action is no vector, there is no `action_size`.

    Args:
        num_actions: Number of targets, at least 1.
        length: Steps of an episode.
        masked: Whether to restrict the choice. The observation is then a dict of `"target"` and
            `"mask"`, a boolean `(num_actions,)` that allows the target and, with probability 1/2
            each, the others. A choice that is not allowed earns 0 and counts in the metric
            `"disallowed"`.
    """

    def __init__(self, num_actions: int = 4, length: int = 10, masked: bool = False) -> None:
        if num_actions < 1:
            raise ValueError(f"num_actions={num_actions} must be at least 1.")
        self.num_actions = num_actions
        self.length = length
        self.masked = masked

    def reset(self, rng: Array) -> AnalyticState:
        """Draw the first target."""
        rng, key = jax.random.split(rng)
        target, mask = self._draw(key)
        info = {"rng": rng, "age": jnp.zeros((), jnp.int32), "target": target, "mask": mask}
        metrics = {"disallowed": jnp.zeros(())}
        return AnalyticState(
            self._observe(target, mask), jnp.zeros(()), jnp.zeros(()), info, metrics
        )

    def step(self, state: AnalyticState, action: Array) -> AnalyticState:
        """Reward the choice of the target seen, draw the next target."""
        rng, key = jax.random.split(state.info["rng"])
        target, mask = self._draw(key)
        age = state.info["age"] + 1
        disallowed = ~state.info["mask"][action]
        return state.replace(
            obs=self._observe(target, mask),
            reward=(action == state.info["target"]).astype(float),
            done=(age >= self.length).astype(float),
            info={**state.info, "rng": rng, "age": age, "target": target, "mask": mask},
            metrics={"disallowed": disallowed.astype(float)},
        )

    def _draw(self, key: Array) -> tuple[Array, Array]:
        target_key, mask_key = jax.random.split(key)
        target = jax.random.randint(target_key, (), 0, self.num_actions)
        if not self.masked:
            return target, jnp.ones(self.num_actions, bool)
        mask = jax.random.bernoulli(mask_key, shape=(self.num_actions,))
        return target, mask.at[target].set(True)

    def _observe(self, target: Array, mask: Array) -> Any:
        shown = jax.nn.one_hot(target, self.num_actions)
        return {"target": shown, "mask": mask} if self.masked else shown


class Endless:
    """Reward 1 at every step, and an end by time limit only.

    With every time limit bootstrapped the value of each state is 1 / (1 − discount); where a
    limit is taken for an end it is less. The observation is the age of the episode as a share
    of `max_len`. No policy matters.

    Args:
        max_len: Steps until the time limit.
        flag: Key of `info` that flags the limit.
    """

    action_size = 1

    def __init__(
        self, max_len: int = 10, flag: Literal["truncation", "truncated"] = "truncation"
    ) -> None:
        self.max_len = max_len
        self.flag = flag

    def reset(self, rng: Array) -> AnalyticState:
        """Start at age 0."""
        info = {"rng": rng, "age": jnp.zeros((), jnp.int32), self.flag: jnp.zeros(())}
        return AnalyticState(jnp.zeros(1), jnp.zeros(()), jnp.zeros(()), info, {})

    def step(self, state: AnalyticState, action: Array) -> AnalyticState:
        """Grow older; flag the time limit."""
        age = state.info["age"] + 1
        time_up = (age >= self.max_len).astype(float)
        return state.replace(
            obs=(age / self.max_len).astype(float)[None],
            reward=jnp.ones(()) + 0.0 * action.sum(),
            done=time_up,
            info={**state.info, "age": age, self.flag: time_up},
        )


class AnalyticEnvironments:
    """Provider of the environments of this module, for the command line and for tests."""

    _MAKERS = {
        "Endless": Endless,
        "FollowTarget": FollowTarget,
        "RememberCue": RememberCue,
        "TwoHands": TwoHands,
    }
    _PRESETS: Mapping[str, Mapping[str, Any]] = {
        "RememberCue": {
            "network": {"kind": "lstm"},
            "train": {
                "ppo": {"total_steps": 300_000, "learning_rate": 3e-3, "rollout_length": 20},
            },
        },
    }

    def names(self) -> Sequence[str]:
        """Return the names of the analytic environments."""
        return sorted(self._MAKERS)

    def load(self, name: str, max_len: int | None = None, **overrides: Any) -> Any:
        """Return an environment; `max_len` adds a time limit.

        Args:
            name: One of `names()`.
            max_len: Time limit in steps; for `Endless` its own.
            **overrides: Arguments of the environment's class.

        Raises:
            ValueError: The environment has no such setting; names those it has.
        """
        settings = {"max_len", *inspect.signature(self._MAKERS[name]).parameters}
        for setting in overrides:
            if setting not in settings:
                known = ", ".join(sorted(settings))
                raise ValueError(f"{name} has no setting {setting!r}; it has {known}.")
        if name == "Endless" and max_len is not None:
            return Endless(max_len=max_len, **overrides)
        env = self._MAKERS[name](**overrides)
        return env if max_len is None else EpisodeWrapper(env, max_len)

    def preset(self, name: str) -> Mapping[str, Any]:
        """Return settings that train `name`."""
        return self._PRESETS.get(name, {})


def _uniform(key: Array, size: int = 1) -> Array:
    """Draw `size` targets."""
    return jax.random.uniform(key, (size,), minval=-0.5, maxval=0.5)
