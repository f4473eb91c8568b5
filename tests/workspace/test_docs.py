"""What the documentation shows works: Python examples run, commands exist.

The Python examples of a page run in order in one namespace, as a reader would follow them. An
example that cannot run here has a comment right before it: `<!-- no-test: the reason -->`.
"""

import dataclasses
import re
import sys
import textwrap
import types
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    path.relative_to(ROOT)
    for pattern in ("*.md", "packages/*/README.md", "docs/**/*.md")
    for path in ROOT.glob(pattern)
    if "_build" not in path.parts
)
EXAMPLE = re.compile(
    r"(?P<skip><!-- no-test: \S.*? -->\s*)?"
    r"^(?P<indent> *)```(?P<language>python|bash)\b[^\n]*\n(?P<code>.*?)^(?P=indent)```$",
    re.DOTALL | re.MULTILINE,
)
MAKE_TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


@dataclasses.dataclass(frozen=True)
class Example:
    """A fenced block of a page; `line` counts the lines before it."""

    code: str
    line: int


def examples(page: Path, language: str) -> list[Example]:
    """The examples of a page in one language, without those marked `no-test`."""
    text = (ROOT / page).read_text()
    return [
        Example(textwrap.dedent(match["code"]), text.count("\n", 0, match.start("code")))
        for match in EXAMPLE.finditer(text)
        if match["language"] == language and not match["skip"]
    ]


def with_marks(page: Path):
    """A parameter for a page, marked if its examples step MuJoCo."""
    physical = any("mujoco" in example.code.lower() for example in examples(page, "python"))
    return pytest.param(page, id=str(page), marks=pytest.mark.physics if physical else ())


@pytest.mark.parametrize("page", [with_marks(page) for page in PAGES if examples(page, "python")])
def test_python_examples_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    module = types.ModuleType(f"examples_of_{page.stem}".replace("-", "_"))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.chdir(tmp_path)
    for example in examples(page, "python"):
        # Blank lines in front make the line numbers of tracebacks those of the page.
        code = compile("\n" * example.line + example.code, ROOT / page, "exec")
        exec(code, vars(module))


@pytest.mark.parametrize("page", [page for page in PAGES if examples(page, "bash")], ids=str)
def test_make_targets_exist(page: Path):
    lines = [line for block in examples(page, "bash") for line in block.code.split("\n")]
    commands = [line.partition("#")[0].split() for line in lines]
    made = {
        word
        for command in commands
        if command[:1] == ["make"]
        for word in command[1:]
        if re.fullmatch(r"[a-z-]+", word)
    }
    assert made <= MAKE_TARGETS


@pytest.mark.parametrize("language", ["python", "bash"])
def test_every_example_is_found(language: str):
    for page in PAGES:
        fences = re.findall(rf"^ *```{language}\b", (ROOT / page).read_text(), re.MULTILINE)
        found = [
            m for m in EXAMPLE.finditer((ROOT / page).read_text()) if m["language"] == language
        ]
        assert len(found) == len(fences), f"{page}: a fence is not closed, or closed elsewhere"
