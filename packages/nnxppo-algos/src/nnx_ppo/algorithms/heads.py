"""How the heads of rewards, values and actions belong together."""

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
