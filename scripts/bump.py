"""Set the version of all five packages, and their pins on each other, in one go.

uv neither checks nor rewrites the pins between members of a workspace, so they are set together.
"""

import argparse
import re
import sys
from pathlib import Path

from packaging.version import InvalidVersion, Version

ROOT = Path(__file__).resolve().parent.parent
OWN_VERSION = re.compile(r'^version = "[^"]*"$', re.MULTILINE)
SIBLING_PIN = re.compile(r'"(nnxppo-[a-z]+(?:\[[a-z,]+\])?)==[^"]*"')


def main() -> int:
    """Rewrite the package files; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("version", type=parse_version, help="the new version, such as 0.2.0")
    version = parser.parse_args().version
    for path in sorted(ROOT.glob("packages/*/pyproject.toml")):
        path.write_text(bump(path.read_text(), version))
        print(f"{path.relative_to(ROOT)}: {version}")
    return 0


def parse_version(text: str) -> str:
    """Return a version in its normal form."""
    try:
        return str(Version(text))
    except InvalidVersion:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a version; use make bump VERSION=0.2.0"
        ) from None


def bump(text: str, version: str) -> str:
    """Return a package's `pyproject.toml` with its version and its pins on siblings set.

    Example:
        >>> print(bump('version = "1"\\ndependencies = ["jax>=1", "nnxppo-core==1"]', "2"))
        version = "2"
        dependencies = ["jax>=1", "nnxppo-core==2"]
    """
    text, count = OWN_VERSION.subn(f'version = "{version}"', text)
    if count != 1:
        raise ValueError(f"expected one line 'version = …' in a pyproject.toml, found {count}")
    return SIBLING_PIN.sub(rf'"\1=={version}"', text)


if __name__ == "__main__":
    sys.exit(main())
