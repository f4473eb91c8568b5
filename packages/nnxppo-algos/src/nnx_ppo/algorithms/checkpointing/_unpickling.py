"""Reading `metadata.pkl` without running code.

Our own files name nothing: they hold builtin containers, numbers, strings and bytes. Files that
earlier implementations of this API wrote are pickles of objects; the names that occur in them are
listed here. Each stands for a class that records what the file says of its instances and does
nothing, NumPy's among them. Others are refused.
"""

import io
import pickle
import re
from collections.abc import Iterable
from typing import Any

import numpy as np

_KEY_FUNCTIONS = ("seed", "split", "random_bits", "fold_in")
_EARLIER: dict[str, tuple[str, ...]] = {
    "numpy": ("ndarray", "dtype"),
    "numpy._core.multiarray": ("_reconstruct", "scalar"),
    "numpy.core.multiarray": ("_reconstruct", "scalar"),
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
}
# Types whose bytes are numbers and nothing else.
_NUMBERS = re.compile(r"[<>|=]?(b1|[iu][1248]|f[248]|c8|c16)")


class StandIn:
    """What a file says of an object of a listed class: how it was made, and its state."""

    class_path: str
    args: tuple[Any, ...]
    state: Any

    def __new__(cls, *args: Any) -> "StandIn":
        made = object.__new__(cls)
        made.args, made.state = args, None
        return made

    def __init__(self, *args: Any) -> None:
        """Arguments are kept by `__new__`."""

    def __setstate__(self, state: Any) -> None:
        self.state = state


def load_pickle(content: bytes, trusted: Iterable[type] = ()) -> Any:
    """Return what a pickle holds: builtins, and a `StandIn` for each object of a listed class.

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


def numpy_array(value: StandIn) -> np.ndarray | None:
    """Return the array or the scalar that a stand-in for one of NumPy's describes, None for others.

    Raises:
        pickle.UnpicklingError: It holds anything but numbers.
    """
    name = value.class_path.partition(":")[2]
    if name == "_reconstruct":
        _, shape, dtype, by_columns, content = value.state
        order = "F" if by_columns else "C"
        return np.frombuffer(content, _dtype(dtype)).reshape(shape, order=order)
    if name == "scalar":
        dtype, content = value.args
        return np.frombuffer(content, _dtype(dtype)).reshape(())
    return None


def _dtype(value: StandIn) -> np.dtype:
    """Return a type of numbers."""
    name = value.args[0]
    order = value.state[1] if value.state else "="
    if not isinstance(name, str) or not _NUMBERS.fullmatch(name):
        raise pickle.UnpicklingError(f"it holds an array of {name!r}, which are no numbers")
    return np.dtype(name).newbyteorder(order)
