"""The mathematics of PPO on arrays: advantages, surrogate and value loss."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PyTree, Shaped

Scalar = float | Float[Array, ""]


def gae(  # noqa: PLR0917  (documented)
    rewards: PyTree[Float[Array, "time batch"]],
    values_excl_last: PyTree[Float[Array, "time batch"]],
    last_value: PyTree[Float[Array, " batch"]],
    done: PyTree[Shaped[Array, "time batch"]],
    truncation: PyTree[Shaped[Array, "time batch"]],
    lambda_: Scalar,
    gamma: PyTree[Scalar],
    truncation_values: PyTree[Float[Array, "time batch"]] = None,
) -> Any:
    """Generalised advantage estimation (Schulman et al. 2016, arXiv:1506.02438, eq. 16).

    An episode ends where `done` or `truncation`; no advantage flows across an end. It ends for
    good where `done` without `truncation`: there the next value counts as 0. A truncated step
    goes on from `truncation_values`; without them nothing is known of what would have come, and
    its advantage is 0.

    Args:
        rewards: Rewards, one array or a tree with one per reward head.
        values_excl_last: Value of the observation before each step, a tree like `rewards`.
        last_value: Value of the observation after the last step, a tree like `rewards`.
        done: Whether the episode ended with the step; one array, or a tree like `rewards`.
        truncation: Whether a time limit ended it; one array, or a tree like `rewards`.
        lambda_: λ, from 0 (one-step) to 1 (Monte Carlo).
        gamma: Discount γ; one number, or a tree of numbers like `rewards`.
        truncation_values: Value of the true last observation of truncated steps, a tree like
            `rewards`; read only where `truncation`.

    Returns:
        Advantages, a tree like `rewards`.

    Raises:
        ValueError: The trees do not fit each other.
    """
    structure = jax.tree.structure(rewards)

    def per_head(name: str, tree: PyTree) -> list[Any]:
        if jax.tree.structure(tree) != structure:
            raise ValueError(
                f"{name} must be a tree like rewards, with one entry for each reward head: "
                f"expected {structure}, got {jax.tree.structure(tree)}."
            )
        return jax.tree.leaves(tree)

    def shared(name: str, tree: PyTree) -> list[Any]:
        if jax.tree.structure(tree) == jax.tree.structure(0.0):
            return [tree] * structure.num_leaves
        return per_head(name, tree)

    stored = [None] * structure.num_leaves
    if truncation_values is not None:
        stored = per_head("truncation_values", truncation_values)
    leaves = (
        jax.tree.leaves(rewards),
        per_head("values_excl_last", values_excl_last),
        per_head("last_value", last_value),
        shared("done", done),
        shared("truncation", truncation),
        stored,
        shared("gamma", gamma),
    )
    advantages = [
        _gae(*head, discounts=(lambda_, gamma)) for *head, gamma in zip(*leaves, strict=True)
    ]
    return jax.tree.unflatten(structure, advantages)


def _gae(
    rewards: Float[Array, "time batch"],
    values: Float[Array, "time batch"],
    last_value: Float[Array, " batch"],
    done: Shaped[Array, "time batch"],
    truncation: Shaped[Array, "time batch"],
    stored: Float[Array, "time batch"] | None,
    *,
    discounts: tuple[Scalar, Scalar],
) -> Float[Array, "time batch"]:
    """Advantages of one reward head; `discounts` are λ and γ."""
    lambda_, gamma = discounts
    done, truncated = done.astype(bool), truncation.astype(bool)
    ended, terminated = done | truncated, done & ~truncated
    next_values = jnp.concatenate([values[1:], last_value[None]])
    if stored is not None:
        next_values = jnp.where(truncated, stored, next_values)
    delta = rewards + gamma * jnp.where(terminated, 0.0, next_values) - values
    if stored is None:
        delta = jnp.where(truncated, 0.0, delta)
    return discounted_sums(delta, jnp.where(ended, 0.0, gamma * lambda_).astype(delta.dtype))


def discounted_sums(
    terms: Float[Array, "time batch"], decay: Float[Array, "time batch"]
) -> Float[Array, "time batch"]:
    """Return `sums[t] = terms[t] + decay[t] * sums[t + 1]`, with 0 after the last step.

    Where the decay is 0 nothing of what comes later is read, be it NaN.

    It is computed step by step on a CPU, and elsewhere in a number of operations that grows with
    the logarithm of the time. (On a CPU of 2 cores the latter took 0.7 to 3 times as long, for 20
    to 1000 steps of 64 to 4096 environments; for a network of width 64 either is 1 to 3 % of the
    gradient phase. Elsewhere each step of a loop waits for the one before; that is not measured.)

    Args:
        terms: What is added at each step.
        decay: Share of the later sum that counts.
    """
    if jax.default_backend() == "cpu":
        return sums_by_scan(terms, decay)
    return sums_in_parallel(terms, decay)


def sums_by_scan(
    terms: Float[Array, "time batch"], decay: Float[Array, "time batch"]
) -> Float[Array, "time batch"]:
    """Compute `discounted_sums` one step after the other."""

    def step(later: Array, inputs: tuple[Array, Array]) -> tuple[Array, Array]:
        total = _add_later(*inputs, later)
        return total, total

    return jax.lax.scan(
        step, jnp.zeros(terms.shape[1:], terms.dtype), (terms, decay), reverse=True
    )[1]


def sums_in_parallel(
    terms: Float[Array, "time batch"], decay: Float[Array, "time batch"]
) -> Float[Array, "time batch"]:
    """Compute `discounted_sums` of ever longer spans (Blelloch 1990, Prefix sums, section 1.4).

    A span is known by its own sum, and by the share of what follows it that counts.
    """

    def join(later: tuple[Array, Array], earlier: tuple[Array, Array]) -> tuple[Array, Array]:
        (late_terms, late_decay), (terms, decay) = later, earlier
        return _add_later(terms, decay, late_terms), decay * late_decay

    return jax.lax.associative_scan(join, (terms, decay), reverse=True)[0]


def _add_later(terms: Array, decay: Array, later: Array) -> Array:
    return terms + jnp.where(decay == 0.0, 0.0, decay * later)


def normalized(advantages: Float[Array, "time batch"]) -> Float[Array, "time batch"]:
    """Standardise with the population standard deviation."""
    return (advantages - advantages.mean()) / (advantages.std() + 1e-8)


def clipped_surrogate(
    ratio: Float[Array, "time batch"], advantages: Float[Array, "time batch"], clip_range: Scalar
) -> Float[Array, ""]:
    """PPO's clipped surrogate as a loss (Schulman et al. 2017, arXiv:1707.06347, eq. 7)."""
    clipped = jnp.clip(ratio, 1.0 - clip_range, 1.0 + clip_range)
    return -jnp.minimum(ratio * advantages, clipped * advantages).mean()


