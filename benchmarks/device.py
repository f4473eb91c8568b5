"""The device, its memory, and the compilation cache, as seen by a process that measures."""

import os
import resource
import sys
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache


def describe_device() -> str:
    """Return what this runs on, by cores and type, as in `CPU, 2 cores`."""
    device = jax.devices()[0]
    if device.platform == "cpu":
        return f"CPU, {len(os.sched_getaffinity(0))} cores"
    return f"{device.platform.upper()}, {device.device_kind}"


def peak_bytes() -> int:
    """Return the most memory so far: of the device, or of this process if that is the CPU."""
    stats = jax.devices()[0].memory_stats()
    if stats and "peak_bytes_in_use" in stats:
        return stats["peak_bytes_in_use"]
    unit = 1 if sys.platform == "darwin" else 1024
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def compiled_bytes(compiled: Any) -> int | None:
    """Return what a compiled program needs by XLA's count: arguments, results, buffers between."""
    stats = compiled.memory_analysis()
    if stats is None:
        return None
    passed = stats.argument_size_in_bytes + stats.output_size_in_bytes - stats.alias_size_in_bytes
    return passed + stats.temp_size_in_bytes


def without_cache() -> None:
    """Compile everything from now on, whatever the persistent cache holds."""
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()  # else the setting is read no more


def count_compilations() -> list[str]:
    """Return a list that grows by one with each program that XLA compiles from now on."""
    compiled: list[str] = []

    def listen(event: str, duration_secs: float, **_: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    return compiled
