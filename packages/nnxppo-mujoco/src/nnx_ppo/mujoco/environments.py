"""Loads Playground environments by name."""

from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

from nnx_ppo.mujoco.presets import PRESETS, preset_from_brax


def load(name: str, **overrides: Any) -> Any:
    """Load a Playground environment, ready to train.

    Four things are done that Playground leaves to its training scripts:

    - The physics back end (`impl`) is chosen for JAX's first device: MuJoCo Warp on a CUDA device
      that Warp can use, MJX's own implementation in JAX elsewhere.
    - An `action_repeat` above 1 is applied, by `ActionRepeatWrapper`.
    - Episodes end after `episode_length` steps as a time limit, by `EpisodeWrapper`. Like Brax,
      Playground counts them before the repeat of actions: with an `action_repeat` of 4, an
      `episode_length` of 1000 is 250 actions. An environment without this setting has no time
      limit.

    Nothing is ever downloaded. Environments of the DeepMind Control Suite need nothing else;
    those with robots need MuJoCo Menagerie in place.

    Args:
        name: One of `PlaygroundEnvironments().names()`.
        **overrides: Changes to the environment's settings. Nested settings are reached by dotted
            names, `**{"reward_config.tracking_sigma": 0.5}`, or by mappings,
            `reward_config={"tracking_sigma": 0.5}`; what a mapping leaves out stays.

    Raises:
        ValueError: Unknown environment or setting; the message names the nearest ones.
        TypeError: An override is not of the setting's type.
        AssetsMissingError: The environment's robot models are not installed.

    Example:
        >>> env = load("CartpoleBalance", episode_length=500)  # doctest: +SKIP
        >>> env.action_size  # doctest: +SKIP
        1
    """
    return _playground().load_environment(name, overrides)


class PlaygroundEnvironments:
    """Provider of MuJoCo Playground's environments."""

    def names(self) -> Sequence[str]:
        """Return the names of all environments, in Playground's order."""
        return _playground().environment_names()

    def load(self, name: str, **overrides: Any) -> Any:
        """Load an environment; see `nnx_ppo.mujoco.load`."""
        return load(name, **overrides)

    def preset(self, name: str) -> Mapping[str, Any]:
        """Return our own settings for `name`, or else the translation of Playground's."""
        if name in PRESETS:
            return PRESETS[name]
        published = _playground().published_settings(name)
        return preset_from_brax(published) if published else {}


def _playground() -> ModuleType:
    """Import Playground, which takes seconds, where it is first needed."""
    from nnx_ppo.mujoco import _playground  # noqa: PLC0415  (takes seconds)

    return _playground
