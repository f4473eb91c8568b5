"""Whether a network fits an environment, found out from shapes alone, before compiling."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import PyTree

from nnx_ppo.algorithms.config import VideoConfig
from nnx_ppo.algorithms.heads import advantages_per_action, match_rewards, per_reward
from nnx_ppo.core import PPONetworkOutput, RLEnv, StatefulModule, check_same_carry, reset_where
from nnx_ppo.core.wrappers import TIME_LIMIT_FLAGS
from nnx_ppo.networks.sampling_layers import ActionSampler

_BATCH = 3


def check_network(
    env: RLEnv,
    networks: StatefulModule,
    combine_advantages: bool,
    *,
    name: str = "networks",
    values: bool = True,
) -> None:
    """Raise if a network cannot be trained in an environment.

    Args:
        env: The environment, written for a single instance.
        networks: The network; it is not changed.
        combine_advantages: As in `PPOConfig`.
        name: What the caller calls the network.
        values: Whether its value estimates are used.

    Raises:
        TypeError: The network's output is no `PPONetworkOutput`.
        ValueError: Its actions, values or carry do not fit, or the environment's own state
            changes its tree, shapes or dtypes from reset to step. Names the path of the leaf.
    """
    first = first_state_shapes(env)
    output = network_output(networks, first.obs, name, values)
    _check_action_sizes(output.actions, getattr(env, "action_size", None), name)
    try:
        stepped = jax.eval_shape(jax.vmap(env.step), first, output.actions)
    except Exception as error:
        error.add_note(
            f"env.step failed on the network's actions {_shapes(output.actions)} (batch axis of "
            f"{_BATCH} included). Do they have the tree and sizes that the environment expects?"
        )
        raise
    _check_same_state(first, stepped)
    _check_scalars(stepped)
    if not values:
        return
    rewards = match_rewards(stepped.reward, output.value_estimates)
    jax.eval_shape(
        lambda advantages, actions: advantages_per_action(advantages, actions, combine_advantages),
        rewards,
        output.loglikelihoods,
    )


def check_kind(name: str, value: Any, kind: type, cure: str) -> None:
    """Raise if an argument is no instance of a class.

    Raises:
        TypeError: Says what it is, and the cure.
    """
    if not isinstance(value, kind):
        raise TypeError(f"{name} must be a {kind.__name__}, got {type(value).__name__}. {cure}")


def check_module(name: str, value: Any) -> None:
    """Raise if an argument is no network.

    Raises:
        TypeError: Says what it is.
    """
    cure = "Build one of nnx_ppo.networks, for instance with make_mlp_actor_critic."
    check_kind(name, value, StatefulModule, cure)


def check_discounts(env: RLEnv, discounting_factor: Any) -> None:
    """Raise if discounts are given for other reward heads than the environment has.

    Raises:
        ValueError: Names both.
    """
    if isinstance(discounting_factor, Mapping):
        per_reward("discounting_factor", discounting_factor, first_state_shapes(env).reward)


def check_same_variables(source: str, expected: Any, found: Any) -> None:
    """Raise if the variables of two modules differ in tree, shape or dtype.

    Args:
        source: Where `found` comes from, for the message.
        expected: State of the module that is to take the variables.
        found: The variables.

    Raises:
        ValueError: Names the first variable that differs.
    """
    want, have = (
        {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}
        for leaves in map(jax.tree.leaves_with_path, (expected, found))
    )
    for name in sorted(want.keys() | have.keys()):
        types = [
            f"{tree[name].dtype}{list(tree[name].shape)}" if name in tree else "nothing"
            for tree in (want, have)
        ]
        if types[0] != types[1]:
            raise ValueError(
                f"{source} does not fit: expected {types[0]} at {name}, got {types[1]}. Build "
                "both from the same network, and the state with new_training_state."
            )


def count_environments(env_states: Any) -> int:
    """Return how many environments a batched state holds."""
    # A state read from a file may lack `done`, if its class computes it.
    done = getattr(env_states, "done", None)
    leaf = jax.tree.leaves(env_states)[0] if done is None else done
    return jnp.shape(leaf)[0]


def check_number_of_environments(env_states: Any, n_envs: int) -> None:
    """Raise if a training state holds another number of environments than configured.

    Raises:
        ValueError: Says both numbers.
    """
    have = count_environments(env_states)
    if have != n_envs:
        raise ValueError(
            f"The training state holds {have} environments, but n_envs={n_envs}. Set "
            f"n_envs={have} to go on from it, or give it fresh ones with "
            f"nnx_ppo.algorithms.restart_environments(state, env, n_envs={n_envs}, seed=…)."
        )


def first_state_shapes(env: RLEnv) -> Any:
    """Return the shapes and dtypes of the states of some environments after `env.reset`."""
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), _BATCH))
    return jax.eval_shape(jax.vmap(env.reset), keys)


def network_output(
    networks: StatefulModule, obs: PyTree, name: str, values: bool
) -> PPONetworkOutput:
    """Return the shapes of a network's output, checked by themselves.

    Args:
        networks: The network; it is not changed.
        obs: Shapes and dtypes of observations, from `first_state_shapes`.
        name: What the caller calls the network.
        values: Whether its value estimates are used.

    Raises:
        TypeError: The network's output is no `PPONetworkOutput`.
        ValueError: A part of it has another shape than it must have, or its carry changes.
    """
    graphdef, variables = nnx.split(networks)

    def step(variables: Any, obs: PyTree) -> tuple[Any, Any, Any, Any]:
        live = nnx.merge(graphdef, variables, copy=True)
        state = live.initialize_state(_BATCH)
        out = live(state, obs)
        reset_where(live, jnp.zeros(_BATCH, bool), out.next_state)
        return state, out.next_state, out.output, out.rollout_extras

    try:
        state, next_state, output, extras = jax.eval_shape(step, variables, obs)
    except Exception as error:
        error.add_note(
            f"{name} failed on the environment's observations {_shapes(obs)} (batch axis of "
            f"{_BATCH} included)."
        )
        raise
    if not isinstance(output, PPONetworkOutput):
        raise TypeError(
            f"{name} must return a PPONetworkOutput, got {type(output).__name__}. End the "
            "network with a PPOAdapter, which makes one from an action and a value port."
        )
    check_same_carry(f"{name}.__call__", state, next_state)
    if extras is None:
        raise ValueError(
            f"{name} returns rollout_extras=None, so the actions it took could not be replayed. "
            "Return from __call__ the rollout_extras of its children (containers do), or the raw "
            "action where it samples by itself."
        )
    for field in ("loglikelihoods", "value_estimates") if values else ("loglikelihoods",):
        for path, leaf in jax.tree.leaves_with_path(getattr(output, field)):
            if leaf.shape != (_BATCH,):
                raise ValueError(
                    f"{name}: {field}{jax.tree_util.keystr(path)} must have one value per "
                    f"environment, expected shape ({_BATCH},) for a batch of {_BATCH}, got "
                    f"{leaf.shape}."
                )
    return output


def _check_action_sizes(actions: PyTree, sizes: Any, name: str) -> None:
    """Raise if actions are not of the sizes that the environment declares, if it does."""
    if sizes is None:
        return
    expected = jax.tree.structure(sizes)
    if jax.tree.structure(actions) != expected:
        raise ValueError(
            f"{name}: the actions must be a tree like env.action_size, expected {expected}, "
            f"got {jax.tree.structure(actions)}."
        )
    for (path, action), size in zip(
        jax.tree.leaves_with_path(actions), jax.tree.leaves(sizes), strict=True
    ):
        if action.shape != (_BATCH, size):
            raise ValueError(
                f"{name}: actions{jax.tree_util.keystr(path)} must have env.action_size="
                f"{size} features, expected shape ({_BATCH}, {size}) for a batch of {_BATCH}, "
                f"got {action.shape}. A NormalTanhSampler needs twice as many inputs as actions; "
                "an environment whose action is one choice (CategoricalSampler) declares no "
                "action_size."
            )


def _check_scalars(stepped: Any) -> None:
    """Raise unless reward, done and flags are scalars of each environment."""
    flags = {key: stepped.info[key] for key in TIME_LIMIT_FLAGS if key in stepped.info}
    scalars = {"reward": stepped.reward, "done": stepped.done, "info": flags}
    for path, leaf in jax.tree.leaves_with_path(scalars):
        if leaf.shape != (_BATCH,):
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            raise ValueError(
                f"env.step: {name} must be a scalar, got shape {leaf.shape[1:]}. Sum or squeeze it."
            )


def _check_same_state(first: Any, stepped: Any) -> None:
    """Raise if an environment's state changes from reset to step."""
    before, tree_before = jax.tree.flatten_with_path(first)
    after, tree_after = jax.tree.flatten_with_path(stepped)
    if tree_before != tree_after:
        names = [{jax.tree_util.keystr(path) for path, _ in leaves} for leaves in (before, after)]
        differing = sorted(names[0] ^ names[1]) or [f"{tree_before} became {tree_after}"]
        raise ValueError(
            "env.step must return a state of the same tree as env.reset, but these differ: "
            f"{', '.join(differing)}. Put every key of info and metrics into the state at reset."
        )
    for (path, old), (_, new) in zip(before, after, strict=True):
        if (old.shape, old.dtype) != (new.shape, new.dtype):
            raise ValueError(
                f"env.step changes the leaf 'state{jax.tree_util.keystr(path)}': env.reset makes "
                f"it {old.dtype}{list(old.shape)}, env.step {new.dtype}{list(new.shape)}. Make "
                "both alike."
            )


def _shapes(tree: PyTree) -> Any:
    """Return a tree of shapes for messages."""
    return jax.tree.map(lambda leaf: tuple(leaf.shape), tree)


def check_video(video: VideoConfig, env: RLEnv) -> None:
    """Raise if videos are asked for that the environment cannot render.

    Raises:
        ValueError: It has no `render`.
    """
    if video.enabled and not callable(getattr(env, "render", None)):
        raise ValueError(
            f"config.video.enabled=True, but {type(env).__name__} has no method render(trajectory, "
            "**render_kwargs); set enabled=False, or pass an eval_env that can render."
        )


def check_training_mode(networks: StatefulModule, name: str = "networks") -> None:
    """Raise if a network was left in evaluation mode, where its policy explores nothing.

    Raises:
        ValueError: All of its action samplers are deterministic.
    """
    nodes = [node for _, node in nnx.iter_modules(networks)]
    samplers = [node for node in nodes if isinstance(node, ActionSampler)]
    if samplers and all(sampler.deterministic for sampler in samplers):
        raise ValueError(
            f"{name} is in evaluation mode: its samplers are deterministic, so there is nothing "
            f"to learn from. Call {name}.train() before training."
        )
