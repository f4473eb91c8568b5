"""Check the wheels in dist/ as their users will meet them.

Reads names, versions, pins and files from the wheels, then installs each wheel with nothing but
what it declares into a fresh environment, imports it there and runs its own tests. The workspace
hides undeclared dependencies, because every package sees all of it; these environments do not.
"""

import argparse
import dataclasses
import email
import json
import os
import subprocess
import sys
import tempfile
import time
import tomllib
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent
UV = os.environ.get("UV", "uv")  # `uv run` sets it to its own path
# A wheel's environment must not see ours.
ENVIRONMENT = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
PROBE = """
import importlib.metadata, importlib.util, json, sys
module, distribution, *portions = sys.argv[1:]
origin = importlib.import_module(module).__file__
for entry_point in importlib.metadata.distribution(distribution).entry_points:
    entry_point.load()
reachable = [name for name in portions if importlib.util.find_spec(name)]
print(json.dumps({"origin": origin, "reachable": reachable}))
"""


class CheckError(Exception):
    """A wheel is not fit for release; the message says why."""


@dataclasses.dataclass(frozen=True)
class Wheel:
    """What a built wheel says about itself, and which module it should hold.

    Attributes:
        path: The file.
        name: Name of the distribution, `nnxppo-core`.
        module: Its portion of the namespace, `nnx_ppo.core`.
        version: Version of the distribution.
        requires: Its requirements, those of extras included.
        files: Paths inside the wheel.
    """

    path: Path
    name: str
    module: str
    version: str
    requires: tuple[Requirement, ...]
    files: tuple[str, ...]


