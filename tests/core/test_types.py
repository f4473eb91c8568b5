"""`JaxDataclass`: frozen dataclasses that are pytrees."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from nnx_ppo.core import JaxDataclass, PPONetworkOutput, StatefulModuleOutput, UnrollOutput


class Point(JaxDataclass):
    x: Any
    y: Any = 0
    name: str = dataclasses.field(default="", metadata={"static": True})


class Named(Point):
    label: Any = None


def test_fields_are_children_but_for_the_static_ones() -> None:
    assert jax.tree.leaves(Point(1, 2, "p")) == [1, 2]
    doubled = jax.tree.map(lambda leaf: 2 * leaf, Point(1, 2, "p"))
    assert (doubled.x, doubled.y, doubled.name) == (2, 4, "p")


def test_static_fields_are_part_of_the_structure() -> None:
    structure = jax.tree.structure(Point(1, 2, "p"))
    assert structure == jax.tree.structure(Point(3, 4, "p"))
    assert structure != jax.tree.structure(Point(1, 2, "q"))
    with pytest.raises(ValueError, match=r"different pytree metadata"):
        jax.tree.map(lambda a, b: a, Point(1, 2, "p"), Point(1, 2, "q"))


def test_children_are_found_by_field_name() -> None:
    paths, _ = jax.tree.flatten_with_path(Point({"a": 1}, 2))
    assert [jax.tree_util.keystr(path) for path, _ in paths] == [".x['a']", ".y"]


def test_replace_copies() -> None:
    point = Point(1, 2, "p")
    moved = point.replace(x=5)
    assert (moved.x, moved.y, moved.name) == (5, 2, "p")
    assert point.x == 1
    with pytest.raises(TypeError, match="z"):
        point.replace(z=0)


def test_fields_cannot_be_assigned() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError, match="x"):
        Point(1).x = 2  # pyright: ignore[reportAttributeAccessIssue]


def test_subclasses_have_the_inherited_fields_too() -> None:
    assert jax.tree.leaves(Named(1, 2, "p", 3)) == [1, 2, 3]
    assert jax.tree.map(lambda leaf: leaf, Named(1, 2, "p", 3)).name == "p"


def test_arrays_are_never_compared_for_truth() -> None:
    # Generated equality would ask for the truth of `x == x`, which an array does not have.
    point = Point(jnp.arange(2))
    assert point == point
    assert point != Point(jnp.arange(2))


def test_passes_through_transforms() -> None:
    @jax.jit
    def shift(point: Point) -> Point:
        return point.replace(x=point.x + 1)

    assert shift(Point(jnp.zeros(2), jnp.ones(()), "p")).x.tolist() == [1.0, 1.0]
    stacked = jax.vmap(lambda x: Point(x, -x, "p"))(jnp.arange(3))
    assert stacked.y.tolist() == [0, -1, -2]
    slope = jax.grad(lambda point: 3.0 * point.x + point.y)(Point(1.0, 2.0))
    assert (slope.x, slope.y) == (3.0, 1.0)


def test_trees_rebuild_with_any_leaves() -> None:
    """JAX fills trees with placeholders; no check of field types may stand in its way."""
    output = StatefulModuleOutput((), jnp.ones((2, 3)), jnp.zeros(2), {"a": jnp.ones(2)})
    shapes = jax.tree.map(jnp.shape, output)
    assert shapes.output == (2, 3)
    assert shapes.metrics == {"a": (2,)}
    nones = jax.tree.map(lambda _: None, output)
    assert nones.regularization_loss is None


def test_results_are_pytrees_with_documented_fields() -> None:
    output = StatefulModuleOutput((), jnp.ones((2, 3)), jnp.zeros(2), {})
    assert output.rollout_extras is None
    network = PPONetworkOutput(jnp.ones((2, 1)), jnp.zeros(2), jnp.zeros(2))
    assert len(jax.tree.leaves(network)) == 3
    window = UnrollOutput((), jnp.ones((4, 2, 3)), jnp.zeros((4, 2)))
    assert [leaf.shape for leaf in jax.tree.leaves(window)] == [(4, 2, 3), (4, 2)]
