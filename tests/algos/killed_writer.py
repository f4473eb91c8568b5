"""Writes a checkpoint again and again, killed each time; `test_checkpointing.py` runs it.

One process prepares a checkpoint in memory. Its forks write it, and kill themselves when they touch
the folder for the n-th time.
"""

import json
import os
import signal
import sys
from pathlib import Path

import numpy as np
from flax import nnx

from nnx_ppo.algorithms import latest_checkpoint, make_checkpoint_fn, new_training_state
from nnx_ppo.algorithms.checkpointing._folders import written_whole
from nnx_ppo.algorithms.checkpointing._saving import _Content
from nnx_ppo.core.testing import FollowTarget
from nnx_ppo.networks import make_mlp_actor_critic

PLACES = 20


def fork(task):
    """Run a task in a fork; return the number of the signal that ended it."""
    pid = os.fork()
    if pid == 0:
        try:
            task()
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def write(folder, content, die_at):
    """Write a checkpoint and die just before the folder is touched for the n-th time."""
    touched = renamed = 0

    def hook(event, arguments):
        nonlocal touched, renamed
        if any(isinstance(a, str | os.PathLike) and str(folder) in str(a) for a in arguments):
            touched += 1
            renamed = touched if event == "os.rename" else renamed
            if touched == die_at:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)
    with written_whole(folder / "step_0000000001") as place:
        content.write(place, {})
    (folder.parent / "renamed").write_text(str(renamed))
    os._exit(0)


def main(folder):
    """Print which places were tried, how the writers ended, and what was the latest step."""
    folder = Path(folder)
    state = new_training_state(
        FollowTarget(3), make_mlp_actor_critic(1, 1, [4], [4], nnx.Rngs(0)), n_envs=2, seed=0
    )
    content = _Content(state, 1, None, {})
    fork(lambda: (make_checkpoint_fn(folder)(state, 0), os._exit(0)))
    whole = fork(lambda: write(folder, content, die_at=0))
    renamed = int((folder.parent / "renamed").read_text())
    (folder / "step_0000000001").rename(folder.parent / "whole")
    places = np.unique(np.linspace(1, renamed, PLACES).round().astype(int)).tolist()
    ends, latest = [], []
    for place in places:
        ends.append(fork(lambda place=place: write(folder, content, die_at=place)))
        found = latest_checkpoint(folder)
        latest.append(found and found.name)
    again = fork(lambda: write(folder, content, die_at=0))
    left = sorted(path.name for path in folder.iterdir())
    found = {"places": places, "ends": ends, "latest": latest, "left": left}
    print(json.dumps({**found, "whole": [whole, again]}))


if __name__ == "__main__":
    main(sys.argv[1])
