"""The training loop, shared by all algorithms.

An algorithm is a function from training state to training state and metrics. The loop compiles
it once as a plain `jax.jit` on flat arrays, and schedules evaluation, checkpoints and logging
around it.
"""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Key

from nnx_ppo.algorithms._forgiving import call_forgivingly
from nnx_ppo.algorithms._functional import merge_modules, split_modules
from nnx_ppo.algorithms.config import EvalConfig, VideoConfig, VideoData
from nnx_ppo.algorithms.counters import as_int
from nnx_ppo.algorithms.evaluation import report, run_episodes
from nnx_ppo.algorithms.keys import PurposeKeys, at_step
from nnx_ppo.algorithms.rendering import (
    eval_rollout_for_render_scan,
    frame_rate,
    unstack_trajectory,
)
from nnx_ppo.core import RLEnv, StatefulModule


@dataclasses.dataclass(frozen=True)
class Algorithm:
    """What distinguishes one algorithm from another.

    Attributes:
        iteration: `(state, *arguments) -> (state, metrics)`, traced once.
        network_field: Field of the state that holds the network that learns.
        steps_per_iteration: Environment steps of one iteration.
        arguments: Trees of arrays that iterations read and never change. They are handed over, and
            not compiled in as constants.
    """

    iteration: Callable[..., tuple[Any, dict[str, Any]]]
    network_field: str
    steps_per_iteration: int
    arguments: tuple[Any, ...] = ()


@dataclasses.dataclass(frozen=True)
class Schedule:
    """When things happen; the intervals are in environment steps."""

    total_steps: int
    eval: EvalConfig
    video: VideoConfig
    checkpoint_every_steps: int


@dataclasses.dataclass(frozen=True)
class Callbacks:
    """Functions of the caller, as `train_ppo` describes them."""

    log_fn: Callable[[dict[str, Any], int], None] | None
    video_fn: Callable[[VideoData], None] | None
    checkpoint_fn: Callable[[Any, int], None] | None
    stop_fn: Callable[[], bool] | None


class Outcome(NamedTuple):
    """What a run leaves behind; fields as in `TrainResult`."""

    training_state: Any
    final_metrics: dict[str, Any]
    eval_history: list[dict[str, Any]]
    total_steps: int
    total_iterations: int


def run_training(
    algorithm: Algorithm,
    state: Any,
    schedule: Schedule,
    callbacks: Callbacks,
    *,
    eval_env: RLEnv,
    keys: PurposeKeys,
    throughput: bool,
) -> Outcome:
    """Iterate until the total is reached.

    Args:
        algorithm: What to iterate.
        state: The state to start from. Nothing it holds is deleted; the network in it is updated
            in place.
        schedule: When to evaluate and save.
        callbacks: Whom to tell.
        eval_env: The environment for evaluation and videos.
        keys: The keys of the run.
        throughput: Whether to report steps per second.
    """
    run = _CompiledRun(algorithm, state)
    breaks = _Breaks(run, schedule, callbacks, eval_env, keys, throughput)
    step = as_int(state.step_words)
    iterations = 0
    try:
        metrics = breaks.take(step, previous=None)
        stopped = run.is_told_to_stop(callbacks)
        while step < schedule.total_steps and not stopped:
            start = time.perf_counter()
            learned = run.iterate()
            if throughput:
                elapsed = time.perf_counter() - start
                learned["throughput/train_sps"] = algorithm.steps_per_iteration / elapsed
            previous, step = step, step + algorithm.steps_per_iteration
            iterations += 1
            stopped = run.is_told_to_stop(callbacks)
            last = stopped or step >= schedule.total_steps
            metrics = {**metrics, **breaks.take(step, previous, learned, last=last)}
            if not last and run.is_told_to_stop(callbacks):
                breaks.save(step)
                stopped = True
    finally:
        run.sync()
        wait = getattr(callbacks.checkpoint_fn, "wait", None)
        if wait is not None:
            wait()
    return Outcome(run.final_state(), metrics, breaks.history, step, iterations)


class _CompiledRun:
    """A training state as flat arrays, and the compiled iteration on them.

    The network's arrays are kept by whoever holds the network, so they are not donated to the
    next iteration; all others are copies of our own, and are.
    """

    def __init__(self, algorithm: Algorithm, state: Any) -> None:
        self._kind = type(state)
        self._field = algorithm.network_field
        self.networks: StatefulModule = getattr(state, self._field)
        self._blueprint, data = split_modules(state)
        self._network = data.pop(self._field)
        leaves, self._tree = jax.tree.flatten(data)
        self._leaves = [leaf.copy() for leaf in leaves]

        def iteration(
            network: Any, leaves: list[Array], *arguments: Any
        ) -> tuple[Any, list[Array], Any]:
            state, metrics = algorithm.iteration(self._merged(network, leaves), *arguments)
            _, data = split_modules(state)
            network = data.pop(self._field)
            leaves, tree = jax.tree.flatten(data)
            if tree != self._tree:
                raise ValueError(f"an iteration changed the state's tree: {self._tree} to {tree}")
            return network, leaves, metrics

        self._iteration = jax.jit(iteration, donate_argnums=1)
        self._arguments = algorithm.arguments

    def iterate(self) -> dict[str, Any]:
        """Run one iteration; return its metrics as Python floats."""
        self._network, self._leaves, metrics = self._iteration(
            self._network, self._leaves, *self._arguments
        )
        return _as_floats(metrics)

    def network_data(self) -> Any:
        """Return the network's variables, to be given to `network_of` in a transform."""
        return self._network

    def network_of(self, network: Any) -> StatefulModule:
        """Return a live network with the given variables."""
        return nnx.merge(self._blueprint.modules[self._field], network, copy=True)

    def sync(self) -> None:
        """Bring the caller's network up to date."""
        nnx.update(self.networks, self._network)

    @contextlib.contextmanager
    def lent(self) -> Iterator[None]:
        """Lend the caller's network, up to date, to a callback; go on with what it wrote."""
        self.sync()
        yield
        self._network = jax.tree.map(
            lambda new, old: new if new is old else jnp.asarray(new, old.dtype),
            nnx.state(self.networks),
            self._network,
        )

    def is_told_to_stop(self, callbacks: Callbacks) -> bool:
        """Ask the caller whether to end early."""
        if callbacks.stop_fn is None:
            return False
        with self.lent():
            return callbacks.stop_fn()

    def state(self) -> Any:
        """Return a training state that later iterations neither change nor delete."""
        return self._merged(self._network, [leaf.copy() for leaf in self._leaves])

    def final_state(self) -> Any:
        """Return the training state with the caller's own network."""
        self.sync()
        return self.state().replace(**{self._field: self.networks})

    def _merged(self, network: Any, leaves: list[Array]) -> Any:
        data = {**jax.tree.unflatten(self._tree, leaves), self._field: network}
        return merge_modules(self._kind, self._blueprint, data)


