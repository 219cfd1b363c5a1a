"""Builds memtools._core (always) and memtools._torch (where torch is found).

torch is never imported and never downloaded: its headers are read from the environment that
memtools is installed into, or from MEMTOOLS_TORCH_DIR. Environment variables:

    MEMTOOLS_TORCH_DIR   the torch package's directory; empty: build without the shim
    MEMTOOLS_CUDA_HOME   where include/cuda_runtime_api.h lies; empty: leave the CUDA backend out
    MEMTOOLS_DEBUG=1     -O0 with assertions
    MEMTOOLS_ASSERT=1    with assertions, optimised but for what takes long to link: for the tests
    MEMTOOLS_SANITIZE    for example "address,undefined"
    MEMTOOLS_WERROR=1    a compiler's warning ends the build
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

HERE = Path(__file__).parent
if sys.platform != "linux":
    raise SystemExit(
        f"memtools runs on Linux only, and this is {sys.platform}: it reads /proc and maps memory "
        "by Linux's own calls; install it in a Linux container or virtual machine"
    )
if sys.byteorder != "little":
    raise SystemExit("memtools writes its records little-endian and knows no other order")
DEBUG = os.environ.get("MEMTOOLS_DEBUG") == "1"
ASSERT = os.environ.get("MEMTOOLS_ASSERT") == "1"
SANITIZE = os.environ.get("MEMTOOLS_SANITIZE", "")
WARNINGS = ["-Wall", "-Wextra"]
# Only where it is asked for: a compiler of next year may warn of what is right.
WARNINGS += ["-Werror"] if os.environ.get("MEMTOOLS_WERROR") == "1" else []


def find(pattern: str, path: Path) -> str:
    """The first group of the first match in a text file."""
    match = re.search(pattern, path.read_text(errors="replace"), re.M)
    if match is None:
        raise SystemExit(f"{path} has nothing like {pattern}")
    return match[1]


VERSION = find(r'__version__ = "(.+)"', HERE / "memtools/_version.py")


def sources(folder: str) -> list[str]:
    """All C files of a layer, relative to this file."""
    return [str(path) for path in sorted(Path("csrc", folder).rglob("*.c"))]


def torch_dir() -> Path | None:
    """The torch package to build the shim for. Under build isolation, sysconfig still names the
    environment that memtools is being installed into."""
    named = os.environ.get("MEMTOOLS_TORCH_DIR")
    if named is not None:
        if named and not (Path(named) / "include/ATen").is_dir():
            raise SystemExit(f"MEMTOOLS_TORCH_DIR={named} holds no include/ATen")
        return Path(named) if named else None
    found = Path(sysconfig.get_path("purelib")) / "torch"
    return found if (found / "include/ATen").is_dir() else None


def torch_fact(torch: Path, name: str) -> str:
    """__version__ or git_version, read from the package's version.py without importing it."""
    return find(rf"^{name}\s*(?::.*)?=\s*'(.+)'", torch / "version.py")


def cuda_include() -> Path | None:
    """The CUDA Toolkit's headers: types only, nothing of it is linked."""
    named = os.environ.get("MEMTOOLS_CUDA_HOME")
    if named == "":
        return None
    purelib = Path(sysconfig.get_path("purelib"))
    homes = [named] if named else [os.environ.get("CUDA_HOME"), "/usr/local/cuda"]
    homes += [] if named else [str(p) for p in sorted(purelib.glob("nvidia/*"))]
    for home in filter(None, homes):
        if (Path(home) / "include/cuda_runtime_api.h").is_file():
            return Path(home) / "include"
    if named:
        raise SystemExit(f"MEMTOOLS_CUDA_HOME={named} holds no include/cuda_runtime_api.h")
    return None


def cuda_version(include: Path) -> str:
    number = int(find(r"#define\s+CUDART_VERSION\s+(\d+)", include / "cuda_runtime_api.h"))
    return f"{number // 1000}.{number % 1000 // 10}"


