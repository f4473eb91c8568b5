"""`scripts/bump.py` sets a package's version and its pins on siblings, and nothing else."""

import importlib.util
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "bump.py"
BEFORE = """\
[build-system]
requires = ["uv_build>=0.9.0,<0.14"]

[project]
name = "nnxppo-algos"
version = "0.1.0"
dependencies = ["jax>=0.1.0", "nnxppo-core==0.1.0", "nnxppo-networks==0.1.0"]

[project.optional-dependencies]
wandb = ["nnxppo-wandb==0.1.0"]
testing = ["nnxppo-core[testing]==0.1.0"]
all = ["nnxppo-algos[wandb]"]
"""
AFTER = """\
[build-system]
requires = ["uv_build>=0.9.0,<0.14"]

[project]
name = "nnxppo-algos"
version = "0.2.0rc1"
dependencies = ["jax>=0.1.0", "nnxppo-core==0.2.0rc1", "nnxppo-networks==0.2.0rc1"]

[project.optional-dependencies]
wandb = ["nnxppo-wandb==0.2.0rc1"]
testing = ["nnxppo-core[testing]==0.2.0rc1"]
all = ["nnxppo-algos[wandb]"]
"""


@pytest.fixture
def script():
    spec = importlib.util.spec_from_file_location("bump", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_version_and_pins_move_together(script):
    assert script.bump(BEFORE, "0.2.0rc1") == AFTER


def test_a_file_without_version_is_refused(script):
    with pytest.raises(ValueError, match="found 0"):
        script.bump('name = "x"\n', "0.2.0")


def test_versions_are_normalised(script):
    assert script.parse_version("0.2.0-rc1") == "0.2.0rc1"
