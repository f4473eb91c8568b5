"""All packages have one version and pin each other to exactly that one."""

import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
PROJECTS: dict[str, dict[str, Any]] = {
    path.parent.name: tomllib.loads(path.read_text())["project"]
    for path in sorted(ROOT.glob("packages/*/pyproject.toml"))
}


def requirements(project: dict[str, Any]) -> list[Requirement]:
    """All requirements of a package, those of its extras included."""
    extras = project.get("optional-dependencies", {}).values()
    return [Requirement(line) for lines in (project["dependencies"], *extras) for line in lines]


def test_versions_are_equal():
    assert len({project["version"] for project in PROJECTS.values()}) == 1


@pytest.mark.parametrize("name", PROJECTS)
def test_siblings_are_pinned_to_the_same_version(name: str):
    project = PROJECTS[name]
    for requirement in requirements(project):
        if requirement.name in PROJECTS and requirement.name != name:
            assert str(requirement.specifier) == f"=={project['version']}", requirement


@pytest.mark.parametrize("name", PROJECTS)
def test_third_parties_have_a_floor_and_no_ceiling(name: str):
    for requirement in requirements(PROJECTS[name]):
        if requirement.name not in PROJECTS:
            operators = [specifier.operator for specifier in requirement.specifier]
            assert operators == [">="], requirement
