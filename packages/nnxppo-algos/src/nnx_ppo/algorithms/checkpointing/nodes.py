"""Pytrees as plain data: builtin containers, bytes and descriptions of nodes.

A description names a node's class and holds its children by name. Reading one runs no code of that
class: classes of the libraries we build on are rebuilt field by field, any other node stays a
`PlainNode`, which `graft` puts onto a structure that somebody else made.
"""

import dataclasses
import enum
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from nnx_ppo.algorithms._lookup import find_class

# Packages whose dataclasses, named tuples and enums are rebuilt without being trusted by name.
_KNOWN = ("nnx_ppo", "jax", "flax", "optax", "mujoco", "mujoco_playground", "brax")
_CONFIGS = "nnx_ppo.algorithms.config"
_PLAIN = (type(None), bool, int, float, str, bytes)
_TAG = "node"


@jax.tree_util.register_pytree_with_keys_class
class PlainNode:
    """A pytree node of a class that is not at hand: its children are its attributes.

    Args:
        class_path: `module:qualname` of the class.
        children: The children by name.
    """

    def __init__(self, class_path: str, children: dict[str, Any]) -> None:
        self._class_path = class_path
        self._children = children

    def __getattr__(self, name: str) -> Any:
        children = self.__dict__.get("_children", {})
        if name in children:
            return children[name]
        raise AttributeError(f"{self.__dict__.get('_class_path')} has no child {name!r}")

    def __repr__(self) -> str:
        return f"PlainNode({self._class_path!r}, {self._children!r})"

    def tree_flatten_with_keys(self) -> tuple[list[Any], Any]:
        """Flatten as JAX asks."""
        keys = [(jax.tree_util.GetAttrKey(name), child) for name, child in self._children.items()]
        return keys, (self._class_path, tuple(self._children))

    @classmethod
    def tree_unflatten(cls, aux: Any, children: Iterable[Any]) -> "PlainNode":
        """Unflatten as JAX asks."""
        class_path, names = aux
        return cls(class_path, dict(zip(names, children, strict=True)))


def describe(tree: Any, where: str) -> Any:
    """Return a pytree as builtin containers, bytes and descriptions of its other nodes.

    Args:
        tree: Any pytree; its leaves are arrays, keys, numbers, strings or enums.
        where: Its name, for messages.

    Raises:
        TypeError: Names a leaf that is nothing of that, or a node whose children have equal names.
    """
    if type(tree) in _PLAIN:
        return tree
    if isinstance(tree, jax.Array | np.ndarray | np.generic):
        return _describe_array(tree)
    if isinstance(tree, enum.Enum):
        value = describe(tree.value, f"{where}.value")
        return {_TAG: "enum", "class": _path_of(type(tree)), "value": value}
    if type(tree) in (list, tuple):
        return type(tree)(describe(child, f"{where}[{i}]") for i, child in enumerate(tree))
    if type(tree) is dict:
        items = [
            (describe(key, f"a key of {where}"), describe(child, f"{where}[{key!r}]"))
            for key, child in tree.items()
        ]
        return {_TAG: "dict", "items": items}
    children, _ = one_level(tree, where)
    if children is None and not dataclasses.is_dataclass(tree):
        raise TypeError(
            f"{where} is a {type(tree).__module__}.{type(tree).__qualname__}, which a checkpoint "
            "cannot hold. Make it an array, or a pytree of arrays."
        )
    children = children or {}
    node = {
        _TAG: "object",
        "class": _path_of(type(tree)),
        "children": {name: describe(child, f"{where}.{name}") for name, child in children.items()},
    }
    if dataclasses.is_dataclass(tree):
        node["static"] = _describe_static(tree, children, where)
    return node


