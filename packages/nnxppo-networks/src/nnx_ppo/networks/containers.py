"""Containers: modules in sequence, side by side, per key; and the splitter of a flat output."""

from collections.abc import Iterable, Mapping
from itertools import accumulate
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Shaped

from nnx_ppo.core import StatefulModule, StatefulModuleOutput
from nnx_ppo.networks._checks import check_module, check_named_modules, check_size
from nnx_ppo.networks.routed import Name, RoutedModule, Runner


class Sequential(RoutedModule):
    """Runs layers one after the other, each on the output of the one before.

    The carry and the rollout extras are lists with one entry for each layer; metrics are keyed
    by the layer's position. Without layers it is the identity.

    Args:
        layers: The layers, first to last.

    Raises:
        TypeError: `layers` is not a list of `StatefulModule`.

    Example:
        >>> from nnx_ppo.networks import LSTM, Dense
        >>> rngs = nnx.Rngs(0)
        >>> net = Sequential([Dense(3, 8, rngs, nnx.relu), LSTM(8, 4, rngs)])
        >>> net(net.initialize_state(2), jnp.ones((2, 3))).output.shape
        (2, 4)
    """

    def __init__(self, layers: Iterable[StatefulModule]) -> None:
        if isinstance(layers, Mapping) or not isinstance(layers, Iterable):
            raise TypeError(
                f"Sequential: layers must be a list of modules, got {type(layers).__name__}; "
                "write Sequential([first, second])."
            )
        self.layers = nnx.List(
            check_module(layer, f"Sequential: layers[{i}]") for i, layer in enumerate(layers)
        )

    def __call__(
        self, network_state: Any, obs: Any, rollout_extras: Any = None
    ) -> StatefulModuleOutput:
        """Run the layers for one step.

        Args:
            network_state: Carries of the layers, a list.
            obs: Input of the first layer, leaves `(batch, *feature)`.
            rollout_extras: None, or the extras of the layers, a list.
        """
        return super().__call__(network_state, obs, rollout_extras)

    unroll = RoutedModule.unroll  # only parameter names changed above

    def _children(self) -> Mapping[Name, StatefulModule]:
        return dict(enumerate(self.layers))

    def _route(self, x: Any, run: Runner) -> Any:
        for position in range(len(self.layers)):
            x = run(position, x)
        return x

    def _pack(self, parts: dict[Name, Any]) -> list[Any]:
        return list(parts.values())


class NamedContainer(RoutedModule):
    """Base of containers whose children have names.

    Args:
        modules: The children by name; for names that are no Python identifiers.
        **kwargs: The children by name, instead of `modules`.

    Raises:
        TypeError: A child is not a `StatefulModule`.
        ValueError: Both forms were used, or no child was given.
    """

    def __init__(self, modules: Mapping[str, StatefulModule] | None = None, /, **kwargs) -> None:
        named = check_named_modules(type(self).__name__, modules, kwargs)
        self.modules = nnx.Dict(named)
        # nnx.Dict comes back from split and merge in alphabetical order.
        self.names = tuple(named)

    def _children(self) -> Mapping[Name, StatefulModule]:
        return {name: self.modules[name] for name in self.names}

    def _entry(self, x: Any, name: str) -> Any:
        """Return the part of a mapping `x` that a child is fed with."""
        if isinstance(x, Mapping) and name in x:
            return x[name]
        found = f"keys {sorted(map(str, x))}" if isinstance(x, Mapping) else type(x).__name__
        raise ValueError(
            f"{type(self).__name__}: x must be a mapping with the keys {list(self.names)}, got "
            f"{found}; {name!r} is missing. Name the modules as the input's entries."
        )


class Parallel(NamedContainer):
    """Runs several modules on the same input; the output is a dict of theirs.

    Args:
        modules: The children by name; for names that are no Python identifiers.
        **kwargs: The children by name, instead of `modules`.

    Example:
        >>> from nnx_ppo.networks import Dense
        >>> rngs = nnx.Rngs(0)
        >>> heads = Parallel(action_params=Dense(3, 4, rngs), value=Dense(3, 1, rngs))
        >>> out = heads(heads.initialize_state(2), jnp.ones((2, 3))).output
        >>> {name: head.shape for name, head in out.items()}
        {'action_params': (2, 4), 'value': (2, 1)}
    """

    def _route(self, x: Any, run: Runner) -> dict[str, Any]:
        return {name: run(name, x) for name in self.names}


class Concat(NamedContainer):
    """Runs each module on the input's entry of the same name, and concatenates their outputs.

    Outputs are joined along the last axis, in the order in which the modules were given.
    Entries of the input without a module are dropped.

    Args:
        modules: The children by name; for names that are no Python identifiers.
        **kwargs: The children by name, instead of `modules`.

    Example:
        >>> from nnx_ppo.networks import Dense
        >>> rngs = nnx.Rngs(0)
        >>> encoder = Concat(body=Dense(3, 4, rngs), goal=Dense(2, 1, rngs))
        >>> obs = {"body": jnp.ones((2, 3)), "goal": jnp.ones((2, 2))}
        >>> encoder(encoder.initialize_state(2), obs).output.shape
        (2, 5)
    """

    def _route(self, x: Any, run: Runner) -> Shaped[Array, "*batch features"]:
        outputs = {name: run(name, self._entry(x, name)) for name in self.names}
        for name, output in outputs.items():
            if not isinstance(output, jax.Array) or output.ndim <= run.leading_axes:
                raise ValueError(
                    f"Concat: the output of {name!r} must be an array with a feature axis to join "
                    f"along, got {_describe(output)}; a Flattener() makes one array of a tree."
                )
        return jnp.concatenate(list(outputs.values()), axis=-1)


class Splitter(StatefulModule):
    """Splits the last axis of an array into named slices.

    Slices are taken from the front in the order of the keywords; features left over are dropped.

    Args:
        **sizes: Width of each slice.

    Raises:
        ValueError: No size was given, or one below 1.

    Example:
        >>> split = Splitter(action_params=4, value=1)
        >>> out = split((), jnp.ones((2, 5))).output
        >>> {name: part.shape for name, part in out.items()}
        {'action_params': (2, 4), 'value': (2, 1)}
    """

    def __init__(self, **sizes: int) -> None:
        if not sizes:
            raise ValueError("Splitter needs at least one size; write Splitter(value=1).")
        checked = {name: check_size(size, f"Splitter: {name}") for name, size in sizes.items()}
        self.sizes = tuple(checked.items())

    def __call__(
        self, state: tuple[()], x: Shaped[Array, "*batch features"], rollout_extras: Any = None
    ) -> StatefulModuleOutput:
        """Split `x`.

        Raises:
            ValueError: `x` has fewer features than the sizes add up to.
        """
        del rollout_extras
        ends = list(accumulate(size for _, size in self.sizes))
        if x.shape[-1] < ends[-1]:
            raise ValueError(
                f"Splitter({', '.join(f'{n}={s}' for n, s in self.sizes)}) needs {ends[-1]} "
                f"features, got x of shape {x.shape}; widen the layer before it."
            )
        parts = {
            name: x[..., end - size : end]
            for (name, size), end in zip(self.sizes, ends, strict=True)
        }
        return StatefulModuleOutput(state, parts, jnp.zeros(()), {})


def _describe(value: Any) -> str:
    return f"shape {value.shape}" if isinstance(value, jax.Array) else type(value).__name__
