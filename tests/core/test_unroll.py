"""What `unroll` means, and when it may take the short way."""

from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from nnx_ppo.core import (
    StatefulModule,
    StatefulModuleOutput,
    UnrollOutput,
    fold_time,
    owns_random_stream,
    unroll_stepwise,
)

from .helpers import Leak, Noise, Scale

TIME, BATCH = 4, 2


def python_loop(module: Any, state: Any, xs: Any, done: Any, rollout_extras: Any = None) -> Any:
    """The meaning of an unroll, in plain Python. `state` is one array, or nothing."""
    outputs, losses = [], []
    for step in range(done.shape[0]):
        extras = None if rollout_extras is None else rollout_extras[step]
        out = module(state, xs[step], extras)
        outputs.append(out.output)
        losses.append(jnp.broadcast_to(out.regularization_loss, done.shape[1:]))
        state = out.next_state
        if jax.tree.leaves(state):
            state = jnp.where(done[step][:, None], module.reset_state(state), state)
    return state, jnp.stack(outputs), jnp.stack(losses)


def window(*ends: int) -> tuple[Any, Any]:
    """Inputs of a window, and `done` set in environment 0 after the steps `ends`."""
    xs = jnp.arange(1.0, 1 + TIME * BATCH).reshape(TIME, BATCH, 1)
    done = jnp.zeros((TIME, BATCH), bool)
    return xs, done.at[jnp.asarray(ends, int), 0].set(True)


def total(outputs: Any, losses: Any) -> Any:
    return outputs.sum() + losses.sum()


@jax.jit
def stepwise_slopes(gain: Any, state: Any, done: Any) -> Any:
    """Gradients by gain and first carry, of the unroll."""

    def run(gain: Any, state: Any) -> Any:
        out = unroll_stepwise(Leak(gain), state, window()[0], done)
        return total(out.output, out.regularization_loss)

    return jax.grad(run, (0, 1))(gain, state)


@jax.jit
def loop_slopes(gain: Any, state: Any, done: Any) -> Any:
    """The same, of the Python loop."""

    def run(gain: Any, state: Any) -> Any:
        return total(*python_loop(Leak(gain), state, window()[0], done)[1:])

    return jax.grad(run, (0, 1))(gain, state)


class TestByHand:
    xs = jnp.ones((3, 1, 1))

    def test_values_and_losses(self) -> None:
        out = unroll_stepwise(Leak(0.5), jnp.zeros((1, 1)), self.xs, jnp.zeros((3, 1), bool))
        # 0.5·0 + 1 = 1,  0.5·1 + 1 = 1.5,  0.5·1.5 + 1 = 1.75; losses are the squares.
        assert out.output.ravel().tolist() == [1.0, 1.5, 1.75]
        assert out.regularization_loss.tolist() == [[1.0], [2.25], [3.0625]]
        assert out.next_state.tolist() == [[1.75]]

    def test_the_carry_is_reset_after_the_step_that_ended(self) -> None:
        done = jnp.asarray([[False], [True], [False]])
        out = unroll_stepwise(Leak(0.5), jnp.zeros((1, 1)), self.xs, done)
        # 1,  0.5·1 + 1 = 1.5, then reset: 0.5·0 + 1 = 1.
        assert out.output.ravel().tolist() == [1.0, 1.5, 1.0]
        assert out.next_state.tolist() == [[1.0]]

    def test_the_end_of_the_last_step_resets_the_final_carry(self) -> None:
        done = jnp.asarray([[False], [False], [True]])
        out = unroll_stepwise(Leak(0.5), jnp.zeros((1, 1)), self.xs, done)
        assert out.output.ravel().tolist() == [1.0, 1.5, 1.75]
        assert out.next_state.tolist() == [[0.0]]

    @pytest.mark.parametrize(("end", "expected"), [(None, 3.0), (1, 1.0), (0, 1.0)])
    def test_gradients_stop_at_resets(self, end: int | None, expected: float) -> None:
        # y0 = 1, y1 = g·y0 + 1, y2 = g·y1 + 1 with g = 0.5:
        # dy1/dg = 1, dy2/dg = y1 + g·dy1/dg = 1.5 + 0.5 = 2, the sum 3.
        # Reset after y1: y2 = 1, so 1 is left. After y0: y1 = 1, y2 = g + 1, so 1 again.
        done = jnp.zeros((3, 1), bool)
        done = done if end is None else done.at[end].set(True)

        def total(module: Leak) -> Any:
            return unroll_stepwise(module, jnp.zeros((1, 1)), self.xs, done).output.sum()

        assert nnx.grad(total)(Leak(0.5))["gain"][...] == expected


