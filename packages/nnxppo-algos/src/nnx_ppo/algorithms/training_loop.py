"""The training loop, shared by all algorithms.

An algorithm is a function from training state to training state and metrics. The loop hands
iterations of it to the device, and schedules evaluation, checkpoints and logging around them. The
device does not wait for the host: metrics of one call are read when the next is under way.
"""

import dataclasses
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Key

from nnx_ppo.algorithms._forgiving import call_forgivingly
from nnx_ppo.algorithms.compiled_run import Algorithm, Call, CompiledRun, Layout
from nnx_ppo.algorithms.config import EvalConfig, VideoConfig, VideoData
from nnx_ppo.algorithms.counters import as_int
from nnx_ppo.algorithms.evaluation import report, run_episodes
from nnx_ppo.algorithms.keys import PurposeKeys, at_step
from nnx_ppo.algorithms.programs import TracedEnvironment, frozen
from nnx_ppo.algorithms.rendering import (
    eval_rollout_for_render_scan,
    frame_rate,
    unstack_trajectory,
)
from nnx_ppo.core import RLEnv


@dataclasses.dataclass(frozen=True)
class Schedule:
    """When things happen; the intervals are in environment steps."""

    total_steps: int
    eval: EvalConfig
    video: VideoConfig
    checkpoint_every_steps: int
    iterations_per_call: int

    def intervals(self) -> tuple[int, ...]:
        """Return the intervals at which training is interrupted."""
        parts = (self.eval, self.video)
        looks = tuple(part.every_steps for part in parts if part.enabled)
        return (*looks, self.checkpoint_every_steps)

    def is_interrupted(self, step: int, previous: int) -> bool:
        """Whether something other than logging is due at a step."""
        return step >= self.total_steps or any(
            is_due(step, previous, every) for every in self.intervals()
        )

    def iterations_ahead(self, step: int, size: int) -> int:
        """Return how many iterations of `size` steps to run in one call, up to an interruption."""
        for ahead in range(1, self.iterations_per_call):
            end = step + ahead * size
            if self.is_interrupted(end, end - size):
                return ahead
        return self.iterations_per_call


