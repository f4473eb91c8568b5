"""Recurrent layers: flax's cells step by step, numbers by hand, carries, time constants."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from nnx_ppo.core import owns_random_stream, unroll_stepwise
from nnx_ppo.networks import Dense
from nnx_ppo.networks.leaky import LeakyRNN
from nnx_ppo.networks.recurrent import GRU, LSTM, RNN, InitialCarry, Recurrent

TIME, BATCH = 4, 3
DONE = np.array([[0, 1, 0], [1, 0, 0], [0, 0, 0], [1, 1, 0]], bool)
CONSTANT = nnx.initializers.constant


def draw(shape, seed=0):
    return np.random.default_rng([seed, *shape]).normal(size=shape).astype(np.float32)


def cheap(key, shape, dtype=jnp.float32, out_sharding=None):
    """Initialize without JAX, whose initializers take seconds to compile."""
    return jnp.asarray(draw(shape) / np.sqrt(shape[0]), dtype)


INITS: dict[str, Any] = {
    "kernel_init": cheap,
    "recurrent_kernel_init": cheap,
    "bias_init": lambda *args, **kwargs: 0.1 + cheap(*args, **kwargs),
}


def layer(kind, **kwargs):
    return kind(2, 3, nnx.Rngs(0), **INITS, **kwargs)


def recurrent(kind, **kwargs):
    return Recurrent(kind(2, 3, rngs=nnx.Rngs(0), **INITS), **kwargs)


def with_learned_start(module):
    """Give starting values other than zero."""
    for i, (path, start) in enumerate(nnx.to_flat_state(nnx.state(module, nnx.Param))):
        if str(path[0]).startswith("initial_"):
            start[...] = jnp.asarray(draw(start.shape, i))
    return module


LAYERS = {
    "lstm": lambda **kwargs: layer(LSTM, **kwargs),
    "lstm four matrices": lambda **kwargs: layer(LSTM, use_optimized=False, **kwargs),
    "gru": lambda **kwargs: layer(GRU, **kwargs),
    "rnn": lambda **kwargs: layer(RNN, activation=jnp.sin, **kwargs),
    "leaky": lambda **kwargs: layer(
        LeakyRNN, tau=[1.5, 2.0, 4.0], trainable_tau=True, noise_std=0.5, **kwargs
    ),
    "recurrent lstm": lambda **kwargs: recurrent(nnx.LSTMCell, **kwargs),
    "recurrent gru": lambda **kwargs: recurrent(nnx.GRUCell, **kwargs),
    "recurrent rnn": lambda **kwargs: recurrent(nnx.SimpleCell, **kwargs),
}
NAMES = pytest.mark.parametrize("name", LAYERS)


def weighted_sum(tree):
    """Return a number in which every element of every floating leaf counts differently."""
    leaves = [leaf for leaf in jax.tree.leaves(tree) if jnp.issubdtype(leaf.dtype, jnp.floating)]
    return sum(
        jnp.sum(leaf * jnp.cos(jnp.arange(leaf.size)).reshape(leaf.shape)) for leaf in leaves
    )


def comparable(tree):
    """Return the leaves as numbers, random keys by their data."""

    def plain(leaf):
        is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        return np.asarray(jax.random.key_data(leaf) if is_key else leaf)

    return [plain(leaf) for leaf in jax.tree.leaves(tree) if leaf.dtype != jax.dtypes.float0]


def assert_close(actual, expected, rtol=1e-5, atol=1e-6):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for have, want in zip(comparable(actual), comparable(expected), strict=True):
        np.testing.assert_allclose(have, want, rtol=rtol, atol=atol)


@NAMES
def test_unroll_equals_stepwise_in_value_and_gradient(name) -> None:
    """With resets in the window, to a start that was learned."""
    module = with_learned_start(LAYERS[name](trainable_initial_state=True))
    graphdef, params, rest = nnx.split(module, nnx.Param, ...)
    carry = jax.tree.map(
        lambda leaf: leaf if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf + 0.3,
        module.initialize_state(BATCH),
    )

    def run(form, params, xs):
        def loss(params, xs):
            out = form(nnx.merge(graphdef, params, rest, copy=True), carry, xs, jnp.asarray(DONE))
            return weighted_sum(out), out

        return jax.value_and_grad(loss, (0, 1), has_aux=True)(params, xs)

    unrolled, stepwise = jax.jit(
        lambda *args: (run(lambda m, *rest: m.unroll(*rest), *args), run(unroll_stepwise, *args))
    )(params, draw((TIME, BATCH, 2)))
    assert unrolled[0][1].output.shape == (TIME, BATCH, 3)
    assert_close(unrolled, stepwise)
    gradients = jax.tree.leaves(unrolled[1])
    assert all(np.abs(gradient).min() > 0 for gradient in gradients)


@pytest.mark.parametrize(
    ("name", "from_cell"),
    [
        ("lstm", lambda carry: (carry[1], carry[0])),  # ours is (h, c), flax's (c, h)
        ("lstm four matrices", lambda carry: (carry[1], carry[0])),
        ("gru", lambda carry: carry),
        ("rnn", lambda carry: carry),
        ("recurrent lstm", lambda carry: carry),
        ("recurrent gru", lambda carry: carry),
        ("recurrent rnn", lambda carry: carry),
    ],
)
def test_steps_equal_flax(name, from_cell) -> None:
    module = LAYERS[name]()
    state = module.initialize_state(BATCH)
    carry = module.cell.initialize_carry((BATCH, 2), nnx.Rngs(0))
    for x in draw((3, BATCH, 2)):
        carry, expected = module.cell(carry, x)
        out = module(state, jnp.asarray(x))
        state = out.next_state
        assert_close((out.output, state), (expected, from_cell(carry)), rtol=1e-6)
        assert (out.metrics, out.rollout_extras, float(out.regularization_loss)) == ({}, None, 0.0)


def one_unit(kind, **kwargs):
    """A layer of one unit: weights 1, recurrent weights 2, biases 0.5."""
    inits = {"kernel_init": 1.0, "recurrent_kernel_init": 2.0, "bias_init": 0.5}
    inits = {name: CONSTANT(value) for name, value in inits.items()}
    return kind(1, 1, nnx.Rngs(0), **(inits | kwargs))


def test_gru_and_rnn_by_hand() -> None:
    # x = 0.3, h = 0.1. Both gates: sigmoid(0.3 + 0.5 + 2 * 0.1) = sigmoid(1) = 0.731059.
    # Candidate: tanh(0.3 + 0.5 + 0.731059 * 2 * 0.1) = tanh(0.946212) = 0.738063.
    # h' = (1 - 0.731059) * 0.738063 + 0.731059 * 0.1 = 0.271602
    h, x = jnp.array([[0.1]]), jnp.array([[0.3]])
    np.testing.assert_allclose(one_unit(GRU)(h, x).output, [[0.271602]], rtol=2e-6)
    # RNN: tanh(0.3 + 0.5 + 2 * 0.1) = tanh(1) = 0.761594
    np.testing.assert_allclose(one_unit(RNN)(h, x).output, [[0.761594]], rtol=2e-6)
    # With another activation: 3 * 1
    tripled = one_unit(RNN, activation=lambda x: 3.0 * x)
    np.testing.assert_allclose(tripled(h, x).output, [[3.0]], rtol=1e-6)


def test_a_learned_start_has_gradients_at_each_start() -> None:
    # h' = x + 2 h. Two steps from h0, x = 0: h1 = 2 h0, h2 = 4 h0, sum 6 h0; with a reset in
    # between h2 = 2 h0, sum 4 h0. The derivative by the shared h0 adds up to 6 + 4 = 10.
    module = one_unit(
        RNN, activation=lambda x: x, bias_init=CONSTANT(0.0), trainable_initial_state=True
    )
    done = jnp.array([[False, True], [False, False]])

    def total(module):
        state = module.initialize_state(2)
        return module.unroll(state, jnp.zeros((2, 2, 1)), done).output.sum()

    gradients = nnx.grad(total)(module)
    np.testing.assert_allclose(gradients["initial_h"][...], [10.0], rtol=1e-6)


@NAMES
def test_reset_gives_the_initial_carry_and_keys_go_on(name) -> None:
    module = with_learned_start(LAYERS[name](trainable_initial_state=True))
    initial = module.initialize_state(BATCH)
    used = module(initial, jnp.ones((BATCH, 2))).next_state
    reset = module.reset_state(used)
    if name == "leaky":
        assert_close(reset["keys"], used["keys"])
        initial, reset = initial["h"], reset["h"]
    assert_close(reset, initial, rtol=0, atol=0)
    one = module.reset_state(jax.tree.map(lambda leaf: leaf[1], used))  # without a batch axis
    assert_close(
        one["h"] if name == "leaky" else one, jax.tree.map(lambda leaf: leaf[1], initial), 0, 0
    )
    assert all(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(initial))


def test_starts_are_zero_and_no_parameter_unless_asked_for() -> None:
    for name, make in LAYERS.items():
        module = make()
        floats = comparable(
            module.initialize_state(2)["h"] if name == "leaky" else module.initialize_state(2)
        )
        assert all((leaf == 0).all() for leaf in floats)
        paths = {path[0] for path, _ in nnx.to_flat_state(nnx.state(module, nnx.Param))}
        assert paths <= {"cell", "tau_scale"}


# --- Recurrent ---------------------------------------------------------------------------------


class Counter(nnx.RNNCellBase):
    """A user's cell: images as input, a nested carry, an integer in it, no in_features."""

    def __call__(self, carry, inputs):
        total = carry["total"] + inputs
        return {"total": total, "steps": carry["steps"] + 1}, total

    def initialize_carry(self, input_shape, rngs=None, carry_init=None) -> Any:
        return {"total": jnp.full(input_shape, 2.0), "steps": jnp.ones(input_shape[:-2], int)}

    @property
    def num_feature_axes(self):
        return 2


