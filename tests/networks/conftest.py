"""Settings of all network tests."""

from collections.abc import Iterator

import jax
import jaxtyping
import pytest


@pytest.fixture(autouse=True)
def no_rank_promotion() -> Iterator[None]:
    """Forbid arrays of different rank to meet in arithmetic, where axes get mixed up."""
    with jax.numpy_rank_promotion("raise"):
        yield


@pytest.fixture(autouse=True)
def quick_compiles() -> Iterator[None]:
    """Compile without optimization: these tests compile a lot and compute little."""
    flag = "jax_disable_most_optimizations"
    before = jax.config.read(flag)
    jax.config.update(flag, True)
    yield
    jax.config.update(flag, before)


@pytest.fixture
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Switch off the run-time type checks, so that users' mistakes reach our own messages."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
