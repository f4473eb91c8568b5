"""The kit finds each way of breaking the contract by the right rule, and says where."""

import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.core import Tracer

from nnx_ppo.core import StatefulModule, StatefulModuleOutput, UnrollOutput
from nnx_ppo.core.testing import ContractError, ContractWarning, check_module

X = jnp.zeros(2)


class Statistic(nnx.Variable):
    pass


class Memory(StatefulModule):
    """A right module, of which the broken ones are made: level' = gain · level + x."""

    def __init__(self):
        self.gain = nnx.Param(jnp.full(2, 0.5))

    def __call__(self, state, x, rollout_extras=None):
        level = self.gain[...][None] * state + x
        return StatefulModuleOutput(level, level, jnp.square(level).sum(-1), {})

    def initialize_state(self, batch_size) -> Any:
        return jnp.zeros((batch_size, 2))

    def reset_state(self, prev_state) -> Any:
        return jnp.zeros_like(prev_state)


class Affine(StatefulModule):
    """A right module without memory."""

    def __init__(self):
        self.gain = nnx.Param(jnp.full(2, 0.5))

    def __call__(self, state, x, rollout_extras=None):
        return StatefulModuleOutput(state, self.gain[...][None] * x, jnp.zeros(()), {})


class Centred(StatefulModule):
    """A right module with statistics."""

    def __init__(self):
        self.mean = Statistic(jnp.zeros(2))

    def __call__(self, state, x, rollout_extras=None):
        return StatefulModuleOutput(state, x - self.mean[...][None], jnp.zeros(()), {}, x)

    def update_statistics(self, rollout_extras):
        self.mean[...] = rollout_extras.mean((0, 1))


class Gaussian(StatefulModule):
    """A right sampler, with unit deviation."""

    deterministic = False

    def __init__(self):
        self.stream = nnx.Rngs(0).action.fork()
        self.deterministic = False

    def __call__(self, state, x, rollout_extras=None):
        action = self.choose(x, rollout_extras)
        output = {"action": action, "log_likelihood": -0.5 * jnp.square(action - x).sum(-1)}
        return StatefulModuleOutput(state, output, jnp.zeros(()), {}, action)

    def choose(self, x, stored):
        if self.deterministic:
            return jax.lax.stop_gradient(x)
        fresh = x + jax.random.normal(self.stream(), x.shape)
        return jax.lax.stop_gradient(fresh if stored is None else stored)


class Pair(StatefulModule):
    """A right container: a memory, then statistics."""

    def __init__(self):
        self.first, self.second = Memory(), Centred()

    def __call__(self, state, x, rollout_extras=None):
        stored = rollout_extras or {"first": None, "second": None}
        one = self.first(state["first"], x, stored["first"])
        two = self.second(state["second"], one.output, stored["second"])
        return StatefulModuleOutput(
            {"first": one.next_state, "second": two.next_state},
            two.output,
            one.regularization_loss + two.regularization_loss,
            {},
            {"first": one.rollout_extras, "second": two.rollout_extras},
        )

    def initialize_state(self, batch_size):
        return {"first": self.first.initialize_state(batch_size), "second": ()}

    def reset_state(self, prev_state):
        return {"first": self.first.reset_state(prev_state["first"]), "second": ()}

    def update_statistics(self, rollout_extras):
        self.second.update_statistics(rollout_extras["second"])


@pytest.mark.parametrize("cls", [Memory, Affine, Centred, Gaussian, Pair])
def test_right_modules_pass(cls) -> None:
    module = cls()
    before = jax.tree.map(jnp.copy, nnx.state(module))
    check_module(module, X)
    assert jax.tree.all(jax.tree.map(lambda a, b: jnp.all(a == b), before, nnx.state(module)))


def altering(base, **changes):
    """Return a module of `base` that returns other fields: name=(out, state, x) -> new."""

    class Altered(base):
        def __call__(self, state, x, rollout_extras=None):
            out = super().__call__(state, x, rollout_extras)
            return out.replace(**{name: new(out, state, x) for name, new in changes.items()})

    return Altered()


def overriding(base, **methods):
    """Return a module of `base` with other methods."""
    return type("Overridden", (base,), methods)()


def holding(value):
    """Return a right module with one attribute more."""
    module: Any = Affine()
    module.extra = value
    return module


