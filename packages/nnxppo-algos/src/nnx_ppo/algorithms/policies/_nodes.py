"""NNX objects taken apart and put together without their constructors.

All that depends on how flax keeps attributes stands here.
"""

from typing import Any, TypeVar

from flax import nnx

Node = TypeVar("Node", bound=nnx.Pytree)


def attributes(node: nnx.Pytree) -> dict[str, Any]:
    """Return the attributes of an object, in the order in which they were set."""
    return {name: value for name, value in vars(node).items() if not name.startswith("_pytree__")}


def marks(node: nnx.Pytree) -> dict[str, bool]:
    """Return whether an attribute is data, for those of which flax would guess it wrongly."""
    if not node._pytree__is_pytree:
        return {}
    is_data = {name: bool(node._pytree__nodes.get(name, False)) for name in attributes(node)}
    return {
        name: is_data[name]
        for name, value in attributes(node).items()
        if is_data[name] != nnx.is_data(value)
    }


def new_node(cls: type[Node]) -> Node:
    """Return an object without attributes."""
    node = object.__new__(cls)
    blank = nnx.Module()
    nodes = type(cls._pytree__nodes)({**cls._pytree__nodes, **blank._pytree__nodes})
    object.__setattr__(node, "_pytree__state", blank._pytree__state)
    object.__setattr__(node, "_pytree__nodes", nodes)
    return node


def set_attribute(node: nnx.Pytree, name: str, value: Any, is_data: bool | None) -> None:
    """Set an attribute, past what the class makes of that.

    Args:
        node: The object.
        name: Name of the attribute.
        value: Its value.
        is_data: Whether it is data; None leaves it to flax.
    """
    if is_data is not None:
        value = nnx.data(value) if is_data else nnx.static(value)
    nnx.Pytree.__setattr__(node, name, value)


def metadata(variable: nnx.Variable) -> dict[str, Any]:
    """Return the metadata of a variable, those left out that every variable has."""
    common = nnx.Variable(0).get_metadata()
    own = variable.get_metadata()
    # By identity, for what is compared by value may be an array.
    return {
        name: value
        for name, value in own.items()
        if name not in common or value is not common[name]
    }


def new_variable(cls: type[nnx.Variable], value: Any, own_metadata: dict[str, Any]) -> nnx.Variable:
    """Return a variable with metadata as `metadata` returns them."""
    return cls.from_metadata(value, {**nnx.Variable(0).get_metadata(), **own_metadata})
