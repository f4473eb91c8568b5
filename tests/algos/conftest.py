"""Fixtures of the tests of algorithms."""

from collections.abc import Iterator

import jax
import pytest


@pytest.fixture(autouse=True)
def no_rank_promotion() -> Iterator[None]:
    """Refuse operations that broadcast arrays of different rank by accident."""
    with jax.numpy_rank_promotion("raise"):
        yield
