"""The documented tutorial on custom modules runs as printed."""

import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax  # comes with flax
import pytest
from flax import nnx

from nnx_ppo.core.testing import check_module
from nnx_ppo.networks import Dense, Sequential, StatefulModule

PAGE = pathlib.Path(__file__).parents[2] / "../shared/spec/3-custom-modules-tutorial.txt"
TIME, BATCH = 4, 3

pytestmark = pytest.mark.skipif(not PAGE.exists(), reason="the documentation is not here")


def code_blocks(text):
    """Return the blocks of code of a page of plain text.

    A block starts at a line that starts an import or a class, and goes on while lines are
    indented, empty, or start another import or class.
    """
    start = re.compile(r"(import \w|from \w+(\.\w+)* import |class \w+.*:$|def \w+.*:$)")
    blocks, current = [], []
    for line in [*text.splitlines(), "end"]:
        if start.match(line) or (current and (not line or line[0] in " )")):
            current.append(line)
        elif current:
            blocks.append("\n".join(current))
            current = []
    return blocks


@pytest.fixture
def page():
    """What the page's code defines; its text takes `nnx` and `Dense` for granted."""
    names = {"nnx": nnx, "Dense": Dense, "__name__": "tutorial"}
    for block in code_blocks(PAGE.read_text()):
        exec(block, names)
    return names


def test_moving_average(page) -> None:
    module = page["MovingAverage"](feature_size=1, k=2)
    state, means = module.initialize_state(1), []
    for x in (2.0, 4.0, 6.0):
        out = module(state, jnp.array([[x]]))
        state = out.next_state
        means.append(float(out.output[0, 0]))
    assert means == [1.0, 3.0, 5.0]  # (0 + 2) / 2, (2 + 4) / 2, (4 + 6) / 2
    assert not module.reset_state(state)["buffer"].any()


@pytest.mark.parametrize("name", ["MovingAverage", "MovingAverageWithStats"])
def test_the_contract_is_kept(page, name) -> None:
    check_module(page[name](feature_size=2, k=3), jnp.zeros(2))


def test_children_are_traced(page) -> None:
    def complete(cls):
        call = lambda self, state, x, rollout_extras=None: None  # noqa: E731
        return type(cls.__name__, (cls,), {"__call__": call})

    zeros = nnx.Rngs(0)
    for module in (
        complete(page["TwoLayer"])(zeros),
        complete(page["StackOfLayers"])([8, 16, 4], zeros),
    ):
        assert isinstance(module, StatefulModule)
        assert len(jax.tree.leaves(nnx.state(module, nnx.Param))) == 4


def test_a_gradient_step_through_unroll_and_the_statistics(page) -> None:
    average = page["MovingAverageWithStats"](feature_size=4, k=3)
    net = Sequential([Dense(2, 4, nnx.Rngs(0)), average, Dense(4, 1, nnx.Rngs(1))])
    graphdef, params, rest = nnx.split(net, nnx.Param, ...)
    xs = jnp.asarray(np.random.default_rng(0).normal(size=(TIME, BATCH, 2)), jnp.float32)
    done = jnp.zeros((TIME, BATCH), bool).at[1, 0].set(True)
    carry = net.initialize_state(BATCH)
    optimizer = optax.sgd(0.1)

    @jax.jit
    def step(params):
        def loss(params):
            live = nnx.merge(graphdef, params, rest, copy=True)
            return jnp.mean(jnp.square(live.unroll(carry, xs, done).output - 1.0))

        value, gradients = jax.value_and_grad(loss)(params)
        changes, _ = optimizer.update(gradients, optimizer.init(params))
        return value, optax.apply_updates(params, changes)

    before, params = step(params)
    after, _ = step(params)
    assert after < before

    emitted = [jax.jit(lambda x: net(carry, x).rollout_extras)(x) for x in xs]
    net.update_statistics(jax.tree.map(lambda *leaves: jnp.stack(leaves), *emitted))
    assert int(average.count[...]) == TIME * BATCH
    inputs = jnp.stack([extras[1] for extras in emitted])
    np.testing.assert_allclose(average.mean[...], inputs.mean((0, 1)), rtol=1e-5, atol=1e-6)