class _Breaks:
    """What happens between iterations, and must not influence them."""

    def __init__(  # noqa: PLR0917  (called once, above)
        self,
        run: _CompiledRun,
        schedule: Schedule,
        callbacks: Callbacks,
        env: RLEnv,
        keys: PurposeKeys,
        throughput: bool,
    ) -> None:
        self.history: list[dict[str, Any]] = []
        self._saved: int | None = None
        self._run = run
        self._schedule = schedule
        self._callbacks = callbacks
        self._env = env
        self._keys = keys
        self._throughput = throughput
        self._episodes = jax.jit(self._run_episodes)
        self._trajectory = jax.jit(self._run_for_video)

    def take(
        self,
        step: int,
        previous: int | None,
        learned: dict[str, Any] | None = None,
        *,
        last: bool = False,
    ) -> dict[str, Any]:
        """Do what is due at a step: evaluate, render, log, save.

        Args:
            step: Environment steps so far.
            previous: Steps at the last call; None at the start, where everything is due.
            learned: Metrics of the iteration that led here.
            last: Whether training ends here, where everything is due as well.

        Returns:
            The metrics that were logged.
        """

        def due(every: int) -> bool:
            return last or previous is None or step // every > previous // every

        schedule, callbacks = self._schedule, self._callbacks
        metrics = {**(learned or {}), "total_steps": step}
        if schedule.eval.enabled and due(schedule.eval.every_steps):
            metrics.update(self._evaluate(step))
        if schedule.video.enabled and callbacks.video_fn and due(schedule.video.every_steps):
            metrics.update(self._film(step, callbacks.video_fn))
        observe = getattr(callbacks.checkpoint_fn, "observe", None)
        if observe is not None:
            observe(metrics, step)
        if callbacks.log_fn is not None and len(metrics) > 1:
            with self._run.lent():
                call_forgivingly(callbacks.log_fn, dict(metrics), step)
        if due(schedule.checkpoint_every_steps):
            self.save(step)
        return metrics

    def save(self, step: int) -> None:
        """Save a checkpoint, unless this step has one."""
        if self._callbacks.checkpoint_fn is None or step == self._saved:
            return
        with self._run.lent():
            self._callbacks.checkpoint_fn(self._run.state(), step)
        self._saved = step

    def _evaluate(self, step: int) -> dict[str, Any]:
        """Evaluate the network as it is, and add to the history."""
        start = time.perf_counter()
        found, steps = self._episodes(
            self._run.network_data(), at_step(self._keys.evaluation, step)
        )
        metrics = _as_floats(found)
        self.history.append({"step": step, **metrics})
        if self._throughput:
            metrics["throughput/eval_sps"] = int(steps) / (time.perf_counter() - start)
        return metrics

    def _film(self, step: int, video_fn: Callable[[VideoData], None]) -> dict[str, Any]:
        """Render the network as it is; failures become warnings. Return what to log."""
        start = time.perf_counter()
        config = self._schedule.video

        def film() -> None:
            key = at_step(self._keys.video, step)
            states, final, reward = self._trajectory(self._run.network_data(), key)
            trajectory = unstack_trajectory(states, final, config.episode_length)
            frames = self._env.render(trajectory, **config.render_kwargs)  # pyright: ignore[reportAttributeAccessIssue]
            data = VideoData(
                np.stack(frames), step, float(reward), config.episode_length, frame_rate(self._env)
            )
            with self._run.lent():
                video_fn(data)

        call_forgivingly(film, what="rendering a video")
        if not self._throughput:
            return {}
        return {"throughput/video_sps": config.episode_length / (time.perf_counter() - start)}

    def _run_for_video(self, network: Any, key: Key[Array, ""]) -> Any:
        """Traced: return the states to render, and the return of the first episode."""
        live = self._run.network_of(network)
        live.eval()
        length = self._schedule.video.episode_length
        return eval_rollout_for_render_scan(self._env, live, length, key)

    def _run_episodes(self, network: Any, key: Key[Array, ""]) -> tuple[dict[str, Any], Array]:
        """Traced: return the metrics of an evaluation and the environment steps it took."""
        config = self._schedule.eval
        live = self._run.network_of(network)
        live.eval()
        episodes = run_episodes(
            self._env, live, config.n_envs, config.max_episode_length, key, config.logging_level
        )
        return report(episodes, config.logging_percentiles), episodes.lifespan.sum()


def _as_floats(metrics: dict[str, Any]) -> dict[str, Any]:
    """Fetch scalars from the device, all at once."""
    return {name: float(value) for name, value in jax.device_get(metrics).items()}
