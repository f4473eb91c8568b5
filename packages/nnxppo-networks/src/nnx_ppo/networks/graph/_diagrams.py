"""Drawings of a graph, as text for Mermaid and for Graphviz."""

import re
from collections.abc import Collection, Mapping

from nnx_ppo.networks.feedforward import Dense
from nnx_ppo.networks.graph._spec import Connection, Population

_MERMAID_SHAPES = {"input": "([{}])", "output": "[[{}]]", "internal": "[{}]"}
_DOT_SHAPES = {"input": "ellipse", "output": "doubleoctagon", "internal": "box"}


def to_mermaid(populations: Collection[Population], connections: Mapping[str, Connection]) -> str:
    """Return a Mermaid flowchart: inputs round, outputs with double sides, delays dotted.

    Args:
        populations: The populations, in the order to draw them.
        connections: The connections by name.
    """
    ids = _ids(populations)
    lines = ["flowchart LR"]
    for population in populations:
        label = "<br/>".join(map(_escape_mermaid, _label(population)))
        shape = _MERMAID_SHAPES[_kind(population)].format(f'"{label}"')
        lines.append(f"    {ids[population.name]}{shape}")
    for connection in connections.values():
        arrow = "-.->" if connection.delay else "-->"
        label = _escape_mermaid(_edge_label(connection))
        text = f'|"{label}"|' if label else ""
        lines.append(f"    {ids[connection.src]} {arrow}{text} {ids[connection.dst]}")
    return "\n".join(lines) + "\n"


def to_dot(populations: Collection[Population], connections: Mapping[str, Connection]) -> str:
    """Return a Graphviz digraph: inputs elliptic, outputs with a double line, delays dashed.

    Args:
        populations: The populations, in the order to draw them.
        connections: The connections by name.
    """
    ids = _ids(populations)
    lines = ["digraph PopulationGraph {", "    rankdir=LR;"]
    for population in populations:
        label = r"\n".join(map(_escape_dot, _label(population)))
        shape = _DOT_SHAPES[_kind(population)]
        lines.append(f'    {ids[population.name]} [label="{label}", shape={shape}];')
    for connection in connections.values():
        style = ", style=dashed" if connection.delay else ""
        label = _escape_dot(_edge_label(connection))
        ends = f"{ids[connection.src]} -> {ids[connection.dst]}"
        lines.append(f'    {ends} [label="{label}"{style}];')
    return "\n".join([*lines, "}"]) + "\n"


def _ids(populations: Collection[Population]) -> dict[str, str]:
    """Return identifiers that no name can break."""
    return {population.name: f"n{i}" for i, population in enumerate(populations)}


def _kind(population: Population) -> str:
    if population.input_from is not None:
        return "input"
    return "internal" if population.output_to is None else "output"


def _label(population: Population) -> list[str]:
    """Return the lines in a node: name, size, and the key it reads or writes if named otherwise."""
    lines = [population.name, str(population.size)]
    if population.input_from not in (None, population.name):
        lines.append(f"from {population.input_from}")
    if population.output_to not in (None, population.name):
        lines.append(f"to {population.output_to}")
    return lines


def _edge_label(connection: Connection) -> str:
    """Return what is not the default: the kind of transform, and the delay."""
    kind = type(connection.transform)
    parts = [] if kind is Dense else [kind.__name__]
    if connection.delay:
        parts.append(f"delay {connection.delay}")
    return ", ".join(parts)


def _escape_mermaid(text: str) -> str:
    """Write all that might have a meaning to Mermaid as character codes."""
    return re.sub(r"[^\w ,.-]", lambda match: f"#{ord(match[0])};", text)


def _escape_dot(text: str) -> str:
    """Escape a text for a quoted label."""
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
