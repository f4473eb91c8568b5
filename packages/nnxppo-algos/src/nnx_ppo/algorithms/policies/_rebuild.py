"""From plain data to a network: `rebuild`."""

import dataclasses
import enum
import functools
from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.core import FrozenDict

from nnx_ppo.algorithms.policies import _nodes
from nnx_ppo.algorithms.policies._names import Classes, find_function


def rebuild(data: Any, where: str, arrays: Mapping[str, np.ndarray], classes: Classes) -> Any:
    """Return the value that `describe` described. No constructor of a module is run.

    Args:
        data: The description.
        where: As it was for `describe`.
        arrays: The arrays by number.
        classes: Those that the description may name.

    Raises:
        ValueError: A class or function may not be used or is not there, or the data are no
            description; says where.
    """
    return _Rebuilder(arrays, classes).rebuild(data, where)


class _Rebuilder:
    def __init__(self, arrays: Mapping[str, np.ndarray], classes: Classes) -> None:
        self._arrays = arrays
        self._classes = classes
        self._by_place: dict[str, Any] = {}

    def rebuild(self, data: Any, where: str) -> Any:
        if isinstance(data, list):
            return self._items(data, where)
        if not isinstance(data, dict):
            return data
        kind = next(iter(data), None)
        if kind not in _METHODS:
            raise ValueError(f"{where} is described as a {kind!r}, which this version cannot read.")
        return _METHODS[kind](self, data, where)

    def _items(self, data: list[Any], where: str) -> list[Any]:
        return [self.rebuild(item, f"{where}[{i}]") for i, item in enumerate(data)]

    def _parts(self, data: Mapping[str, Any], where: str) -> dict[str, Any]:
        return {name: self.rebuild(part, f"{where}.{name}") for name, part in data.items()}

    def _class_of(self, name: str, where: str, kind: Callable[[type], bool]) -> Any:
        """Return the class of a name, of the kind that is wanted in that place."""
        try:
            found = self._classes.find(name)
        except ValueError as error:
            raise ValueError(f"{where}: {error}.") from None
        if not kind(found):
            raise ValueError(
                f"{where}: the class {name} is not of the kind that is wanted here; where an "
                "attribute is to be the class itself, trust it."
            )
        return found

    def _module(self, data: Any, where: str) -> Any:
        cls = self._class_of(data["module"], where, lambda cls: issubclass(cls, nnx.Pytree))
        # Known by its place before it is complete, for parts of it may refer to it.
        node = self._by_place[where] = _nodes.new_node(cls)
        marks = data.get("is data", {})
        for name, value in data["attributes"].items():
            part = self.rebuild(value, f"{where}.{name}")
            _nodes.set_attribute(node, _checked(name, where), part, marks.get(name))
        return node

    def _list(self, data: Any, where: str) -> nnx.Module:
        node = self._by_place[where] = nnx.List()
        for i, item in enumerate(data["list"]):
            node.append(self.rebuild(item, f"{where}[{i}]"))
        return node

    def _named(self, data: Any, where: str) -> nnx.Module:
        node = self._by_place[where] = nnx.Dict()
        for name, value in data["named"].items():
            node[_checked(name, where)] = self.rebuild(value, f"{where}[{name!r}]")
        return node

    def _variable(self, data: Any, where: str) -> nnx.Variable:
        cls = self._class_of(data["variable"], where, lambda cls: issubclass(cls, nnx.Variable))
        value = self.rebuild(data["value"], f"{where}.value")
        metadata = self._parts(data.get("metadata", {}), where)
        for name in metadata:
            _checked(name, where)
        variable = self._by_place[where] = _nodes.new_variable(cls, value, metadata)
        return variable

    def _same(self, data: Any, where: str) -> Any:
        if data["same as"] not in self._by_place:
            raise ValueError(f"{where} refers to {data['same as']}, which is not there.")
        return self._by_place[data["same as"]]

    def _array(self, data: Any, where: str) -> Any:
        array = self._arrays[data["array"]]
        if data.get("numpy"):
            return array
        made = jnp.asarray(array)
        if made.dtype != array.dtype:
            raise ValueError(
                f"{where} is {array.dtype}, which JAX turned into {made.dtype}; set "
                "jax.config.update('jax_enable_x64', True) before loading."
            )
        return made

    def _key(self, data: Any, where: str) -> jax.Array:
        return jax.random.wrap_key_data(self.rebuild(data["key"], where), impl=data["impl"])

    def _tuple(self, data: Any, where: str) -> tuple[Any, ...]:
        return tuple(self._items(data["tuple"], where))

    def _dict(self, data: Any, where: str) -> Any:
        ((name, items),) = data.items()
        if isinstance(items, dict):
            parts = {key: self.rebuild(value, f"{where}[{key!r}]") for key, value in items.items()}
        else:
            keys = [self.rebuild(key, f"a key of {where}") for key, _ in items]
            values = [value for _, value in items]
            parts = {
                key: self.rebuild(value, f"{where}[{key!r}]")
                for key, value in zip(keys, values, strict=True)
            }
        return parts if name == "dict" else FrozenDict(parts)

    def _float(self, data: Any, where: str) -> float:
        del where
        return float(data["float"])

    def _scalar(self, data: Any, where: str) -> np.generic:
        return jnp.dtype(data["dtype"]).type(self.rebuild(data["scalar"], where))

    def _dtype(self, data: Any, where: str) -> np.dtype:
        del where
        return jnp.dtype(data["dtype"])

    def _scalar_type(self, data: Any, where: str) -> type:
        del where
        return jnp.dtype(data["scalar type"]).type

    def _spec(self, data: Any, where: str) -> jax.ShapeDtypeStruct:
        del where
        return jax.ShapeDtypeStruct(tuple(data["shape"]), jnp.dtype(data["spec"]))

    def _tree(self, data: Any, where: str) -> Any:
        return jax.tree.structure(self.rebuild(data["tree"], where))

    def _leaf(self, data: Any, where: str) -> Any:
        del data, where
        return 0

    def _function(self, data: Any, where: str) -> Callable[..., Any]:
        try:
            return find_function(data["function"])
        except ValueError as error:
            raise ValueError(f"{where}: {error}.") from None

    def _partial(self, data: Any, where: str) -> functools.partial:
        # Of a function alone: to call a class would be to run its constructor.
        function = self._function(data["partial"], f"{where}.func")
        arguments = self.rebuild(data["arguments"], f"{where}.args")
        keywords = self.rebuild(data["keywords"], f"{where}.keywords")
        return functools.partial(function, *arguments, **keywords)

    def _class(self, data: Any, where: str) -> type:
        return self._class_of(data["class"], where, self._classes.is_value)

    def _enum(self, data: Any, where: str) -> enum.Enum:
        cls = self._class_of(data["enum"], where, lambda cls: issubclass(cls, enum.Enum))
        return cls(self.rebuild(data["value"], where))

    def _dataclass(self, data: Any, where: str) -> Any:
        cls = self._class_of(data["dataclass"], where, dataclasses.is_dataclass)
        names = [field.name for field in dataclasses.fields(cls)]
        node = object.__new__(cls)
        for name, value in self._fields(data, names, where).items():
            object.__setattr__(node, name, value)
        return node

    def _named_tuple(self, data: Any, where: str) -> Any:
        cls = self._class_of(
            data["named tuple"], where, lambda c: issubclass(c, tuple) and hasattr(c, "_fields")
        )
        return tuple.__new__(cls, self._fields(data, cls._fields, where).values())

    def _fields(self, data: Any, names: Collection[str], where: str) -> dict[str, Any]:
        """Return the values of fields in the order of their names."""
        if data["fields"].keys() != set(names):
            raise ValueError(
                f"{where}: {next(iter(data.values()))} has the fields {list(names)}, but was saved "
                f"with {list(data['fields'])}. Install the versions that saved the policy."
            )
        return self._parts({name: data["fields"][name] for name in names}, where)


