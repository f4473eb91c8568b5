"""How the heads of rewards, values and actions belong together."""

from collections.abc import Mapping
from typing import Any

import jax
from jaxtyping import PyTree


def match_rewards(rewards: PyTree, values: PyTree) -> Any:
    """Return the rewards as a tree like the value estimates.

    One reward and one value belong together whatever names they have.

    Raises:
        ValueError: They differ otherwise.
    """
    reward_tree, value_tree = jax.tree.structure(rewards), jax.tree.structure(values)
    if reward_tree == value_tree:
        return rewards
    if reward_tree.num_leaves == value_tree.num_leaves == 1:
        return jax.tree.unflatten(value_tree, jax.tree.leaves(rewards))
    raise ValueError(
        f"The network's value_estimates must have one value for each reward of the environment: "
        f"expected a tree like {reward_tree}, got {value_tree}. Name the entries of the value "
        "port as the environment names its rewards."
    )


def per_reward(argument: str, value: Any, rewards: PyTree) -> Any:
    """Return a tree like the rewards with the value of each head.

    Args:
        argument: What the user calls the value.
        value: A mapping from the names of heads to their values; anything else is every head's.
            The name of a nested head is its path, as in the names of metrics: `arm/left`.
        rewards: A tree with one leaf per reward head.

    Raises:
        ValueError: The names are not those of the heads.
    """
    if not isinstance(value, Mapping):
        return jax.tree.map(lambda _: value, rewards)
    names = [
        jax.tree_util.keystr(path, simple=True, separator="/")
        for path, _ in jax.tree.leaves_with_path(rewards)
    ]
    if names == [""]:
        raise ValueError(
            f"{argument}={dict(value)} names reward heads, but the environment's reward is one "
            f"array without names; set {argument} to a number."
        )
    if sorted(names) != sorted(value):
        raise ValueError(
            f"{argument} must name each reward head once, expected {sorted(names)}, got "
            f"{sorted(value)}."
        )
    return jax.tree.unflatten(jax.tree.structure(rewards), [value[name] for name in names])


def advantages_per_action(advantages: PyTree, actions: PyTree, combine: bool) -> Any:
    """Return one advantage for each action head.

    Args:
        advantages: A tree with one advantage per reward head.
        actions: Any tree with one leaf per action head.
        combine: Whether the sum over reward heads serves every action head.

    Returns:
        A tree like `actions`. A single reward head serves every action head; several serve the
        action heads of the same names.

    Raises:
        ValueError: Several reward heads whose names are not those of the action heads.
    """
    reward_heads, action_heads = jax.tree.structure(advantages), jax.tree.structure(actions)
    if combine or reward_heads.num_leaves == 1:
        total = sum_heads(advantages)
        return jax.tree.unflatten(action_heads, [total] * action_heads.num_leaves)
    if reward_heads == action_heads:
        return advantages
    raise ValueError(
        f"The reward heads {reward_heads} are not the action heads {action_heads}, so it is "
        "unclear which advantage trains which action. Set combine_advantages=True to train every "
        "action on the sum of the advantages, or give rewards and actions the same names."
    )


def sum_heads(tree: PyTree) -> Any:
    """Sum over the heads of a tree."""
    return sum(jax.tree.leaves(tree))
