"""Measures the training loop itself: what it costs this processor, and whether it compiles again.

Waits for commands; they are in `commands`.
"""

import functools
import statistics
import time
from collections.abc import Callable, Mapping

import environments
import nets
from device import count_compilations, describe_device, without_cache
from protocol import Answer, serve

from nnx_ppo.algorithms import EvalConfig, PPOConfig, TrainConfig, train_ppo

FUSED = 8
CALLS = 5


def commands() -> Mapping[str, Callable[[], Answer]]:
    """Return the commands by name."""
    without_cache()
    env = environments.load("FollowTarget")
    compiled = count_compilations()

    def train(per_call: int) -> list[float]:
        """Train a new network; return how long this thread was busy before each `log_fn`."""
        ppo = PPOConfig(n_envs=64, rollout_length=30, total_steps=64 * 30 * per_call * CALLS)
        config = TrainConfig(ppo, EvalConfig(enabled=False), iterations_per_call=per_call)
        network = nets.build("many-leaves", *environments.sizes(env))
        busy: list[float] = []
        train_ppo(
            env, network, config, log_fn=lambda metrics, step: busy.append(time.thread_time())
        )
        return busy

    def compilations() -> Answer:
        """Count what a first call compiles, and a second with an equal network."""
        counts = []
        for _ in range(2):
            compiled.clear()
            train(per_call=1)
            counts.append(len(compiled))
        return {"first": counts[0], "second": counts[1]}

    def host(per_call: int) -> Answer:
        """Return the seconds of an iteration, the median over calls of one or more."""
        busy = train(per_call)
        spans = [end - start for start, end in zip(busy, busy[per_call:], strict=False)]
        return {"host_seconds": statistics.median(spans) / per_call}

    def describe() -> Answer:
        """Say what is measured, and on what."""
        return {
            "device": describe_device(),
            "leaves": nets.NUM_LEAVES,
            "iterations_per_call": FUSED,
        }

    return {
        "describe": describe,
        "compilations": compilations,
        "single": functools.partial(host, 1),
        "fused": functools.partial(host, FUSED),
    }


if __name__ == "__main__":
    serve(commands)
