"""Whether samples are apart from each other, and the replay is the rollout once more."""

from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from nnx_ppo.core import PPONetworkOutput
from nnx_ppo.core.testing._conformance.comparison import (
    as_numpy,
    differences,
    is_key,
    leaf_equal,
)
from nnx_ppo.core.testing._conformance.findings import Finding
from nnx_ppo.core.testing._conformance.subject import BATCH, Mode, Subject

# What is done to the rows of a batch.
_CHOICES = {"reordered and repeated": np.array([2, 0, 1, 0]), "alone": np.array([1])}


def replay(subject: Subject) -> Iterator[Finding]:
    """From stored extras the same window comes out, whatever the random streams do."""
    rolled = subject.rollout
    replayed = subject.replay(subject.xs)
    for field in ("output", "next_state"):
        before, again = (getattr(run.outputs, field) for run in (rolled, replayed))
        for gap in differences(before, again, field, subject.tolerance):
            yield Finding(
                "replay",
                gap.path,
                f"{gap.want}, as in the rollout (index: time, batch, …)",
                gap.have,
                "store what was drawn in rollout_extras and use it when it is given, or draw from "
                "one key per environment in the carry; noise from the module's own stream is "
                "another one in the replay.",
            )


def sampler(subject: Subject) -> Iterator[Finding]:
    """A replayed action is the one that was taken; its likelihood follows the parameters."""
    taken = _heads(subject.rollout.outputs.output)
    if not taken:
        return
    replayed = _heads(subject.replay(subject.other_inputs()).outputs.output)
    pairs = zip(taken, replayed, strict=True)
    for (name, action, likelihood), (_, action_again, likelihood_again) in pairs:
        for gap in differences(action, action_again, f"{name}['action']", subject.tolerance):
            yield Finding(
                "sampler",
                gap.path,
                f"{gap.want}, the action that was taken, whatever the input is now",
                gap.have,
                "in the replay take the action from rollout_extras; from the same key, other "
                "parameters would give another action.",
            )
        if leaf_equal(likelihood, likelihood_again, 0.0):
            yield Finding(
                "sampler",
                f"{name}['log_likelihood']",
                "another value under another input: that of the old action, by the new parameters",
                "the same value",
                "compute the likelihood from the stored action and the current input; a stored "
                "likelihood makes every probability ratio 1.",
            )


def _heads(output: Any) -> list[tuple[str, Any, Any]]:
    """Return name, action and log-likelihood of each action head in an output."""

    def is_head(node: Any) -> bool:
        is_dict = isinstance(node, Mapping) and {"action", "log_likelihood"} <= node.keys()
        return is_dict or isinstance(node, PPONetworkOutput)

    found = []
    for path, node in jax.tree_util.tree_leaves_with_path(output, is_leaf=is_head):
        name = f"output{jax.tree_util.keystr(path)}"
        if isinstance(node, PPONetworkOutput):
            found.append((name, node.actions, jnp.stack(jax.tree.leaves(node.loglikelihoods))))
        elif is_head(node):
            found.append((name, node["action"], node["log_likelihood"]))
    return found


def per_sample(subject: Subject) -> Iterator[Finding]:
    """What is done to the rows of the input happens to the rows of the output, and no more."""
    yield from _judge_rows(subject, "eval")
    stored = jax.tree.leaves(subject.rollout.outputs.rollout_extras)
    if stored or any(is_key(leaf) for leaf in jax.tree.leaves(subject.rollout.start)):
        yield from _judge_rows(subject, "train")


def _judge_rows(subject: Subject, mode: Mode) -> Iterator[Finding]:
    """Compare a step on the whole batch with steps on choices of its rows.

    What changes with the random streams is left out: noise may be dealt out by position.
    """
    results, moved = _rows(subject, mode)
    when = "in the replay" if mode == "train" else "in evaluation mode"
    for field, whole in results["all"].items():
        if list(differences(whole, moved["all"][field], field)):
            continue
        for name, rows in _CHOICES.items():
            want = jax.tree.map(lambda leaf, rows=rows: leaf[rows], whole)
            for gap in differences(want, results[name][field], field, subject.tolerance):
                yield _dependence(gap, f"{when}, samples {name}")


def _rows(subject: Subject, mode: Mode) -> tuple[Any, Any]:
    """Return a step on choices of rows, in evaluation or replay, from two states of the streams."""
    if mode not in subject.memo:
        merge, variables = subject.split(mode)
        extras = subject.rollout.outputs.rollout_extras if mode == "train" else None
        stored = jax.tree.map(lambda leaf: leaf[0], extras)
        inputs = (subject.used_carry, subject.x, stored)

        def step(variables: Any, inputs: Any, rows: np.ndarray) -> dict[str, Any]:
            out = merge(variables)(*jax.tree.map(lambda leaf: leaf[rows], inputs))
            loss = jnp.broadcast_to(out.regularization_loss, rows.shape)
            fields = {name: getattr(out, name) for name in ("output", "next_state")}
            extras = {"rollout_extras": out.rollout_extras}
            return {**fields, **extras, "regularization_loss": loss}

        @jax.jit
        def steps(variables: Any, inputs: Any) -> dict[str, Any]:
            choices = {"all": np.arange(BATCH), **_CHOICES}
            return {name: step(variables, inputs, rows) for name, rows in choices.items()}

        states = (variables, subject.moved_variables(mode))
        subject.memo[mode] = tuple(steps(values, inputs) for values in states)
    return subject.memo[mode]


def _dependence(gap: Any, circumstance: str) -> Finding:
    if gap.path.startswith("regularization_loss"):
        cure = (
            "return one loss for each sample, (batch,), neither summed nor averaged over the "
            "batch: its weight would depend on the number of environments."
        )
    else:
        cure = (
            "let no sample see another one: no mean, sum or normalisation over the batch in "
            "__call__; use update_statistics for what is learned from many samples."
        )
    return Finding("per-sample", f"{gap.path} {circumstance}", gap.want, gap.have, cure)


def eval_mode(subject: Subject) -> Iterator[Finding]:
    """A module with a `deterministic` switch draws nothing that shows after `eval()`."""
    paths = [
        path
        for path, module in subject.modules()
        if isinstance(getattr(module, "deterministic", None), bool)
    ]
    outputs = [result["all"]["output"] for result in _rows(subject, "eval")] if paths else [(), ()]
    if list(differences(outputs[0], outputs[1], "output")):
        yield Finding(
            "eval",
            f"output after eval() (deterministic: {', '.join(paths)})",
            "the same whatever the state of the random streams",
            "another one",
            "act by the mean or the mode when self.deterministic is set.",
        )
    for path, module in nnx.iter_graph(subject.live("train")):
        if getattr(module, "deterministic", False) is True and isinstance(module, nnx.Module):
            yield Finding(
                "eval",
                ".".join(("self", *map(str, path), "deterministic")),
                "False after train()",
                "True",
                "make it a plain attribute that eval() and train() can set, no property.",
            )


def finite(subject: Subject) -> Iterator[Finding]:
    """Finite input gives finite output and losses."""
    for field in ("output", "regularization_loss"):
        leaves = jax.tree_util.tree_leaves_with_path(getattr(subject.rollout.outputs, field))
        for path, leaf in leaves:
            values = as_numpy(leaf)
            if values.dtype.kind == "f" and not np.isfinite(values).all():
                yield Finding(
                    "finite",
                    f"{field}{jax.tree_util.keystr(path)}",
                    "finite values",
                    f"{values[~np.isfinite(values)][0]}",
                    "guard logarithms, roots and quotients; if the inputs that the kit draws are "
                    "out of range, pass draw_input.",
                )
