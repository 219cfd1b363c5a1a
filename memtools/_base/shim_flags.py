"""How the shim memtools._torch is compiled: by setup.py, and by `memtools build-shim`.

setup.py runs this file by itself, before memtools is installed: it imports nothing of memtools.
"""

from __future__ import annotations

from pathlib import Path

#: The one file that is compiled, and what it includes beside torch's headers.
SOURCE = "csrc/torch/torch_shim.cpp"
HEADERS = ("csrc/torch/torch_shim.h", "csrc/third_party/dlpack/dlpack.h")

# torch is loaded before the shim, so its libraries are found without an rpath.
LIBRARIES = ("c10", "torch_cpu", "torch_python")


def compile_flags(torch: Path, version: str, clang: bool) -> list[str]:
    """The compiler's flags beside optimisation and Python's headers.

    Args:
        torch: the folder of the package torch.
        version: its version, such as "2.13.0+cpu".
        clang: whether the compiler is clang.
    """
    major, minor = (int(part) for part in version.split(".")[:2])
    standard = "-std=c++20" if (major, minor) >= (2, 12) else "-std=c++17"
    # torch's threads are OpenMP's where it was built so, by gcc's library. For the compiler only:
    # linked by name, the library might be another copy of it, with threads of its own; this way it
    # is the one that torch brings.
    openmp = [] if clang else ["-fopenmp"]
    include = torch / "include"
    folders = ["-isystem", str(include), "-isystem", str(include / "torch/csrc/api/include")]
    return [standard, *openmp, *folders]


def has_headers(torch: Path) -> bool:
    """Whether this folder of the package torch has what the shim is compiled with."""
    return (torch / "include/ATen").is_dir()
