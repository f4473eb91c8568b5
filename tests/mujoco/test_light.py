"""Importing the package costs nothing, and nothing in it reaches out."""

import subprocess
import sys

import pytest

IMPORT_IS_LIGHT = """
import sys
import nnx_ppo.mujoco
heavy = {"mujoco", "mujoco_playground", "brax", "warp"} & set(sys.modules)
assert not heavy, heavy
"""

NOTHING_REACHES_OUT = """
import socket, subprocess, sys

start = subprocess.Popen.__init__

def start_python_only(self, args, *rest, **options):
    # glfw, with which MuJoCo renders, asks a second Python for its version.
    if args[0] != sys.executable:
        raise AssertionError(f"started a process: {args}")
    start(self, args, *rest, **options)

def refuse(self, address):
    raise AssertionError(f"connected to {address}")

subprocess.Popen.__init__ = start_python_only
socket.socket.connect = refuse

import nnx_ppo.mujoco
from nnx_ppo.mujoco import AssetsMissingError, PlaygroundEnvironments, load

assert "CartpoleBalance" in PlaygroundEnvironments().names()
load("CartpoleBalance")
try:
    load("Go1JoystickFlatTerrain")
except AssetsMissingError as error:
    for part in ("Go1JoystickFlatTerrain", "mujoco_menagerie", "1b86ece"):
        assert part in str(error), error
else:
    raise AssertionError("loaded a robot without its model")
"""


def run_python(code: str) -> None:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_import_leaves_playground_alone() -> None:
    run_python(IMPORT_IS_LIGHT)


@pytest.mark.physics
def test_neither_import_nor_load_starts_a_process_or_a_connection() -> None:
    run_python(NOTHING_REACHES_OUT)
