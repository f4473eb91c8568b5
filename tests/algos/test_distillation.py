"""Distillation: its loss, which action goes where, what it leaves alone, and what it achieves."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from nnx_ppo.algorithms import EvalConfig, LoggingLevel, TrainConfig, eval_rollout, train_ppo
from nnx_ppo.algorithms.checkpointing import load_checkpoint, make_checkpoint_fn
from nnx_ppo.algorithms.config import DistillationConfig, DistillationTrainConfig
from nnx_ppo.algorithms.distillation import (
    default_distillation_config,
    distillation_loss,
    distillation_single_transition,
    distillation_step,
    distillation_unroll_env,
    new_distillation_state,
    train_distillation,
)
from nnx_ppo.algorithms.imitation import mixed_loss
from nnx_ppo.algorithms.raw_actions import check_same_heads, find_raw_actions
from nnx_ppo.algorithms.types import DistillationTransition
from nnx_ppo.core import EpisodeWrapper
from nnx_ppo.core.testing import AnalyticState, FollowTarget, PickTarget, TwoHands
from nnx_ppo.networks import (
    LSTM,
    CategoricalSampler,
    Delay,
    Dense,
    Filter,
    Flattener,
    MultiCategoricalSampler,
    NormalSampler,
    NormalTanhSampler,
    Parallel,
    PPOAdapter,
    Sequential,
    with_recording,
)

from .helpers import IntegerEnv, lstm_network, mlp_network
from .test_training import hands_network

RNGS = nnx.Rngs(0)


def zeros(size_in, size_out):
    return Dense(size_in, size_out, nnx.Rngs(0), kernel_init=nnx.initializers.zeros)


def actor(sampler, size, obs_size=1):
    """Puts 0 into each of `size` parameters of a sampler."""
    return Sequential([zeros(obs_size, size), sampler])


def tanh():
    return actor(NormalTanhSampler(RNGS, 0.0, free_std=[1.0]), 1)


def normal(entropy_weight=0.0):
    return actor(NormalSampler(RNGS, entropy_weight, free_std=[1.0]), 1)


def network_of(action, obs_size=1) -> Any:
    return PPOAdapter(action=action, value=zeros(obs_size, 1))


OBS = jnp.ones((2, 1, 1))


def own_window(network, **changes):
    """What a network without memory did in two steps of one environment."""
    out = network(network.initialize_state(2), OBS[:, 0])
    output, extras = jax.tree.map(lambda leaf: leaf[:, None], (out.output, out.rollout_extras))
    ends, rewards = jnp.zeros((2, 1), bool), jnp.asarray([[1.0], [5.0]])
    window = DistillationTransition(OBS, output, rewards, ends, ends, OBS, {}, extras)
    return window.replace(**changes)


def raw(*values):
    """Raw actions of size 1 for two steps of one environment."""
    return jnp.asarray(values).reshape(2, 1, 1)


@nnx.jit
def loss_of(network, window):
    return distillation_loss(network, network.initialize_state(1), window, LoggingLevel.ALL)


# The loss


def test_the_loss_by_hand():
    # Both heads have mean 0 and standard deviation 1; ½ log 2π = 0.918939.
    # left, z = ½ and 0: −½·¼ − 0.918939 − 2(log 2 − ½ − softplus(−1)) = −0.803709, and −0.918939,
    #   the Jacobian of tanh at 0 being 1; their mean is −0.861324.
    # right is not squashed, 1 and −1: −½ − 0.918939 = −1.418939 twice.
    # Regularisation: −0.1 times the entropy ½ + 0.918939 of the right head.
    network = network_of(Parallel(left=tanh(), right=normal(0.1)))
    actions = {"left": raw(0.5, 0.0), "right": raw(1.0, -1.0)}
    loss, metrics = loss_of(network, own_window(network, teacher_actions=actions))
    assert metrics.keys() == {
        "losses/distillation_nll", "losses/regularization", "loglikelihood"
    }  # fmt: skip
    nll = metrics["losses/distillation_nll"]
    np.testing.assert_allclose([nll["left"], nll["right"]], [0.861324, 1.418939], rtol=1e-5)
    np.testing.assert_allclose(metrics["losses/regularization"], -0.1418939, rtol=1e-5)
    np.testing.assert_allclose(loss, 0.861324 + 1.418939 - 0.1418939, rtol=1e-5)
    left = metrics["loglikelihood"]["left"]
    np.testing.assert_allclose(left, [[-0.803709], [-0.918939]], rtol=1e-5)


def test_extras_of_a_teacher_of_the_students_tree_serve_as_well():
    network = network_of(tanh())
    window = own_window(network)
    theirs = {"action": [None, raw(0.5, 0.0)], "value": None}
    loss, metrics = loss_of(network, window.replace(teacher_rollout_extras=theirs))
    np.testing.assert_allclose(loss, 0.861324, rtol=1e-5)
    assert metrics["losses/distillation_nll"].shape == ()
    with pytest.raises(ValueError, match="rollout_data lacks"):
        loss_of(network, window)
    with pytest.raises(ValueError, match="must be a tree like the student's"):
        loss_of(network, window.replace(teacher_rollout_extras=[raw(0.5, 0.0)]))


def test_the_loss_works_in_the_users_grad():
    # d/d mean of ½(z − mean)², averaged over two steps: −(½ + 1)/2.
    network = network_of(tanh())
    window = own_window(network, teacher_actions=raw(0.5, 1.0))
    gradient = nnx.grad(lambda net: loss_of(net, window)[0])(network)
    bias = gradient["action"]["layers"][0]["linear"]["bias"][...]
    np.testing.assert_allclose(bias, [-0.75], rtol=1e-6)


def test_the_loss_refuses_a_student_that_would_evaluate_its_own_mean():
    network = network_of(Parallel(left=tanh(), right=normal()))
    window = own_window(network)
    network.action.modules["right"].eval()
    with pytest.raises(ValueError, match=r"the action head 'right' .* student.train\(\)"):
        loss_of(network, window)


@pytest.mark.parametrize("level", [LoggingLevel.ALL, LoggingLevel.NONE])
def test_ppos_loss_is_added_with_its_weight_and_regularisation_counts_once(level):
    network = network_of(normal(0.1))
    window = own_window(network, teacher_actions=raw(0.5, 1.0))
    window = window.replace(bootstrap_values=jnp.zeros((2, 1)))
    config = DistillationConfig(
        ppo_weight=2.0, clip_range=0.3, discounting_factor=0.9, gae_lambda=0.8,
        normalize_advantages=False, critic_loss_weight=0.25, logging_level=level,
    )  # fmt: skip

    @nnx.jit
    def mixed(network):
        carry = network.initialize_state(1)
        return mixed_loss(network, carry, window, config, jnp.asarray(2.0))

    loss, metrics = mixed(network)
    # Nothing has changed since the rollout, and values are 0: A₁ = 5, A₀ = 1 + 0.72·5 = 4.6; the
    # surrogate is −(4.6 + 5)/2 = −4.8, the value loss ½(4.6² + 5²)/2 = 11.54.
    expected = loss_of(network, window)[0] + 2.0 * (-4.8 + 0.25 * 11.54)
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    names = {"losses/distillation_nll", "losses/actor", "losses/critic", "losses/ppo_weight"}
    if level is LoggingLevel.NONE:
        assert not metrics
        return
    assert names <= metrics.keys()
    np.testing.assert_allclose(metrics["losses/actor"], -4.8, rtol=1e-5)
    # The teacher's actions, not the student's own: −½·¼ − 0.918939 and −½ − 0.918939.
    np.testing.assert_allclose(metrics["loglikelihood"], [[-1.043939], [-1.418939]], rtol=1e-5)


# Heads


def test_raw_actions_are_found_wherever_a_network_has_them():
    """Behind containers, recorders and filters, and where one sampler makes two heads."""
    shared = NormalTanhSampler(RNGS, 0.0)
    action = Parallel(
        b=actor(MultiCategoricalSampler(RNGS, [3, 2], 0.0), 5),
        a=Sequential([Sequential([zeros(1, 4)]), Sequential([shared])]),
        c=Parallel(y=actor(shared, 2), x=tanh()),
    )
    network = Sequential([Filter({"o": "obs"}), Flattener(), network_of(action)])
    obs = {"obs": jnp.ones((5, 1)), "unused": jnp.ones(5)}
    for net in (network, with_recording(network)):
        heads = find_raw_actions("student", net, obs)
        out = nnx.jit(lambda net: net(net.initialize_state(5), obs))(net)
        assert [head.name for head in heads.heads] == ["a", "b", "c/x", "c/y"]
        assert [head.sampler.choices for head in heads.heads] == [None, (3, 2), None, None]
        actions = out.output.actions
        squashed = [jnp.tanh(heads.read(out.rollout_extras)[i]) for i in (0, 2, 3)]
        assert_close(squashed, [actions["a"], actions["c"]["x"], actions["c"]["y"]])
        assert_same(heads.read(out.rollout_extras)[1], actions["b"])
        written = heads.write(out.rollout_extras, [1, 2, 3, 4])
        assert heads.read(written) == [1, 2, 3, 4]
        assert heads.tree == jax.tree.structure(actions)


@pytest.mark.parametrize(
    ("teacher", "student", "message"),
    [
        (Parallel(l=tanh()), Parallel(l=tanh(), r=tanh()), r"expected \['l'\], got \['l', 'r'\]"),
        (
            Parallel(l=tanh(), r=tanh()),
            Parallel(r=tanh(), x=tanh()),
            r"expected \['l', 'r'\], got \['r', 'x'\]",
        ),
        (
            Parallel(l=tanh(), r=normal()),
            Parallel(l=tanh(), r=tanh()),
            "action head 'r' has a NormalSampler in the teacher and a NormalTanhSampler in the",
        ),
        (
            tanh(),
            actor(NormalTanhSampler(RNGS, 0.0), 4),
            r"the action head .* expected float32\[1\], got float32\[2\]",
        ),
        (
            actor(CategoricalSampler(RNGS, 0.0), 4),
            actor(CategoricalSampler(RNGS, 0.0), 3),
            r"expected choices of \[4\], got choices of \[3\]",
        ),
    ],
    ids=["number", "names", "kinds", "sizes", "choices"],
)
def test_heads_that_do_not_match_are_refused(teacher, student, message):
    obs = jnp.ones((2, 1))
    teacher = find_raw_actions("teacher", network_of(teacher), obs)
    student = find_raw_actions("student", network_of(student), obs)
    with pytest.raises(ValueError, match=message):
        check_same_heads(teacher, student)


def test_single_heads_and_subclasses_of_a_sampler_match():
    class Mine(NormalTanhSampler):
        pass

    obs = jnp.ones((2, 1))
    teacher = find_raw_actions("teacher", network_of(Parallel(arm=tanh())), obs)
    student = network_of(actor(Mine(RNGS, 0.0, free_std=[1.0]), 1))
    check_same_heads(teacher, find_raw_actions("student", student, obs))


def test_heads_without_a_sampler_are_refused():
    class Doubled(Sequential):
        """Its log-likelihood is computed from the sampler's, and no longer the same."""

        def _route(self, x, run):
            out = super()._route(x, run)
            return {**out, "log_likelihood": 2.0 * out["log_likelihood"]}

    with pytest.raises(TypeError) as info:
        find_raw_actions("student", network_of(Doubled(tanh().layers)), jnp.ones((2, 1)))
    assert any("action samplers of student" in note for note in info.value.__notes__)

    class Mute(Sequential):
        """Swallows the extras."""

        def __call__(self, state, x, rollout_extras=None):
            return super().__call__(state, x, None).replace(rollout_extras=None)

    with pytest.raises(ValueError, match="teacher: the action head must be made by one action"):
        find_raw_actions("teacher", network_of(Mute(tanh().layers)), jnp.ones((2, 1)))


