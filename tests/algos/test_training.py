"""`train_ppo`: what it learns, when it calls whom, and what it leaves alone."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import monitoring

from nnx_ppo.algorithms import (
    EvalConfig,
    LoggingLevel,
    PPOConfig,
    TrainConfig,
    VideoConfig,
    default_config,
    train_ppo,
)
from nnx_ppo.core import EpisodeWrapper
from nnx_ppo.core.testing import Endless, FollowTarget, TwoHands
from nnx_ppo.networks.adapter import PPOAdapter
from nnx_ppo.networks.containers import Parallel, Sequential
from nnx_ppo.networks.feedforward import Dense
from nnx_ppo.networks.sampling_layers import NormalTanhSampler
from nnx_ppo.networks.utils import Flattener

from .helpers import IntegerEnv, lstm_network, mlp_network

ENV = EpisodeWrapper(FollowTarget(length=7), 5)
SMALL = TrainConfig(
    ppo=PPOConfig(n_envs=8, rollout_length=5, total_steps=120, n_epochs=2, n_minibatches=2),
    eval=EvalConfig(every_steps=80, n_envs=4, max_episode_length=10, logging_percentiles=None),
    seed=3,
)


def parameters(network):
    return [np.asarray(leaf) for leaf in jax.tree.leaves(nnx.state(network, nnx.Param))]


def assert_same_parameters(left, right):
    for a, b in zip(parameters(left), parameters(right), strict=True):
        np.testing.assert_array_equal(a, b)


def same_parameters(left, right):
    pairs = zip(parameters(left), parameters(right), strict=True)
    return all((a == b).all() for a, b in pairs)


def changed(config, **changes):
    return dataclasses.replace(config, **changes)


@pytest.fixture(scope="module")
def reference():
    """One small run and everything that was reported of it."""
    network, calls, checkpoints = mlp_network(), [], []
    result = train_ppo(
        ENV,
        network,
        SMALL,
        log_fn=lambda metrics, step: calls.append((step, metrics)),
        checkpoint_fn=lambda state, step: checkpoints.append((step, state)),
    )
    return network, result, calls, checkpoints


def test_schedule(reference):
    """120 steps in iterations of 40; evaluated at the start, at 80, and at the end."""
    network, result, calls, checkpoints = reference
    assert [step for step, _ in calls] == [0, 40, 80, 120]
    assert [step for step, metrics in calls if "eval/episode_reward/mean" in metrics] == [
        0,
        80,
        120,
    ]
    assert [entry["step"] for entry in result.eval_history] == [0, 80, 120]
    assert [step for step, _ in checkpoints] == [0, 120]
    assert (result.total_steps, result.total_iterations) == (120, 3)
    assert result.training_state.networks is network
    assert result.training_state.steps_taken == 120.0


def test_metrics(reference):
    _, result, calls, _ = reference
    step, metrics = calls[1]
    names = {"losses/actor", "losses/critic", "losses/regularization"}
    assert set(metrics) == {f"{n}/{e}" for n in names for e in ("mean", "std")} | {"total_steps"}
    assert metrics["total_steps"] == step == 40
    assert all(isinstance(value, float | int) for value in metrics.values())
    assert np.isfinite(list(result.final_metrics.values())).all()
    # Episodes are cut after 5 steps.
    assert result.final_metrics["eval/lifespan/mean"] == 5.0


@pytest.fixture
def optimized():
    """Compile as users do. Unoptimised, what is logged moves the rounding of LSTM gradients."""
    jax.config.update("jax_disable_most_optimizations", False)
    jax.clear_caches()
    yield
    jax.config.update("jax_disable_most_optimizations", True)
    jax.clear_caches()  # else later tests draw their parameters by optimised programs


@pytest.mark.usefixtures("optimized")
@pytest.mark.parametrize("make", [mlp_network, lstm_network], ids=["mlp", "lstm"])
def test_nothing_that_looks_on_changes_what_is_learned(make):
    """Evaluation, logging of everything, checkpoints: bit-equal parameters with and without."""
    watched, alone = make(), make()
    level = LoggingLevel.ALL | LoggingLevel.ROLLOUT_OBS
    train_ppo(
        ENV,
        watched,
        changed(
            SMALL,
            ppo=changed(SMALL.ppo, logging_level=level),
            eval=changed(SMALL.eval, every_steps=40, logging_level=level),
            checkpoint_every_steps=40,
        ),
        log_fn=lambda metrics, step: None,
        checkpoint_fn=lambda state, step: None,
        eval_env=FollowTarget(length=3),
    )
    quiet = changed(
        SMALL,
        ppo=changed(SMALL.ppo, logging_level=LoggingLevel.NONE),
        eval=changed(SMALL.eval, enabled=False),
    )
    train_ppo(ENV, alone, quiet)
    assert_same_parameters(watched, alone)


@pytest.mark.parametrize("make", [mlp_network, lstm_network], ids=["mlp", "lstm"])
def test_no_random_key_is_used_twice(make):
    """Three iterations with evaluation and checkpoints, under JAX's own check."""
    with jax.debug_key_reuse(True):
        result = train_ppo(
            EpisodeWrapper(IntegerEnv(low=1, high=6), 4),
            make(),
            SMALL,
            checkpoint_fn=lambda state, step: None,
        )
    assert result.total_iterations == 3


