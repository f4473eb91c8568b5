"""What docstrings and README show works."""

import doctest
import re
from pathlib import Path

import pytest

from spiking_memory import environments, neurons

README = Path(__file__).parents[1] / "README.md"


@pytest.mark.parametrize("module", [environments, neurons])
def test_docstrings(module):
    result = doctest.testmod(module)
    assert result.attempted > 0 and result.failed == 0


def test_readme():
    pytest.importorskip("nnx_ppo.algorithms", reason="the README trains, which takes nnxppo-algos")
    names = {}
    for code in re.findall(r"^```python\n(.*?)^```$", README.read_text(), re.DOTALL | re.MULTILINE):
        exec(code, names)