# Collecting


def arrays(tree):
    """Every leaf of a tree, keys as numbers."""

    def plain(leaf):
        is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        return np.asarray(jax.random.key_data(leaf) if is_key else leaf)

    return [plain(leaf) for leaf in jax.tree.leaves(tree)]


def variables_and_modes(module):
    """Every variable of a module, and the mode of every part of it."""
    modes = [getattr(part, "deterministic", None) for _, part in nnx.iter_modules(module)]
    return arrays(nnx.state(module)), modes


def assert_same(left, right):
    jax.tree.map(np.testing.assert_array_equal, left, right)


def assert_close(left, right):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), left, right)


def test_a_window_shows_the_teachers_means_and_both_memories_are_reset():
    """Two windows: the second one starts from both carries of the first, in mid-episode."""
    env, teacher, student = IntegerEnv(low=1, high=4), lstm_network(seed=1), lstm_network(seed=2)
    before = variables_and_modes(teacher)
    start = new_distillation_state(env, teacher, student, 3, seed=0)
    keys = jax.random.split(jax.random.key(0))

    @nnx.jit
    def collect(student, carry, key):
        student_state, teacher_state, env_states = carry
        first = distillation_single_transition(
            env, teacher, nnx.clone(student), carry, jax.random.split(key, (5, 3))[0]
        )
        *carry, window = distillation_unroll_env(
            env, env_states, teacher, student, student_state, teacher_state, 5, key
        )
        return tuple(carry), window, first[1]

    carry = (start.student_states, start.teacher_states, start.env_states)
    middle, _, _ = collect(student, carry, keys[0])
    after, window, first = collect(student, middle, keys[1])
    assert window.done.any() and not window.done.all()
    assert_same(variables_and_modes(teacher), before)

    own = student.unroll(middle[0], window.obs, window.done, window.student_rollout_extras)
    assert_close(own.output.loglikelihoods, window.student_output.loglikelihoods)
    assert_close(own.next_state, after[0])
    teacher.eval()
    theirs = teacher.unroll(middle[1], window.obs, window.done)
    assert_close(theirs.output.actions, jnp.tanh(window.teacher_actions))
    assert_close(theirs.next_state, after[1])
    assert_close(first, jax.tree.map(lambda leaf: leaf[0], window))
    assert window.bootstrap_values is None


