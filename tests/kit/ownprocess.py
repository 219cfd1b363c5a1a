"""Programs that measure their own process: in it no other test leaves garbage, threads or pages."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]
PATHS = [os.environ.get("PYTHONPATH", str(PROJECT)), str(PROJECT)]
#: of this process, with this project's tests and the same build of memtools
ENV = os.environ | {"PYTHONPATH": os.pathsep.join(PATHS)}


def in_own_process(
    code: str, *arguments: object, warnings: str = "", env: Mapping[str, str] = ENV
) -> str:
    """What it prints; it must end well, and write no errors. `warnings` is a filter as for -W."""
    filters = ["-W", warnings] if warnings else []
    done = subprocess.run(
        [sys.executable, *filters, "-c", textwrap.dedent(code), *map(str, arguments)],
        cwd=PROJECT, env=env, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    return done.stdout