def compile_flags() -> list[str]:
    # -g0 undoes the interpreter's own -g: it only makes the wheel eight times larger.
    flags = ["-O0", "-g", "-UNDEBUG"] if DEBUG else ["-O3", "-g0"]
    if SANITIZE:
        flags += [f"-fsanitize={SANITIZE}", "-fno-omit-frame-pointer", "-g", "-O1", "-UNDEBUG"]
    return flags + ["-fvisibility=hidden", "-fno-plt", "-MMD"]


def link_flags() -> list[str]:
    return [f"-fsanitize={SANITIZE}"] if SANITIZE else ["-Wl,-z,now"]


def whole_program() -> list[str]:
    """An append crosses eight small functions in six files: worth 15 ns of 70. gcc only, whose
    plugin is always beside its linker."""
    clang = "clang" in os.environ.get("CC", sysconfig.get_config_var("CC") or "")
    return [] if DEBUG or ASSERT or SANITIZE or clang else ["-flto"]


def core_extension() -> Extension:
    cuda = cuda_include()
    # The backend, or what stands in for it and says that it is missing.
    backend = [path for path in sources("cuda") if path.endswith("_absent.c") == (cuda is None)]
    return Extension(
        "memtools._core",
        sources("core") + sources("os") + backend + sources("py"),
        include_dirs=["csrc", "csrc/core"],
        define_macros=[("MEMTOOLS_VERSION", f'"{VERSION}"')],
        extra_compile_args=["-std=c11", "-pthread", *WARNINGS, *compile_flags(), *whole_program()]
        + (["-O2", "-g", "-UNDEBUG"] if ASSERT and not DEBUG and not SANITIZE else [])
        + (["-isystem", str(cuda)] if cuda else []),
        extra_link_args=["-pthread", *link_flags(), *whole_program()],
        libraries=["m", "dl"],
        depends=[str(path) for path in sorted(Path("csrc").rglob("*.h"))],
    )


def openmp() -> list[str]:
    """torch's threads are OpenMP's where it was built so, by gcc's library. For the compiler only:
    linked by name, the library might be another copy of it, with threads of its own; this way it is
    the one that torch brings."""
    clang = "clang" in os.environ.get("CXX", sysconfig.get_config_var("CXX") or "")
    return [] if clang else ["-fopenmp"]


def shim_extension(torch: Path) -> Extension:
    major, minor = (int(part) for part in torch_fact(torch, "__version__").split(".")[:2])
    standard = "-std=c++20" if (major, minor) >= (2, 12) else "-std=c++17"
    return Extension(
        "memtools._torch",
        ["csrc/torch/torch_shim.cpp"],
        language="c++",
        include_dirs=["csrc"],
        extra_compile_args=[
            standard,
            *WARNINGS,
            *compile_flags(),
            *openmp(),
            "-isystem",
            str(torch / "include"),
            "-isystem",
            str(torch / "include/torch/csrc/api/include"),
        ],
        # torch is loaded before the shim, so its libraries are found without an rpath.
        library_dirs=[str(torch / "lib")],
        libraries=["c10", "torch_cpu", "torch_python"],
        extra_link_args=link_flags(),
        depends=["csrc/torch/torch_shim.h"],
    )


def build_info() -> str:
    torch, cuda = torch_dir(), cuda_include()
    facts = {
        "TORCH_VERSION": torch and torch_fact(torch, "__version__"),
        "TORCH_GIT_VERSION": torch and torch_fact(torch, "git_version"),
        "CUDA_HEADERS": cuda and cuda_version(cuda),
        "COMPILER": sysconfig.get_config_var("CC") or "",
        "DEBUG": DEBUG,
        "SANITIZE": SANITIZE,
    }
    kinds = {"DEBUG": "bool", "COMPILER": "str", "SANITIZE": "str"}
    lines = [
        f"{name}: {kinds.get(name, 'str | None')} = {value!r}" for name, value in facts.items()
    ]
    return '"""What this copy was built with; written by setup.py."""\n\n' + "\n".join(lines) + "\n"