# An iteration


def test_an_iteration_works_in_the_users_jit_and_folds_in_what_the_student_saw():
    """However many epochs: mean and variance are those of the 24 observations of the window."""
    env, teacher, student = IntegerEnv(), mlp_network(seed=5), lstm_network()
    level = LoggingLevel.LOSSES | LoggingLevel.ACTOR_EXTRA
    state = new_distillation_state(env, teacher, student, 4, seed=0)

    @nnx.jit
    def iterate(state):
        carry = (nnx.clone(state.student), state.student_states, state.teacher_states)
        key = jax.random.split(state.rng_key, 3)[1]
        *_, window = distillation_unroll_env(env, state.env_states, teacher, *carry, 6, key)
        return window.obs, *distillation_step(env, teacher, state, 4, 6, 2, 2, level)

    before = jax.tree.leaves(jax.tree.map(np.asarray, nnx.state(student, nnx.Param)))
    obs, state, metrics = iterate(state)
    after = jax.tree.leaves(nnx.state(student, nnx.Param))
    assert any((np.asarray(a) != b).any() for a, b in zip(after, before, strict=True))
    assert (state.steps_taken, metrics["total_steps"]) == (24.0, 24.0)
    arrays = ("losses/distillation_nll", "losses/regularization", "loglikelihood")
    single = {"losses/ratio_error", "losses/carry_drift", "total_steps"}
    assert set(metrics) == {f"{n}/{e}" for n in arrays for e in ("mean", "std")} | single
    # The student's own actions replay as they were; its memory moves as it learns.
    assert metrics["losses/ratio_error"] < 1e-4 < metrics["losses/carry_drift"] < 1.0
    normalizer = student.layers[0]
    np.testing.assert_allclose(normalizer.mean[...], obs.mean((0, 1)), rtol=1e-5)
    np.testing.assert_allclose(normalizer.M2[...] / 24, obs.var((0, 1)), rtol=1e-4)


