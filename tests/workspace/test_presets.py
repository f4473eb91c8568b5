"""Every preset of every provider is a valid configuration of the command."""

import pytest

from nnx_ppo.algorithms.cli.run_config import preset_run
from nnx_ppo.algorithms.discovery import environment_providers

NAMES = [name for provider in environment_providers().values() for name in provider.names()]


@pytest.mark.parametrize("name", NAMES)
def test_preset(name):
    run = preset_run(name)
    assert run.env == name
    assert run.train.ppo.n_envs % run.train.ppo.n_minibatches == 0
