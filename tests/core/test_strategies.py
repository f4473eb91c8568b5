"""Random networks: what is drawn, how it shrinks, and that the reference modules are sound."""

import subprocess
import sys

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis.vendor.pretty import pretty

from nnx_ppo.core.testing import check_module
from nnx_ppo.core.testing.blocks import Block, NetworkPlan
from nnx_ppo.core.testing.modules import REFERENCE_BLOCKS, Affine, Branch, LeakyMemory
from nnx_ppo.core.testing.strategies import module_strategies

AFFINE, LEAKY, NOISE, CHAIN, BRANCH = REFERENCE_BLOCKS

plans_only = hypothesis.settings(max_examples=50, database=None, deadline=None, derandomize=True)


def smallest(strategy, condition):
    settings = hypothesis.settings(max_examples=500, database=None, derandomize=True)
    return hypothesis.find(strategy, condition, settings=settings)


def leaves(plan):
    return [plan] if not plan.parts else [leaf for part in plan.parts for leaf in leaves(part)]


class TestPlans:
    @plans_only
    @hypothesis.given(module_strategies(widths=(2, 3), min_depth=2, max_depth=4, out_size=5))
    def test_have_depth_and_sizes_that_were_asked_for(self, plan):
        assert 2 <= plan.depth <= 4
        assert plan.in_size in (2, 3)
        assert plan.out_size == 5
        for leaf in leaves(plan):
            assert leaf.block.accepts(leaf.in_size, leaf.out_size)

    @plans_only
    @hypothesis.given(module_strategies(root=CHAIN, max_depth=2, in_size=4))
    def test_have_the_root_that_was_asked_for(self, plan):
        first, second = plan.parts
        assert plan.block is CHAIN
        assert (first.in_size, second.out_size) == (4, plan.out_size)
        assert first.out_size == second.in_size

    @pytest.mark.parametrize(
        ("condition", "expected"),
        [
            (lambda plan: True, "Affine(2, 2)"),
            (lambda plan: "LeakyMemory" in plan.names(), "LeakyMemory(2, 2, decay=0.5)"),
            (lambda plan: "decay=0.9" in repr(plan), "LeakyMemory(2, 2, decay=0.9)"),
            (lambda plan: plan.depth == 2, "Chain(2, 2, Affine(2, 2), Affine(2, 2))"),
        ],
    )
    def test_shrink_to_the_simplest_network(self, condition, expected):
        assert repr(smallest(module_strategies(), condition)) == expected

    def test_are_printed_on_a_line_by_hypothesis(self):
        assert pretty(NetworkPlan(AFFINE, 3, 2)) == "Affine(3, 2)"

    def test_count_what_is_inside(self):
        pair = (NetworkPlan(AFFINE, 2, 2), NetworkPlan(LEAKY, 2, 1, {"decay": 0.5}))
        plan = NetworkPlan(BRANCH, 2, 3, parts=(NetworkPlan(CHAIN, 2, 2, parts=pair), pair[1]))
        assert plan.depth == 3
        assert list(plan.names()) == ["Branch", "Chain", "Affine", "LeakyMemory", "LeakyMemory"]


class TestBuild:
    def test_gives_the_same_parameters_for_the_same_seed_only(self):
        plan = NetworkPlan(CHAIN, 3, 2, parts=(NetworkPlan(AFFINE, 3, 4), NetworkPlan(LEAKY, 4, 2)))
        first, again, other = (
            jax.tree.leaves(nnx.state(plan.build(seed), nnx.Param)) for seed in (0, 0, 1)
        )
        for a, b in zip(first, again, strict=True):
            np.testing.assert_array_equal(a, b)
        assert not np.array_equal(first[1], other[1])  # a kernel; the bias before it is zero

    def test_hands_over_sizes_options_and_parts(self):
        seen = []

        def make(in_size, out_size, rngs, part, slope):
            seen.append((in_size, out_size, type(part), slope))
            return part

        block = Block("Mine", make, {"slope": (7,)}, parts=lambda m, n, width: [(m, n)])
        plan = smallest(module_strategies([AFFINE, block], root=block), lambda plan: True)
        plan.build()
        assert seen == [(2, 2, Affine, 7)]


class TestErrors:
    @pytest.mark.parametrize("depths", [(0, 3), (3, 2)])
    def test_depths(self, depths):
        with pytest.raises(ValueError, match="min_depth=.*a single module has depth 1"):
            module_strategies(min_depth=depths[0], max_depth=depths[1])

    @pytest.mark.parametrize("sizes", [{"widths": ()}, {"widths": (2, 0)}, {"in_size": 0}])
    def test_sizes(self, sizes):
        with pytest.raises(ValueError, match="must be 1 or more"):
            module_strategies(**sizes)

    @pytest.mark.parametrize("options", [{"root": AFFINE, "min_depth": 2}, {"root": CHAIN}])
    def test_root(self, options):
        with pytest.raises(ValueError, match="root '.*' cannot have min_depth"):
            module_strategies(**{"max_depth": options.get("min_depth", 1), **options})

    def test_no_block_fits(self):
        strategy = module_strategies([NOISE], in_size=2, out_size=3)
        with pytest.raises(ValueError, match=r"no block among \['EnvironmentNoise'\] accepts in"):
            smallest(strategy, lambda plan: True)


@pytest.mark.parametrize("block", [LEAKY, NOISE], ids=lambda block: block.name)
def test_reference_modules_keep_the_contract(block):
    inside = (NetworkPlan(block, 2, 2, {k: v[-1] for k, v in block.options.items()}),)
    plan = NetworkPlan(CHAIN, 2, 2, parts=(*inside, NetworkPlan(AFFINE, 2, 2)))
    check_module(plan.build(), plan.sample_input)


def test_branch_joins_outputs_in_order():
    first, second = Affine(2, 2, nnx.Rngs(0)), Affine(2, 1, nnx.Rngs(0))
    first.kernel[...], second.kernel[...] = jnp.full((2, 2), 1.0), jnp.full((2, 1), 2.0)
    branch = Branch(first, second)
    # Inputs 3 and 4: 1·3 + 1·4 = 7, twice; 2·3 + 2·4 = 14.
    out = branch(branch.initialize_state(1), jnp.asarray([[3.0, 4.0]]))
    assert out.output.tolist() == [[7.0, 7.0, 14.0]]


def test_leaky_memory_forgets():
    leaky = LeakyMemory(1, 1, nnx.Rngs(0), decay=0.5)
    leaky.kernel[...] = jnp.ones((1, 1))
    done = jnp.asarray([[False], [True], [False]])
    # 2; 0.5·2 + 2 = 3; reset, 2. The loss is the square.
    out = leaky.unroll(leaky.initialize_state(1), jnp.full((3, 1, 1), 2.0), done)
    assert out.output[:, 0, 0].tolist() == [2.0, 3.0, 2.0]
    assert out.regularization_loss[:, 0].tolist() == [4.0, 9.0, 4.0]


def test_neither_hypothesis_nor_orbax_comes_with_the_kit():
    script = (
        "import sys, nnx_ppo.core.testing, nnx_ppo.core.testing.modules\n"
        "print(sorted({'hypothesis', 'orbax.checkpoint'} & set(sys.modules)))"
    )
    command = [sys.executable, "-I", "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