def rebuild(data: Any, trusted: Iterable[type] = ()) -> Any:
    """Return the pytree that `describe` described.

    Nodes of classes that are neither known nor trusted, or that no module holds that is imported,
    become `PlainNode`. Configurations are made by their constructor, which checks them.

    Args:
        data: What `describe` returned.
        trusted: Classes that may be rebuilt beside the known ones.

    Raises:
        ValueError: An array has a type that JAX does not make under its present settings.
    """
    trust = {_path_of(cls): cls for cls in trusted}

    def walk(data: Any) -> Any:
        if isinstance(data, list | tuple):
            return type(data)(walk(child) for child in data)
        if isinstance(data, dict):
            return make[data[_TAG]](data)
        return data

    def enum_member(data: dict[str, Any]) -> Any:
        cls, value = _class_at(data["class"], trust), walk(data["value"])
        return value if cls is None or not issubclass(cls, enum.Enum) else cls(value)

    def node(data: dict[str, Any]) -> Any:
        children = {name: walk(child) for name, child in data["children"].items()}
        static = {name: walk(value) for name, value in data.get("static", {}).items()}
        cls = _class_at(data["class"], trust)
        if cls is not None and cls.__module__ == _CONFIGS:
            return _make_config(cls, {**children, **static})
        made = None if cls is None else _make_node(cls, {**children, **static})
        return PlainNode(data["class"], children or static) if made is None else made

    make: dict[str, Callable[[dict[str, Any]], Any]] = {
        "dict": lambda data: {walk(key): walk(child) for key, child in data["items"]},
        "key": lambda data: jax.random.wrap_key_data(_jax_array(data["data"]), impl=data["impl"]),
        "array": _jax_array,
        "numpy": lambda data: _numpy_array(data).copy(),
        "left out": lambda data: _LeftOut(data["what"]),
        "enum": enum_member,
        "object": node,
    }
    return walk(data)


def graft(template: PyTree, data: PyTree, where: str) -> Any:
    """Return the arrays of `data` in the structure of `template`.

    Args:
        template: A pytree of `jax.ShapeDtypeStruct` or arrays.
        data: A pytree whose nodes have children of the same names; their classes are not compared,
            and what the template lacks is left out.
        where: The name of `data`, for messages.

    Raises:
        ValueError: Names the first leaf that differs, expected and found.
    """
    names, rebuild_level = one_level(template, where)
    if names is None:
        if summary(template) != summary(data):
            raise ValueError(
                f"{where} does not fit: expected {summary(template)}, found {summary(data)}."
            )
        return data
    if not names:
        return template
    found, _ = one_level(data, where)
    children = []
    for name, child in names.items():
        if found is None or name not in found:
            raise ValueError(
                f"{where} does not fit: expected a child {name!r} with {summary(child)}, found "
                f"{'only ' + ', '.join(found) if found else summary(data)}."
            )
        children.append(graft(child, found[name], f"{where}.{name}"))
    return rebuild_level(children)


def one_level(tree: Any, where: str) -> tuple[dict[str, Any] | None, Callable[[list[Any]], Any]]:
    """Return a node's children by name, None for a leaf, and what makes a node of others.

    Raises:
        TypeError: Two children have the same name.
    """
    leaves, treedef = jax.tree.flatten_with_path(tree, is_leaf=lambda node: node is not tree)
    if len(leaves) == 1 and leaves[0][0] == ():
        return None, lambda children: children[0]
    children: dict[str, Any] = {}
    for path, child in leaves:
        name = jax.tree_util.keystr(path[:1], simple=True)
        if name in children:
            raise TypeError(f"{where} has two children that are called {name!r}.")
        children[name] = child
    return children, lambda children: jax.tree.unflatten(treedef, children)


def summary(leaf: Any) -> str:
    """Return a leaf's dtype and shape, or the class of what is no array."""
    if leaf is None:
        return "nothing"
    if hasattr(leaf, "shape") and hasattr(leaf, "dtype"):
        return f"{leaf.dtype}{list(leaf.shape)}"
    return f"a {type(leaf).__name__}"


@dataclasses.dataclass(frozen=True)
class _LeftOut:
    """Stands for a static field that could not be described."""

    what: str