def is_due(step: int, previous: int, every: int) -> bool:
    """Whether an interval ends between two steps."""
    return step // every > previous // every


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
    env: TracedEnvironment,
    eval_env: TracedEnvironment,
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
        env: The environment that `algorithm` runs in.
        eval_env: The environment for evaluation and videos.
        keys: The keys of the run.
        throughput: Whether to report steps per second.
    """
    run = CompiledRun(algorithm, state, env, schedule.iterations_per_call)
    size = algorithm.steps_per_iteration
    breaks = _Breaks(run, schedule, callbacks, eval_env, keys, throughput)
    reports = _Reports(breaks, size, throughput)
    step = first = as_int(state.step_words)
    try:
        breaks.take(step, previous=None)
        stopped = breaks.is_told_to_stop()
        while step < schedule.total_steps and not stopped:
            ahead = schedule.iterations_ahead(step, size)
            reports.expect(run.advance(ahead), step)
            step += ahead * size
            stopped = breaks.is_told_to_stop()
            if not (stopped or schedule.is_interrupted(step, step - size)):
                continue
            last = stopped or step >= schedule.total_steps
            breaks.take(step, step - size, reports.latest(), last=last)
            if not last and breaks.is_told_to_stop():
                breaks.save(step)
                stopped = True
    finally:
        reports.finish()
        run.sync()
        wait = getattr(callbacks.checkpoint_fn, "wait", None)
        if wait is not None:
            wait()
    return Outcome(run.final_state(), breaks.metrics, breaks.history, step, (step - first) // size)


class _Reports:
    """Passes metrics on in order, those of one call when the next is under way."""

    def __init__(self, breaks: "_Breaks", steps_per_iteration: int, throughput: bool) -> None:
        self._breaks = breaks
        self._size = steps_per_iteration
        self._throughput = throughput
        self._pending: tuple[Call, int] | None = None
        self._last_read = 0.0

    def expect(self, call: Call, step: int) -> None:
        """Report on the call before; report on this one when the next is under way.

        Args:
            call: The call, just begun.
            step: Environment steps before it.
        """
        before, self._pending = self._pending, (call, step)
        if before is not None:
            self._report(self._rows(*before))

    def latest(self) -> dict[str, Any]:
        """Wait for the call under way and report on it, but return its last metrics unreported."""
        assert self._pending is not None
        *earlier, (_, latest) = self._rows(*self._pending)
        self._pending = None
        self._report(earlier)
        return latest

    def finish(self) -> None:
        """Report what is there when training ends early."""
        if self._pending is not None and self._pending[0].is_ready():
            then = "The last metrics before training ended are missing."
            pending, self._pending = self._pending, None
            call_forgivingly(
                lambda: self._report(self._rows(*pending)), what="reading metrics", then=then
            )

    def _rows(self, call: Call, step: int) -> list[tuple[int, dict[str, Any]]]:
        rows = call.rows()
        now = time.perf_counter()
        if self._throughput:
            seconds = now - max(call.begun, self._last_read)
            for row in rows:
                row["throughput/train_sps"] = self._size * len(rows) / seconds
        self._last_read = now
        return [(step + (i + 1) * self._size, row) for i, row in enumerate(rows)]

    def _report(self, rows: list[tuple[int, dict[str, Any]]]) -> None:
        for step, row in rows:
            self._breaks.log({**row, "total_steps": step}, step)


class _Breaks:
    """What happens between iterations, and must not influence them."""

    def __init__(  # noqa: PLR0917  (called once, above)
        self,
        run: CompiledRun,
        schedule: Schedule,
        callbacks: Callbacks,
        env: TracedEnvironment,
        keys: PurposeKeys,
        throughput: bool,
    ) -> None:
        self.history: list[dict[str, Any]] = []
        self.metrics: dict[str, Any] = {}
        self._saved: int | None = None
        self._run = run
        self._schedule = schedule
        self._callbacks = callbacks
        self._env = env
        self._keys = keys
        self._throughput = throughput
        layout, length = run.layout, schedule.video.episode_length
        self._episodes = env.program(
            lambda: _compile_episodes(env, layout, schedule.eval),
            "evaluation",
            frozen(schedule.eval),
            layout.key,
        )
        self._trajectory = env.program(
            lambda: _compile_trajectory(env, layout, length), "video", length, layout.key
        )

    def take(
        self,
        step: int,
        previous: int | None,
        learned: dict[str, Any] | None = None,
        *,
        last: bool = False,
    ) -> None:
        """Do what is due at a step: evaluate, render, log, save.

        Args:
            step: Environment steps so far.
            previous: Steps at the last call; None at the start, where everything is due.
            learned: Metrics of the iteration that led here.
            last: Whether training ends here, where everything is due as well.
        """

        def due(every: int) -> bool:
            return last or previous is None or is_due(step, previous, every)

        schedule, callbacks = self._schedule, self._callbacks
        metrics = {**(learned or {}), "total_steps": step}
        if schedule.eval.enabled and due(schedule.eval.every_steps):
            metrics.update(self._evaluate(step))
        if schedule.video.enabled and callbacks.video_fn and due(schedule.video.every_steps):
            metrics.update(self._film(step, callbacks.video_fn))
        self.log(metrics, step)
        if due(schedule.checkpoint_every_steps):
            self.save(step)

    def log(self, metrics: dict[str, Any], step: int) -> None:
        """Tell callbacks of metrics, if there are any."""
        self.metrics.update(metrics)
        observe = getattr(self._callbacks.checkpoint_fn, "observe", None)
        if observe is not None:
            observe(metrics, step)
        if self._callbacks.log_fn is not None and len(metrics) > 1:
            with self._run.lent():
                call_forgivingly(self._callbacks.log_fn, dict(metrics), step)

    def is_told_to_stop(self) -> bool:
        """Ask the caller whether to end early."""
        if self._callbacks.stop_fn is None:
            return False
        with self._run.lent():
            return self._callbacks.stop_fn()

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
        found, steps = jax.device_get(
            self._episodes(self._run.network, at_step(self._keys.evaluation, step))
        )
        metrics = {name: float(value) for name, value in found.items()}
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
            states, final, reward = self._trajectory(self._run.network, key)
            trajectory = unstack_trajectory(states, final, config.episode_length)
            frames = self._env.render(trajectory, **config.render_kwargs)
            data = VideoData(
                np.stack(frames), step, float(reward), config.episode_length, frame_rate(self._env)
            )
            with self._run.lent():
                video_fn(data)

        call_forgivingly(film, what="rendering a video")
        if not self._throughput:
            return {}
        return {"throughput/video_sps": config.episode_length / (time.perf_counter() - start)}


def _compile_episodes(env: RLEnv, layout: Layout, config: EvalConfig) -> Callable[..., Any]:
    """Return a function to the metrics of an evaluation and the environment steps it took."""

    @jax.jit
    def episodes(network: list[Array], key: Key[Array, ""]) -> tuple[dict[str, Any], Array]:
        live = layout.networks(network)
        live.eval()
        found = run_episodes(
            env, live, config.n_envs, config.max_episode_length, key, config.logging_level
        )
        return report(found, config.logging_percentiles), found.lifespan.sum()

    return episodes


def _compile_trajectory(env: RLEnv, layout: Layout, length: int) -> Callable[..., Any]:
    """Return a function to the states to render, and the return of the first episode."""

    @jax.jit
    def trajectory(network: list[Array], key: Key[Array, ""]) -> Any:
        live = layout.networks(network)
        live.eval()
        return eval_rollout_for_render_scan(env, live, length, key)

    return trajectory