def test_a_choice_is_taught_by_its_likeliest_option_to_a_student_without_values():
    # The teacher prefers option 1; to the student both options are alike: −log ½ = log 2.
    class WithoutValues(Sequential):
        def _route(self, x, run):
            return super()._route(x, run).replace(value_estimates=None)

    teacher, student = (
        network_of(actor(CategoricalSampler(RNGS, 0.0), 2, obs_size=2), obs_size=2)
        for _ in range(2)
    )
    teacher.action.layers[0].linear.bias[...] = jnp.asarray([0.0, 1.0])
    student = WithoutValues([student])
    env = EpisodeWrapper(PickTarget(num_actions=2, length=3), 2)
    state = new_distillation_state(env, teacher, student, 2, seed=0)
    _, metrics = nnx.jit(lambda s: distillation_step(env, teacher, s, 2, 3, 1, 1))(state)
    np.testing.assert_allclose(metrics["losses/distillation_nll/mean"], np.log(2.0), rtol=1e-6)
    settings = DistillationConfig(ppo_weight=1.0)
    with pytest.raises(ValueError, match="one value for each reward"):
        train_distillation(env, teacher, student, DistillationTrainConfig(settings))


# A run


ENV = EpisodeWrapper(FollowTarget(length=7), 5)
SMALL = DistillationTrainConfig(
    distillation=DistillationConfig(
        n_envs=8, rollout_length=5, total_steps=120, n_epochs=2, n_minibatches=2, learning_rate=1e-2
    ),
    eval=EvalConfig(every_steps=80, n_envs=4, max_episode_length=10, logging_percentiles=None),
    seed=3,
)