def test_another_seed_learns_something_else(reference):
    network = mlp_network()
    train_ppo(ENV, network, SMALL, seed=4)
    assert not same_parameters(network, reference[0])


def test_both_spellings_of_the_time_limit_train_alike():
    networks = [mlp_network(), mlp_network()]
    for network, flag in zip(networks, ("truncation", "truncated"), strict=True):
        train_ppo(Endless(max_len=3, flag=flag), network, SMALL)
    assert_same_parameters(*networks)


def test_a_resumed_run_goes_on_exactly_where_it_was(reference):
    """80 steps and 40 more, against 120 at a stretch."""
    network = mlp_network()
    first = train_ppo(ENV, network, SMALL, total_steps=80)
    other = mlp_network(seed=9)
    steps = []
    result = train_ppo(
        ENV,
        other,
        SMALL,
        initial_state=first.training_state,
        log_fn=lambda metrics, step: steps.append(step),
    )
    assert steps == [80, 120] and result.total_steps == 120 and result.total_iterations == 1
    assert_same_parameters(other, reference[0])
    # Nothing that the caller holds was deleted or changed.
    assert first.training_state.env_states.obs.shape == (8, 1)
    assert first.training_state.steps_taken == 80.0


def test_a_resumed_run_goes_on_under_the_settings_of_its_config(reference):
    """A learning rate of 0 and other clipping take effect: nothing moves any more."""
    _, result, _, _ = reference
    ppo = changed(SMALL.ppo, learning_rate=0.0, gradient_clipping=1.0, weight_decay=0.1)
    network = mlp_network(seed=9)
    train_ppo(
        ENV,
        network,
        changed(SMALL, ppo=ppo),
        total_steps=160,
        initial_state=result.training_state,
    )
    assert_same_parameters(network, reference[0])


def test_a_state_of_another_network_is_refused_and_nothing_touched(reference):
    _, result, _, _ = reference
    network = lstm_network()
    with pytest.raises(ValueError, match="initial_state.optimizer does not fit: expected"):
        train_ppo(ENV, network, SMALL, initial_state=result.training_state)
    assert_same_parameters(network, lstm_network())


def test_training_goes_on_with_what_a_callback_wrote():
    """An entropy weight that is raised at the first call changes what is learned, for good."""
    network, plain = mlp_network(), mlp_network()
    weight = network.layers[-1].action.layers[-1].entropy_weight

    def log(metrics, step):
        if step == 0:
            weight[...] = jnp.asarray(10.0)

    result = train_ppo(ENV, network, SMALL, log_fn=log)
    train_ppo(ENV, plain, SMALL)
    assert weight[...] == 10.0
    assert not same_parameters(network, plain)
    # Of the order of 10 times an entropy of −1 to 1, where it was a hundredth of it.
    assert abs(result.final_metrics["losses/regularization/mean"]) > 0.1


def test_checkpointed_states_outlive_training(reference):
    _, _, _, checkpoints = reference
    _, first = checkpoints[0]
    assert_same_parameters(first.networks, mlp_network())
    assert first.env_states.obs.shape == (8, 1)
    assert first.rng_key.shape == ()


def test_the_network_is_up_to_date_in_callbacks_and_after_an_exception(reference):
    network = mlp_network()
    start = mlp_network()
    seen = []

    def log(metrics, step):
        seen.append(not same_parameters(start, network))

    def fail(state, step):
        if step:
            raise RuntimeError("disk full")

    config = changed(SMALL, checkpoint_every_steps=80)
    with pytest.raises(RuntimeError, match="disk full"):
        train_ppo(ENV, network, config, log_fn=log, checkpoint_fn=fail)
    assert seen == [False, True, True]
    shorter = mlp_network()
    train_ppo(ENV, shorter, SMALL, total_steps=80)
    assert_same_parameters(network, shorter)