class TestStepwise:
    @pytest.mark.parametrize("ends", [(), (0,), (1, 2), (3,), (0, 1, 2, 3)])
    def test_equals_a_python_loop(self, ends: tuple[int, ...]) -> None:
        xs, done = window(*ends)
        state = jnp.asarray([[3.0], [-1.0]])
        out = unroll_stepwise(Leak(), state, xs, done)
        next_state, outputs, losses = python_loop(Leak(), state, xs, done)
        np.testing.assert_allclose(out.next_state, next_state, rtol=1e-6)
        np.testing.assert_allclose(out.output, outputs, rtol=1e-6)
        np.testing.assert_allclose(out.regularization_loss, losses, rtol=1e-6)

    @hypothesis.given(st.lists(st.booleans(), min_size=TIME * BATCH, max_size=TIME * BATCH))
    @hypothesis.settings(deadline=None, max_examples=20)
    def test_gradients_equal_those_of_a_python_loop(self, ends: list[bool]) -> None:
        done = jnp.asarray(ends).reshape(TIME, BATCH)
        at = (jnp.asarray(0.5), jnp.ones((BATCH, 1)), done)
        for found, expected in zip(stepwise_slopes(*at), loop_slopes(*at), strict=True):
            np.testing.assert_allclose(found, expected, rtol=1e-5)

    def test_random_streams_go_on_from_step_to_step(self) -> None:
        xs, done = window()
        stepwise, looped = Noise(7), Noise(7)
        out = unroll_stepwise(stepwise, (), xs, done)
        _, outputs, _ = python_loop(looped, (), xs, done)
        np.testing.assert_allclose(out.output, outputs, rtol=1e-6)
        assert stepwise.noise.count[...] == looped.noise.count[...] == TIME
        assert len(np.unique(out.output - xs)) == TIME * BATCH
        # And from window to window.
        again = unroll_stepwise(stepwise, (), xs, done)
        assert stepwise.noise.count[...] == 2 * TIME
        assert not np.isin(again.output - xs, out.output - xs).any()

    def test_rollout_extras_go_to_their_step(self) -> None:
        xs, done = window()
        extras = jnp.arange(100.0, 100.0 + TIME * BATCH).reshape(TIME, BATCH, 1)
        out = unroll_stepwise(Scale(2.0), (), xs, done, extras)
        np.testing.assert_array_equal(out.output, 2 * xs + extras)

    def test_parameters_are_not_replaced(self) -> None:
        module = Leak()
        before = module.gain
        unroll_stepwise(module, jnp.zeros((BATCH, 1)), *window())
        assert module.gain is before

    def test_a_carry_that_changes_is_refused(self) -> None:
        class Grows(Leak):
            def __call__(
                self, module_state: Any, obs: Any, rollout_extras: Any = None
            ) -> StatefulModuleOutput:
                out = super().__call__(module_state, obs)
                return out.replace(next_state=jnp.concatenate([module_state, obs], axis=-1))

        with pytest.raises(ValueError, match=r"Grows.__call__ changes .*'state'.*\[2, 1\].*\[2, 2"):
            unroll_stepwise(Grows(), jnp.zeros((BATCH, 1)), *window())

    def test_modules_inside_modules(self) -> None:
        class Pair(StatefulModule):
            def __init__(self) -> None:
                self.noise = Noise(3)
                self.leak = Leak()

            def __call__(
                self, module_state: Any, obs: Any, rollout_extras: Any = None
            ) -> StatefulModuleOutput:
                return self.leak(module_state, self.noise((), obs).output)

            def reset_state(self, prev_state: Any) -> Any:
                return self.leak.reset_state(prev_state)

        assert owns_random_stream(Pair())
        xs, done = window(1)
        module, state = Pair(), jnp.zeros((BATCH, 1))
        out = module.unroll(state, xs, done)
        _, outputs, _ = python_loop(Pair(), state, xs, done)
        np.testing.assert_allclose(out.output, outputs, rtol=1e-6)
        assert module.noise.noise.count[...] == TIME


