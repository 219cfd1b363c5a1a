"""Small programs, run by `memtools run` in a folder of the test's own."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

RUN = [sys.executable, "-m", "memtools", "run"]
Done = subprocess.CompletedProcess[bytes]


def execute(command: Sequence[str], folder: Path, stdin: bytes = b"") -> Done:
    return subprocess.run(command, cwd=folder, input=stdin, capture_output=True, timeout=60)


def run(folder: Path, *words: str, stdin: bytes = b"") -> Done:
    return execute([*RUN, *words], folder, stdin)


def without_addresses(text: bytes) -> bytes:
    return re.sub(rb"0x[0-9a-f]+", b"0x", text)


def write(folder: Path, text: str, name: str = "train.py") -> Path:
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(textwrap.dedent(text))
    return path
