"""Refuses to run beside the PyPI distribution that owns the same import name."""

import sys


def refuse_regular_package() -> None:
    """Raise if `nnx_ppo` is a regular package instead of our namespace.

    The PyPI distribution `nnx-ppo` ships `nnx_ppo/__init__.py`. Where it is installed, Python
    stops looking for our portions, and half of the library would be missing or be the other one.

    Raises:
        ImportError: `nnx_ppo` has an `__init__.py`.
    """
    owner = sys.modules["nnx_ppo"].__file__
    if owner is not None:
        raise ImportError(
            f"nnx_ppo is a regular package here ({owner}), so the nnxppo packages, which share it "
            "as a namespace, cannot be used. The PyPI distribution 'nnx-ppo' is the usual owner: "
            "uninstall it (pip uninstall nnx-ppo), then reinstall your nnxppo packages "
            "(pip install --force-reinstall --no-deps nnxppo-core …)."
        )