def test_recurrent_takes_a_users_own_cell() -> None:
    module = Recurrent(Counter(), input_shape=(2, 2), trainable_initial_state=True)
    kinds = [type(leaf) for leaf in module.initial_carry]
    assert kinds == [InitialCarry, nnx.Param]  # steps, an integer; total
    # totals 2 + 1 = 3, 4, and after the reset 3 again; steps 1 + 1 = 2
    done = jnp.array([[False, True], [True, False]])
    out = module.unroll(module.initialize_state(2), jnp.ones((2, 2, 2, 2)), done)
    np.testing.assert_array_equal(out.output[:, :, 0, 0], [[3.0, 3.0], [4.0, 3.0]])
    np.testing.assert_array_equal(out.next_state["steps"], [1, 2])
    np.testing.assert_array_equal(out.next_state["total"][:, 0, 0], [2.0, 3.0])


def test_recurrent_starts_from_the_cells_own_carry() -> None:
    with pytest.warns(UserWarning, match="carry_init"):
        cell = nnx.LSTMCell(2, 3, carry_init=CONSTANT(0.5), rngs=nnx.Rngs(0), **INITS)
    module = Recurrent(cell)
    for leaf in module.initialize_state(2):
        np.testing.assert_array_equal(leaf, np.full((2, 3), 0.5))
    assert "initial_carry" not in nnx.state(module, nnx.Param)
    with pytest.warns(UserWarning, match="carry_init"):
        cell = nnx.LSTMCell(2, 3, carry_init=nnx.initializers.normal(), rngs=nnx.Rngs(0), **INITS)
    with pytest.raises(ValueError, match="draws at random, .* constant carry_init"):
        Recurrent(cell)


