"""The tutorial shows the example package as it is."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
EXTENSION = ROOT / "examples" / "extension-package"
PAGE = (ROOT / "docs" / "tutorials" / "custom_module.md").read_text()


def test_the_project_file_is_quoted_from_the_example():
    (shown,) = re.findall(r"^```toml\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    assert shown in (EXTENSION / "pyproject.toml").read_text()


def test_the_files_of_the_example_are_those_listed():
    (listing,) = re.findall(r"^extension-package/\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    listed = set(re.findall(r"[├└]── (\S+\.\S+|\S+py\.typed)", listing))
    there = {path.name for path in EXTENSION.rglob("*.*") if "__pycache__" not in path.parts}
    assert listed == {name for name in there if not name.startswith(".")}
