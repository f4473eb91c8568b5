"""Environments for the libraries that we compare with, which must not get into our own."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

FOLDER = Path(__file__).parent / "peers"
ROOT = FOLDER.parents[1]
PACKAGES = ("packages/nnxppo-core", "packages/nnxppo-mujoco")
UV = os.environ.get("UV", "uv")  # `uv run` sets it to its own path


class PeerError(Exception):
    """A peer cannot be installed; the message says why."""


def python_of(name: str) -> Path:
    """Return the Python of a peer's environment, which is made if it is not there.

    Args:
        name: Name of the peer; `peers/NAME.txt` holds its requirements.

    Raises:
        PeerError: It cannot be installed.
    """
    folder = FOLDER / f".venv-{name}"
    python, done = folder / "bin" / "python", folder / "installed.txt"
    wanted = (
        f"{sys.version}\n{(FOLDER / f'{name}.txt').read_text()}{(ROOT / 'uv.lock').read_text()}"
    )
    if done.exists() and done.read_text() == wanted:
        return python
    _run("venv", "--quiet", "--clear", "--python", sys.executable, str(folder))
    with tempfile.TemporaryDirectory() as scratch:
        constraints = Path(scratch) / "constraints.txt"
        export = ["export", "--locked", "--all-extras", "--no-hashes", "--no-emit-workspace"]
        _run(*export, "--quiet", "--output-file", str(constraints))
        sources = [word for package in PACKAGES for word in ("--editable", package)]
        install = ["pip", "install", "--quiet", "--python", str(python)]
        limits = ["--constraint", str(constraints), "--requirement", str(FOLDER / f"{name}.txt")]
        _run(*install, *limits, *sources)
    done.write_text(wanted)
    return python


def _run(*words: str) -> None:
    try:
        done = subprocess.run([UV, *words], cwd=ROOT, capture_output=True, text=True, check=False)
    except OSError as error:
        raise PeerError(f"uv does not run: {error}") from error
    if done.returncode:
        raise PeerError(done.stderr.strip().splitlines()[-1] if done.stderr else "uv failed")
