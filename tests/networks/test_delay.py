"""`Delay`: against a list, over windows, and messages."""

# Some tests hand in what the types forbid.
# pyright: reportArgumentType=false

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nnx_ppo.core import reset_where, unroll_stepwise
from nnx_ppo.networks.delay import Delay

TIME, BATCH = 9, 3
# One environment without an end, one with an end at every second step, one that is left alone
# for longer than the buffer and then ends twice in a row, the last time at the window's end.
DONE = np.array([[0] * 9, [0, 1] * 4 + [0], [0, 0, 0, 0, 0, 0, 0, 1, 1]], bool).T


def assert_equal(found, expected):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    assert [a.dtype for a in jax.tree.leaves(found)] == [b.dtype for b in jax.tree.leaves(expected)]


def delayed_by_list(xs, done, k_steps, fill):
    """The reference: for each environment a list of what is to come out."""
    outputs = np.zeros_like(xs)
    for env in range(xs.shape[1]):
        queue = [fill] * k_steps
        for t in range(len(xs)):
            queue.append(xs[t, env])
            outputs[t, env] = queue.pop(0)
            if done[t, env]:
                queue = [fill] * k_steps
    return outputs


@pytest.fixture(scope="module")
def xs():
    rng = np.random.default_rng(0)
    return {
        "float": jnp.asarray(rng.normal(size=(TIME, BATCH, 2)).astype(np.float32)),
        "others": [
            jnp.asarray(rng.integers(-9, 9, (TIME, BATCH))),
            jnp.asarray(rng.random((TIME, BATCH, 1, 2)) > 0.5),
        ],
    }


SAMPLE = {"float": np.zeros(2, np.float32), "others": [0, jax.ShapeDtypeStruct((1, 2), bool)]}


@pytest.mark.parametrize(("k_steps", "fill"), [(1, 0.0), (3, 1), (12, 0)])
def test_delays_as_a_list_does(xs, k_steps, fill) -> None:
    delay = Delay(SAMPLE, k_steps, initial_value=fill)
    carry = delay.initialize_state(BATCH)
    out = delay.unroll(carry, xs, jnp.asarray(DONE))
    expected = jax.tree.map(lambda x: delayed_by_list(x, DONE, k_steps, x.dtype.type(fill)), xs)
    assert_equal(out.output, expected)
    assert_equal(out, unroll_stepwise(delay, carry, xs, jnp.asarray(DONE)))


def test_windows_go_on_where_the_last_one_ended(xs) -> None:
    delay, done = Delay(SAMPLE, 3), jnp.asarray(DONE)
    whole = delay.unroll(delay.initialize_state(BATCH), xs, done)
    carry, outputs = delay.initialize_state(BATCH), []
    for start, stop in [(0, 1), (1, 3), (3, 9)]:  # shorter and longer than the buffer
        part = jax.tree.map(lambda x, a=start, b=stop: x[a:b], xs)
        out = delay.unroll(carry, part, done[start:stop])
        carry = out.next_state
        outputs.append(out.output)
    assert_equal(jax.tree.map(lambda *parts: jnp.concatenate(parts), *outputs), whole.output)
    assert_equal(carry, whole.next_state)


def test_step_by_hand() -> None:
    delay = Delay(jnp.zeros(1), 2, initial_value=-1.0)
    carry, outputs = delay.initialize_state(2), []
    for t in range(5):
        out = delay(carry, jnp.full((2, 1), float(t)))
        carry = reset_where(delay, jnp.array([False, t == 2]), out.next_state)
        outputs.append(out.output[:, 0])
        assert (out.metrics, out.rollout_extras, float(out.regularization_loss)) == ({}, None, 0.0)
    # Env 0: two fills, then 0, 1, 2. Env 1 ends after step 2: the fills come again.
    np.testing.assert_array_equal(np.stack(outputs, 1), [[-1, -1, 0, 1, 2], [-1, -1, 0, -1, -1]])
    # Env 0 wrote 4 at 4 % 2 and 3 at 3 % 2; env 1 began anew at 0 with steps 3 and 4.
    np.testing.assert_array_equal(carry["buffer"][..., 0], [[4, 3], [3, 4]])
    np.testing.assert_array_equal(carry["idx"], [1, 0])


def test_carry() -> None:
    delay = Delay({"x": 1.5}, 4, initial_value=7.0)
    carry = delay.initialize_state(2)
    assert carry.keys() == {"buffer", "idx"} and carry["idx"].dtype == jnp.int32
    np.testing.assert_array_equal(carry["buffer"]["x"], np.full((2, 4), 7.0, np.float32))
    used = {"buffer": {"x": jnp.arange(8.0).reshape(2, 4)}, "idx": jnp.array([3, 1])}
    assert_equal(delay.reset_state(used), carry)
    single = delay.reset_state(jax.tree.map(lambda leaf: leaf[0], used))
    assert_equal(single, jax.tree.map(lambda leaf: leaf[0], carry))
    assert not any(leaf.weak_type for leaf in jax.tree.leaves(carry))


