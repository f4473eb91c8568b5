"""Reading `metadata.pkl` without running code.

Our own files hold builtin containers and NumPy arrays only. Files that earlier implementations of
this API wrote are pickles of objects; the names that occur in them are listed here. Each stands for
a class that records what the file says of its instances and does nothing. Others are refused.
"""

import io
import pickle
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

# What NumPy's own arrays and scalars are pickled with, under NumPy 2 and 1.
_NUMPY = {
    *((module, name) for module in ("numpy._core.multiarray", "numpy.core.multiarray")
      for name in ("_reconstruct", "scalar")),
    ("numpy._core.numeric", "_frombuffer"),
    ("numpy.core.numeric", "_frombuffer"),
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
}  # fmt: skip

_KEY_FUNCTIONS = ("seed", "split", "random_bits", "fold_in")
_EARLIER: dict[str, tuple[str, ...]] = {
    "jax._src.array": ("_reconstruct_array",),
    "jax._src.random.prng": ("PRNGImpl", "PRNGKeyArray"),
    "jax._src.prng": (
        "PRNGImpl",
        "PRNGKeyArray",
        *(f"threefry_{name}" for name in _KEY_FUNCTIONS),
        *(f"_rbg_{name}" for name in _KEY_FUNCTIONS),
    ),
    "jax._src.random.threefry2x32": tuple(f"threefry_{name}" for name in _KEY_FUNCTIONS),
    "jax._src.random.rbg": tuple(f"_rbg_{name}" for name in _KEY_FUNCTIONS),
    "flax.nnx.rnglib": ("RngKey", "RngCount", "RngState"),
    "flax.nnx.statelib": ("State",),
    "flax.nnx.tracers": ("TraceState",),
    "flax.nnx.variablelib": ("Param", "Variable", "VariableState", "BatchStat", "Cache"),
    "optax._src.base": ("EmptyState",),
    "optax._src.transform": (
        "ScaleByAdamState",
        "ScaleByScheduleState",
        "EmptyState",
        "TraceState",
    ),
    "mujoco.mjx._src.types": ("Contact", "Data", "DataC", "DataJAX", "DataWarp", "Impl"),
    "mujoco_playground._src.mjx_env": ("State",),
    "brax.envs.base": ("State",),
    "nnx_ppo.algorithms.config": (
        "DistillationConfig",
        "DistillationTrainConfig",
        "EvalConfig",
        "PPOConfig",
        "TrainConfig",
        "VideoConfig",
    ),
    "nnx_ppo.algorithms.types": ("DistillationState", "LoggingLevel", "TrainingState"),
    "nnx_ppo.networks.types": ("PPONetworkOutput", "StatefulModuleOutput"),
}  # fmt: skip


class StandIn:
    """What a file says of an object of a listed class: how it was made, and its state."""

    class_path: str

    def __new__(cls, *args: Any) -> "StandIn":
        made = object.__new__(cls)
        made.args = args
        made.state = {}
        return made

    args: tuple[Any, ...]
    state: dict[str, Any]

    def __init__(self, *args: Any) -> None:
        """Arguments are kept by `__new__`."""

    def __setstate__(self, state: Any) -> None:
        parts = state if isinstance(state, tuple) else (state,)  # (__dict__, slots) or one
        self.state = {name: value for part in parts for name, value in (part or {}).items()}


def load_pickle(content: bytes, trusted: Iterable[type] = ()) -> Any:
    """Return what a pickle holds: builtins, NumPy arrays, and a `StandIn` for each listed class.

    Args:
        content: The pickle.
        trusted: Classes that may be unpickled as themselves, by their own code.

    Raises:
        pickle.UnpicklingError: The pickle names anything else, or is cut short; names it.
    """
    allowed = {(cls.__module__, cls.__qualname__): cls for cls in trusted}

    class Reader(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            if (module, name) in allowed:
                return allowed[module, name]
            if (module, name) in _NUMPY:
                return super().find_class(module, name)
            if (module, name) == ("jax._src.array", "_reconstruct_array"):
                return _array
            if name in _EARLIER.get(module, ()):
                return type(name, (StandIn,), {"class_path": f"{module}:{name}"})
            raise pickle.UnpicklingError(
                f"it names {module}.{name}, which may not be loaded from a file. If you know who "
                f"wrote the file, pass trusted=({name},) with that class."
            )

    try:
        return Reader(io.BytesIO(content)).load()
    except pickle.UnpicklingError:
        raise
    except Exception as error:
        raise pickle.UnpicklingError(f"it is no whole pickle ({error!r})") from error


def _array(make: Callable[..., np.ndarray], args: tuple[Any, ...], state: Any, aval: Any) -> Any:
    """Return a pickled JAX array; `make` has come through `find_class`."""
    array = make(*args)
    array.__setstate__(state)
    return JaxArray(array)


class JaxArray:
    """Tells an array that was a JAX array from one that was NumPy's."""

    def __init__(self, value: np.ndarray) -> None:
        self.value = value
