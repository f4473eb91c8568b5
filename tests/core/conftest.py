"""Fixtures for all tests of the contract."""

from collections.abc import Iterator

import jax
import pytest


@pytest.fixture(autouse=True)
def no_rank_promotion() -> Iterator[None]:
    """Broadcasting must be spelled out."""
    with jax.numpy_rank_promotion("raise"):
        yield