def _make_node(cls: type, fields: dict[str, Any]) -> Any:
    """Return a dataclass or named tuple with the given fields, None if it has others."""
    if issubclass(cls, tuple):
        return tuple.__new__(cls, fields.values()) if _fields_of(cls) == tuple(fields) else None
    if not dataclasses.is_dataclass(cls) or {f.name for f in dataclasses.fields(cls)} != {*fields}:
        return None
    if any(isinstance(value, _LeftOut) for value in fields.values()):
        return None
    node = object.__new__(cls)
    for name, value in fields.items():
        object.__setattr__(node, name, value)
    return node


def _fields_of(cls: type) -> tuple[str, ...] | None:
    """Return the fields of a named tuple."""
    return getattr(cls, "_fields", None)


def _make_config(cls: Any, fields: dict[str, Any]) -> Any:
    """Return a configuration; what it cannot take is left out with a warning."""
    known = {field.name for field in dataclasses.fields(cls)}
    for name, value in fields.items():
        if name not in known:
            why = f"{cls.__name__} has no such field any more"
        elif isinstance(value, _LeftOut):
            why = f"it was {value.what}, which a file cannot hold; set it again"
        else:
            continue
        warnings.warn(f"The stored {cls.__name__}.{name} is left out: {why}.", stacklevel=2)
    kept = {n: v for n, v in fields.items() if n in known and not isinstance(v, _LeftOut)}
    try:
        return cls(**kept)
    except (TypeError, ValueError) as error:
        warnings.warn(f"The stored {cls.__name__} is left out: {error}", stacklevel=2)
        return None


def _describe_array(array: Any) -> Any:
    """Return the bytes of an array, with what they mean."""
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        data = _describe_array(jax.random.key_data(array))
        return {_TAG: "key", "impl": str(jax.random.key_impl(array)), "data": data}
    kind = "array" if isinstance(array, jax.Array) else "numpy"
    return array_of_bytes(np.asarray(array), kind)


def array_of_bytes(array: np.ndarray, kind: str) -> dict[str, Any]:
    """Return the description of an array: of `kind` `"array"` if JAX's, `"numpy"` if NumPy's."""
    if array.dtype.hasobject:
        raise TypeError(f"An array of {array.dtype} holds Python objects, not numbers.")
    name = array.dtype.str  # which says nothing of types that NumPy does not have itself
    name = name if np.dtype(name) == array.dtype else array.dtype.name
    return {_TAG: kind, "dtype": name, "shape": array.shape, "bytes": array.tobytes()}


def _numpy_array(data: dict[str, Any]) -> np.ndarray:
    dtype = jnp.dtype(data["dtype"])
    if dtype.hasobject:
        raise ValueError(f"An array of {dtype} would hold Python objects.")
    return np.frombuffer(data["bytes"], dtype).reshape(data["shape"])


def _jax_array(data: dict[str, Any]) -> jax.Array:
    stored = _numpy_array(data)
    array = jnp.asarray(stored)
    if array.dtype != stored.dtype:
        raise ValueError(
            f"The file holds an array of {stored.dtype}, which JAX would make {array.dtype}; set "
            "jax_enable_x64 as it was when the file was written."
        )
    return array


def _describe_static(node: Any, children: dict[str, Any], where: str) -> dict[str, Any]:
    """Return those fields of a dataclass that are no children."""
    static = {}
    for field in dataclasses.fields(node):
        if field.name in children:
            continue
        value = getattr(node, field.name)
        try:
            static[field.name] = describe(value, f"{where}.{field.name}")
        except TypeError:
            static[field.name] = {_TAG: "left out", "what": f"a {type(value).__name__}"}
    return static


def _path_of(cls: type) -> str:
    return f"{cls.__module__}:{cls.__qualname__}"


def _class_at(path: str, trusted: dict[str, type]) -> type | None:
    """Return a trusted class, or a known one of an imported module; None for all others."""
    if path in trusted:
        return trusted[path]
    return find_class(path, _KNOWN)