def with_settings(config, **changes):
    settings = dataclasses.replace(config.distillation, **changes)
    return dataclasses.replace(config, distillation=settings)


@pytest.fixture(scope="module")
def reference():
    """A small run with every metric and a weight of PPO that rises, and what was seen of it."""
    teacher, student = lstm_network(seed=5), mlp_network()
    before, calls, asked = variables_and_modes(teacher), [], []

    def rising(steps):
        asked.append(steps)
        return steps / 120

    config = with_settings(
        SMALL, ppo_weight=rising, logging_level=LoggingLevel(1023), logging_percentiles=(0, 50)
    )
    result = train_distillation(
        ENV, teacher, student, config, log_fn=lambda metrics, step: calls.append((step, metrics))
    )
    return teacher, before, student, result, calls, asked


def test_the_schedule_is_that_of_any_training(reference):
    _, _, student, result, calls, _ = reference
    assert [step for step, _ in calls] == [0, 40, 80, 120]
    assert [entry["step"] for entry in result.eval_history] == [0, 80, 120]
    assert (result.total_steps, result.total_iterations) == (120, 3)
    assert result.training_state.student is student
    assert result.training_state.steps_taken == 120.0


def test_the_weight_of_ppo_follows_its_schedule_without_compiling_again(reference):
    *_, calls, asked = reference
    weights = [metrics["losses/ppo_weight"] for _, metrics in calls[1:]]
    np.testing.assert_allclose(weights, [0.0, 1 / 3, 2 / 3], rtol=1e-6)
    # Once to check it, once to trace it; not once for each of three iterations.
    assert len(asked) == 2


def test_every_metric_is_there_and_finite(reference):
    *_, calls, _ = reference
    metrics = calls[1][1]
    bare = {
        "total_steps", "throughput/train_sps", "losses/clipping_fraction", "losses/ppo_weight",
        "losses/ratio_error", "losses/carry_drift",
        "rollout_batch/done_rate", "rollout_batch/truncation_rate",
    }  # fmt: skip
    arrays = {
        "losses/distillation_nll", "losses/regularization", "losses/actor",
        "losses/critic", "loglikelihood", "losses/approx_kl", "losses/advantages",
        "losses/critic_R^2", "losses/explained_variance", "losses/predicted_value",
        "rollout_batch/reward", "rollout_batch/action", "rollout_batch/obs", "env/error",
        "net/1/action/2/mu", "net/1/action/2/sigma", "grad_norm", "weights",
    }  # fmt: skip
    assert bare | {f"{name}/p{level}" for name in arrays for level in (0, 50)} <= metrics.keys()
    assert np.isfinite(list(metrics.values())).all()


