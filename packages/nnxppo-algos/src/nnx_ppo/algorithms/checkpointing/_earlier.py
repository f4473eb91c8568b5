"""Files of earlier implementations of this API, put into the form of ours."""

import math
from typing import Any

import jax

from nnx_ppo.algorithms.checkpointing._unpickling import StandIn, numpy_array
from nnx_ppo.algorithms.checkpointing.nodes import array_of_bytes, rebuild

_STATE_FIELDS = {
    "TrainingState": ("network_states", "env_states", "rng_key", "steps_taken"),
    "DistillationState": (
        "student_states",
        "teacher_states",
        "env_states",
        "rng_key",
        "steps_taken",
    ),
}
# What modules of ours keep in variables of these names that earlier ones did not have.
IMPLIED = {"clip": math.inf}
_KEY_TAGS = {"fry": "threefry2x32", "rbg": "rbg", "urbg": "unsafe_rbg"}


def in_our_form(metadata: dict[str, Any]) -> dict[str, Any]:
    """Return the metadata of an earlier file as `Metadata.from_plain` reads them.

    Args:
        metadata: What `load_pickle` found.

    Raises:
        LookupError: Something is missing.
    """
    kind = "DistillationState" if "student_states" in metadata else "TrainingState"
    keys_field = next(name for name in metadata if name.endswith("rng_key_state"))
    return {
        "format": 0,
        "kind": kind,
        "state": {name: _described(metadata[name]) for name in _STATE_FIELDS[kind]},
        "keys": {"networks": list(_flat(_described(metadata[keys_field]))), "optimizer": []},
        "step": int(rebuild(_described(metadata["step"]))),
        "config": _described(metadata.get("config")),
    }


def _described(value: Any) -> Any:
    """Return a value as `describe` would, with descriptions for stand-ins."""
    if type(value) in (list, tuple):
        return type(value)(map(_described, value))
    if type(value) is dict:
        return {"node": "dict", "items": [(key, _described(child)) for key, child in value.items()]}
    if isinstance(value, StandIn):
        return _described_object(value)
    # A node of a trusted class has been unpickled as itself, with children that have not.
    leaves, treedef = jax.tree.flatten(value)
    if treedef == jax.tree.structure(0):
        return value
    return jax.tree.unflatten(treedef, [rebuild(_described(leaf)) for leaf in leaves])


def _described_object(value: StandIn) -> Any:
    """Return the description of an object."""
    array = numpy_array(value)
    if array is not None:
        return array_of_bytes(array, "numpy")
    name = value.class_path.partition(":")[2]
    if name == "_reconstruct_array":
        make, args, state, _ = value.args
        array = make(*args)
        array.__setstate__(state)
        return {**_described_object(array), "node": "array"}
    if name == "PRNGKeyArray":
        implementation = value.state["_impl"].args
        name = next(_KEY_TAGS[tag] for tag in implementation if tag in _KEY_TAGS)
        data = _described(value.state["_base_array"])
        return {"node": "key", "impl": name, "data": data}
    if value.class_path.startswith("flax"):
        # A state is its mapping; a variable its value, under the name that flax gave it then.
        names = ("_mapping", "_raw_value", "raw_value")
        return _described(next(value.state[name] for name in names if name in value.state))
    if value.args and not value.state:  # an enum or a named tuple
        if len(value.args) == 1 and isinstance(value.args[0], int):
            return {"node": "enum", "class": value.class_path, "value": value.args[0]}
        children = {str(i): _described(child) for i, child in enumerate(value.args)}
        return {"node": "object", "class": value.class_path, "children": children}
    children = {name: _described(child) for name, child in (value.state or {}).items()}
    return {"node": "object", "class": value.class_path, "children": children}


def _flat(node: Any, path: tuple[str, ...] = ()) -> Any:
    """Yield path and value of a described tree of dicts."""
    if isinstance(node, dict) and node.get("node") == "dict":
        for name, child in node["items"]:
            yield from _flat(child, (*path, str(name)))
    else:
        yield path, node