def test_recurrent_leaves_no_random_stream() -> None:
    with pytest.warns(UserWarning, match="keep_rngs"):
        cell = nnx.GRUCell(2, 3, keep_rngs=True, rngs=nnx.Rngs(0), **INITS)
    assert owns_random_stream(cell)
    assert not owns_random_stream(Recurrent(cell))


class Halved(nnx.GRUCell):
    """A user's variant of one of flax's cells."""

    def __call__(self, carry, inputs):
        return super().__call__(0.5 * carry, inputs)


@pytest.mark.parametrize(
    ("cell", "tolerance"),
    [
        (lambda: Halved(2, 3, rngs=nnx.Rngs(0), **INITS), 1e-6),
        (lambda: nnx.SimpleCell(2, 3, residual=True, rngs=nnx.Rngs(0), **INITS), 1e-6),
        (lambda: nnx.LSTMCell(2, 3, dtype=jnp.bfloat16, rngs=nnx.Rngs(0), **INITS), 2e-2),
    ],
)
def test_a_window_of_a_special_cell_is_that_of_its_steps(cell, tolerance) -> None:
    module = Recurrent(cell())
    args = (module.initialize_state(BATCH), jnp.asarray(draw((TIME, BATCH, 2))), jnp.asarray(DONE))
    both = jax.jit(lambda: (module.unroll(*args), unroll_stepwise(module, *args)))()
    assert_close(*both, rtol=tolerance, atol=tolerance)


