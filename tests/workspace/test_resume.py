"""A run that is saved, ended and resumed in a new process is the run that was never ended."""

import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from nnx_ppo.algorithms import latest_checkpoint
from nnx_ppo.algorithms.checkpointing._variables import read_arrays

from . import resume_runs

SCRIPT = Path(resume_runs.__file__)


def in_new_process(*arguments):
    """Run the script under the settings of this process."""
    settings = {
        "JAX_COMPILATION_CACHE_DIR": jax.config.values["jax_compilation_cache_dir"],
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.3",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
    }
    command = [sys.executable, SCRIPT, *map(str, arguments)]
    subprocess.run(command, env=os.environ | settings, check=True)


def content(folder):
    """What the latest checkpoint of a folder holds, as NumPy arrays by path."""
    path: Any = latest_checkpoint(folder)
    metadata = pickle.loads((path / "metadata.pkl").read_bytes())
    parts = {name: metadata[name] for name in ("state", "keys", "step")}
    parts |= {name: read_arrays(path / name) for name in ("networks", "optimizer")}
    return dict(jax.tree.leaves_with_path(parts))


@pytest.mark.physics
@pytest.mark.parametrize("environment", resume_runs.OBS_SIZES)
def test_three_and_three_iterations_are_six(environment, tmp_path):
    """Parameters, optimiser, statistics, carries, environments, keys and counters bit for bit."""
    straight, stopped = tmp_path / "straight", tmp_path / "stopped"
    for name in resume_runs.NETWORKS:
        resume_runs.train(environment, name, straight / name, 6)
        resume_runs.train(environment, name, stopped / name, 3)
    in_new_process(environment, stopped)
    for name in resume_runs.NETWORKS:
        want, found = content(straight / name), content(stopped / name)
        assert (stopped / name / "step_0000000120").is_dir()
        assert want.keys() == found.keys()
        for path, leaf in want.items():
            same = np.asarray(leaf).tobytes() == np.asarray(found[path]).tobytes()
            assert same, (name, jax.tree_util.keystr(path))
