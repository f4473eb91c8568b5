"""`Policy`: a network that acts, with its memory."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, PyTree

from nnx_ppo.core import ModuleState, PPONetworkOutput, StatefulModule, reset_where


class Policy:
    """A network that acts step by step; it carries the memory along and hides the batch axis.

    `reset` starts an episode, and each call takes one observation to one action. With
    `reset(batch_size)` several episodes run side by side: observations and actions then have a
    leading axis of that size, and `reset_where` starts those anew that have ended.

    Actions are deterministic while the network is in evaluation mode, in which a policy is
    loaded. What you change of the network (its mode, its weights, its random streams) counts from
    the next `reset`. Random streams that you leave alone go on from one episode to the next.

    Args:
        networks: The network; its output must be a `PPONetworkOutput`.
        config: Settings that it was trained with, as plain data.
        environment: Name of its environment, as providers know it.
        overrides: Settings of the environment.
        observation_spec: An observation as a tree of `jax.ShapeDtypeStruct`, without batch axis;
            None if unknown.
        action_spec: An action likewise.
        step: Environment steps it was trained for.
        versions: Versions of the packages that saved it.

    Example:
        >>> import numpy as np
        >>> from nnx_ppo.networks import make_mlp_actor_critic
        >>> policy = Policy(make_mlp_actor_critic(3, 2, [8], [8], nnx.Rngs(0)))
        >>> policy.networks.eval()
        >>> policy.reset()
        >>> policy(np.ones(3)).shape
        (2,)
        >>> policy.reset(batch_size=4)
        >>> policy(np.ones((4, 3))).shape
        (4, 2)
        >>> policy.reset_where(np.array([True, False, False, False]))
    """

    def __init__(
        self,
        networks: StatefulModule,
        *,
        config: Mapping[str, Any] | None = None,
        environment: str | None = None,
        overrides: Mapping[str, Any] | None = None,
        observation_spec: Any = None,
        action_spec: Any = None,
        step: int | None = None,
        versions: Mapping[str, str] | None = None,
    ) -> None:
        self.networks = networks
        self.config = None if config is None else dict(config)
        self.environment = environment
        self.overrides = dict(overrides or {})
        self.observation_spec = observation_spec
        self.action_spec = action_spec
        self.step = step
        self.versions = dict(versions or {})
        self._batch_size: int | None = None
        self._memory: ModuleState = None
        self._streams: Any = None
        self._streams_before: dict[Any, Any] = {}
        self._variables: Any = None
        self._functions: _Functions | None = None

    def reset(self, batch_size: int | None = None) -> None:
        """Start an episode, or several side by side.

        Args:
            batch_size: How many; None is one, whose observations have no batch axis.

        Raises:
            ValueError: `batch_size` is below 1.
        """
        if batch_size is not None and batch_size < 1:
            raise ValueError(f"policy.reset: batch_size must be at least 1, got {batch_size!r}.")
        if self._functions is not None:
            self._put_back_streams()
        graphdef, streams, self._variables = nnx.split(self.networks, nnx.RngState, ...)
        self._streams_before = _values(streams)
        if self._functions is None or self._functions.graphdef != graphdef:
            self._functions = _Functions(graphdef)
        self._batch_size = batch_size
        size = 1 if batch_size is None else batch_size
        self._streams, self._memory = self._functions.start(streams, self._variables, size)

    def __call__(self, obs: PyTree) -> Any:
        """Return the action for an observation, and remember.

        Args:
            obs: A tree of arrays, `(*feature)`, or `(batch_size, *feature)` after
                `reset(batch_size)`.

        Returns:
            The action, a tree of arrays with the same leading axis, or none.

        Raises:
            RuntimeError: `reset` was not called.
            ValueError: `obs` is not what the network was trained on; says what it wants.
            TypeError: The network returns no `PPONetworkOutput`.
        """
        functions = self._started()
        if self.observation_spec is not None:
            check_observation(obs, self.observation_spec, self._batch_size)
            obs = converted(obs, self.observation_spec)
        self._streams, self._memory, action = functions.step(
            self._streams, self._variables, self._memory, obs, self._batch_size is None
        )
        return action

    def reset_where(self, done: Bool[Any, " *batch"] | bool) -> None:
        """Forget the episodes that have ended, as training does after their last step.

        Args:
            done: Which have, `(batch_size,)`; without a batch axis, a single boolean.

        Raises:
            RuntimeError: `reset` was not called.
            ValueError: `done` has another shape.
        """
        functions = self._started()
        ended = jnp.asarray(done).astype(bool)
        want = () if self._batch_size is None else (self._batch_size,)
        if ended.shape != want:
            raise ValueError(
                f"policy.reset_where: done must have shape {want}, got {ended.shape}; there is "
                "one episode for each of reset's batch_size."
            )
        self._streams, self._memory = functions.reset_where(
            self._streams, self._variables, self._memory, jnp.atleast_1d(ended)
        )

    def _put_back_streams(self) -> None:
        """Put those streams into the network that nobody has changed there since `reset`."""
        before, now = self._streams_before, _values(nnx.state(self.networks, nnx.RngState))
        unchanged = [
            (path, stream)
            for path, stream in nnx.to_flat_state(self._streams)
            if now.get(path) is before[path]
        ]
        nnx.update(self.networks, nnx.from_flat_state(unchanged))

    def _started(self) -> "_Functions":
        if self._functions is None:
            raise RuntimeError("policy: call policy.reset() before the first observation.")
        return self._functions


class _Functions:
    """The compiled functions of a network of a certain structure.

    They take and return its random streams, and take its other variables.
    """

    def __init__(self, graphdef: Any) -> None:
        self.graphdef = graphdef
        self.start = jax.jit(self._start, static_argnums=2)
        self.step = jax.jit(self._step, static_argnums=4)
        self.reset_where = jax.jit(self._reset_where)

    def _start(self, streams: Any, variables: Any, batch_size: int) -> tuple[Any, ModuleState]:
        live = self._live(streams, variables)
        memory = live.initialize_state(batch_size)
        return nnx.state(live, nnx.RngState), memory

    def _step(
        self, streams: Any, variables: Any, memory: ModuleState, obs: PyTree, single: bool
    ) -> tuple[Any, ModuleState, Any]:
        live = self._live(streams, variables)
        obs = jax.tree.map(lambda leaf: jnp.asarray(leaf)[None] if single else leaf, obs)
        out = live(memory, obs)
        actions = actions_of(out.output)
        if single:
            actions = jax.tree.map(lambda leaf: leaf[0], actions)
        return nnx.state(live, nnx.RngState), out.next_state, actions

    def _reset_where(
        self, streams: Any, variables: Any, memory: ModuleState, done: Array
    ) -> tuple[Any, ModuleState]:
        live = self._live(streams, variables)
        memory = reset_where(live, done, memory)
        return nnx.state(live, nnx.RngState), memory

    def _live(self, streams: Any, variables: Any) -> StatefulModule:
        return nnx.merge(self.graphdef, streams, variables, copy=True)


def actions_of(output: Any) -> Any:
    """Return the actions in a network's output.

    Raises:
        TypeError: It has none.
    """
    if not isinstance(output, PPONetworkOutput):
        raise TypeError(
            f"policy: networks must return a PPONetworkOutput, got {type(output).__name__}. End "
            "the network with a PPOAdapter, which makes one from an action and a value port."
        )
    return output.actions


def check_observation(obs: PyTree, spec: PyTree, batch_size: int | None) -> None:
    """Raise unless an observation has the leaves that a policy wants.

    Args:
        obs: The observation.
        spec: What the policy wants, without batch axis.
        batch_size: Size of the leading axis, None for none.

    Raises:
        ValueError: Says what is wanted and what was given.
    """
    lead = () if batch_size is None else (batch_size,)
    wanted, given = _leaves(spec), _leaves(obs)
    want = {path: (*lead, *leaf.shape) for path, leaf in wanted.items()}
    have = {path: jnp.shape(leaf) for path, leaf in given.items()}
    if have != want:
        raise ValueError(
            f"policy: obs must have the leaves {_in_words(want)}, got {_in_words(have)}. "
            f"{_cure(want, have, batch_size)}"
        )
    for path, leaf in given.items():
        if not _can_be(leaf, wanted[path].dtype):
            raise ValueError(
                f"policy: obs{path} must be {wanted[path].dtype}, got {_dtype(leaf)} with values "
                "that would change; convert it as you mean it."
            )


def _can_be(leaf: Any, want: Any) -> bool:
    """Whether an array may be converted: integers to where they fit, all real numbers to floats.

    Floats of another width count as the same.
    """
    have = _dtype(leaf)
    if have == want:
        return True
    if jnp.issubdtype(want, jnp.floating):
        return jnp.issubdtype(have, jnp.floating) or jnp.issubdtype(have, jnp.integer)
    if not (jnp.issubdtype(want, jnp.integer) and jnp.issubdtype(have, jnp.integer)):
        return False
    low, high, values = jnp.iinfo(want).min, jnp.iinfo(want).max, np.asarray(leaf)
    return not values.size or bool(low <= values.min() and values.max() <= high)


def converted(obs: PyTree, spec: PyTree) -> PyTree:
    """Return an observation with the dtypes that a policy wants; `check_observation` let it pass.

    Before JAX sees it, which would cut integers to 32 bits.
    """
    wanted = _leaves(spec)

    def convert(path: Any, leaf: Any) -> Any:
        want = wanted[jax.tree_util.keystr(path)].dtype
        return leaf if _dtype(leaf) == want else np.asarray(leaf).astype(want)

    return jax.tree.map_with_path(convert, obs)


def _dtype(leaf: Any) -> Any:
    """Return the dtype of an array or number, as it is before JAX makes it narrower."""
    return leaf.dtype if hasattr(leaf, "dtype") else np.asarray(leaf).dtype


def _cure(want: dict[str, Any], have: dict[str, Any], batch_size: int | None) -> str:
    if want.keys() != have.keys():
        missing, more = sorted(want.keys() - have.keys()), sorted(have.keys() - want.keys())
        words = [f"{', '.join(map(_root, missing))} missing"] if missing else []
        words += [f"{', '.join(map(_root, more))} not known to it"] if more else []
        return f"Select the entries that it was trained on ({'; '.join(words)})."
    if batch_size is None and all(have[path][1:] == want[path] for path in want):
        size = next(iter(have.values()))[0]
        return f"For a batch of episodes call policy.reset(batch_size={size})."
    if batch_size is not None and all(have[path] == want[path][1:] for path in want):
        return "For a single episode call policy.reset() without a batch_size."
    return "It is not the observation that it was trained on."


def _values(streams: Any) -> dict[Any, Any]:
    """Return the arrays of a state by path."""
    return {path: variable.get_raw_value() for path, variable in nnx.to_flat_state(streams)}


def _leaves(tree: PyTree) -> dict[str, Any]:
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree.leaves_with_path(tree)}


def _in_words(shapes: dict[str, tuple[int, ...]]) -> str:
    return ", ".join(f"{_root(path)} {shape}" for path, shape in shapes.items()) or "none"


def _root(path: str) -> str:
    return path or "(one array)"
