"""The C suite of every page store, on the real driver: builds tests/gpu/store_gpu.c and runs it."""

from __future__ import annotations

import os
import subprocess
import sysconfig
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
SOURCES = [
    "tests/gpu/store_gpu.c",
    *(f"csrc/core/{name}.c" for name in ("base/alloc", "base/status")),
    *(f"csrc/cuda/{name}.c" for name in ("runtime", "driver", "streams", "store")),
]


def headers() -> Path:
    """The CUDA Toolkit's, wherever setup.py would look."""
    named = os.environ.get("MEMTOOLS_CUDA_HOME") or os.environ.get("CUDA_HOME")
    homes = [Path(named)] if named else []
    homes += [Path("/usr/local/cuda"), *Path(sysconfig.get_path("purelib")).glob("nvidia/*")]
    found = [home / "include" for home in homes if (home / "include/cuda_runtime_api.h").is_file()]
    assert found, "no cuda_runtime_api.h: install the CUDA Toolkit's headers, or set CUDA_HOME"
    return found[0]


def runtime() -> Path:
    """The libcudart that torch has loaded, which another process would not find."""
    torch.cuda.init()
    maps = Path("/proc/self/maps").read_text().split()
    return next(Path(path) for path in maps if "/libcudart.so" in path)


def test_the_store_is_one_like_any_other(tmp_path: Path) -> None:
    program = tmp_path / "store_gpu"
    flags = ["-std=c11", "-O1", "-g", "-UNDEBUG", "-Icsrc", "-Icsrc/core"]
    flags += ["-Itests/c", "-isystem"]
    libraries = ["-ldl", "-lm", "-o", str(program)]
    build = ["cc", *flags, str(headers()), *SOURCES, *libraries]
    subprocess.run(build, cwd=ROOT, check=True)
    paths = f"{runtime().parent}:{os.environ.get('LD_LIBRARY_PATH', '')}"
    done = subprocess.run(
        [program],
        env={**os.environ, "LD_LIBRARY_PATH": paths},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert "0 failed" in done.stdout