def test_a_failing_logger_warns_and_training_goes_on(reference):
    network = mlp_network()

    def log(metrics, step):
        raise OSError("no connection")

    with pytest.warns(RuntimeWarning, match="no connection"):
        train_ppo(ENV, network, SMALL, log_fn=log)
    assert_same_parameters(network, reference[0])


def test_stop_fn_ends_after_the_iteration_under_way():
    network = mlp_network()

    def learned_something():
        return not same_parameters(network, mlp_network())

    result = train_ppo(ENV, network, SMALL, stop_fn=learned_something)
    assert result.total_steps == 40
    assert [entry["step"] for entry in result.eval_history] == [0, 40]


@pytest.mark.parametrize(("asked", "end"), [(1, 0), (3, 40)])
def test_stop_fn_is_asked_after_what_follows_an_iteration_too(asked, end):
    """The evaluations at 0 and 40 take time, too; the last checkpoint is of where it ends."""
    answers = iter([False] * (asked - 1) + [True])
    saved = []
    result = train_ppo(
        ENV,
        mlp_network(),
        changed(SMALL, eval=changed(SMALL.eval, every_steps=40), checkpoint_every_steps=1000),
        stop_fn=lambda: next(answers),
        checkpoint_fn=lambda state, step: saved.append(step),
    )
    assert result.total_steps == end
    assert saved == sorted({0, end})


def test_a_total_that_is_no_multiple_is_reached_and_reported():
    result = train_ppo(ENV, mlp_network(), SMALL, total_steps=41)
    assert (result.total_steps, result.total_iterations) == (80, 2)


def test_a_total_of_0_only_evaluates():
    result = train_ppo(ENV, mlp_network(), SMALL, total_steps=0)
    assert result.total_iterations == 0 and len(result.eval_history) == 1


def test_modes_are_left_as_they_were(reference):
    network, *_ = reference
    assert network.layers[-1].action.layers[-1].deterministic is False


def test_throughput_is_reported_on_request():
    config = changed(SMALL, ppo=changed(SMALL.ppo, logging_level=LoggingLevel.THROUGHPUT))
    result = train_ppo(ENV, mlp_network(), config, total_steps=40)
    assert result.final_metrics["throughput/train_sps"] > 0
    assert result.final_metrics["throughput/eval_sps"] > 0
    assert "throughput/eval_sps" not in result.eval_history[0]


def hands_network():
    rngs = nnx.Rngs(0)
    actions = Parallel(
        left=Sequential([Dense(4, 2, rngs), NormalTanhSampler(rngs, 1e-3)]),
        right=Sequential([Dense(4, 4, rngs), NormalTanhSampler(rngs, 1e-3)]),
    )
    values = Parallel(left=Dense(4, 1, rngs), right=Dense(4, 1, rngs))
    return Sequential([Flattener(), PPOAdapter(action=actions, value=values)])


def test_dict_actions_rewards_and_observations():
    network = hands_network()
    result = train_ppo(TwoHands(length=4), network, SMALL)
    assert {"losses/actor/left/mean", "losses/critic/right/std"} <= set(result.final_metrics)
    assert {"eval/episode_reward/left/mean", "eval/episode_reward/mean"} <= set(
        result.final_metrics
    )
    both = sum(result.final_metrics[f"eval/episode_reward/{h}/mean"] for h in ("left", "right"))
    np.testing.assert_allclose(both, result.final_metrics["eval/episode_reward/mean"], rtol=1e-5)


def test_default_config():
    assert default_config() == TrainConfig()


@pytest.mark.slow
def test_it_learns_to_follow_a_target():
    # The optimum is 10 an episode, acting 0 earns 10·11/12 = 9.17.
    config = TrainConfig(
        ppo=PPOConfig(n_envs=64, rollout_length=10, total_steps=64_000, learning_rate=3e-3),
        eval=EvalConfig(every_steps=10**9, n_envs=64, logging_percentiles=None),
    )
    result = train_ppo(FollowTarget(length=10), mlp_network(normalize=False), config)
    assert result.final_metrics["eval/episode_reward/mean"] > 9.9


