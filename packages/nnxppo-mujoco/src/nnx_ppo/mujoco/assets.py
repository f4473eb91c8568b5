"""Robot models that Playground does not ship."""

import pathlib

MENAGERIE_URL = "https://github.com/google-deepmind/mujoco_menagerie"


class AssetsMissingError(FileNotFoundError):
    """An environment needs robot models that are not installed."""


def require_menagerie(name: str, folder: str, commit: str) -> None:
    """Raise if the robot models are absent, where Playground would download them.

    Args:
        name: The environment that needs them.
        folder: Where Playground looks for them.
        commit: The commit of MuJoCo Menagerie that Playground was written for.

    Raises:
        AssetsMissingError: Says what to put where.
    """
    if not pathlib.Path(folder).exists():
        raise AssetsMissingError(
            f"Environment {name!r} needs the robot models of MuJoCo Menagerie (mujoco_menagerie), "
            f"expected in the folder '{folder}', which does not exist. nnxppo downloads nothing. "
            f"Put commit {commit} of {MENAGERIE_URL} there: "
            f"git clone {MENAGERIE_URL} '{folder}' && git -C '{folder}' checkout {commit}"
        )
