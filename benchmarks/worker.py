"""Measures one form of one case: `worker.py CASE FORM`, which then waits for commands.

The case is a `Case` as JSON, the form `fast` or `plain`. Commands are in `Measured.commands`.
"""

import contextlib
import json
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import environments
import jax
import jax.numpy as jnp
import nets
import numpy as np
from cases import Case
from device import compiled_bytes, describe_device, peak_bytes, without_cache
from flax import nnx
from floor import gradient_flops, product_rate
from plain_form import Stepwise, plain_form
from protocol import Answer, serve

from nnx_ppo.algorithms import PPOConfig, TrainingState, new_training_state
from nnx_ppo.algorithms._functional import merge_modules, split_modules
from nnx_ppo.algorithms.bookkeeping import iteration_keys
from nnx_ppo.algorithms.compiled_run import Algorithm, CompiledRun
from nnx_ppo.algorithms.iteration import collect_window, iterate, learn_from
from nnx_ppo.algorithms.objective import loss_settings
from nnx_ppo.algorithms.programs import frozen, traced
from nnx_ppo.core import StatefulModule

PRODUCTS_SECONDS = 0.1


class Measured:
    """One form of a case, and what can be asked of it.

    Args:
        case: What to measure.
        plain: Whether in the plain form.
    """

    def __init__(self, case: Case, plain: bool) -> None:
        self.case = case
        self.config = PPOConfig(
            n_envs=case.n_envs,
            rollout_length=case.window,
            n_epochs=case.n_epochs,
            n_minibatches=case.n_minibatches,
        )
        self._form = plain_form if plain else contextlib.nullcontext
        self.env = traced(environments.load(case.environment))
        self.obs_size, action_size = environments.sizes(self.env)
        network = nets.build(case.network, self.obs_size, action_size)
        self.network: StatefulModule = Stepwise(network) if plain else network
        self.state = new_training_state(self.env, self.network, case.n_envs, seed=0)
        algorithm = Algorithm(
            iteration=lambda state: iterate(self.env, state, self.config),
            key=("ppo", frozen(self.config)),
            network_field="networks",
            steps_per_iteration=case.steps,
        )
        self.run = CompiledRun(algorithm, self.state, self.env, capacity=1)
        without_cache()

    def commands(self) -> Mapping[str, Callable[[], Answer]]:
        """Return the commands by name."""
        return {
            "describe": self.describe,
            "compile": self.compile,
            "iterate": self.iterate,
            "memory": lambda: {"peak_bytes": peak_bytes()},
            "prepare gradient": self.prepare_gradient,
            "gradient": self.gradient,
            "prepare products": self.prepare_products,
            "products": lambda: {"flops_per_second": self._rate()},
        }

    def describe(self) -> Answer:
        """Say what is measured, and on what."""
        return {
            "device": describe_device(),
            "leaves": len(jax.tree.leaves(nnx.state(self.network))),
            "parameters": sum(
                leaf.size for leaf in jax.tree.leaves(nnx.state(self.network, nnx.Param))
            ),
        }

    def compile(self) -> Answer:
        """Trace, lower and compile the iteration that the training loop runs."""
        start = time.perf_counter()
        run = self.run
        program: Any = run._iterations  # a `jax.jit`, which later calls do not compile again
        with self._form():
            compiled = program.lower(run.network, run._leaves, np.int32(1)).compile()
        seconds = time.perf_counter() - start
        return {"seconds": seconds, "program_bytes": compiled_bytes(compiled)}

    def iterate(self) -> Answer:
        """Run an iteration, and read its metrics.

        Returns:
            The seconds that it took, and the processor's seconds that this thread was busy, less
            those of waiting for the device.
        """
        start = time.perf_counter()
        begun = time.thread_time()
        call = self.run.advance(1)
        handed_over = time.thread_time()
        jax.block_until_ready(call.table)
        done = time.thread_time()
        (metrics,) = call.rows()
        busy = handed_over - begun + time.thread_time() - done
        seconds = time.perf_counter() - start
        if not all(np.isfinite(value) for value in metrics.values()):
            raise ValueError(f"training went wrong: {metrics}")
        return {"seconds": seconds, "host_seconds": busy}

    def prepare_gradient(self) -> Answer:
        """Compile the gradient phase alone, and make up a window for it to learn from."""
        state, config = self.state, self.config
        blueprint, data = split_modules(state)

        def collect(data: Any) -> Any:
            state = merge_modules(TrainingState, blueprint, data)
            key = iteration_keys(state.rng_key).reset
            # Learning does not read the environments, which have hundreds of arrays.
            return collect_window(self.env, state, config, key)._replace(env_state=None)

        @jax.jit
        def learn(data: Any, window: Any) -> Any:
            state = merge_modules(TrainingState, blueprint, data)
            key = iteration_keys(state.rng_key).minibatches
            updates = learn_from(state, window, config, loss_settings(config), key)
            _, data = split_modules(state)
            return data["networks"], data["optimizer"], updates

        window = made_up(jax.eval_shape(collect, data))
        data["env_states"] = None
        self._learn = lambda: learn(data, window)
        jax.block_until_ready(self._learn())
        return {}

    def gradient(self) -> Answer:
        """Run the gradient phase: all epochs on one window."""
        start = time.perf_counter()
        jax.block_until_ready(self._learn())
        return {"seconds": time.perf_counter() - start}

    def prepare_products(self) -> Answer:
        """Get ready to measure the rate of matrix products."""
        samples = self.case.steps // self.case.n_minibatches
        self._rate = product_rate(self.network, samples, PRODUCTS_SECONDS)
        all_samples = samples * self.case.n_updates
        return {"gradient_flops": gradient_flops(self.network, self.obs_size, all_samples)}


def made_up(shapes: Any) -> Any:
    """Return random arrays of the given shapes: normal numbers, keys, and one True in a hundred.

    How long it takes to learn from a window does not depend on what it shows.
    """
    rng = np.random.default_rng(0)

    def draw(spec: jax.ShapeDtypeStruct) -> jax.Array:
        if jnp.issubdtype(spec.dtype, jax.dtypes.prng_key):
            return jax.random.split(jax.random.key(0), spec.shape)
        if spec.dtype == bool:
            return jnp.asarray(rng.random(spec.shape) < 0.01)
        return jnp.asarray(rng.standard_normal(spec.shape), spec.dtype)

    return jax.tree.map(draw, shapes)


if __name__ == "__main__":
    serve(lambda: Measured(Case(**json.loads(sys.argv[1])), sys.argv[2] == "plain").commands())