def main() -> int:
    """Run all checks; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("packages", nargs="*", help="names of distributions; default: all")
    parser.add_argument("--workers", type=int, default=2, help="processes that run tests")
    parser.add_argument("--no-tests", action="store_true", help="install and import only")
    args = parser.parse_args()
    try:
        wheels = read_wheels()
        check_pins(wheels)
        with tempfile.TemporaryDirectory() as scratch:
            constraints = export_lock(Path(scratch))
            for name in args.packages or sorted(wheels):
                workers = 0 if args.no_tests else args.workers
                check_wheel(wheels[name], wheels, constraints, workers)
    except CheckError as error:
        print(f"check_wheels: {error}", file=sys.stderr)
        return 1
    print(f"check_wheels: {len(args.packages or wheels)} wheels are fit for release")
    return 0


def read_wheels() -> dict[str, Wheel]:
    """Return the wheel of each package of the workspace, by name."""
    wheels = {}
    for project_file in sorted(ROOT.glob("packages/*/pyproject.toml")):
        project = tomllib.loads(project_file.read_text())
        name = project["project"]["name"]
        found = sorted(ROOT.glob(f"dist/{name.replace('-', '_')}-*.whl"))
        if len(found) != 1:
            raise CheckError(
                f"dist/ should hold one wheel of {name}, found {found}; run make build"
            )
        module = project["tool"]["uv"]["build-backend"]["module-name"]
        wheels[name] = read_wheel(found[0], name, module)
    return wheels


def read_wheel(path: Path, name: str, module: str) -> Wheel:
    """Read metadata and file names of a wheel."""
    with zipfile.ZipFile(path) as archive:
        files = tuple(item for item in archive.namelist() if not item.endswith("/"))
        metadata_file = next(file for file in files if file.endswith(".dist-info/METADATA"))
        metadata = email.message_from_bytes(archive.read(metadata_file))
    requires = tuple(Requirement(line) for line in metadata.get_all("Requires-Dist", []))
    return Wheel(path, name, module, metadata["Version"], requires, files)


def check_pins(wheels: Mapping[str, Wheel]) -> None:
    """Raise unless all versions are equal and siblings are pinned to exactly that version."""
    versions = {wheel.name: wheel.version for wheel in wheels.values()}
    if len(set(versions.values())) != 1:
        raise CheckError(f"versions differ: {versions}; set them with make bump VERSION=…")
    for wheel in wheels.values():
        for requirement in wheel.requires:
            sibling = requirement.name in wheels and requirement.name != wheel.name
            if sibling and str(requirement.specifier) != f"=={wheel.version}":
                raise CheckError(
                    f"{wheel.name} {wheel.version} requires '{requirement}', expected "
                    f"=={wheel.version}; set the pins with make bump VERSION={wheel.version}"
                )


def export_lock(folder: Path) -> Path:
    """Write the third-party versions of uv.lock to a constraints file.

    So a new release of a dependency cannot break the checks of an unchanged commit.
    """
    path = folder / "constraints.txt"
    command = [UV, "export", "--locked", "--all-groups", "--all-extras", "--no-hashes"]
    run([*command, "--no-emit-workspace", "--quiet", "--output-file", path], ROOT)
    return path


def check_wheel(wheel: Wheel, wheels: Mapping[str, Wheel], constraints: Path, workers: int) -> None:
    """Check one wheel; `workers` processes run its tests, none if 0."""
    start = time.monotonic()
    check_files(wheel)
    # Resolved: where /tmp is a link, the paths that Python reports would not match.
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch).resolve()
        declared = [wheel, *siblings(wheel, wheels)]
        python = install(declared, constraints, folder)
        check_import(wheel, declared, wheels, python)
        if workers:
            run_tests(wheel, python, constraints, workers)
    print(f"check_wheels: {wheel.name} {wheel.version}, {time.monotonic() - start:.0f} s")


def check_files(wheel: Wheel) -> None:
    """Raise unless the wheel holds its portion, marked as typed, its licence and nothing else."""
    portion = wheel.module.replace(".", "/") + "/"
    info = f"{wheel.name.replace('-', '_')}-{wheel.version}.dist-info/"
    foreign = [file for file in wheel.files if not file.startswith((portion, info))]
    if foreign:
        raise CheckError(f"{wheel.path.name} holds files outside {portion}: {foreign}")
    for needed in (f"{portion}__init__.py", f"{portion}py.typed", f"{info}licenses/LICENSE"):
        if needed not in wheel.files:
            raise CheckError(f"{wheel.path.name} lacks {needed}")


def siblings(wheel: Wheel, wheels: Mapping[str, Wheel]) -> Iterator[Wheel]:
    """Yield the packages of the workspace that a wheel needs without its extras."""
    needed = [requirement.name for requirement in wheel.requires if is_required(requirement)]
    direct = [wheels[name] for name in needed if name in wheels]
    found = {sibling.name: sibling for sibling in direct}
    for sibling in direct:
        found |= {further.name: further for further in siblings(sibling, wheels)}
    yield from found.values()


def is_required(requirement: Requirement) -> bool:
    """Whether a requirement holds here when no extra is asked for."""
    return requirement.marker is None or requirement.marker.evaluate({"extra": ""})


def install(wheels: Sequence[Wheel], constraints: Path, folder: Path) -> Path:
    """Install wheels by path into a fresh environment; return its Python."""
    environment = folder / "venv"
    run([UV, "venv", "--quiet", "--python", sys.executable, environment], folder)
    python = environment / "bin" / "python"
    pip_install(python, constraints, [wheel.path for wheel in wheels])
    return python


def pip_install(python: Path, constraints: Path, what: Sequence[str | Path]) -> None:
    """Install into the environment of `python`."""
    command = [UV, "pip", "install", "--quiet", "--python", python, "--constraint", constraints]
    run([*command, *what], python.parent)


def check_import(
    wheel: Wheel, declared: Sequence[Wheel], wheels: Mapping[str, Wheel], python: Path
) -> None:
    """Raise unless the module imports from the wheel and undeclared portions are out of reach."""
    portions = sorted(other.module for other in wheels.values())
    command = [python, "-I", "-c", PROBE, wheel.module, wheel.name, *portions]
    # The last line: a dependency may print while it is imported.
    found = json.loads(run(command, python.parent, capture=True).splitlines()[-1])
    expected = sorted(other.module for other in declared)
    if found["reachable"] != expected:
        raise CheckError(f"{wheel.name} alone should see {expected}, sees {found['reachable']}")
    if not Path(found["origin"]).is_relative_to(python.parents[1]):
        raise CheckError(f"{wheel.module} was imported from {found['origin']}, not from its wheel")


def run_tests(wheel: Wheel, python: Path, constraints: Path, workers: int) -> None:
    """Run the package's tests against the installed wheel, from an empty folder.

    Those marked slow are left out: they say nothing of a wheel that the others do not.
    """
    pip_install(python, constraints, ["--group", f"{ROOT / 'pyproject.toml'}:test"])
    tests = ROOT / "tests" / wheel.name.removeprefix("nnxppo-")
    empty = python.parents[2] / "empty"
    empty.mkdir()
    config = ["-c", ROOT / "pyproject.toml", "--rootdir", ROOT, "-p", "no:cacheprovider"]
    run(
        [python, "-P", "-m", "pytest", *config, "-q", "-m", "not slow", "-n", workers, tests], empty
    )


def run(command: Sequence[object], cwd: Path, capture: bool = False) -> str:
    """Run a command; return what it printed, if captured.

    Raises:
        CheckError: The command failed.
    """
    words = [str(word) for word in command]
    stdout = subprocess.PIPE if capture else None
    done = subprocess.run(words, cwd=cwd, env=ENVIRONMENT, stdout=stdout, text=True, check=False)
    if done.returncode:
        shown = " ".join(word if "\n" not in word else "…" for word in words)
        raise CheckError(f"exit status {done.returncode} from: {shown}")
    return done.stdout or ""


if __name__ == "__main__":
    sys.exit(main())
