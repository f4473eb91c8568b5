"""From a network to plain data: `describe`."""

import dataclasses
import enum
import functools
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.core import FrozenDict

from nnx_ppo.algorithms.policies import _nodes
from nnx_ppo.algorithms.policies._names import PUBLIC, name_of_class, name_of_function


def describe(value: Any, where: str, arrays: dict[str, np.ndarray]) -> Any:
    """Return a value as what JSON can hold; `rebuild` is the inverse.

    None, booleans, integers, strings, finite floats and lists stand for themselves. All else
    becomes a dict whose first key says what it is. An NNX object or variable that is found in
    several places is described in the first one, which the others refer to.

    Args:
        value: A network, or any other value of those kinds.
        where: How one writes the value, for messages and for the references.
        arrays: Gets the arrays in it, by running number.

    Raises:
        TypeError: Something in the value cannot be described; says what, where, and the cure.
    """
    return _Describer(arrays).describe(value, where)


class _Leaf:
    """Stands for a leaf where only the structure of a tree is described."""


class _Describer:
    def __init__(self, arrays: dict[str, np.ndarray]) -> None:
        self._arrays = arrays
        # With each place the object, which must live on for its identity to mean it.
        self._places: dict[int, tuple[str, Any]] = {}

    def describe(self, value: Any, where: str) -> Any:
        if value is None or type(value) in (bool, int, str):
            return value
        by_type = _BY_TYPE.get(type(value))
        if by_type is not None:
            return by_type(self, value, where)
        for kind, by_kind in _BY_KIND:
            if isinstance(value, kind):
                return by_kind(self, value, where)
        if dataclasses.is_dataclass(value) and name_of_function(value) is None:
            return self._dataclass(value, where)
        if callable(value):
            return self._function(value, where)
        return self._unknown(value, where)

    def _unknown(self, value: Any, where: str) -> NoReturn:
        raise TypeError(
            f"{where} is a {name_of_class(type(value))}, which a policy cannot hold. It holds "
            "modules, arrays, numbers, strings, containers of them, dataclasses and enums; keep "
            "this in one of these forms."
        )

    def _float(self, value: float, where: str) -> Any:
        del where
        return value if math.isfinite(value) else {"float": str(value)}

    def _object(self, value: Any, where: str) -> Any:
        if id(value) in self._places:
            return {"same as": self._places[id(value)][0]}
        self._places[id(value)] = (where, value)
        if isinstance(value, nnx.Variable):
            return self._variable(value, where)
        marks = _nodes.marks(value)
        if type(value) is nnx.List and not marks:
            return {"list": self._items(value, where)}
        if type(value) is nnx.Dict and not marks:
            items = _nodes.attributes(value).items()
            return {"named": {k: self.describe(v, f"{where}[{k!r}]") for k, v in items}}
        found: dict[str, Any] = {
            "module": name_of_class(type(value)),
            "attributes": self._parts(_nodes.attributes(value), where),
        }
        return found | {"is data": marks} if marks else found

    def _variable(self, variable: nnx.Variable, where: str) -> Any:
        found = {
            "variable": name_of_class(type(variable)),
            "value": self.describe(variable.get_raw_value(), f"{where}.value"),
        }
        metadata = _nodes.metadata(variable)
        return found | {"metadata": self._parts(metadata, where)} if metadata else found

    def _parts(self, parts: dict[str, Any], where: str) -> dict[str, Any]:
        return {name: self.describe(part, f"{where}.{name}") for name, part in parts.items()}

    def _array(self, array: jax.Array | np.ndarray, where: str) -> Any:
        if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
            data = self._array(jax.random.key_data(array), where)
            return {"key": data, "impl": str(jax.random.key_impl(array))}
        number = str(len(self._arrays))
        self._arrays[number] = np.asarray(array)
        found = {"array": number, "dtype": array.dtype.name, "shape": list(array.shape)}
        return found | {"numpy": True} if isinstance(array, np.ndarray) else found

    def _items(self, value: Iterable[Any], where: str) -> list[Any]:
        return [self.describe(item, f"{where}[{i}]") for i, item in enumerate(value)]

    def _tuple(self, value: tuple[Any, ...], where: str) -> Any:
        if type(value) is tuple:
            return {"tuple": self._items(value, where)}
        names = getattr(value, "_fields", None)
        if names is None:
            return self._unknown(value, where)
        parts = self._parts(dict(zip(names, value, strict=True)), where)
        return {"named tuple": name_of_class(type(value)), "fields": parts}

    def _mapping(self, value: Mapping[Any, Any], where: str) -> Any:
        name = "dict" if isinstance(value, dict) else "frozen dict"
        parts = {key: self.describe(v, f"{where}[{key!r}]") for key, v in value.items()}
        if all(type(key) is str for key in parts):
            return {name: parts}
        keys = [self.describe(key, f"a key of {where}") for key in parts]
        return {name: [list(pair) for pair in zip(keys, parts.values(), strict=True)]}

    def _scalar(self, value: np.generic, where: str) -> Any:
        return {"scalar": self.describe(value.item(), where), "dtype": value.dtype.name}

    def _dtype(self, value: np.dtype, where: str) -> Any:
        del where
        return {"dtype": value.name}

    def _enum(self, value: enum.Enum, where: str) -> Any:
        return {"enum": name_of_class(type(value)), "value": self.describe(value.value, where)}

    def _class(self, value: type, where: str) -> Any:
        del where
        if issubclass(value, np.generic):
            return {"scalar type": np.dtype(value).name}
        return {"class": name_of_class(value)}

    def _treedef(self, value: Any, where: str) -> Any:
        tree = jax.tree.unflatten(value, [_Leaf()] * value.num_leaves)
        return {"tree": self.describe(tree, where)}

    def _leaf(self, value: _Leaf, where: str) -> Any:
        del value, where
        return {"leaf": None}

    def _spec(self, value: jax.ShapeDtypeStruct, where: str) -> Any:
        if jnp.issubdtype(value.dtype, jax.dtypes.extended):
            raise TypeError(f"{where} describes random keys, which a policy cannot hold.")
        return {"spec": value.dtype.name, "shape": list(value.shape)}

    def _partial(self, value: functools.partial, where: str) -> Any:
        return {
            "partial": self._function(value.func, f"{where}.func"),
            "arguments": self.describe(list(value.args), f"{where}.args"),
            "keywords": self.describe(value.keywords, f"{where}.keywords"),
        }

    def _dataclass(self, value: Any, where: str) -> Any:
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        parts = self._parts(fields, where)
        return {"dataclass": name_of_class(type(value)), "fields": parts}

    def _function(self, value: Any, where: str) -> Any:
        name = name_of_function(value)
        if name is None:
            raise TypeError(
                f"{where} is {_in_words(value)}, which cannot be found again by name when the "
                f"policy is loaded. Use a function of {PUBLIC} that turns arrays into arrays, or a "
                "functools.partial of one; or compute it in a StatefulModule of your own, and name "
                "its class in the argument trusted of load_policy."
            )
        return {"function": name}


_BY_TYPE: Mapping[type, Callable[[_Describer, Any, str], Any]] = {
    float: _Describer._float,
    list: _Describer._items,
    dict: _Describer._mapping,
    FrozenDict: _Describer._mapping,
    functools.partial: _Describer._partial,
    _Leaf: _Describer._leaf,
}
_BY_KIND: tuple[tuple[Any, Callable[[_Describer, Any, str], Any]], ...] = (
    (nnx.Pytree | nnx.Variable, _Describer._object),
    (jax.Array | np.ndarray, _Describer._array),
    (tuple, _Describer._tuple),
    (enum.Enum, _Describer._enum),
    (np.generic, _Describer._scalar),
    (np.dtype, _Describer._dtype),
    (type, _Describer._class),
    (jax.tree_util.PyTreeDef, _Describer._treedef),
    (jax.ShapeDtypeStruct, _Describer._spec),
)


def _in_words(function: Any) -> str:
    name = getattr(function, "__qualname__", None)
    if name is None:
        return f"a {name_of_class(type(function))}"
    if name.endswith("<lambda>"):
        return "a lambda"
    return f"the function {function.__module__}.{name}"
