"""Bringing files to the disk, so that a power cut cannot take them back."""

import os
from pathlib import Path


def reach_the_disk(folder: Path) -> None:
    """Wait until all files of a folder are on the disk."""
    for parent, _, files in os.walk(folder):
        for name in files:
            sync(Path(parent, name))
        sync(Path(parent))


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