def _checked(name: str, where: str) -> str:
    """Return the name of an attribute, unless Python or flax would take it for their own."""
    if name.startswith(("__", "_pytree__")):
        raise ValueError(f"{where} has the attribute {name}, which a file may not set.")
    return name


_METHODS: Mapping[Any, Callable[[_Rebuilder, Any, str], Any]] = {
    "module": _Rebuilder._module,
    "list": _Rebuilder._list,
    "named": _Rebuilder._named,
    "variable": _Rebuilder._variable,
    "same as": _Rebuilder._same,
    "array": _Rebuilder._array,
    "key": _Rebuilder._key,
    "tuple": _Rebuilder._tuple,
    "dict": _Rebuilder._dict,
    "frozen dict": _Rebuilder._dict,
    "float": _Rebuilder._float,
    "scalar": _Rebuilder._scalar,
    "dtype": _Rebuilder._dtype,
    "scalar type": _Rebuilder._scalar_type,
    "spec": _Rebuilder._spec,
    "tree": _Rebuilder._tree,
    "leaf": _Rebuilder._leaf,
    "function": _Rebuilder._function,
    "partial": _Rebuilder._partial,
    "class": _Rebuilder._class,
    "enum": _Rebuilder._enum,
    "dataclass": _Rebuilder._dataclass,
    "named tuple": _Rebuilder._named_tuple,
}
