"""Five packages share the namespace `nnx_ppo`; it stays open only if no file lies in it."""

from pathlib import Path

import pytest

import nnx_ppo

ROOT = Path(__file__).parents[2]
SHARES = sorted(ROOT.glob("packages/*/src/nnx_ppo"))


def test_there_are_five_packages():
    assert len(SHARES) == 5


@pytest.mark.parametrize("share", SHARES, ids=lambda share: share.parts[-3])
def test_package_holds_one_typed_portion_and_no_file_beside_it(share: Path):
    (portion,) = share.iterdir()  # an __init__.py here would hide the other four
    assert (portion / "__init__.py").is_file()
    assert (portion / "py.typed").is_file()


def test_namespace_is_open():
    assert nnx_ppo.__file__ is None
    assert sorted(nnx_ppo.__path__) == [str(share) for share in SHARES]
