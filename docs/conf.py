"""Configuration of the site. `make docs` builds it and fails on any warning."""

import typing

project = "nnxppo"
author = "The nnxppo authors"
copyright = "2026, The nnxppo authors"

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
exclude_patterns = ["_build"]
default_role = "code"  # docstrings put code in single backticks
myst_enable_extensions = ["colon_fence", "dollarmath"]
myst_heading_anchors = 3

autodoc_default_options = {"members": True, "show-inheritance": True}
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
# Signatures show types; repeated in a list of attributes, a "*batch" would be taken for markup.
napoleon_attr_annotations = False
# A switch of jaxtyping: it then shows `Float[Array, "*batch"]` without the names of modules.
typing.GENERATING_DOCUMENTATION = project  # pyright: ignore[reportAttributeAccessIssue]

from flax import nnx  # noqa: E402  (after the switch)

# A module's metaclass hides the arguments of its constructor. autodoc looks past the metaclass of
# enums only, so nnx's goes under that name here.
_call = type(nnx.Module).__call__
_call.__module__, _call.__qualname__ = "enum", "EnumType.__call__"
