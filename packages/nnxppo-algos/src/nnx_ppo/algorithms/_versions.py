"""Which versions made a file."""

import platform
from importlib.metadata import version

_PACKAGES = ("nnxppo-core", "nnxppo-networks", "nnxppo-algos", "jax", "flax", "optax")


def installed_versions() -> dict[str, str]:
    """Return the versions of Python, of our packages and of those that decide the numbers."""
    return {"python": platform.python_version(), **{name: version(name) for name in _PACKAGES}}
