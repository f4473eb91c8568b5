"""What is measured: which network, in which environment, with how many of them at a time."""

import dataclasses
import fnmatch
from collections.abc import Iterable, Sequence

PLAIN_FORM = "plain form"
REJAX = "rejax"
"""Names of what a case is compared with."""

NETWORKS = ("mlp", "mlp-128", "mlp-256", "lstm", "lstm-actor", "gru", "graph")
ENVIRONMENTS = ("FollowTarget", "CartpoleBalance", "CheetahRun")
"""All of them, in the order of the table."""

HOST = "host"
"""Name of the measurement of the loop itself, which is no case but can be chosen like one."""


@dataclasses.dataclass(frozen=True)
class Case:
    """One row of the table.

    Attributes:
        network: One of `NETWORKS`; `nets.py` makes them.
        environment: One of `ENVIRONMENTS`.
        n_envs: Environments that run side by side.
        against: What it is measured in turns with: `PLAIN_FORM`, `REJAX`, or None.
        window: Steps of an iteration.
        n_epochs: Passes over the window.
        n_minibatches: Gradient updates of a pass.
    """

    network: str
    environment: str
    n_envs: int
    against: str | None = PLAIN_FORM
    window: int = 30
    n_epochs: int = 4
    n_minibatches: int = 4

    @property
    def name(self) -> str:
        """What it is chosen by, as in `mlp/CartpoleBalance/256`."""
        return f"{self.network}/{self.environment}/{self.n_envs}"

    @property
    def steps(self) -> int:
        """Environment steps of an iteration."""
        return self.n_envs * self.window

    @property
    def n_updates(self) -> int:
        """Gradient updates of an iteration."""
        return self.n_epochs * self.n_minibatches


QUICK = Case("mlp", "FollowTarget", 8, window=4, n_epochs=1, n_minibatches=2)
"""Takes seconds, and measures nothing of interest."""


def all_cases(full: bool = False) -> list[Case]:
    """Return the rows in the order in which they are measured, those that say most first.

    Args:
        full: Whether to add those with 2048 environments.
    """
    cases = [*_every_network("FollowTarget", 256), *_every_network("CartpoleBalance", 256)]
    cases += [Case("mlp-256", "FollowTarget", 256), Case("lstm-actor", "FollowTarget", 256)]
    cases += _every_network("CheetahRun", 256)
    cases += [Case("mlp-128", env, 256, REJAX) for env in ("FollowTarget", "CartpoleBalance")]
    for n_envs in (64, 2048) if full else (64,):
        for environment in ENVIRONMENTS:
            cases += _every_network(environment, n_envs)
    return cases


def chosen(cases: Iterable[Case], patterns: Sequence[str]) -> list[Case]:
    """Return the cases whose names match a pattern such as `*/CartpoleBalance/*`."""
    return [case for case in cases if is_chosen(case.name, patterns)]


def is_chosen(name: str, patterns: Sequence[str]) -> bool:
    """Whether a name matches one of the patterns."""
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def place(case: Case) -> tuple[int, int, int]:
    """Return what sorts cases into the order of the table."""
    return ENVIRONMENTS.index(case.environment), case.n_envs, NETWORKS.index(case.network)


def _every_network(environment: str, n_envs: int) -> list[Case]:
    """Return the rows of an environment.

    CheetahRun resets by 200 steps of physics, so its plain form takes half a minute for an
    iteration: it is measured once.
    """
    return [
        Case(network, environment, n_envs, PLAIN_FORM if worth_it else None)
        for network in ("mlp", "lstm", "gru", "graph")
        for worth_it in [environment != "CheetahRun" or (network, n_envs) == ("mlp", 256)]
    ]