class TestDefault:
    def test_without_memory_time_is_folded_into_one_call(self) -> None:
        xs, done = window(1)
        module = Scale(2.0)
        out = module.unroll((), xs, done)
        assert module.seen.shapes == [(TIME * BATCH, 1)]
        np.testing.assert_array_equal(out.output, 2 * xs)
        assert out.regularization_loss.tolist() == [[1.0] * BATCH] * TIME
        assert out.next_state == ()

    def test_extras_are_folded_with_their_inputs(self) -> None:
        xs, done = window()
        extras = jnp.arange(100.0, 100.0 + TIME * BATCH).reshape(TIME, BATCH, 1)
        module = Scale(2.0)
        np.testing.assert_array_equal(module.unroll((), xs, done, extras).output, 2 * xs + extras)
        assert module.seen.shapes == [(TIME * BATCH, 1)]

    def test_a_random_stream_is_drawn_from_step_by_step(self) -> None:
        xs, done = window()
        module, looped = Noise(7), Noise(7)
        out = module.unroll((), xs, done)
        assert set(module.seen.shapes) == {(BATCH, 1)}
        _, outputs, _ = python_loop(looped, (), xs, done)
        np.testing.assert_allclose(out.output, outputs, rtol=1e-6)
        assert module.noise.count[...] == TIME

    def test_a_carry_goes_step_by_step(self) -> None:
        xs, done = window(1)
        state = jnp.ones((BATCH, 1))
        out = Leak().unroll(state, xs, done)
        expected = unroll_stepwise(Leak(), state, xs, done)
        for found, wanted in zip(jax.tree.leaves(out), jax.tree.leaves(expected), strict=True):
            np.testing.assert_array_equal(found, wanted)

    def test_folded_equals_stepwise(self) -> None:
        xs, done = window(0, 2)
        folded, stepwise = Scale().unroll((), xs, done), unroll_stepwise(Scale(), (), xs, done)
        for found, wanted in zip(jax.tree.leaves(folded), jax.tree.leaves(stepwise), strict=True):
            np.testing.assert_allclose(found, wanted, rtol=1e-6)

    def test_trees_of_inputs(self) -> None:
        class Adds(StatefulModule):
            def __call__(
                self, module_state: Any, obs: Any, rollout_extras: Any = None
            ) -> StatefulModuleOutput:
                return StatefulModuleOutput((), {"sum": obs["a"] + obs["b"]}, jnp.zeros(()), {})

        xs, done = window()
        out = Adds().unroll((), {"a": xs, "b": 10 * xs}, done)
        np.testing.assert_array_equal(out.output["sum"], 11 * xs)


class TestTransforms:
    """`unroll` inside the caller's own transforms; the hand-computed gradient is 3."""

    xs, done, state = jnp.ones((3, 1, 1)), jnp.zeros((3, 1), bool), jnp.zeros((1, 1))

    def test_nnx_jit(self) -> None:
        @nnx.jit
        def run(module: StatefulModule, xs: Any, done: Any) -> UnrollOutput:
            return module.unroll(module.initialize_state(done.shape[1]), xs, done)

        assert run(Leak(), self.xs, self.done).output.ravel().tolist() == [1.0, 1.5, 1.75]
        noise = Noise(7)
        out = run(noise, *window())
        assert noise.noise.count[...] == TIME
        np.testing.assert_array_equal(out.output, Noise(7).unroll((), *window()).output)

    @pytest.mark.parametrize("jit", [False, True])
    def test_nnx_grad(self, jit: bool) -> None:
        def total(module: Leak) -> Any:
            return module.unroll(self.state, self.xs, self.done).output.sum()

        grad = nnx.jit(nnx.grad(total)) if jit else nnx.grad(total)
        assert grad(Leak())["gain"][...] == 3.0

    def test_jax_transforms_of_split_state(self) -> None:
        graphdef, params = nnx.split(Leak())

        @jax.jit
        @jax.grad
        def slope(params: Any) -> Any:
            module = nnx.merge(graphdef, params, copy=True)
            return module.unroll(self.state, self.xs, self.done).output.sum()

        assert slope(params)["gain"][...] == 3.0

    def test_gradients_pass_the_folded_form(self) -> None:
        def total(module: Scale) -> Any:
            return module.unroll((), *window()).output.sum()

        # d/dg of the sum of g·x over x = 1 … 8: 36.
        assert nnx.grad(total)(Scale())["gain"][...] == 36.0

    def test_streams_pass_a_gradient(self) -> None:
        class ScaledNoise(Scale):
            def __init__(self) -> None:
                super().__init__()
                self.noise = Noise(1)

            def __call__(
                self, module_state: Any, obs: Any, rollout_extras: Any = None
            ) -> StatefulModuleOutput:
                return super().__call__((), self.noise((), obs).output)

        module = ScaledNoise()
        xs, done = window()
        slope = nnx.grad(lambda live: live.unroll((), xs, done).output.sum())(module)
        noisy = Noise(1).unroll((), xs, done).output
        np.testing.assert_allclose(slope["gain"][...], noisy.sum(), rtol=1e-5)
        assert module.noise.noise.count[...] == TIME


