"""Settings of all tests."""

from collections.abc import Iterator
from pathlib import Path

import jax
import jaxtyping
import pytest

# Most of the suite's time is XLA's, and many tests compile the same programs, as do the wheels'
# own runs of these tests: compiled code is kept beside the repository's other caches.
jax.config.update("jax_compilation_cache_dir", str(Path(__file__).parents[1] / ".cache" / "jax"))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)
# Tests compile a lot and compute little.
jax.config.update("jax_disable_most_optimizations", True)


@pytest.fixture(autouse=True)
def no_rank_promotion(request: pytest.FixtureRequest) -> Iterator[None]:
    """Refuse operations that broadcast arrays of different rank by accident."""
    if "physics" in request.keywords:  # MuJoCo's own code relies on it
        yield
    else:
        with jax.numpy_rank_promotion("raise"):
            yield


@pytest.fixture
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Switch off the run-time type checks, so that users' mistakes reach our own messages."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