def test_recurrent_can_be_made_without_values() -> None:
    abstract = nnx.eval_shape(lambda: recurrent(nnx.GRUCell, trainable_initial_state=True))
    assert nnx.state(abstract)["initial_carry"][0].shape == (3,)


class Dropped(Counter):
    def __init__(self):
        self.dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(0))


class Written(Counter):
    def __init__(self):
        self.calls = nnx.Variable(jnp.zeros(()))

    def __call__(self, carry, inputs):
        self.calls[...] += 1.0
        return carry, inputs


class Widened(Counter):
    def __call__(self, carry, inputs):
        return {**carry, "steps": carry["steps"] * 1.0}, inputs


class Unbatched(Counter):
    def initialize_carry(self, input_shape, rngs=None, carry_init=None):
        return jnp.zeros(7)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("cell", "error", "message"),
    [
        (lambda: nnx.GRUCell, TypeError, "the class GRUCell: make an instance"),
        (lambda: nnx.RNN(nnx.SimpleCell(2, 3, rngs=nnx.Rngs(0), **INITS)), TypeError, "rnn.cell"),
        (lambda: layer(GRU), TypeError, "got GRU: it has a carry of its own; use it directly"),
        (lambda: nnx.Linear(2, 3, rngs=nnx.Rngs(0)), TypeError, "got Linear: .* use Lift"),
        (lambda: 3, TypeError, r"got int: write Recurrent\(nnx.GRUCell"),
        (Dropped, TypeError, "Dropped, holds a random stream"),
        (Written, TypeError, r"cell writes \['calls'\] in its forward pass"),
        (Widened, ValueError, r"cell.__call__ changes .*'steps'.* expected int32\[2\]"),
        (Unbatched, ValueError, r"must return leaves with the batch axes .* got \(7,\)"),
    ],
)
def test_recurrent_messages(cell, error, message) -> None:
    with pytest.raises(error, match=message):
        Recurrent(cell(), input_shape=(2, 2))


@pytest.mark.usefixtures("unchecked")
def test_messages() -> None:
    with pytest.raises(ValueError, match="input_shape must be given, as Counter has no attribute"):
        Recurrent(Counter())
    for kind in (GRU, RNN, LeakyRNN):
        with pytest.raises(ValueError, match=f"{kind.__name__}: in_features must be at least 1"):
            kind(0, 2, nnx.Rngs(0))
        module = layer(kind)
        with pytest.raises(ValueError, match=rf"{kind.__name__}: .*in_features=2 .*got .*\(4, 7\)"):
            module(module.initialize_state(4), jnp.ones((4, 7)))
    module = recurrent(nnx.GRUCell)
    with pytest.raises(ValueError, match=r"x must have the shape \(batch, 2\), got \(4, 7\)"):
        module(module.initialize_state(4), jnp.ones((4, 7)))
    with pytest.raises(
        ValueError, match=r"x must have the shape \(time, batch, 2\), got \(2, 4, 7"
    ):
        module.unroll(module.initialize_state(4), jnp.ones((2, 4, 7)), jnp.ones((2, 4), bool))
    dense: Any = Dense(2, 3, nnx.Rngs(0), kernel_init=cheap)
    with pytest.raises(TypeError, match="cell must be an nnx.RNNCellBase, got Dense"):
        Recurrent(dense)


# --- LeakyRNN ----------------------------------------------------------------------------------


def uncoupled(tau, units=None, **kwargs):
    """Units without recurrent weights, each driven by its own input: u = x + 0.5."""
    units = units or len(tau)
    return LeakyRNN(
        units,
        units,
        nnx.Rngs(0),
        tau=tau,
        activation=lambda h: 2.0 * h,
        kernel_init=lambda key, shape, dtype, **_: jnp.eye(*shape, dtype=dtype),
        recurrent_kernel_init=CONSTANT(0.0),
        bias_init=CONSTANT(0.5),
        **kwargs,
    )