def test_time_limits_are_bootstrapped_to_the_right_value():
    # Reward 1 for ever, γ = 0.9: V = 1/(1 − 0.9) = 10 though episodes last 5 steps. Taken for
    # ends, the limits would make it 1 + 0.9 + … + 0.9⁴ = 4.1 at most. (Nothing that the network
    # sees tells the limit: a last observation that is seen at limits only would never be trained.)
    config = TrainConfig(
        ppo=PPOConfig(
            n_envs=64,
            rollout_length=10,
            total_steps=64_000,
            learning_rate=1e-2,
            discounting_factor=0.9,
            logging_level=LoggingLevel.CRITIC_EXTRA,
        ),
        eval=EvalConfig(enabled=False),
    )
    env = EpisodeWrapper(Endless(max_len=10**6), 5)
    metrics = train_ppo(env, mlp_network(normalize=False), config).final_metrics
    np.testing.assert_allclose(metrics["losses/predicted_value/mean"], 10.0, rtol=0.02)
    assert metrics["losses/predicted_value/std"] < 0.1


class WeaklyTyped(FollowTarget):
    """Its step returns a reward that is a bare Python number's kind, its reset does not."""

    def step(self, state, action):
        state = super().step(state, action)
        return state.replace(reward=jnp.where(state.done > 0, 1.0, 0.0))


@pytest.fixture
def compiled():
    """Names of what is compiled from now on."""
    names = []

    def count(event: str, duration_secs: float, **known: str | int) -> None:
        del duration_secs
        if event == "/jax/core/compile/backend_compile_duration":
            names.append(known.get("fun_name", event))

    monitoring.register_event_duration_secs_listener(count)
    yield names
    monitoring.clear_event_listeners()


def test_nothing_is_compiled_again_after_the_first_iteration(compiled):
    counts = []
    env = EpisodeWrapper(WeaklyTyped(length=7), 5)
    config = changed(SMALL, eval=changed(SMALL.eval, every_steps=40))
    log = lambda metrics, step: counts.append(len(compiled))  # noqa: E731
    train_ppo(env, mlp_network(), config, log_fn=log)
    assert len(counts) == 4 and counts[1] == counts[3] > 0


@pytest.mark.parametrize("make", [mlp_network, lstm_network], ids=["mlp", "lstm"])
def test_a_second_run_compiles_nothing(make, compiled):
    """The same environment object and configuration, an equal network; another seed."""
    log = lambda metrics, step: None  # noqa: E731
    checkpoint = lambda state, step: None  # noqa: E731
    train_ppo(ENV, make(), SMALL, log_fn=log, checkpoint_fn=checkpoint)
    del compiled[:]
    train_ppo(ENV, make(seed=5), SMALL, seed=8, log_fn=log, checkpoint_fn=checkpoint)
    assert compiled == []


class Drawn(FollowTarget):
    """Renders 2 × 2 images of one brightness: the age of the episode."""

    def render(self, trajectory, brightness=1):
        return [np.full((2, 2, 3), brightness * s.info["age"], np.uint8) for s in trajectory]


def test_videos_are_rendered_when_due_and_change_nothing():
    """Iterations of 40 steps; a video at the start, at 80 and at the end."""

    def train(env, enabled, videos):
        video = VideoConfig(enabled, 80, episode_length=5, render_kwargs={"brightness": 9})
        network = mlp_network()
        train_ppo(env, network, changed(SMALL, video=video), video_fn=videos.append)
        return network

    videos = []
    filmed = train(Drawn(length=3), True, videos)
    assert [data.step for data in videos] == [0, 80, 120]
    # Episodes of 3 steps: 5 steps are 6 states, of ages 0 1 2 0 1 2.
    ages = [0, 1, 2, 0, 1, 2]
    for data in videos:
        assert data.frames.shape == (6, 2, 2, 3) and data.frames.dtype == np.uint8
        np.testing.assert_array_equal(data.frames[:, 0, 0, 0], 9 * np.array(ages))
        assert data.episode_length == 5 and data.episode_reward <= 3.0
    assert_same_parameters(filmed, train(Drawn(length=3), False, []))


def test_a_renderer_that_fails_does_not_end_training():
    class Broken(FollowTarget):
        def render(self, trajectory):
            raise OSError("no display")

    config = changed(SMALL, video=VideoConfig(enabled=True, episode_length=2))
    with pytest.warns(RuntimeWarning, match="rendering a video raised OSError: no display"):
        result = train_ppo(Broken(), mlp_network(), config, total_steps=40, video_fn=print)
    assert result.total_steps == 40