def adding(offset):
    """Return a module whose output is that of `Memory` plus `offset(self, state, x)`."""

    class Adding(Memory):
        def __init__(self):
            super().__init__()
            self.count = Statistic(jnp.zeros(()))
            self.stream = nnx.Rngs(0).noise.fork()
            self.calls = 0

        def __call__(self, state, x, rollout_extras=None):
            out = super().__call__(state, x)
            return out.replace(output=out.output + offset(self, state, x))

    return Adding()


def count_in_python(self, state, x):
    self.calls += 1
    return 0.0


def count_in_a_variable(self, state, x):
    self.count[...] += 1.0
    return self.count[...]


def shared_counter():
    tally = types.SimpleNamespace(calls=0)

    def offset(self, state, x):
        tally.calls += 1
        return float(tally.calls)

    return adding(offset)


def branch_on_a_value(self, state, x):
    return 1.0 if x.sum() > 0 else 0.0


class Writing(Memory):
    """Writes into the carry that it was given."""

    def __call__(self, state, x, rollout_extras=None):
        state["level"] = 0.5 * state["level"] + x
        out = super().__call__(state["level"], x)
        return out.replace(next_state=dict(state))

    def initialize_state(self, batch_size):
        return {"level": jnp.zeros((batch_size, 2))}

    def reset_state(self, prev_state):
        return {"level": jnp.zeros_like(prev_state["level"])}


class Learned(Memory):
    """Starts at a level that is learned."""

    def __init__(self):
        super().__init__()
        self.start = nnx.Param(jnp.zeros(2))

    def initialize_state(self, batch_size):
        return jnp.broadcast_to(self.start[...], (batch_size, 2))


class Untyped(Memory):
    """Its first carry has a weak type."""

    def initialize_state(self, batch_size):
        return jnp.full((batch_size, 2), 0.0)

    def reset_state(self, prev_state):
        return jnp.zeros_like(prev_state)


class Counting(Memory):
    """Its count of steps is an integer first and a float later."""

    def __call__(self, state, x, rollout_extras=None):
        out = super().__call__(state["level"], x)
        return out.replace(next_state={"level": out.next_state, "count": state["count"] + 1.0})

    def initialize_state(self, batch_size):
        return {"level": jnp.zeros((batch_size, 2)), "count": jnp.zeros(batch_size, jnp.int32)}

    def reset_state(self, prev_state):
        return jax.tree.map(jnp.zeros_like, prev_state)


class OneClock(Counting):
    """Has one count for all environments."""

    def __call__(self, state, x, rollout_extras=None):
        out = Memory.__call__(self, state["level"], x)
        return out.replace(next_state={"level": out.next_state, "count": state["count"] + 1})

    def initialize_state(self, batch_size):
        return {"level": jnp.zeros((batch_size, 2)), "count": jnp.zeros((), jnp.int32)}


class KeyedSampler(Gaussian):
    """Draws the action again from a key in the carry instead of storing it."""

    def __call__(self, state, x, rollout_extras=None):
        pairs = jax.vmap(jax.random.split)(state)
        noise = jax.vmap(lambda key: jax.random.normal(key, (2,)))(pairs[:, 1])
        action = x if self.deterministic else jax.lax.stop_gradient(x + noise)
        output = {"action": action, "log_likelihood": -0.5 * jnp.square(action - 2 * x).sum(-1)}
        return StatefulModuleOutput(pairs[:, 0], output, jnp.zeros(()), {})

    def initialize_state(self, batch_size):
        return jax.random.split(self.stream(), batch_size)


class OneKeyForAll(Gaussian):
    """Has a key for each environment, and draws the noise of the batch from the first."""

    def __call__(self, state, x, rollout_extras=None):
        pairs = jax.vmap(jax.random.split)(state)
        noise = 0.0 if self.deterministic else jax.random.normal(pairs[0, 1], x.shape)
        return StatefulModuleOutput(pairs[:, 0], x + noise, jnp.zeros(()), {})

    def initialize_state(self, batch_size):
        return jax.random.split(self.stream(), batch_size)