def test_leaky_units_follow_the_closed_form_and_start_again_after_a_reset() -> None:
    # Constant input x, W = 0: h_t = u + (h_0 - u) (1 - dt/tau)^t with u = x + 0.5, rate 2 h.
    # dt/tau = 0.5, 0.25, 0.05 for the three units; h_0 = 0.
    module = uncoupled([1.0, 2.0, 10.0], dt=0.5)
    x = np.array([1.0, -1.0, 2.0], np.float32)
    xs = np.broadcast_to(x, (5, 2, 3))
    done = np.zeros((5, 2), bool)
    done[2, 1] = True  # the second environment starts again at step 3
    out = module.unroll(module.initialize_state(2), jnp.asarray(xs), jnp.asarray(done))
    steps = np.array([[1, 1], [2, 2], [3, 3], [4, 1], [5, 2]])[:, :, None]
    u = x + 0.5
    h = u * (1.0 - (1.0 - np.array([0.5, 0.25, 0.05])) ** steps)
    np.testing.assert_allclose(out.output, 2.0 * h, rtol=1e-5)
    np.testing.assert_allclose(out.next_state["h"], h[-1], rtol=1e-5)


def test_a_leaky_step_with_coupling_by_hand() -> None:
    # h = 0.2, x = 0.3, R = 2, b = 0.5, f = relu, dt/tau = 0.25:
    # h' = 0.2 + 0.25 (2 * 0.2 + 0.3 + 0.5 - 0.2) = 0.45; with h = -0.2 the rate is 0:
    # h' = -0.2 + 0.25 (0 + 0.3 + 0.5 + 0.2) = 0.05
    module = one_unit(LeakyRNN, tau=4.0, activation=nnx.relu)
    out = module({"h": jnp.array([[0.2], [-0.2]])}, jnp.array([[0.3], [0.3]]))
    np.testing.assert_allclose(out.next_state["h"], [[0.45], [0.05]], rtol=1e-5)
    # A unit whose state is below 0 is silent: h' = -1 + 0.25 (0.3 + 0.5 + 1) = -0.55
    out = module({"h": jnp.array([[-1.0]])}, jnp.array([[0.3]]))
    np.testing.assert_allclose(out.next_state["h"], [[-0.55]], rtol=1e-5)
    np.testing.assert_array_equal(out.output, [[0.0]])


def test_a_leaky_layer_with_tau_dt_is_a_plain_one() -> None:
    leaky, plain = layer(LeakyRNN, dt=0.1, tau=0.1), layer(RNN)
    xs, done = jnp.asarray(draw((TIME, BATCH, 2))), jnp.asarray(DONE)
    outputs = [m.unroll(m.initialize_state(BATCH), xs, done).output for m in (leaky, plain)]
    np.testing.assert_allclose(*outputs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("dt", "tau", "steps"), [(1.0, 1.0, 1), (1.0, 2.0, 12), (0.5, 4.0, 60)])
def test_noise_at_rest_has_the_given_deviation(dt, tau, steps) -> None:
    # v' = (1 - a)^2 v + a (2 - a) s^2 has the fixed point s^2; from v = 0 it is reached up to
    # (1 - a)^(2 steps) < 1e-6. The sample deviation of 20 000 units has a standard error of
    # s / sqrt(40 000) = 0.005 s.
    module = uncoupled(tau, 200, dt=dt, noise_std=0.3)
    xs = jnp.full((steps, 100, 200), -0.5)  # cancels the bias
    state = module.unroll(module.initialize_state(100), xs, jnp.zeros((steps, 100), bool))
    assert abs(float(jnp.std(state.next_state["h"])) / 0.3 - 1.0) < 0.025
    assert abs(float(jnp.mean(state.next_state["h"]))) < 5 * 0.3 / np.sqrt(20_000)


def test_noise_is_repeated_from_the_carry_and_is_each_environments_own() -> None:
    module = layer(LeakyRNN, noise_std=0.5)
    start, x = module.initialize_state(BATCH), jnp.ones((BATCH, 2))
    first, again = module(start, x), module(start, x)
    assert_close(first, again, rtol=0, atol=0)
    second = module(first.next_state, x).next_state["h"]
    rows = [*first.next_state["h"], *second, *module(module.initialize_state(1), x[:1]).output]
    assert len({row.tobytes() for row in map(np.asarray, rows)}) == 2 * BATCH + 1
    # an environment's noise stays its own, whatever its neighbours
    swapped = jax.tree.map(lambda leaf: leaf[np.array([2, 0])], start)
    np.testing.assert_array_equal(module(swapped, x[:2]).output, first.output[np.array([2, 0])])