def value_loss(
    values: Float[Array, "time batch"],
    targets: Float[Array, "time batch"],
    old_values: Float[Array, "time batch"] | None = None,
    *,
    clip_range: Scalar | None = None,
    huber_delta: Scalar | None = None,
) -> Float[Array, ""]:
    """Half the mean squared error, with variants.

    Args:
        values: The values.
        targets: What they should be.
        old_values: Values of the rollout; read only with `clip_range`.
        clip_range: Where a value has moved from its old one by more than this, the error is that
            of the clipped value if that is larger. So nothing is gained by moving further
            (appendix of Engstrom et al. 2020, arXiv:2005.12729). Needs `old_values`.
        huber_delta: Size of an error from which on the loss grows linearly (Huber 1964,
            doi:10.1214/aoms/1177703732), or None.

    Raises:
        ValueError: There is a `clip_range` but no `old_values`.
    """
    if clip_range is None and huber_delta is None:
        return 0.5 * jnp.square(values - targets).mean()

    def each(values: Array) -> Array:
        error = values - targets
        if huber_delta is None:
            return 0.5 * jnp.square(error)
        inside = jnp.minimum(jnp.abs(error), huber_delta)
        return inside * (jnp.abs(error) - 0.5 * inside)

    loss = each(values)
    if clip_range is not None:
        if old_values is None:
            raise ValueError(
                f"clip_range={clip_range} clips how far values move from old_values, got None; "
                "pass the values of the rollout, or clip_range=None."
            )
        moved = jnp.clip(values - old_values, -clip_range, clip_range)
        loss = jnp.maximum(loss, each(old_values + moved))
    return loss.mean()


def r_squared(
    values: Float[Array, "time batch"], targets: Float[Array, "time batch"]
) -> Float[Array, ""]:
    """Coefficient of determination of the values as a prediction of the targets."""
    residual = jnp.square(targets - values).sum()
    return 1.0 - residual / (jnp.square(targets - targets.mean()).sum() + 1e-8)


def explained_variance(
    values: Float[Array, "time batch"], targets: Float[Array, "time batch"]
) -> Float[Array, ""]:
    """Share of the targets' variance that the values explain; a constant error is no loss."""
    return 1.0 - (targets - values).var() / (targets.var() + 1e-8)


def approximate_kl(
    new: Float[Array, "time batch"], old: Float[Array, "time batch"]
) -> Float[Array, ""]:
    """Estimate the divergence of the new policy from the old one, KL(old ‖ new).

    The estimator `r - 1 - log r` of the actions taken is unbiased and never negative (Schulman,
    2020, "Approximating KL divergence", http://joschu.net/blog/kl-approx.html).

    Args:
        new: Log-likelihoods of the actions under the new policy.
        old: Those under the policy that drew them.
    """
    log_ratio = new - old
    return (jnp.expm1(log_ratio) - log_ratio).mean()


def outside_clip(
    ratio: Float[Array, "time batch"], clip_range: Scalar
) -> Bool[Array, "time batch"]:
    """Where the probability ratio lies outside the clip range."""
    return jnp.abs(ratio - 1.0) > clip_range