def test_gradients_are_those_of_the_steps() -> None:
    delay, done = Delay(jnp.zeros(2), 3), jnp.asarray(DONE)
    weights = np.random.default_rng(1).normal(size=(TIME + 3, BATCH, 2)).astype(np.float32)
    idx = jnp.array([0, 1, 2])

    def loss(unroll, buffer, xs):
        out = unroll({"buffer": buffer, "idx": idx}, xs, done)
        shown = jnp.sum(out.output * weights[:TIME])
        return shown + jnp.sum(out.next_state["buffer"] * weights[TIME:].swapaxes(0, 1))

    grad = jax.grad(loss, argnums=(1, 2))
    buffer, xs = jnp.ones((BATCH, 3, 2)), jnp.ones((TIME, BATCH, 2))
    found = grad(delay.unroll, buffer, xs)
    stepwise = grad(lambda *args: unroll_stepwise(delay, *args), buffer, xs)
    assert_equal(found, stepwise)
    # Env 0 has no end: x[0] comes out at step 3 and nowhere else.
    np.testing.assert_array_equal(found[1][0, 0], weights[3, 0])
    # Env 1 ends after step 1: what came in at steps 0 and 1 never comes out.
    np.testing.assert_array_equal(found[1][:2, 1], np.zeros((2, 2)))


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("args", "error", "message"),
    [
        ((0.0, 0), ValueError, "Delay: k_steps must be at least 1, got 0"),
        ((0.0, 1.5), TypeError, "Delay: k_steps must be an integer, got 1.5"),
        (({}, 1), ValueError, "sample_input has no leaves, got {}"),
        (({"x": "text"}, 1), TypeError, "sample_input must be a tree of arrays and numbers"),
        ((0.0, 1, "x"), TypeError, r"initial_value must be a number, got 'x' \(str\)"),
        (({"n": 3}, 1, 0.5), ValueError, r"initial_value=0.5 .* sample_input\['n'\] is int32"),
        ((np.uint8(3), 1, -1), ValueError, "initial_value=-1 .* sample_input is uint8"),
        ((3, 1, float("nan")), ValueError, "initial_value=nan .* is int32"),
        ((True, 1, 2), ValueError, "initial_value=2 .* is bool"),
        ((np.float16(0), 1, 1e6), ValueError, "initial_value=1000000.0 .* is float16"),
        ((jax.random.key(0), 1), ValueError, "initial_value=0.0 .* is key<fry>"),
    ],
)
def test_messages_of_the_constructor(args, error, message) -> None:
    with pytest.raises(error, match=message):
        Delay(*args)


@pytest.mark.usefixtures("unchecked")
def test_messages_about_the_input() -> None:
    delay = Delay({"a": np.zeros(2), "n": 0}, 2)
    carry = delay.initialize_state(3)
    n = jnp.zeros(3, jnp.int32)
    with pytest.raises(ValueError, match=r"tree of sample_input, expected .*'n'.* got PyTreeDef"):
        delay(carry, {"a": jnp.zeros((3, 2))})
    with pytest.raises(ValueError, match=r"x\['a'\] .* float32\[3, 2\], got float32\[3, 1\]"):
        delay(carry, {"a": jnp.zeros((3, 1)), "n": n})
    with pytest.raises(ValueError, match=r"x\['a'\] .* float32\[3, 2\], got float32\[4, 2\]"):
        delay(carry, {"a": jnp.zeros((4, 2)), "n": n})
    with pytest.raises(ValueError, match=r"x\['n'\] .* int32\[3\], got float32\[3\]"):
        delay(carry, {"a": jnp.zeros((3, 2)), "n": jnp.zeros(3)})
    with pytest.raises(ValueError, match=r"x\['a'\] .* float32\[5, 3, 2\], got float32\[3, 5, 2\]"):
        delay.unroll(carry, {"a": jnp.zeros((3, 5, 2)), "n": n}, jnp.zeros((5, 3), bool))


def test_special_numbers_fill_floats() -> None:
    assert bool(jnp.isnan(Delay(0.0, 1, float("nan")).initialize_state(1)["buffer"]).all())
    assert Delay(jnp.bfloat16(0), 1, 0.1).initialize_state(1)["buffer"].dtype == jnp.bfloat16
