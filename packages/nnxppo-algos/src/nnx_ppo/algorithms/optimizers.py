"""The optimiser, and how its learning rate changes."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from nnx_ppo.algorithms._validation import check_schedule
from nnx_ppo.algorithms.config import PPOConfig
from nnx_ppo.core import StatefulModule

_STEP = 1.5


@dataclasses.dataclass(frozen=True)
class AdaptiveRate:
    """A learning rate that keeps the policy's divergence near a target.

    Before an update the rate is divided by 1.5 where the divergence exceeds twice the target, and
    multiplied by 1.5 where it is below half of it.

    Attributes:
        target: The divergence aimed at.
        minimum: Lowest rate.
        maximum: Highest rate.
    """

    target: float
    minimum: float
    maximum: float

    def after(self, rate: Float[Array, ""], divergence: Float[Array, ""]) -> Float[Array, ""]:
        """Return the rate that follows `rate`; a NaN divergence changes nothing."""
        lowered = jnp.where(divergence > 2.0 * self.target, rate / _STEP, rate)
        changed = jnp.where(divergence < 0.5 * self.target, rate * _STEP, lowered)
        return jnp.clip(changed, self.minimum, self.maximum)


class RateState(NamedTuple):
    """Where a learning rate stands: the number of updates, and how the last one got its rate."""

    n_updates: Int[Array, ""]
    rate: Float[Array, ""]
    adapted: Bool[Array, ""]


def scale_by_rate(
    schedule: optax.Schedule, adaptive: AdaptiveRate | None = None
) -> optax.GradientTransformationExtraArgs:
    """Scale by minus the learning rate, which the state of the transformation shows.

    Args:
        schedule: The rate of each update, by number, unless the update is given a `learning_rate`.
            With `adaptive` the rate that adaptation starts from, at 0.
        adaptive: How the rate follows the `divergence` that each update is then given. It goes on
            from the rate of the last update if that was adapted too.
    """

    def init(params: optax.Params) -> RateState:
        del params
        rate = jnp.asarray(schedule(0), jnp.float32)
        return RateState(jnp.zeros((), jnp.int32), rate, jnp.asarray(False))

    def update(
        updates: optax.Updates,
        state: RateState,
        params: optax.Params | None = None,
        *,
        learning_rate: Array | None = None,
        divergence: Array | None = None,
        **extra: Any,
    ) -> tuple[optax.Updates, RateState]:
        del params, extra
        if adaptive is None:
            due = schedule(state.n_updates) if learning_rate is None else learning_rate
            rate = jnp.asarray(due, jnp.float32)
        elif divergence is None:
            raise ValueError("An adaptive learning rate needs update(…, divergence=…).")
        else:
            rate = adaptive.after(jnp.where(state.adapted, state.rate, schedule(0)), divergence)
        updates = jax.tree.map(lambda g: jnp.array(-rate, g.dtype) * g, updates)
        n_updates = jnp.asarray(optax.safe_increment(state.n_updates))
        return updates, RateState(n_updates, rate, jnp.asarray(adaptive is not None))

    return optax.GradientTransformationExtraArgs(init, update)  # pyright: ignore[reportArgumentType]


def make_optimizer(
    networks: StatefulModule,
    learning_rate: float | optax.Schedule,
    gradient_clipping: float | None = None,
    weight_decay: float | None = None,
    *,
    adaptive: AdaptiveRate | None = None,
) -> nnx.Optimizer:
    """Return Adam, or AdamW with `weight_decay`, behind global-norm clipping if asked for.

    Its state has the same tree whatever the settings, so that a run can go on with others.

    Args:
        networks: Whose parameters it is for.
        learning_rate: The rate, or a schedule over updates.
        gradient_clipping: Largest global norm of a gradient, or None.
        weight_decay: Decay of AdamW, or None.
        adaptive: How the rate adapts from there, or None. The updates then need a `divergence`.
    """
    settings = (learning_rate, gradient_clipping, weight_decay, adaptive)
    try:
        adam = _adam(*settings)
    except TypeError:  # one has no hash
        adam = _adam.__wrapped__(*settings)
    return nnx.Optimizer(networks, adam, wrt=nnx.Param)


@functools.lru_cache(maxsize=32)
def _adam(
    learning_rate: float | optax.Schedule,
    gradient_clipping: float | None,
    weight_decay: float | None,
    adaptive: AdaptiveRate | None,
) -> optax.GradientTransformation:
    """Return the transformation of `make_optimizer`.

    The same one for the same settings, since transformations are functions, which are equal only
    to themselves: what was compiled for one is found again.
    """
    clip, decay = optax.identity(), optax.identity()
    if gradient_clipping is not None:
        clip = optax.clip_by_global_norm(gradient_clipping)
    if weight_decay is not None:
        decay = optax.add_decayed_weights(weight_decay)
    schedule = learning_rate if callable(learning_rate) else optax.constant_schedule(learning_rate)
    return optax.chain(clip, optax.scale_by_adam(), decay, scale_by_rate(schedule, adaptive))


def configured_optimizer(
    networks: StatefulModule,
    config: PPOConfig,
    optimizer: optax.GradientTransformation | None = None,
) -> nnx.Optimizer:
    """Return the optimiser of a run.

    Args:
        networks: Whose parameters it is for.
        config: The configuration.
        optimizer: Takes the place of what the configuration asks for, if given.

    Raises:
        TypeError: `optimizer` is no `optax.GradientTransformation`.
        ValueError: The learning rate is a function that gives no number, or the configuration asks
            for what a given optimiser replaces.
    """
    if optimizer is not None:
        replaced = {
            "learning_rate": config.learning_rate if callable(config.learning_rate) else None,
            "final_learning_rate": config.final_learning_rate,
            "adaptive_kl": config.adaptive_kl,
            "gradient_clipping": config.gradient_clipping,
            "weight_decay": config.weight_decay,
        }
        return given_optimizer(networks, optimizer, replaced)
    adaptive = None
    if config.adaptive_kl is not None:
        bounds = (config.min_learning_rate, config.max_learning_rate)
        adaptive = AdaptiveRate(config.adaptive_kl, *bounds)
    check_schedule("learning_rate", config.learning_rate, jnp.int32)
    return make_optimizer(
        networks,
        config.learning_rate,
        config.gradient_clipping,
        config.weight_decay,
        adaptive=adaptive,
    )


def given_optimizer(
    networks: StatefulModule, optimizer: optax.GradientTransformation, replaced: Mapping[str, Any]
) -> nnx.Optimizer:
    """Return an optimiser that the user handed in, over a network's parameters.

    Args:
        networks: Whose parameters it is for.
        optimizer: The user's.
        replaced: Settings by name that it takes the place of; all must be None.

    Raises:
        TypeError: It is no `optax.GradientTransformation`.
        ValueError: One of the settings is not None.
        Exception: It cannot update the network's parameters; what it raises, with a note.
    """
    if not isinstance(optimizer, optax.GradientTransformation):
        wrapped = isinstance(optimizer, optax.MultiSteps)
        cure = " Hand in its .gradient_transformation()." if wrapped else ""
        raise TypeError(
            f"optimizer must be an optax.GradientTransformation, such as optax.adam(1e-3), got "
            f"{type(optimizer).__name__}.{cure}"
        )
    for name, value in replaced.items():
        if value is not None:
            raise ValueError(
                f"{name}={'a schedule' if callable(value) else value} has no effect with the "
                f"optimizer that was handed in. Build it into that one, for instance with "
                f"optax.chain, and leave {name} at its default; or hand in no optimizer."
            )
    own = nnx.Optimizer(networks, _with_extra_arguments(optimizer), wrt=nnx.Param)
    _check_update(networks, own)
    return own


@functools.lru_cache(maxsize=32)
def _with_extra_arguments(
    optimizer: optax.GradientTransformation,
) -> optax.GradientTransformationExtraArgs:
    """Return an optimiser that lets arguments be that it does not know; the same for the same."""
    return optax.with_extra_args_support(optimizer)


def _check_update(networks: StatefulModule, optimizer: nnx.Optimizer) -> None:
    """Raise if an optimiser cannot take a step, from shapes alone."""
    graphdef, variables = nnx.split((networks, optimizer))

    def update(variables: Any) -> None:
        network, live = nnx.merge(graphdef, variables, copy=True)
        live.update(network, nnx.state(network, nnx.Param))

    try:
        jax.eval_shape(update, variables)
    except Exception as error:
        error.add_note(
            "This came up in a trial of optimizer.update(gradients, state, params), which is how "
            "training calls the optimizer that was handed in. Leave out parts that need other "
            "arguments, such as the value=… of optax.contrib.reduce_on_plateau."
        )
        raise


def linear_rates(config: PPOConfig, steps: Float[Array, ""]) -> Float[Array, " updates"] | None:
    """Return the learning rates of an iteration's updates, None without `final_learning_rate`.

    They follow environment steps and not updates, some of which may be left out or may have been
    taken under other settings. Within the iteration they fall as evenly as from one to the next.

    Args:
        config: The configuration.
        steps: Environment steps before the iteration.
    """
    if config.final_learning_rate is None or callable(config.learning_rate):
        return None
    n_updates = config.n_epochs * config.n_minibatches
    within = jnp.arange(n_updates) / n_updates * (config.n_envs * config.rollout_length)
    ends = (config.learning_rate, config.final_learning_rate)
    schedule = optax.linear_schedule(*ends, max(config.total_steps, 1))
    return jnp.asarray(schedule(steps + within), jnp.float32)


def rate_changes(config: PPOConfig) -> bool:
    """Whether a configuration asks for a learning rate that is not constant."""
    changing = (config.adaptive_kl, config.final_learning_rate)
    return callable(config.learning_rate) or any(value is not None for value in changing)


def last_learning_rate(optimizer: nnx.Optimizer) -> Float[Array, ""] | None:
    """Return the rate of the last update, or None for an optimiser that was handed in."""
    state = optimizer.opt_state
    last = state[-1] if isinstance(state, tuple) and state else None
    return last.rate[...] if isinstance(last, RateState) else None
