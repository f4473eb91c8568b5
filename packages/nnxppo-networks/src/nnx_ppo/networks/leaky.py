"""`LeakyRNN`: rate units with time constants."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Key

from nnx_ppo.core import StatefulModuleOutput, UnrollOutput
from nnx_ppo.networks._keys import initial_keys, split_keys, split_keys_over_time
from nnx_ppo.networks._streams import fork_stream
from nnx_ppo.networks.recurrent._base import RecurrentLayer

State = dict[str, Float[Array, "*batch hidden"] | Key[Array, "*batch"]]


class TimeConstant(nnx.Variable):
    """Time constants as they were given: kept in checkpoints, never trained."""


class LeakyRNN(RecurrentLayer):
    """Leaky rate units, `tau dh/dt = -h + R f(h) + W x + b`, with rates `f(h)` as output.

    One call is one step of forward Euler with `alpha = dt / tau` (the model and its discretisation
    as in Song, Yang and Wang, 2016, PLoS Comput. Biol. 12(2), e1004792):

        h' = (1 - alpha) h + alpha (R f(h) + W x + b) + sqrt(alpha (2 - alpha)) noise_std xi

    Each unit forgets with its own time constant; it is stable on its own for `dt <= tau`. `xi` is
    standard normal, one draw for each unit and step. The factor before it gives a unit without
    recurrent input the standard deviation `noise_std` at rest, whatever `dt` and `tau`; it is
    `sqrt(2 alpha)`, as in the paper, for `dt` much below `tau`.

    The carry is a dict: `h`, `(batch, hidden_features)`, and with noise also `keys`,
    `(batch,)`, one for each environment. They are split at each step, in evaluation too, and go
    on when `h` is reset, so that the replay repeats the rollout's noise.

    A trained time constant is `dt + (tau - dt) softplus(s) / log 2`, with a parameter `s` for each
    unit (`tau_scale`) that starts from 0: it is `tau` at first, never below `dt`, and the same
    step of `s` changes it by the same fraction whether it is short or long. With `tau = dt` and
    no noise, rates follow the equation of an `RNN`.

    Args:
        in_features: Number of input features.
        hidden_features: Number of units, which is the size of the output.
        rngs: Draws the initial parameters and, with noise, gives the layer a stream for its first
            keys: from the stream `noise` if there is one, otherwise from the default stream.
        dt: Duration of one call, in the unit of `tau`: 1 if `tau` counts environment steps,
            `env.dt` if it is in seconds.
        tau: Time constant of all units, or of each.
        trainable_tau: Learn a time constant for each unit, from `tau`.
        activation: `f`, from the state of a unit to its rate.
        noise_std: Standard deviation of the noise, in units of `h`. There is none in
            deterministic mode.
        kernel_init: Initializer of `W`; None is flax's for dense layers.
        recurrent_kernel_init: Initializer of `R`; None is orthogonal.
        bias_init: Initializer of `b`; None is zeros.
        trainable_initial_state: Learn `h` at the start of an episode, from zeros.

    Attributes:
        deterministic: Whether to leave the noise out; `network.eval()` sets it,
            `network.train()` clears it.

    Raises:
        TypeError: A size is not an integer, or `rngs` is not an `nnx.Rngs`.
        ValueError: A size is below 1; `dt` or `noise_std` is out of range; `tau` is below `dt`, or
            not above it although it is trained, or has another number of units.

    Example:
        >>> layer = LeakyRNN(3, 4, nnx.Rngs(0), dt=0.02, tau=[0.02, 0.1, 0.5, 2.0])
        >>> out = layer(layer.initialize_state(2), jnp.ones((2, 3)))
        >>> out.output.shape, bool((out.output == jnp.tanh(out.next_state["h"])).all())
        ((2, 4), True)
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        rngs: nnx.Rngs,
        *,
        dt: float = 1.0,
        tau: float | Sequence[float] | Array | np.ndarray = 10.0,
        trainable_tau: bool = False,
        activation: Callable[[Array], Array] = nnx.tanh,
        noise_std: float = 0.0,
        kernel_init: Callable[..., Array] | None = None,
        recurrent_kernel_init: Callable[..., Array] | None = None,
        bias_init: Callable[..., Array] | None = None,
        trainable_initial_state: bool = False,
    ) -> None:
        super().__init__(in_features, hidden_features, trainable_initial_state)
        self.dt = _checked_number(dt, "dt", dt > 0, "above 0")
        self.noise_std = _checked_number(noise_std, "noise_std", noise_std >= 0, "0 or more")
        self.start_tau = TimeConstant(
            jnp.asarray(_checked_tau(tau, self.dt, self.hidden_features, trainable_tau))
        )
        self.tau_scale = nnx.Param(jnp.zeros(self.hidden_features)) if trainable_tau else None
        self.cell = self._make_cell(
            nnx.SimpleCell,
            rngs,
            activation_fn=activation,
            kernel_init=kernel_init,
            recurrent_kernel_init=recurrent_kernel_init,
            bias_init=bias_init,
        )
        self.rng = fork_stream(rngs, "noise", "LeakyRNN: rngs") if self.noise_std else None
        self.deterministic = False

    @property
    def tau(self) -> Float[Array, " hidden"]:
        """The time constants as they are now, in the unit of `dt`."""
        if self.tau_scale is None:
            return self.start_tau[...]
        factor = jax.nn.softplus(self.tau_scale[...]) / math.log(2.0)
        return self.dt + (self.start_tau[...] - self.dt) * factor

    def initialize_state(self, batch_size: int) -> State:
        """Return the carry at the start of an episode; with noise, its keys come from the stream.

        Args:
            batch_size: Number of environments.
        """
        start = self._start((batch_size,))
        return start if self.rng is None else {**start, "keys": initial_keys(self.rng, batch_size)}

    def reset_state(self, prev_state: State) -> State:
        """Return the carry with `h` as at the start of an episode; keys go on."""
        return {**prev_state, **self._start(prev_state["h"].shape[:-1])}

    def __call__(
        self, state: State, x: Float[Array, "*batch features"], rollout_extras: Any = None
    ) -> StatefulModuleOutput:
        """Run one step.

        Args:
            state: The carry.
            x: The input, `(batch, in_features)`.
            rollout_extras: Ignored.

        Raises:
            ValueError: `x` has not `in_features` features.
        """
        if self.rng is None:
            return super().__call__(state, x, rollout_extras)
        self._check_input(x)
        keys, step_keys = split_keys(state["keys"])
        units: State = {"h": state["h"]}
        drive = self._noisy(self._project(x), step_keys)
        units = self._update(units, self._total(self._output(units), drive))
        next_state = {**units, "keys": keys}
        return StatefulModuleOutput(next_state, self._output(units), jnp.zeros(()), {})

    def unroll(
        self,
        state: State,
        xs: Float[Array, "time batch features"],
        done: Bool[Array, "time batch"],
        rollout_extras: Any = None,
    ) -> UnrollOutput:
        """Run a window of steps as `RecurrentLayer` does, with all the noise drawn at once."""
        if self.rng is None:
            return super().unroll(state, xs, done, rollout_extras)
        self._check_input(xs)
        keys, step_keys = split_keys_over_time(state["keys"], len(done))
        drives = self._noisy(self._project_window(xs), step_keys)
        out = self._unroll_drives({"h": state["h"]}, drives, done)
        return out.replace(next_state={**out.next_state, "keys": keys})

    def _project(self, x: Array) -> Array:
        return self.cell.dense_i(x)

    def _output(self, state: State) -> Array:
        return self.cell.activation_fn(state["h"])

    def _recur(self, sent: Array) -> Array:
        return self.cell.dense_h(sent)

    def _update(self, state: State, total: Array) -> State:
        h = state["h"]
        return {"h": h + self._alpha(h.ndim) * (total - h)}

    def _alpha(self, ndim: int) -> Array:
        """Return `dt / tau` with so many axes, the last of which are the units."""
        return jnp.expand_dims(self.dt / self.tau, range(ndim - 1))

    def _noisy(self, drive: Array, keys: Key[Array, "*batch"]) -> Array:
        """Return the drive with the noise of a step in it, drawn from one key for each sample."""
        if self.deterministic:
            return drive
        xi = jax.vmap(lambda key: jax.random.normal(key, drive.shape[-1:], drive.dtype))
        alpha = self._alpha(drive.ndim)
        size = self.noise_std * jnp.sqrt((2.0 - alpha) / alpha)  # `_update` multiplies by alpha
        return drive + size * xi(keys.reshape(-1)).reshape(drive.shape)

    def _join(self, parts: tuple[Array, ...]) -> State:
        (h,) = parts
        return {"h": h}


def _checked_number(value: float, name: str, valid: bool, rule: str) -> float:
    if not (valid and math.isfinite(value)):
        raise ValueError(f"LeakyRNN: {name} must be finite and {rule}, got {value!r}.")
    return float(value)


def _checked_tau(tau: Any, dt: float, units: int, trainable: bool) -> np.ndarray:
    """Return the time constant of each unit, `(units,)`.

    Raises:
        ValueError: Their number is wrong, or one is too short for `dt`.
    """
    values = np.asarray(tau, np.float32)
    if values.shape not in {(), (units,)}:
        raise ValueError(
            "LeakyRNN: tau must be one number or one for each of hidden_features="
            f"{units} units, got shape {values.shape}."
        )
    values = np.broadcast_to(values, (units,))
    valid = np.isfinite(values) & (values > dt if trainable else values >= dt)
    if not valid.all():
        unit = int(np.argmin(valid))
        rule = "above dt if it is trained" if trainable else "at least dt"
        raise ValueError(
            f"LeakyRNN: tau must be finite and {rule}, got {values[unit]:g} for unit {unit} with "
            f"dt={dt:g}: a longer step than the time constant overshoots. Lengthen tau or "
            "shorten dt; both are in the same unit."
        )
    return values