class StoredLikelihood(Gaussian):
    """Emits the likelihood and hands it back in the replay."""

    def __call__(self, state, x, rollout_extras=None):
        stored = None if rollout_extras is None else rollout_extras["raw"]
        out = super().__call__(state, x, stored)
        if rollout_extras is not None:
            out.output["log_likelihood"] = rollout_extras["likelihood"]
        extras = {"raw": out.output["action"], "likelihood": out.output["log_likelihood"]}
        return out.replace(rollout_extras=extras)


class StoredNoise(StatefulModule):
    """Draws noise, in evaluation too, and stores it."""

    def __init__(self):
        self.stream = nnx.Rngs(0).noise.fork()

    def __call__(self, state, x, rollout_extras=None):
        fresh = jax.random.normal(self.stream(), x.shape)
        noise = fresh if rollout_extras is None else rollout_extras
        return StatefulModuleOutput(state, x + noise, jnp.zeros(()), {}, noise)


def never_resetting(self, state, xs, done, rollout_extras=None):
    return StatefulModule.unroll(self, state, xs, jnp.zeros_like(done), rollout_extras)


def without_gradient(self, state, xs, done, rollout_extras=None):
    out = StatefulModule.unroll(self, state, xs, done, rollout_extras)
    return UnrollOutput(out.next_state, jax.lax.stop_gradient(out.output), out.regularization_loss)


def drawing_once(self, state, xs, done, rollout_extras=None):
    out = StatefulModule.unroll(self, state, xs, done, rollout_extras)
    self.stream()
    return out


def on_the_host(x):
    return jax.pure_callback(np.asarray, jax.ShapeDtypeStruct(x.shape, x.dtype), x)


def update_with(write):
    """Return a module with statistics and a parameter, and an `update_statistics` of its own."""

    class Updating(Centred):
        def __init__(self):
            super().__init__()
            self.gain = nnx.Param(jnp.ones(2))

        def __call__(self, state, x, rollout_extras=None):
            out = super().__call__(state, x)
            return out.replace(output=self.gain[...][None] * out.output)

        def update_statistics(self, rollout_extras):
            write(self, rollout_extras)

    return Updating()


def write_parameter(self, extras):
    self.mean[...] = extras.mean((0, 1))
    self.gain[...] = self.gain[...] * 0.5


def write_integers(self, extras):
    self.mean.set_value(extras.mean((0, 1)).astype(jnp.int32))


def twice(self, rollout_extras):
    self.second.update_statistics(rollout_extras["second"])
    self.second.update_statistics(rollout_extras["second"])


def listed(self, state, x, rollout_extras=None):
    stored = rollout_extras and {"first": rollout_extras[0], "second": rollout_extras[1]}
    out = Pair.__call__(self, state, x, stored)
    return out.replace(rollout_extras=list(out.rollout_extras.values()))


def update_listed(self, rollout_extras):
    self.second.update_statistics(rollout_extras[1])


ROOT_OF_ABS = altering(
    Affine, output=lambda out, state, x: jnp.where(x > 9, jnp.sqrt(jnp.maximum(x, 0)), out.output)
)