def test_the_teacher_is_left_as_it_was(reference):
    teacher, before, *_ = reference
    assert_same(variables_and_modes(teacher), before)


def test_the_teacher_is_left_as_it_was_by_a_run_that_fails():
    teacher, student = mlp_network(seed=5), mlp_network()
    before = variables_and_modes(teacher)

    def fail(state, step):
        raise RuntimeError("disk full")

    with pytest.raises(RuntimeError, match="disk full"):
        train_distillation(ENV, teacher, student, SMALL, total_steps=0, checkpoint_fn=fail)
    assert_same(variables_and_modes(teacher), before)


def test_a_run_resumed_from_a_file_goes_on_exactly_where_it_was(reference, tmp_path):
    """40 steps, save, load, and 80 more, against 120 at a stretch."""
    teacher, _, student, result, *_ = reference
    config = with_settings(SMALL, ppo_weight=lambda steps: steps / 120)
    first, second = mlp_network(), mlp_network(seed=9)
    save = make_checkpoint_fn(str(tmp_path))
    train_distillation(ENV, teacher, first, config, total_steps=40, checkpoint_fn=save)
    template = new_distillation_state(ENV, teacher, second, 8, seed=0)
    loaded = load_checkpoint(
        str(tmp_path / "step_0000000040"), template.student, template.optimizer
    )
    rest = train_distillation(ENV, teacher, second, config, initial_state=loaded["training_state"])
    assert (rest.total_steps, rest.total_iterations) == (120, 2)
    assert_same(*(variables_and_modes(network) for network in (second, student)))
    for field in ("teacher_states", "env_states", "step_words"):
        assert_same(*(arrays(getattr(r.training_state, field)) for r in (rest, result)))


def test_networks_that_cannot_be_trained_are_refused():
    teacher, student = mlp_network(seed=5), mlp_network()
    student.eval()
    with pytest.raises(ValueError, match="student is in evaluation mode"):
        train_distillation(ENV, teacher, student, SMALL)
    student.train()
    with pytest.raises(TypeError, match="teacher must return a PPONetworkOutput"):
        train_distillation(ENV, zeros(1, 2), student, SMALL)
    with pytest.raises(ValueError, match="has a NormalSampler in the teacher and a NormalTanh"):
        train_distillation(ENV, network_of(normal()), student, SMALL)
    with pytest.raises(ValueError, match="teacher and student share the variable layers/0/"):
        train_distillation(ENV, Sequential([student.layers[0], *teacher.layers]), student, SMALL)
    start = new_distillation_state(ENV, student, student, 4, seed=0)
    with pytest.raises(ValueError, match="teacher and student share the variable"):
        distillation_step(ENV, student, start, 4, 6, 1, 1)
    with pytest.raises(ValueError, match="ppo_weight=-1.0 must be a finite number of at least 0"):
        DistillationConfig(ppo_weight=-1.0)
    assert default_distillation_config() == DistillationTrainConfig()


@pytest.mark.usefixtures("unchecked")
def test_arguments_of_another_kind_are_refused():
    teacher, student = mlp_network(seed=5), mlp_network()
    other: Any = TrainConfig()
    with pytest.raises(TypeError, match="config must be a DistillationTrainConfig, got TrainConfi"):
        train_distillation(ENV, teacher, student, other)
    nothing: Any = None
    with pytest.raises(TypeError, match="teacher must be a StatefulModule, got NoneType"):
        train_distillation(ENV, nothing, student, SMALL)
    other = SMALL
    with pytest.raises(TypeError, match="config must be a TrainConfig, got DistillationTrainConfi"):
        train_ppo(ENV, student, other)


