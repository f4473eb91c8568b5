"""`check_roundtrip`: what survives a checkpoint, and what it says about what does not."""

from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from nnx_ppo.core import StatefulModule, StatefulModuleOutput
from nnx_ppo.core.testing import ContractError
from nnx_ppo.core.testing import roundtrip as kit
from nnx_ppo.core.testing.modules import Affine, Chain, EnvironmentNoise, LeakyMemory
from nnx_ppo.core.testing.roundtrip import check_roundtrip


class Holder(StatefulModule):
    """A module that keeps what it is given."""

    def __init__(self, **values):
        self.values = nnx.Dict(values)

    def __call__(self, state, x, rollout_extras=None):
        return StatefulModuleOutput(state, x, jnp.zeros(()), {})


def findings(module):
    with pytest.raises(ContractError) as caught:
        check_roundtrip(module, jnp.zeros(2))
    assert {finding.rule for finding in caught.value.findings} == {"roundtrip"}
    return {finding.where: finding for finding in caught.value.findings}


class TestSound:
    def test_parameters_carries_and_random_streams(self):
        rngs = nnx.Rngs(0)
        affine, noise = Affine(2, 3, rngs), EnvironmentNoise(rngs)
        kernel = np.asarray(affine.kernel[...])
        check_roundtrip(Chain(affine, noise, LeakyMemory(3, 2, rngs)), jnp.zeros(2))
        # It worked on a copy.
        assert noise.stream.count[...] == 0
        np.testing.assert_array_equal(affine.kernel[...], kernel)

    def test_all_kinds_of_values(self):
        values = {
            "not a number": jnp.asarray([jnp.nan, -0.0, jnp.inf]),
            "half": jnp.ones((2, 3), jnp.bfloat16),
            "counter": jnp.asarray(2**32 - 1, jnp.uint32),
            "flag": jnp.asarray([True, False]),
            "key": jax.random.key(3, impl="rbg"),
            "a->b@2": jnp.ones(()),
            "path/with/slashes": {"tree": (jnp.ones(2), jnp.zeros(()))},
        }
        check_roundtrip(Holder(**{k: nnx.Variable(v) for k, v in values.items()}), jnp.zeros(2))

    def test_a_module_without_variables(self):
        check_roundtrip(Holder(), jnp.zeros(2))


class TestBroken:
    def test_names_that_mean_one_file(self):
        inner = nnx.Dict({"b": nnx.Variable(jnp.ones(()))})
        found = findings(Holder(**{"a.b": nnx.Variable(jnp.full((), 5.0)), "a": inner}))
        assert set(found) == {"self.values.a.b"}
        # Either of them overwrites the other.
        finding = found["self.values.a.b"]
        assert {finding.expected.split(",")[0], finding.got} == {"5", "1"}

    def test_values_that_cannot_be_saved(self):
        module = Holder(
            word=nnx.Variable("text"),
            none=nnx.Variable(jnp.zeros((0, 2))),
            w=nnx.Param(jnp.ones(2)),
        )
        found = findings(module)
        assert set(found) == {"self.values.word", "self.values.none"}
        assert found["self.values.word"].got == "str"
        assert found["self.values.none"].got == "float32[0, 2]"

    def test_a_sign_that_got_lost(self, monkeypatch):
        def forget_sign(state):
            return jax.tree.map(jnp.abs, state)

        monkeypatch.setattr(kit, "_save_and_restore", forget_sign)
        found = findings(Holder(zero=nnx.Variable(jnp.asarray([-0.0]))))
        assert found["self.values.zero"].expected == "the bits that were saved"

    def test_a_step_that_shows_another_type(self, monkeypatch):
        class Half(Holder):
            def __call__(self, state, x, rollout_extras=None):
                y = x.astype(jnp.bfloat16) * self.values["gain"][...]
                return StatefulModuleOutput(state, y, jnp.zeros(()), {})

        # A weak type leaves the input's dtype alone; orbax gives a strong one back.
        found = findings(Half(gain=nnx.Variable(jnp.asarray(2.0))))
        assert found["output of a step"].expected == "bfloat16[3, 2], as without the round trip"
        assert found["output of a step"].got == "float32[3, 2]"

    def test_what_orbax_refuses(self, monkeypatch):
        def refuse(state):
            raise OSError("no space left")

        monkeypatch.setattr(kit, "_save_and_restore", refuse)
        found = findings(Holder(a=nnx.Variable(jnp.ones(()))))
        assert found["saving or restoring"].got.startswith("OSError: no space left")

    def test_no_module(self, unchecked):
        with pytest.raises(TypeError, match="must be a StatefulModule, got ModuleMeta"):
            check_roundtrip(cast(StatefulModule, Holder), jnp.zeros(2))