# name: (module, the rule that breaks, what its message must hold)
BROKEN = {
    "returns an array": (
        overriding(Affine, __call__=lambda self, state, x, rollout_extras=None: x),
        "runs",
        "a StatefulModuleOutput",
    ),
    "raises": (altering(Affine, output=lambda out, state, x: x["goal"]), "runs", "Error"),
    "metrics are no dict": (altering(Affine, metrics=lambda out, state, x: [1]), "runs", "metrics"),
    "a word in the extras": (
        altering(Affine, rollout_extras=lambda out, state, x: {"phase": "early"}),
        "runs",
        "rollout_extras['phase']",
    ),
    "bare array": (holding(jnp.ones(2)), "hidden-state", "self.extra"),
    "bare numpy array": (holding(np.ones(2)), "hidden-state", "self.extra"),
    "module in a closure": (
        (lambda inner: holding(lambda x: inner((), x)))(Affine()),
        "hidden-state",
        "closes over 'inner'",
    ),
    "array in a closure": (
        (lambda weight: holding(lambda x: weight * x))(jnp.ones(2)),
        "hidden-state",
        "closes over 'weight'",
    ),
    "module in a plain object": (
        holding(types.SimpleNamespace(inner=Affine())),
        "hidden-state",
        "self.extra.inner",
    ),
    "bound method of a module": (holding(Affine().__call__), "hidden-state", "__self__"),
    "attribute without hash": (holding([1, 2]), "hidden-state", "self.extra"),
    "noise from numpy": (
        adding(lambda self, state, x: float(np.random.default_rng().normal())),
        "pure",
        "output",
    ),
    "counter in Python": (adding(count_in_python), "pure", "self.calls"),
    "counter out of sight": (shared_counter(), "pure", "output"),
    "statistics in the forward pass": (adding(count_in_a_variable), "pure", "self.count"),
    "writes into the carry": (Writing(), "pure", "arguments after the call"),
    "Python if": (adding(branch_on_a_value), "transforms", "under jax.jit"),
    "no vmap": (
        altering(Affine, output=lambda out, state, x: on_the_host(jax.lax.stop_gradient(x))),
        "transforms",
        "under jax.vmap",
    ),
    "output without batch axis": (
        altering(Affine, output=lambda out, state, x: x.mean(0)),
        "batch-axis",
        "output",
    ),
    "extras without batch axis": (
        altering(Affine, rollout_extras=lambda out, state, x: {"n": jnp.zeros(3)}),
        "batch-axis",
        "rollout_extras['n']",
    ),
    "one clock for all": (OneClock(), "batch-axis", "initialize_state['count']"),
    "loss for each feature": (
        altering(Memory, regularization_loss=lambda out, state, x: jnp.square(x)),
        "batch-axis",
        "regularization_loss",
    ),
    "carry changes dtype": (Counting(), "carry", "next_state['count']"),
    "carry has a weak type": (Untyped(), "carry", "weak type"),
    "carry changes tree": (
        altering(Memory, next_state=lambda out, state, x: {"level": out.next_state}),
        "carry",
        "next_state",
    ),
    "reset changes tree": (
        overriding(Memory, reset_state=lambda self, prev_state: ()),
        "carry",
        "reset_state(next_state)",
    ),
    "no reset": (
        overriding(Memory, reset_state=StatefulModule.reset_state),
        "reset",
        "as initialize_state returns",
    ),
    "reset forgets the learned start": (Learned(), "reset", "as initialize_state returns"),
    "reset assumes a batch": (
        overriding(Memory, reset_state=lambda self, prev_state: jnp.zeros((len(prev_state), 2))),
        "reset",
        "carry of one",
    ),
    "reset mixes environments": (
        overriding(Memory, reset_state=lambda self, prev_state: prev_state - prev_state[:1]),
        "reset",
        "whatever the order",
    ),
    "NaN": (altering(Affine, output=lambda out, state, x: jnp.log(x)), "finite", "output"),
    "noise that is not stored": (
        adding(lambda self, state, x: jax.random.normal(self.stream(), x.shape)),
        "replay",
        "as in the rollout",
    ),
    "action drawn again": (KeyedSampler(), "sampler", "output['action']"),
    "stored likelihood": (StoredLikelihood(), "sampler", "log_likelihood"),
    "never deterministic": (
        overriding(
            Gaussian,
            choose=lambda self, x, stored: jax.lax.stop_gradient(
                x + jax.random.normal(self.stream(), x.shape) if stored is None else stored
            ),
        ),
        "eval",
        "after eval()",
    ),
    "mean over the batch": (
        altering(Memory, output=lambda out, state, x: out.output - x.mean(0, keepdims=True)),
        "per-sample",
        "output",
    ),
    "loss summed over the batch": (
        altering(Memory, regularization_loss=lambda out, state, x: jnp.square(x).sum()),
        "per-sample",
        "regularization_loss",
    ),
    "loss averaged over the batch": (
        altering(Memory, regularization_loss=lambda out, state, x: jnp.square(x).mean()),
        "per-sample",
        "regularization_loss",
    ),
    "one key for the batch": (OneKeyForAll(), "per-sample", "output in the replay"),
    "loss averaged where evaluation is noisy": (
        altering(
            StoredNoise, regularization_loss=lambda out, state, x: jnp.square(out.output).mean()
        ),
        "per-sample",
        "regularization_loss in the replay",
    ),
    "container loses a carry": (
        altering(Pair, next_state=lambda out, state, x: state),
        "routing",
        "carry given to self.first",
    ),
    "container loses extras": (
        altering(
            Pair,
            rollout_extras=lambda out, state, x: {**out.rollout_extras, "first": x},
        ),
        "routing",
        "rollout_extras given to self.first",
    ),
    "extras with other keys": (
        overriding(Pair, __call__=listed, update_statistics=update_listed),
        "extras",
        "keys of the state",
    ),
    "container forgets statistics": (
        overriding(Pair, update_statistics=StatefulModule.update_statistics),
        "statistics",
        "self.second",
    ),
    "container updates twice": (
        overriding(Pair, update_statistics=twice),
        "statistics",
        "update_statistics of self.second",
    ),
    "statistics write a parameter": (update_with(write_parameter), "statistics", "self.gain"),
    "statistics change dtype": (update_with(write_integers), "statistics", "int32"),
    "statistics write nothing": (update_with(lambda self, extras: None), "statistics", "mean"),
    "unroll without resets": (
        overriding(Memory, unroll=never_resetting),
        "unroll",
        "as unroll_stepwise gives",
    ),
    "unroll without gradient": (
        overriding(Memory, unroll=without_gradient),
        "unroll",
        "gradient of unroll",
    ),
    "unroll with another stream": (
        overriding(Gaussian, unroll=drawing_once),
        "unroll",
        "['variables']",
    ),
    "gradient is NaN": (ROOT_OF_ABS, "gradient", "a finite gradient"),
}


