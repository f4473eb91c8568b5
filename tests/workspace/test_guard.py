"""A regular package of our name takes the namespace away; core says so."""

import importlib.util
import subprocess
import sys
from pathlib import Path


def test_core_names_the_distribution_that_owns_its_namespace(tmp_path: Path):
    core = importlib.util.find_spec("nnx_ppo.core")
    assert core is not None and core.origin is not None
    other = tmp_path / "nnx_ppo"
    other.mkdir()
    (other / "__init__.py").touch()
    (other / "core").symlink_to(Path(core.origin).parent)
    script = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import nnx_ppo.core"

    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)

    assert done.returncode == 1
    message = done.stderr.splitlines()[-1]
    assert message.startswith(f"ImportError: nnx_ppo is a regular package here ({other}")
    assert "pip uninstall nnx-ppo" in message
