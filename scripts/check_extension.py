"""Check that a package of one's own can extend nnxppo, on the one in examples/extension-package.

Builds it, installs it with the wheel of nnxppo-core alone, and runs its tests there. Then adds the
wheels that bring the command `nnxppo`, which has to find the package's environment and train in it.
"""

import json
import sys
import tempfile
import time
import tomllib
from collections.abc import Mapping
from pathlib import Path

from check_wheels import (
    ROOT,
    UV,
    CheckError,
    Wheel,
    check_import,
    export_lock,
    install,
    pip_install,
    read_wheel,
    read_wheels,
    run,
)

EXTENSION = ROOT / "examples" / "extension-package"
ENVIRONMENT_NAME = "AccumulateEvidence"
# Compiling takes most of the time; tests/conftest.py has the same settings.
QUICK = (
    "env",
    f"JAX_COMPILATION_CACHE_DIR={ROOT / '.cache' / 'jax'}",
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0.3",
    "JAX_DISABLE_MOST_OPTIMIZATIONS=1",
)
# 240 steps: two iterations, and an evaluation at the start and at the end.
SMALL_RUN = """
    --ppo.total-steps=240 --ppo.n-envs=8 --ppo.rollout-length=15 --ppo.n-epochs=1
    --ppo.n-minibatches=1 --eval.n-envs=4 --eval.max-episode-length=10
    --network.actor-hidden=8 --network.critic-hidden=8 --network.lstm-features=4
""".split()


def main() -> int:
    """Run all checks; return the exit status."""
    start = time.monotonic()
    try:
        wheels = read_wheels()
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch).resolve()
            constraints = export_lock(folder)
            extension = build(folder)
            python = check_on_core(extension, wheels, constraints, folder)
            check_command(extension, wheels, constraints, python)
    except CheckError as error:
        print(f"check_extension: {error}", file=sys.stderr)
        return 1
    print(f"check_extension: {extension.name}, {time.monotonic() - start:.0f} s")
    return 0


def build(folder: Path) -> Wheel:
    """Build the wheel of the extension, as its author would."""
    project = tomllib.loads((EXTENSION / "pyproject.toml").read_text())["project"]
    run([UV, "build", "--wheel", "--quiet", "--out-dir", folder / "dist", EXTENSION], folder)
    (path,) = (folder / "dist").glob("*.whl")
    return read_wheel(path, project["name"], project["name"].replace("-", "_"))


def check_on_core(
    extension: Wheel, wheels: Mapping[str, Wheel], constraints: Path, folder: Path
) -> Path:
    """Install the extension with nothing but core, run its tests; return the Python."""
    core = wheels["nnxppo-core"]
    python = install([core, extension], constraints, folder)
    check_import(extension, [core], wheels, python)
    pip_install(python, constraints, [f"{extension.path}[test]"])
    run_tests(python, EXTENSION / "tests")
    return python


def check_command(
    extension: Wheel, wheels: Mapping[str, Wheel], constraints: Path, python: Path
) -> None:
    """Add the command; raise unless it lists the extension's environment and trains in it."""
    more = [wheels["nnxppo-networks"], wheels["nnxppo-algos"]]
    pip_install(python, constraints, [wheel.path for wheel in more])
    command, folder = python.parent / "nnxppo", python.parents[2] / "run"
    listed = run([command, "envs"], python.parent, capture=True)
    if ENVIRONMENT_NAME not in listed.split():
        raise CheckError(f"nnxppo envs does not list {ENVIRONMENT_NAME}:\n{listed}")
    run([*QUICK, command, "train", ENVIRONMENT_NAME, f"--out={folder}", *SMALL_RUN], python.parent)
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    if json.loads(lines[-1])["step"] != 240:
        raise CheckError(f"nnxppo train {ENVIRONMENT_NAME} should end at step 240: {lines[-1]}")
    # The README trains in Python; on core alone that was skipped.
    run_tests(python, EXTENSION / "tests" / "test_documentation.py")


def run_tests(python: Path, tests: Path) -> None:
    """Run tests of the extension against what is installed, from an empty folder."""
    config = ["-c", EXTENSION / "pyproject.toml", "--rootdir", EXTENSION, "-p", "no:cacheprovider"]
    empty = python.parents[2] / "empty"
    empty.mkdir(exist_ok=True)
    run([*QUICK, python, "-P", "-m", "pytest", *config, "-q", tests], empty)


if __name__ == "__main__":
    sys.exit(main())
