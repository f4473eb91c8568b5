"""The weight of the entropy bonus over the course of training."""

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jaxtyping import Array, Float

from nnx_ppo.algorithms._validation import check_schedule
from nnx_ppo.algorithms.config import PPOConfig
from nnx_ppo.core import StatefulModule
from nnx_ppo.networks.sampling_layers import ActionSampler, EntropyWeight


def check_entropy_weight(networks: StatefulModule, config: PPOConfig) -> None:
    """Raise if the configuration sets a weight that the network does not have.

    Raises:
        ValueError: No module holds an `EntropyWeight`, or an action sampler has none, or the
            schedule gives no number.
    """
    if config.entropy_weight is None:
        return
    check_schedule("entropy_weight", config.entropy_weight, jnp.float32)
    if not jax.tree.leaves(nnx.state(networks, EntropyWeight)):
        raise ValueError(
            "entropy_weight is set, but networks has no EntropyWeight to write it to. "
            "Action samplers of nnx_ppo.networks have one; with others leave entropy_weight=None."
        )
    for path, node in nnx.iter_modules(networks):
        has_weight = bool(jax.tree.leaves(nnx.state(node, EntropyWeight)))
        if isinstance(node, ActionSampler) and not has_weight:
            raise ValueError(
                f"entropy_weight is set, but the {type(node).__name__} at "
                f"{'/'.join(map(str, path))} has no EntropyWeight to write it to. Give it one, or "
                "leave entropy_weight=None."
            )


def schedule_entropy_weight(
    networks: StatefulModule, config: PPOConfig, steps: Float[Array, ""]
) -> None:
    """Write the weight that is due to every `EntropyWeight` of a network, if one is configured.

    Args:
        networks: The network.
        config: The configuration.
        steps: Environment steps so far.
    """
    schedule, final = config.entropy_weight, config.final_entropy_weight
    if schedule is None:
        return
    if final is not None and not callable(schedule):
        schedule = optax.linear_schedule(schedule, final, max(config.total_steps, 1))
    weight = jnp.asarray(schedule(steps) if callable(schedule) else schedule, jnp.float32)
    nnx.update(networks, jax.tree.map(lambda _: weight, nnx.state(networks, EntropyWeight)))
