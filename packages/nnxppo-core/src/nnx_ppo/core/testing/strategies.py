"""Random networks, as hypothesis strategies.

Needs hypothesis, which the extra `nnxppo-core[testing]` installs.
"""

import contextlib
import dataclasses
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import hypothesis.strategies as st

from nnx_ppo.core.testing.blocks import Block, NetworkPlan
from nnx_ppo.core.testing.modules import REFERENCE_BLOCKS

__all__ = ["module_strategies"]

# hypothesis's own DrawFn is a protocol that cannot be checked at run time.
Draw: TypeAlias = Callable[[st.SearchStrategy[Any]], Any]


def module_strategies(
    blocks: Sequence[Block] = REFERENCE_BLOCKS,
    *,
    in_size: int | None = None,
    out_size: int | None = None,
    widths: Sequence[int] = (2, 3),
    min_depth: int = 1,
    max_depth: int = 3,
    root: Block | None = None,
) -> st.SearchStrategy[NetworkPlan]:
    """Return a strategy of random networks, nested up to a depth.

    It yields plans: `plan.build(seed)` makes the network, and hypothesis prints the plan of the
    smallest network that fails. A plan shrinks to fewer levels, to earlier blocks and to earlier
    options. Almost all of a test's time goes into compiling what it draws: keep depths, widths and
    `max_examples` small, and set `deadline=None`.

    Args:
        blocks: What networks are made of, the simplest first; append a block for a module of your
            own. `nnx_ppo.networks.testing.NETWORK_BLOCKS` has all that the library ships.
        in_size: Number of input features; None draws one of `widths`.
        out_size: Number of output features; None draws one of `widths`.
        widths: What to choose from for the sizes between the modules.
        min_depth: How many modules are nested in each other at least.
        max_depth: How many at most; 1 is a single module.
        root: The outermost block; None draws one of `blocks`.

    Raises:
        ValueError: The depths or sizes leave no network; or, when drawing, no block accepts the
            sizes that a container asks for.

    Example:
        >>> import hypothesis
        >>> import jax.numpy as jnp
        >>> from nnx_ppo.core import StatefulModule, StatefulModuleOutput
        >>> from nnx_ppo.core.testing import check_module
        >>> class Rectifier(StatefulModule):  # a module of your own
        ...     def __call__(self, state, x, rollout_extras=None):
        ...         return StatefulModuleOutput(state, jnp.maximum(x, 0.0), jnp.zeros(()), {})
        >>> mine = Block("Rectifier", lambda *_: Rectifier(), accepts=lambda m, n: m == n)
        >>> @hypothesis.settings(max_examples=1, deadline=None, database=None)
        ... @hypothesis.given(module_strategies([*REFERENCE_BLOCKS, mine]))
        ... def test_inside_of_any_network(plan):
        ...     check_module(plan.build(), plan.sample_input)
        >>> test_inside_of_any_network()
    """
    blocks, widths = tuple(blocks), tuple(widths)
    if not 1 <= min_depth <= max_depth:
        raise ValueError(
            f"module_strategies: expected 1 <= min_depth <= max_depth, got min_depth={min_depth}, "
            f"max_depth={max_depth}; a single module has depth 1."
        )
    if root is not None and (min_depth > 1 if root.parts is None else max_depth < 2):
        raise ValueError(
            f"module_strategies: root {root.name!r} cannot have min_depth={min_depth}, "
            f"max_depth={max_depth}; a block without parts has depth 1, a container 2 or more."
        )
    ends = [size for size in (in_size, out_size) if size is not None]
    if not widths or min([*widths, *ends]) < 1:
        raise ValueError(
            f"module_strategies: widths and sizes must be 1 or more, got widths={widths}, "
            f"in_size={in_size}, out_size={out_size}."
        )
    # Leaves first: towards the front of a list is where hypothesis shrinks.
    ordered = tuple(sorted(blocks, key=lambda block: block.parts is not None))
    sizes = tuple(widths if size is None else (size,) for size in (in_size, out_size))
    return _plans(_Grammar(ordered, widths, sizes, (min_depth, max_depth), root))


@st.composite
def _plans(draw: Draw, grammar: "_Grammar") -> NetworkPlan:
    with _same_random_state():
        return grammar.draw_plan(draw)


@contextlib.contextmanager
def _same_random_state() -> Iterator[None]:
    """Put the state of `random` back.

    Type checkers at run time look at random elements of containers, also on behalf of the blocks
    of others; hypothesis takes that for randomness which it cannot repeat.
    """
    before = random.getstate()
    try:
        yield
    finally:
        random.setstate(before)


@dataclasses.dataclass(frozen=True)
class _Grammar:
    """What `module_strategies` was asked for; `sizes` are choices for input and output."""

    blocks: tuple[Block, ...]
    widths: tuple[int, ...]
    sizes: tuple[tuple[int, ...], ...]
    depths: tuple[int, int]
    root: Block | None

    def draw_plan(self, draw: Draw) -> NetworkPlan:
        """Draw a whole network."""
        in_size, out_size = (draw(st.sampled_from(sizes)) for sizes in self.sizes)
        if self.root is not None:
            return self.draw_block(draw, self.root, (in_size, out_size), self.depths)
        return self.draw_network(draw, (in_size, out_size), self.depths)

    def draw_network(
        self, draw: Draw, sizes: tuple[int, int], depths: tuple[int, int]
    ) -> NetworkPlan:
        """Draw a network of some sizes, as deep as the first of `depths`, at most as the second."""
        least, most = depths
        usable = [
            block
            for block in self.blocks
            if block.accepts(*sizes) and (most > 1 if block.parts else least == 1)
        ]
        if not usable:
            kind = "container" if least > 1 else "block"
            raise ValueError(
                f"module_strategies: no {kind} among {[block.name for block in self.blocks]} "
                f"accepts in_size={sizes[0]}, out_size={sizes[1]}; add one that takes any sizes."
            )
        return self.draw_block(draw, draw(st.sampled_from(usable)), sizes, depths)

    def draw_block(
        self, draw: Draw, block: Block, sizes: tuple[int, int], depths: tuple[int, int]
    ) -> NetworkPlan:
        """Draw the options of a block, and what is inside of it."""
        least, most = depths
        options = {name: draw(st.sampled_from(list(v))) for name, v in block.options.items()}
        if block.parts is None:
            return NetworkPlan(block, *sizes, options)
        inner = block.parts(*sizes, draw(st.sampled_from(self.widths)))
        deep = draw(st.integers(0, len(inner) - 1)) if least > 2 else 0
        parts = tuple(
            self.draw_network(draw, size, (least - 1 if i == deep and least > 1 else 1, most - 1))
            for i, size in enumerate(inner)
        )
        return NetworkPlan(block, *sizes, options, parts)
