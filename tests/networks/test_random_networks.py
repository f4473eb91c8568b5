"""Networks that nobody thought of: random nestings of all we ship keep the contract."""

import functools
import inspect

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import nnx_ppo.networks
from nnx_ppo.core import StatefulModule, reset_where
from nnx_ppo.core.testing import check_module
from nnx_ppo.core.testing.blocks import NetworkPlan
from nnx_ppo.core.testing.roundtrip import check_roundtrip
from nnx_ppo.core.testing.strategies import module_strategies
from nnx_ppo.networks.testing import ACTOR_CRITIC, NETWORK_BLOCKS

pytestmark = pytest.mark.slow
TIME, BATCH = 6, 3

# What has to work together; the first of several ways to keep something from step to step.
KINDS = (
    {"Delay", "PopulationGraph"},
    {"RNN", "GRU", "LSTM", "LeakyRNN", "Recurrent"},
    {"VariationalBottleneck", "AR1VariationalBottleneck", "Dropout"},
    {"Normalizer"},
)

few = functools.partial(
    hypothesis.settings,
    deadline=None,
    database=None,
    derandomize=True,  # compiling takes seconds for each network, and a cache keeps these
    phases=[hypothesis.Phase.generate],  # shrinking would compile hundreds of networks
    suppress_health_check=[
        hypothesis.HealthCheck.too_slow,
        hypothesis.HealthCheck.filter_too_much,
    ],
)


def networks(kinds, **options):
    """Networks with so many of `KINDS` in them."""

    def is_mixed(plan):
        return sum(not kind.isdisjoint(plan.names()) for kind in KINDS) >= kinds

    return module_strategies(NETWORK_BLOCKS, **options).filter(is_mixed)


def test_blocks_cover_every_module_that_is_shipped():
    shipped = {
        kind
        for kind in map(vars(nnx_ppo.networks).get, nnx_ppo.networks.__all__)
        if inspect.isclass(kind) and issubclass(kind, StatefulModule)
    }
    found = set()
    for block in (*NETWORK_BLOCKS, ACTOR_CRITIC):
        sizes = block.parts(2, 2, 2) if block.parts else ()
        inside = tuple(NetworkPlan(NETWORK_BLOCKS[0], *size) for size in sizes)
        for i in range(max(map(len, block.options.values()), default=1)):
            options = {name: values[i % len(values)] for name, values in block.options.items()}
            network = NetworkPlan(block, 2, 2, options, inside).build()
            found |= {type(module) for _, module in nnx.iter_modules(network)}
    assert {kind for kind in shipped - found if not inspect.isabstract(kind)} == set()


# A random network may well have parameters that nothing depends on, e.g. before a Detach.
@pytest.mark.filterwarnings("ignore::nnx_ppo.core.testing.ContractWarning")
class TestContract:
    @few(max_examples=5)
    @hypothesis.given(networks(kinds=3, min_depth=3))
    def test_holds_for_random_networks(self, plan):
        network = plan.build()
        check_module(network, plan.sample_input)
        check_roundtrip(network, plan.sample_input)

    @few(max_examples=2)
    @hypothesis.given(networks(kinds=2, min_depth=3, root=ACTOR_CRITIC))
    def test_holds_for_random_actor_critics(self, plan):
        network = plan.build()
        check_module(network, plan.sample_input)
        check_roundtrip(network, plan.sample_input)


class TestReplay:
    @few(max_examples=6)
    @hypothesis.given(
        networks(kinds=3, min_depth=4, max_depth=4, root=ACTOR_CRITIC),
        st.lists(st.booleans(), min_size=TIME * BATCH, max_size=TIME * BATCH),
    )
    def test_has_ratio_one_whenever_episodes_end(self, plan, ends):
        network = plan.build()
        graphdef, state = nnx.split(network)
        xs = np.random.default_rng(0).normal(size=(TIME, BATCH, plan.in_size))
        xs, done = jnp.asarray(xs, jnp.float32), jnp.asarray(ends).reshape(TIME, BATCH)

        def collect(loop, inputs):
            state, carry = loop
            x, ended = inputs
            live = nnx.merge(graphdef, state, copy=True)
            out = live(carry, x)
            after = reset_where(live, ended, out.next_state)
            return (nnx.state(live), after), (out.output, out.rollout_extras)

        @jax.jit
        def rollout_and_replay(state, start):
            _, (output, extras) = jax.lax.scan(collect, (state, start), (xs, done))
            live = nnx.merge(graphdef, state, copy=True)
            return output, extras, live.unroll(start, xs, done, extras).output

        start = network.initialize_state(BATCH)
        _, extras, _ = rollout_and_replay(state, start)
        network.update_statistics(extras)  # else a normaliser would only divide by 10
        rolled, _, replayed = rollout_and_replay(nnx.state(network), start)

        likelihoods = [jax.tree.leaves(out.loglikelihoods) for out in (rolled, replayed)]
        for old, new in zip(*likelihoods, strict=True):
            assert old.shape == (TIME, BATCH)
            np.testing.assert_allclose(np.exp(new - old), np.ones((TIME, BATCH)), atol=1e-4)
        everything = map(jax.tree.leaves, (rolled, replayed))
        for old, new in zip(*everything, strict=True):
            np.testing.assert_allclose(new, old, rtol=1e-4, atol=1e-4)