class BuildPy(build_py):
    """Adds the generated _build_info.py, which setuptools cannot know as a source file, and the
    examples, which `memtools demo` runs, as the folder memtools/examples."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            Path(self.build_lib, "memtools/_build_info.py").write_text(build_info())
            examples = Path(self.build_lib, "memtools/examples")
            examples.mkdir(exist_ok=True)
            for path in sorted(HERE.glob("examples/*.py")):
                shutil.copy(path, examples)


class BuildExt(build_ext):
    """Compiles again what has changed: a file, one that it includes, or for all files torch, the
    toolkit or a flag. Writes _build_info.py beside the extension modules of an editable install."""

    def finalize_options(self) -> None:
        super().finalize_options()
        if self.editable_mode:  # else objects would lie in a folder that goes
            self.build_temp = str(Path("build", f"editable-{sys.implementation.cache_tag}"))

    def run(self) -> None:
        super().run()
        if self.inplace:
            (HERE / "memtools/_build_info.py").write_text(build_info())

    def build_extensions(self) -> None:
        for ext in self.extensions:
            require_compiler(self.compiler.compiler[0], "C")
            if ext.language == "c++":
                require_compiler(self.compiler.compiler_cxx[0], "C++")
            ext.depends.append(str(settings_file(ext)))
        compile_on_all_cores(self.compiler, bool(self.force))
        if TORCH is None:  # an earlier build may have left one, for a torch that is gone
            Path(self.get_ext_fullpath("memtools._torch")).unlink(missing_ok=True)
        super().build_extensions()


def compile_on_all_cores(compiler: Any, force: bool) -> None:
    """Makes the compiler object compile an extension's files side by side, and only those that
    have changed: by itself it takes all, one after the other."""
    compile_all, compile_one = compiler.compile, compiler._compile

    def compile_side_by_side(*args: Any, **kwargs: Any) -> Any:
        pool, jobs = ThreadPoolExecutor(len(os.sched_getaffinity(0))), []
        settings = kwargs["depends"][-1]  # build_extensions() has put it there

        def compile_what_changed(made: str, *rest: Any) -> None:
            if force or not up_to_date(Path(made), settings):
                jobs.append(pool.submit(compile_one, made, *rest))

        compiler._compile = compile_what_changed
        try:
            objects = compile_all(*args, **kwargs)
            for job in jobs:
                job.result()
        finally:
            pool.shutdown(cancel_futures=True)  # the first error ends it
        return objects

    compiler.compile = compile_side_by_side


def up_to_date(made: Path, settings: str) -> bool:
    """Whether an object file is newer than the settings file and all that the compiler read for it.
    That is in a rule of make's language that the compiler writes beside the object (-MMD)."""
    rules = made.with_suffix(".d")
    if not (made.is_file() and rules.is_file()):
        return False
    read = rules.read_text().partition(":")[2].replace("\\\n", " ").split()
    dates = [Path(name).stat().st_mtime_ns for name in [settings, *read] if Path(name).is_file()]
    return len(dates) == 1 + len(read) and max(dates) < made.stat().st_mtime_ns


def require_compiler(command: str, language: str) -> None:
    if shutil.which(command) is None:
        raise SystemExit(
            f"memtools is compiled when it is installed and needs a {language} compiler: there is "
            f"no {command!r} here; install one (Debian: apt-get install build-essential), or name "
            "yours in CC and CXX"
        )


def settings_file(ext: Extension) -> Path:
    """A file that names all that the extension is made with beside its sources, written when that
    changes. As a dependency it makes setuptools compile again, which compares dates only: a shim
    for the torch of before must not pass for one for the torch of now."""
    torch = TORCH and (torch_fact(TORCH, "__version__"), torch_fact(TORCH, "git_version"))
    facts = [
        sys.version,
        [os.environ.get(name) for name in ("CC", "CXX", "CFLAGS", "LDFLAGS")],
        ext.extra_compile_args,
        ext.extra_link_args,
        ext.define_macros,
        ext.sources,
        torch if ext.name == "memtools._torch" else None,
        cuda_include() and cuda_version(cuda_include()) if ext.name == "memtools._core" else None,
    ]
    text = "\n".join(map(repr, facts)) + "\n"
    path = HERE / "build/settings" / ext.name
    if not path.is_file() or path.read_text() != text:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return path


TORCH = torch_dir()
setup(
    ext_modules=[core_extension()] + ([shim_extension(TORCH)] if TORCH else []),
    cmdclass={"build_py": BuildPy, "build_ext": BuildExt},
)