def test_evaluation_has_no_noise_and_the_same_carry() -> None:
    noisy, plain = layer(LeakyRNN, noise_std=0.5), layer(LeakyRNN)
    start, x = noisy.initialize_state(BATCH), jnp.ones((BATCH, 2))
    trained = noisy(start, x)
    noisy.eval()
    evaluated = noisy(start, x)
    assert_close(evaluated.output, plain(plain.initialize_state(BATCH), x).output)
    assert_close(evaluated.next_state["keys"], trained.next_state["keys"])
    assert evaluated.next_state.keys() == start.keys()
    noisy.train()
    assert_close(noisy(start, x), trained, rtol=0, atol=0)
    assert not owns_random_stream(plain)


def test_trained_time_constants_start_as_given_and_never_pass_dt() -> None:
    module = uncoupled([1.5, 2.0, 100.0], trainable_tau=True)
    np.testing.assert_array_equal(module.tau, [1.5, 2.0, 100.0])

    def state_after_a_step(module):
        return module({"h": jnp.zeros((1, 3))}, jnp.ones((1, 3))).next_state["h"].sum()

    # h' = u / tau with u = 1.5; d tau / d s = (tau - 1) softplus'(0) / log 2, softplus'(0) = 1/2:
    # d h' / d s = -1.5 / tau^2 (tau - 1) / (2 log 2) = -1.5 * 0.5 / 2.25 / 1.386294 = -0.240449,
    # -1.5 / 4 / 1.386294 = -0.270505, -1.5 * 99 / 10^4 / 1.386294 = -0.010712
    gradients = nnx.grad(state_after_a_step)(module)
    np.testing.assert_allclose(
        gradients["tau_scale"][...], [-0.240449, -0.270505, -0.010712], rtol=1e-4
    )
    for step in (-1e4, 1e4):
        tau_scale: Any = module.tau_scale
        tau_scale[...] = jnp.full(3, step)
        assert (module.tau >= 1.0).all() and np.isfinite(module.tau).all()
        gradients = nnx.grad(state_after_a_step)(module)
        assert np.isfinite(gradients["tau_scale"][...]).all()


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dt": 0.0}, "dt must be finite and above 0, got 0.0"),
        ({"noise_std": -1.0}, "noise_std must be finite and 0 or more, got -1.0"),
        ({"tau": [1.0, 2.0]}, r"one for each of hidden_features=3 units, got shape \(2,\)"),
        ({"tau": [3, 0.5, 2], "dt": 1}, "at least dt, got 0.5 for unit 1 with dt=1: a longer"),
        ({"tau": float("nan")}, "tau must be finite"),
        ({"tau": 1.0, "trainable_tau": True}, "above dt if it is trained, got 1 for unit 0"),
    ],
)
def test_leaky_messages(arguments, message) -> None:
    with pytest.raises(ValueError, match=f"LeakyRNN: .*{message}"):
        LeakyRNN(2, 3, nnx.Rngs(0), **arguments)


def test_a_layer_that_only_reads_may_be_closed_over() -> None:
    layer = Recurrent(nnx.SimpleCell(2, 2, rngs=nnx.Rngs(0)))

    def run(xs):
        return layer.unroll(layer.initialize_state(1), xs, jnp.zeros((2, 1), bool)).output

    xs = jnp.ones((2, 1, 2))
    np.testing.assert_allclose(jax.jit(run)(xs), run(xs), rtol=1e-6)


@pytest.mark.parametrize(
    "make",
    [
        lambda rngs: LSTM(2, 2, rngs, trainable_initial_state=True),
        lambda rngs: LeakyRNN(2, 2, rngs, tau=3.0, trainable_initial_state=True),
        lambda rngs: Recurrent(nnx.GRUCell(2, 2, rngs=rngs), trainable_initial_state=True),
    ],
)
def test_a_learned_start_has_the_dtype_of_the_carry(make) -> None:
    """Also where parameters are kept in bfloat16."""
    layer = make(nnx.Rngs(0))
    halves = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), nnx.state(layer, nnx.Param))
    nnx.update(layer, halves)
    carry = layer.initialize_state(1)
    out = layer.unroll(carry, jnp.ones((2, 1, 2)), jnp.ones((2, 1), bool))
    for leaf in jax.tree.leaves((carry, out.next_state)):
        assert leaf.dtype == jnp.float32