def test_a_student_of_which_one_head_is_in_evaluation_mode_is_refused_before_anything_runs():
    def fail(metrics, step):
        pytest.fail("it ran")

    student: Any = hands_network()
    student.layers[-1].action.modules["left"].eval()
    with pytest.raises(ValueError, match=r"head 'left' would evaluate its own mean"):
        train_distillation(TwoHands(), hands_network(), student, SMALL, log_fn=fail)


# What it is for


class Orbit:
    """Follow a target on a circle, of which one coordinate is seen.

    The target is ½ sin φ, and φ grows by π/4 at each step. The reward is 1 − 4 (action − target)².
    Whoever sees the target earns 1 a step. Who saw it two steps ago, and nothing else, knows
    ½ sin(φ − π/2) = −½ cos φ, to which ½ sin φ is as likely as −½ sin φ: acting 0 is best and earns
    1 − E sin² φ = ½ on average. Two such observations in a row tell φ.
    """

    action_size = 1

    def reset(self, rng):
        phase = jax.random.uniform(rng, (), maxval=2.0 * jnp.pi)
        info = {"rng": rng, "phase": phase, "age": jnp.zeros((), jnp.int32)}
        return AnalyticState(self._see(phase), jnp.zeros(()), jnp.zeros(()), info, {})

    def step(self, state, action):
        error = jnp.square(action - state.obs["now"]).sum()
        phase, age = state.info["phase"] + jnp.pi / 4.0, state.info["age"] + 1
        return state.replace(
            obs=self._see(phase),
            reward=1.0 - 4.0 * error,
            done=(age >= 40).astype(jnp.float32),
            info={**state.info, "phase": phase, "age": age},
        )

    def _see(self, phase):
        target = 0.5 * jnp.sin(phase)[None]
        return {"now": target, "late": target}


def perceptron_that_sees_the_target():
    """tanh(1.05 x) is x up to 0.02 on [−½, ½]; the hidden units are the two signs of x."""
    hidden, out = Dense(1, 2, RNGS, nnx.relu), zeros(2, 2)
    hidden.linear.kernel[...] = jnp.asarray([[1.0, -1.0]])
    out.linear.kernel[...] = jnp.asarray([[1.05, 0.0], [-1.05, 0.0]])
    action = Sequential([hidden, out, NormalTanhSampler(RNGS, 0.0)])
    return Sequential([Filter({"x": "now"}), Flattener(), network_of(action)])


@pytest.mark.slow
def test_an_lstm_on_delayed_observations_learns_from_a_perceptron_that_sees_the_target():
    env, teacher = Orbit(), perceptron_that_sees_the_target()
    late = [Filter({"x": "late"}), Flattener(), Delay(jnp.zeros(1), k_steps=2)]
    action = Sequential([Dense(16, 2, RNGS), NormalTanhSampler(RNGS, 0.0, min_std=0.05)])
    heads = PPOAdapter(action=action, value=Dense(16, 1, RNGS))
    student = Sequential([*late, LSTM(1, 16, RNGS), heads])
    config = DistillationTrainConfig(
        DistillationConfig(n_envs=64, rollout_length=20, total_steps=38_400, learning_rate=1e-2),
        EvalConfig(every_steps=10**9, n_envs=64, logging_percentiles=None),
    )
    result = train_distillation(env, teacher, student, config)

    def return_of(network):
        network.eval()
        metrics = eval_rollout(env, network, 64, 100, jax.random.key(0))
        return metrics["eval/episode_reward/mean"]

    best = return_of(teacher)
    np.testing.assert_allclose(best, 40.0, rtol=1e-2)
    assert result.final_metrics["eval/episode_reward/mean"] >= 0.9 * best
    # The teacher itself on what the student sees: 1 − E (cos φ + sin φ)² = 0, except that it acts
    # 0 in the first two steps, for 1 − E sin² φ = ½ each; its slope of 1.05 costs a little.
    delayed = Sequential([*late, *teacher.layers[2:]])
    np.testing.assert_allclose(return_of(delayed), 0.5, atol=2.0)
