"""Measures rejax's PPO on a case: `rejax_worker.py CASE`, which then waits for commands.

Runs in an environment of its own; see `peers.py` beside this folder. The commands are those of
`worker.py` that apply.
"""

import importlib.metadata
import json
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import environments
import jax
import jax.numpy as jnp
import numpy as np
import rejax  # pyright: ignore[reportMissingImports]
from cases import Case
from device import compiled_bytes, describe_device, peak_bytes, without_cache
from gymnax.environments import spaces  # pyright: ignore[reportMissingImports]
from protocol import Answer, serve

WIDTHS: Mapping[str, tuple[int, ...]] = {"mlp-128": (128, 128)}
"""Hidden layers of actor and critic, by the name that our network of the same size has."""


class Adapted:
    """One of our environments, as rejax asks for them: every step resets, and selects.

    Args:
        env: The environment.
    """

    def __init__(self, env: Any) -> None:
        self.env = env
        self.obs_size, self.action_size = environments.sizes(env)
        self.default_params = None

    def reset(self, key: jax.Array, params: Any) -> tuple[jax.Array, Any]:
        """Return an observation and a state."""
        state = self.env.reset(key)
        return state.obs, state

    def step(self, key: jax.Array, state: Any, action: jax.Array, params: Any) -> tuple[Any, ...]:
        """Return observation, state, reward, done and info, after a reset where one is due."""
        stepped = self.env.step(state, action)
        done = stepped.done.astype(bool)
        fresh = self.env.reset(key)
        state = jax.tree.map(lambda new, old: jnp.where(done, new, old), fresh, stepped)
        return state.obs, state, stepped.reward, done, {}

    def observation_space(self, params: Any) -> Any:
        """Return the space of observations."""
        return spaces.Box(-jnp.inf, jnp.inf, (self.obs_size,))

    def action_space(self, params: Any) -> Any:
        """Return the space of actions."""
        return spaces.Box(-1.0, 1.0, (self.action_size,))

    def __deepcopy__(self, memo: Any) -> "Adapted":
        return self  # a physics model cannot be copied, and is never changed


class Measured:
    """rejax's PPO on a case, and what can be asked of it."""

    def __init__(self, case: Case) -> None:
        self.algorithm = rejax.PPO.create(
            env=Adapted(environments.load(case.environment)),
            agent_kwargs={"hidden_layer_sizes": WIDTHS[case.network], "activation": "relu"},
            num_envs=case.n_envs,
            num_steps=case.window,
            num_epochs=case.n_epochs,
            num_minibatches=case.n_minibatches,
            learning_rate=1e-4,
            normalize_observations=True,
        )
        self.state = jax.jit(self.algorithm.init_state)(jax.random.key(0))
        without_cache()

    def commands(self) -> Mapping[str, Callable[[], Answer]]:
        """Return the commands by name."""
        return {
            "describe": self.describe,
            "compile": self.compile,
            "iterate": self.iterate,
            "memory": lambda: {"peak_bytes": peak_bytes()},
        }

    def describe(self) -> Answer:
        """Say what is measured, and on what."""
        leaves = jax.tree.leaves((self.state.actor_ts.params, self.state.critic_ts.params))
        return {
            "device": describe_device(),
            "leaves": len(leaves),
            "parameters": sum(leaf.size for leaf in leaves),
            "version": importlib.metadata.version("rejax"),
        }

    def compile(self) -> Answer:
        """Trace, lower and compile an iteration."""
        start = time.perf_counter()
        jitted = jax.jit(self.algorithm.train_iteration, donate_argnums=0)
        self._iteration = jitted.lower(self.state).compile()
        seconds = time.perf_counter() - start
        return {"seconds": seconds, "program_bytes": compiled_bytes(self._iteration)}

    def iterate(self) -> Answer:
        """Run an iteration, as `worker.py` does, and read how many steps there have been."""
        start = time.perf_counter()
        begun = time.thread_time()
        self.state = self._iteration(self.state)
        handed_over = time.thread_time()
        jax.block_until_ready(self.state)
        done = time.thread_time()
        np.asarray(self.state.global_step)
        busy = handed_over - begun + time.thread_time() - done
        return {"seconds": time.perf_counter() - start, "host_seconds": busy}


if __name__ == "__main__":
    serve(lambda: Measured(Case(**json.loads(sys.argv[1]))).commands())
