"""What is traced and compiled once for an environment, and found again by later runs.

Tracing an environment can take seconds and compiling an iteration a minute, so both outlive the
call that asked for them: `traced(env)` returns the same `TracedEnvironment` for the same
environment as long as nothing in it has changed, and that one keeps the programs that were made
for it. Programs hold no parameters. Both collections are bounded; what was used longest ago goes.
"""

import enum
import functools
import types
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from typing import Any, TypeVar

import jax
import numpy as np

from nnx_ppo.core import RLEnv
from nnx_ppo.core.wrappers import Wrapper

_ENVIRONMENTS = 4
_PROGRAMS = 8

Program = TypeVar("Program")

_PLAIN = (
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    enum.Enum,
    type,
    np.dtype,
    types.FunctionType,
    types.BuiltinFunctionType,
)

# What these hold is not among their attributes, or is half the world.
_OPAQUE = (jax.Array, types.ModuleType, types.MethodType, functools.partial)


class TracedEnvironment(Wrapper):
    """An environment whose `reset` and `step` are traced once for all who call them.

    Args:
        env: The environment.
    """

    def __init__(self, env: RLEnv) -> None:
        super().__init__(env)
        # Functions of our own: JAX would find what it traced for the same methods before.
        self._reset = jax.jit(lambda rng: env.reset(rng))
        self._step = jax.jit(lambda state, action: env.step(state, action))
        self._programs: OrderedDict[Hashable, Any] = OrderedDict()

    def reset(self, rng: Any) -> Any:
        """Reset the environment."""
        return self._reset(rng)

    def step(self, state: Any, action: Any) -> Any:
        """Step the environment."""
        return self._step(state, action)

    def program(self, make: Callable[[], Program], *key: Hashable) -> Program:
        """Return what `make` made for this key, now or earlier.

        Args:
            make: Makes a function, with `jax.jit` for instance. It may depend on this environment
                and on what the key says only, and must not hold arrays of a run.
            *key: What the program is made of, its name first.
        """
        return _kept(self._programs, key, make, _PROGRAMS)


_environments: OrderedDict[Hashable, TracedEnvironment] = OrderedDict()


def traced(env: RLEnv) -> TracedEnvironment:
    """Return an environment that is traced once, the same one for an unchanged environment.

    Numbers, text, arrays and containers in its attributes, and in those of the environments that
    it wraps, are compared with those of the last time; where one differs, all is traced anew.
    Other objects, such as a `mujoco.MjModel`, count as unchanged while they are the same object.

    Args:
        env: The environment; one that is traced already is returned as it is.
    """
    if isinstance(env, TracedEnvironment):
        return env
    found = (_Identity(env), frozen(getattr(env, "__dict__", None)))
    return _kept(_environments, found, lambda: TracedEnvironment(env), _ENVIRONMENTS)


def _kept(
    kept: OrderedDict[Hashable, Any], key: Hashable, make: Callable[[], Any], limit: int
) -> Any:
    """Return what is kept under a key, made now if it is not there."""
    if key not in kept:
        kept[key] = make()
        while len(kept) > limit:
            kept.popitem(last=False)
    kept.move_to_end(key)
    return kept[key]


class _Identity:
    """Equal only to the same object, which it keeps alive so that no other gets its address."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identity) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


def frozen(value: Any) -> Hashable:
    """Return a hashable picture of a value, which a later change of the value leaves as it is.

    Plain values, numpy arrays, containers and the attributes of other objects are taken by their
    contents, jax arrays and whatever has neither by identity.
    """
    return _frozen(value, set())


def _frozen(value: Any, above: set[int]) -> Hashable:
    if isinstance(value, float):
        return (float, value.hex())  # of two NaNs neither equals the other
    if isinstance(value, _PLAIN):
        return (type(value), value)
    if isinstance(value, np.ndarray | np.generic):
        return (np.ndarray, value.shape, value.dtype.str, value.tobytes())
    if isinstance(value, _OPAQUE) or id(value) in above:
        return _Identity(value)
    above = above | {id(value)}
    if isinstance(value, Mapping):
        pairs = tuple((_frozen(key, above), _frozen(part, above)) for key, part in value.items())
        return (type(value), pairs)
    if isinstance(value, list | tuple):
        return (type(value), tuple(_frozen(part, above) for part in value))
    if isinstance(value, set | frozenset):
        return (type(value), frozenset(_frozen(part, above) for part in value))
    if hasattr(value, "__dict__"):
        return (type(value), _frozen(vars(value), above))
    return _Identity(value)
