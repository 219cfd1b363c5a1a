"""The tree in a source distribution."""

from __future__ import annotations

import tarfile
from pathlib import Path


def unpacked(archive: Path, folder: Path) -> Path:
    """Unpack a source distribution into a new folder; returns the tree in it."""
    with tarfile.open(archive) as files:
        files.extraction_filter = getattr(tarfile, "data_filter", None)  # Python 3.11.4 and later
        files.extractall(folder)
    (tree,) = folder.iterdir()
    return tree
