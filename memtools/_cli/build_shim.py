"""`memtools build-shim`: compile memtools._torch for the torch that is installed now."""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import warnings
from contextlib import suppress
from pathlib import Path

from memtools import MemtoolsError, _build_info
from memtools._base import shim, shim_flags
from memtools._base.size import format_bytes
from memtools._cli.doctor import INSTALL_TORCH, Torch, find_package, read_torch
from memtools._cli.records import printed

OLDEST_TORCH = (2, 11)
INSTALL_COMPILER = "install one (Debian: apt-get install g++), or name yours in CXX"
COMPILERS = ("c++", "g++", "clang++")


class BuildError(MemtoolsError):
    """The shim cannot be built. The message is one sentence that says why, and what to do."""


class BuildShim:
    """Compile the extension module for the installed torch.

    memtools works without it, more slowly in places. Run this once after installing or upgrading
    torch: nothing else builds the module. It needs a C++ compiler and Python's headers; the sources
    and torch's headers are installed already. The module is written into the folder of memtools, or
    into the user's cache if that folder is read-only.
    """

    name = "build-shim"

    def prepare_parser(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--force", action="store_true", help="build it even if a fitting one exists"
        )

    def run(self, args: argparse.Namespace) -> int:
        folder, torch = find_torch()
        fitting = [
            built.path
            for built in shim.built(_build_info)
            if not built.refused and built.fits(torch.version, torch.git) and built.path.is_file()
        ]
        if fitting and not args.force:
            printed(f"The shim for torch {torch.version} is there: {fitting[0]}")
            return 0
        sources, compiler, place = find_sources(), find_compiler(), find_place()
        printed(f"Compiling the shim for torch {torch.version} with {shlex.join(compiler)} ...")
        path = place / shim.file_name(torch.version, torch.git)
        compile_shim(compiler, sources, folder, torch, path)
        if reason := why_not_loaded():
            path.unlink(missing_ok=True)
            raise BuildError(f"the shim was compiled and removed again: {reason}")
        enter_in_record(path)
        printed(f"Wrote {path} ({format_bytes(path.stat().st_size)})")
        return 0


def find_torch() -> tuple[Path, Torch]:
    """The folder of the package torch, and its version, without importing it."""
    folder = find_package("torch")
    torch = read_torch(folder)
    if folder is None or torch is None:
        raise BuildError(f"torch is not installed in {sys.prefix}; {INSTALL_TORCH}")
    try:
        major, minor = (int(part) for part in torch.version.split(".")[:2])
    except ValueError:
        raise BuildError(f"{folder}/version.py names no version; install torch again") from None
    if (major, minor) < OLDEST_TORCH:
        raise BuildError(f"memtools needs torch >= 2.11, found {torch.version}; upgrade torch")
    if not shim_flags.has_headers(folder):
        raise BuildError(
            f"torch {torch.version} came without its C++ headers: there is no "
            f"{folder}/include/ATen; install torch from a wheel that has them"
        )
    return folder, torch


def find_sources() -> Path:
    """The folder with csrc/: the package, or the source tree of an editable install."""
    for folder in (shim.PACKAGE, shim.PACKAGE.parent):
        if all((folder / name).is_file() for name in (shim_flags.SOURCE, *shim_flags.HEADERS)):
            return folder
    raise BuildError(
        f"the sources of the shim are missing in {shim.PACKAGE}; install memtools again"
    )


def find_compiler() -> list[str]:
    """The command of the C++ compiler: CXX, or that with which Python was built, or any other."""
    if not Path(sysconfig.get_path("include"), "Python.h").is_file():
        raise BuildError(
            f"Python's C headers are missing: there is no {sysconfig.get_path('include')}/Python.h;"
            " install them (Debian: apt-get install python3-dev)"
        )
    named = os.environ.get("CXX", "")
    tried = [named] if named else [sysconfig.get_config_var("CXX") or "", *COMPILERS]
    for command in map(shlex.split, tried):
        if command and shutil.which(command[0]) is not None:
            return command
    if named:
        raise BuildError(f"the C++ compiler that CXX names, {named!r}, does not exist")
    raise BuildError(f"there is no C++ compiler ({', '.join(COMPILERS)}); {INSTALL_COMPILER}")


def find_place() -> Path:
    """The first of the folders for shims to which this user, and no other user, can write."""
    folders, refused = shim.folders(), ""
    for folder in folders:
        with suppress(OSError):
            for one in (folder.parent, folder):  # also if the umask lets others write
                one.mkdir(mode=0o755, parents=True, exist_ok=True)
            if os.access(folder, os.W_OK):
                refused = shim.why_not_ours(folder)
                if not refused:
                    return folder
    if refused:
        raise BuildError(f"a shim in {folders[-1]} would not be loaded: {refused}")
    raise BuildError(
        f"the shim can be written neither to {' nor to '.join(map(str, folders))}; "
        "make one of them writable, or set XDG_CACHE_HOME to a folder that is"
    )


def compile_shim(
    compiler: list[str], sources: Path, folder: Path, torch: Torch, path: Path
) -> None:
    """Compile and link the shim, and move it to its place.

    Raises BuildError if the compiler fails. The compiler's output is printed to stderr then.
    """
    clang = "clang" in os.path.basename(compiler[-1])
    with tempfile.TemporaryDirectory(prefix=".shim-", dir=path.parent) as work:
        made = Path(work, path.name)
        command = [
            *compiler,
            *("-O3", "-g0", "-DNDEBUG", "-fPIC", "-fvisibility=hidden", "-fno-plt"),
            *shim_flags.compile_flags(folder, torch.version, clang),
            f"-I{sysconfig.get_path('include')}",
            str(sources / shim_flags.SOURCE),
            *("-shared", "-Wl,-z,now", f"-L{folder / 'lib'}"),
            *(f"-l{name}" for name in shim_flags.LIBRARIES),
            *("-o", str(made)),
        ]
        done = subprocess.run(command, capture_output=True, text=True, errors="replace")
        if done.returncode != 0 or not made.is_file():
            sys.stderr.write(done.stdout + done.stderr)
            raise BuildError(
                f"{compiler[0]} cannot compile the shim for torch {torch.version}, see its errors "
                "above; it must support C++20, as gcc 12 and clang 14 do"
            )
        made.chmod(made.stat().st_mode & ~0o022)  # A shim that others may write to is not loaded.
        os.replace(made, path)


def why_not_loaded() -> str:
    """Connect to torch as a program does. Return why the shim is not in use; "" if it is."""
    from memtools._base import torch as bridge

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            bridge.connect()
    except Exception as error:  # importing torch can fail in any way
        return str(error).strip().partition("\n")[0]
    return bridge.shim_status()[1]


def enter_in_record(path: Path) -> None:
    """Enter the file in pip's list of installed files, so that uninstalling memtools removes it. If
    there is no such list beside the package, do nothing."""
    from importlib import metadata  # Importing it takes 20 ms.

    try:
        files = metadata.files("memtools") or []
    except metadata.PackageNotFoundError:
        return
    for name in files:
        record = Path(str(name.locate())).resolve()
        root = record.parent.parent
        if record.name != "RECORD" or not path.is_relative_to(root):
            continue
        line = f"{path.relative_to(root)},,\n"
        with suppress(OSError):  # The module works; uninstalling leaves it behind.
            if line not in record.read_text("utf-8"):
                with record.open("a", encoding="utf-8") as file:
                    file.write(line)
