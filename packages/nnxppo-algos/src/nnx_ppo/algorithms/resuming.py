"""Going on from a training state: with another network object, optimiser or set of environments."""

from collections.abc import Mapping
from typing import Any, TypeVar

import jax
from flax import nnx

from nnx_ppo.algorithms._functional import functional_copy
from nnx_ppo.algorithms.checkpointing.nodes import graft
from nnx_ppo.algorithms.checks import check_number_of_environments, check_same_variables
from nnx_ppo.algorithms.counters import as_int, words_of
from nnx_ppo.algorithms.keys import at_step, purpose_keys
from nnx_ppo.algorithms.resets import first_env_states
from nnx_ppo.algorithms.types import DistillationState
from nnx_ppo.core import JaxDataclass, RLEnv, StatefulModule

State = TypeVar("State", bound=JaxDataclass)


def resumed(
    state: JaxDataclass,
    networks: StatefulModule,
    optimizer: nnx.Optimizer,
    env: RLEnv,
    n_envs: int,
    *,
    network_field: str = "networks",
    carries: Mapping[str, StatefulModule] | None = None,
) -> Any:
    """Return a state that goes on from another, with the caller's network and optimiser.

    Environment states and carries that came from a file as plain nodes are put into the structure
    that `env.reset` and `initialize_state` make.

    Args:
        state: A training state; not changed.
        networks: Takes the variables of the state's network, in place.
        optimizer: Takes the state's optimiser's variables, in place.
        env: The environment, written for a single instance.
        n_envs: Environments that the run is configured for.
        network_field: Field of the state that holds the network that learns.
        carries: The module of each field that holds carries; `networks` for `network_states` if
            None.

    Raises:
        TypeError: The state is another algorithm's.
        ValueError: Something does not fit; names the first leaf, expected and found.
    """
    old: Any = state
    if not hasattr(state, network_field):
        raise TypeError(
            f"initial_state is a {type(state).__name__}, which has no {network_field!r}: a "
            "TrainingState goes on with train_ppo, a DistillationState with train_distillation."
        )
    check_number_of_environments(old.env_states, n_envs)
    stored = nnx.state(old.optimizer)
    check_same_variables("initial_state.optimizer", nnx.state(optimizer), stored)
    learned = getattr(state, network_field)
    weights = nnx.state(learned)
    check_same_variables(f"initial_state.{network_field}", nnx.state(networks), weights)
    parts: dict[str, Any] = {network_field: networks, "optimizer": optimizer}
    for name, module in (carries or {"network_states": networks}).items():
        shapes = _carry_shapes(module, n_envs)
        parts[name] = graft(shapes, getattr(state, name), f"initial_state.{name}")
    shapes = jax.eval_shape(lambda keys: first_env_states(env, n_envs, keys), purpose_keys(0))
    parts["env_states"] = graft(shapes, old.env_states, "initial_state.env_states")
    nnx.update(optimizer, stored)
    if learned is not networks:
        nnx.update(networks, weights)
    return state.replace(step_words=words_of(old.steps_taken, old.step_words), **parts)


def restart_environments(
    state: State,
    env: RLEnv,
    n_envs: int,
    seed: int,
    *,
    carries: Mapping[str, StatefulModule] | None = None,
) -> State:
    """Return a training state with as many fresh environments as wanted.

    What was learned stays: parameters, statistics, optimiser, step count and key; random streams
    advance where the network's first carry draws from them. So a run can go
    on with another number of environments, or in another environment of the same observations and
    actions.

    Args:
        state: A training state; not changed.
        env: The environment, written for a single instance.
        n_envs: Environments that are to run side by side.
        seed: Seed that they are reset from, together with the state's step count.
        carries: The module of each field that holds carries; for a distillation
            `{"student_states": student, "teacher_states": teacher}`. The state's own network for
            `network_states` if None.

    Raises:
        ValueError: `carries` is missing for a distillation.

    Example:
        >>> from nnx_ppo.algorithms import new_training_state
        >>> from nnx_ppo.core.testing import FollowTarget
        >>> from nnx_ppo.networks import make_mlp_actor_critic
        >>> env = FollowTarget(length=5)
        >>> network = make_mlp_actor_critic(1, 1, [8], [8], nnx.Rngs(0))
        >>> state = new_training_state(env, network, n_envs=2, seed=0)
        >>> restart_environments(state, env, n_envs=4, seed=0).env_states.done.shape
        (4,)
    """
    old: Any = state
    words = words_of(old.steps_taken, old.step_words)
    keys = purpose_keys(seed)
    reset, stagger = (at_step(key, as_int(words)) for key in (keys.reset, keys.stagger))
    keys = keys._replace(reset=reset, stagger=stagger)
    learner = old.student if isinstance(state, DistillationState) else old.networks
    if carries is None:
        if isinstance(state, DistillationState):
            raise ValueError(
                "restart_environments: a DistillationState does not hold its teacher; pass "
                'carries={"student_states": student, "teacher_states": teacher}.'
            )
        carries = {"network_states": learner}
    parts = {
        # Only the network that learns draws from its own streams.
        name: (module if module is learner else functional_copy(module)).initialize_state(n_envs)
        for name, module in carries.items()
    }
    return state.replace(env_states=first_env_states(env, n_envs, keys), step_words=words, **parts)


def _carry_shapes(module: StatefulModule, n_envs: int) -> Any:
    """Return the shapes of a module's carry, without drawing from its streams."""
    graphdef, variables = nnx.split(module)
    return jax.eval_shape(
        lambda data: nnx.merge(graphdef, data, copy=True).initialize_state(n_envs), variables
    )