@pytest.mark.filterwarnings("ignore::nnx_ppo.core.testing.ContractWarning")
@pytest.mark.parametrize("name", BROKEN)
def test_each_way_to_break_the_contract_is_found(name: str) -> None:
    module, rule, message = BROKEN[name]
    with pytest.raises(ContractError) as caught:
        check_module(module, X)
    assert {finding.rule for finding in caught.value.findings} == {rule}
    assert message in str(caught.value)
    for finding in caught.value.findings:
        assert finding.where and finding.expected and finding.got and finding.cure


@pytest.mark.parametrize(
    ("base", "rules"),
    [
        (Memory, ["reset", "per-sample"]),
        (type(adding(count_in_a_variable)), ["pure", "reset"]),  # nothing is said about its losses
    ],
)
def test_all_broken_rules_are_reported(base, rules) -> None:
    keeping = type(overriding(base, reset_state=StatefulModule.reset_state))
    module = altering(keeping, regularization_loss=lambda out, state, x: jnp.square(x).sum())
    with pytest.raises(ContractError, match=", ".join(rules)) as caught:
        check_module(module, X)
    assert {finding.rule for finding in caught.value.findings} == set(rules)


def test_a_rule_can_be_skipped() -> None:
    check_module(overriding(Memory, reset_state=StatefulModule.reset_state), X, skip=["reset"])


def test_a_parameter_without_gradient_is_a_warning() -> None:
    module: Any = Affine()
    module.unused = nnx.Param(jnp.ones(3))
    with pytest.warns(ContractWarning, match="unused"):
        check_module(module, X)


def test_inputs_are_drawn_like_the_sample_or_as_told() -> None:
    seen = []

    class Looking(StatefulModule):
        def __call__(self, state, x, rollout_extras=None):
            if not isinstance(x["n"], Tracer):
                seen.append(x)
            return StatefulModuleOutput(state, x["n"], jnp.zeros(()), {})

    sample = {"n": jnp.array([3, 1]), "on": jnp.array(True), "f": np.float32(0)}
    check_module(Looking(), sample)
    assert {key: (leaf.shape, str(leaf.dtype)) for key, leaf in seen[0].items()} == {
        "n": ((3, 2), "int32"),
        "on": ((3,), "bool"),
        "f": ((3,), "float32"),
    }
    assert 0 <= int(seen[0]["n"].min()) and int(seen[0]["n"].max()) <= 3
    seen.clear()
    check_module(Looking(), None, draw_input=lambda key: {"n": jax.random.randint(key, (), 7, 9)})
    assert set(np.unique(seen[0]["n"])) <= {7, 8}


def test_bad_arguments(unchecked) -> None:
    with pytest.raises(TypeError, match="pass an instance"):
        check_module(Affine, X)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="names no rule .'resets'"):
        check_module(Affine(), X, skip=["resets"])