class Fast(Leak):
    """Knows a faster way."""

    def unroll(self, state: Any, xs: Any, done: Any, rollout_extras: Any = None) -> UnrollOutput:
        raise NotImplementedError("the fast way")


class TestInheritance:
    """A fast way holds for the step that it was written for, and for no other."""

    def test_is_inherited_with_the_step(self) -> None:
        class Same(Fast):
            def update_statistics(self, rollout_extras: Any) -> None: ...

        assert Same.unroll is Fast.unroll

    @pytest.mark.parametrize("name", ["__call__", "initialize_state", "reset_state"])
    def test_is_dropped_with_the_step(self, name: str) -> None:
        changed = type("Changed", (Fast,), {name: getattr(Leak, name)})
        assert changed.unroll is StatefulModule.unroll
        below = type("Below", (changed,), {})
        assert below.unroll is StatefulModule.unroll

    def test_result_is_that_of_the_new_step(self) -> None:
        class Doubled(Fast):
            def __call__(
                self, module_state: Any, obs: Any, rollout_extras: Any = None
            ) -> StatefulModuleOutput:
                return super().__call__(module_state, 2 * obs)

        out = Doubled(0.5).unroll(jnp.zeros((1, 1)), jnp.ones((2, 1, 1)), jnp.zeros((2, 1), bool))
        # 0.5·0 + 2 = 2,  0.5·2 + 2 = 3.
        assert out.output.ravel().tolist() == [2.0, 3.0]

    def test_a_mixin_counts(self) -> None:
        class KeepsMemory:
            def reset_state(self, prev_state: Any) -> Any:
                return prev_state

        class Mixed(KeepsMemory, Fast):
            pass

        assert Mixed.unroll is StatefulModule.unroll

    def test_an_unroll_of_a_sibling_does_not_fit(self) -> None:
        """`unroll` from one parent and the step from another mean different things."""

        class Faster(Fast):
            def unroll(self, *args: Any, **kwargs: Any) -> Any:
                return Fast.unroll(self, *args, **kwargs)

        class Gated(Fast):
            def reset_state(self, prev_state: Any) -> Any:
                return prev_state

        assert Faster.unroll is not StatefulModule.unroll
        both = type("Both", (Faster, Gated), {})
        assert both.unroll is StatefulModule.unroll

    def test_both_at_once_is_the_authors_business(self) -> None:
        class Faster(Fast):
            def reset_state(self, prev_state: Any) -> Any:
                return prev_state

            def unroll(
                self, state: Any, xs: Any, done: Any, rollout_extras: Any = None
            ) -> UnrollOutput:
                raise NotImplementedError("faster still")

        assert Faster.unroll is not StatefulModule.unroll
        assert Faster.unroll is not Fast.unroll


class TestParts:
    def test_owns_random_stream(self) -> None:
        assert owns_random_stream(Noise())
        assert not owns_random_stream(Leak())

    def test_fold_time_and_back(self) -> None:
        fold, unfold = fold_time((2, 3))
        tree = {
            "a": jnp.arange(24).reshape(2, 3, 4),
            "key": jax.random.split(jax.random.key(0), (2, 3)),
        }
        folded = fold(tree)
        assert folded["a"].shape == (6, 4)
        assert folded["a"][4].tolist() == tree["a"][1, 1].tolist()  # step 1, environment 1
        assert folded["key"].shape == (6,)
        back = unfold(folded)
        assert (back["a"] == tree["a"]).all()
        assert (back["key"] == tree["key"]).all()

    def test_step_and_defaults_of_the_contract(self) -> None:
        with pytest.raises(TypeError, match="abstract"):
            StatefulModule()  # pyright: ignore[reportAbstractUsage]
        module = Scale()
        assert module.initialize_state(5) == ()
        assert module.reset_state((1,)) == (1,)
        assert module.update_statistics(None) is None


def test_an_override_is_seen_whatever_was_asked_of_its_parent_before() -> None:
    """Abstract classes remember answers, and one under construction reads its parent's memory."""

    class Window(StatefulModule):
        def __call__(self, module_state, obs, rollout_extras=None):
            return StatefulModuleOutput(module_state, obs, jnp.zeros(()), {})

        def unroll(self, state, xs, done, rollout_extras=None):
            raise AssertionError

    assert issubclass(Window, Window)

    class Same(Window):
        pass

    class Other(Window):
        def __call__(self, module_state, obs, rollout_extras=None):
            return StatefulModuleOutput(module_state, 2 * obs, jnp.zeros(()), {})

    assert Same.unroll is Window.unroll
    assert Other.unroll is StatefulModule.unroll
