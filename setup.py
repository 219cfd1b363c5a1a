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

import logging
import os
import re
import runpy
import shutil
import sys
import sysconfig
import threading
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
if "t" in sys.abiflags:
    raise SystemExit(
        f"memtools does not run on free-threaded Python, and this is {sys.version_info[0]}."
        f"{sys.version_info[1]}t: its C code relies on the global interpreter lock; install it in "
        "the standard build of Python"
    )
if sys.byteorder != "little":
    raise SystemExit("memtools writes its records little-endian and knows no other order")
DEBUG = os.environ.get("MEMTOOLS_DEBUG") == "1"
ASSERT = os.environ.get("MEMTOOLS_ASSERT") == "1"
SANITIZE = os.environ.get("MEMTOOLS_SANITIZE", "")
CORES = len(os.sched_getaffinity(0))
WARNINGS = ["-Wall", "-Wextra"]
# Only where it is asked for: a compiler of next year may warn of what is right.
WARNINGS += ["-Werror"] if os.environ.get("MEMTOOLS_WERROR") == "1" else []


def find(pattern: str, path: Path) -> str:
    """The first group of the first match in a text file."""
    match = re.search(pattern, path.read_text(errors="replace"), re.M)
    if match is None:
        raise SystemExit(f"{path} has nothing like {pattern}")
    return match[1]


SHIM = runpy.run_path(str(HERE / "memtools/_base/shim_flags.py"))
VERSION = find(r'__version__ = "(.+)"', HERE / "memtools/_version.py")


def sources(folder: str) -> list[str]:
    """All C files of a layer, relative to this file."""
    return [str(path) for path in sorted(Path("csrc", folder).rglob("*.c"))]


def torch_dir() -> Path | None:
    """The torch package to build the shim for. Under build isolation, sysconfig still names the
    environment that memtools is being installed into."""
    named = os.environ.get("MEMTOOLS_TORCH_DIR")
    if named is not None:
        if named and not SHIM["has_headers"](Path(named)):
            raise SystemExit(f"MEMTOOLS_TORCH_DIR={named} holds no include/ATen")
        return Path(named) if named else None
    found = Path(sysconfig.get_path("purelib")) / "torch"
    return found if SHIM["has_headers"](found) else None


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
    return [] if DEBUG or ASSERT or SANITIZE or clang else [f"-flto={CORES}"]


def thread_exit() -> list[str]:
    """glibc opens libgcc_s only when a thread ends by pthread_exit(), as Python has its threads do
    while it finalizes, and aborts the process if there is no memory for it: open it with us."""
    return ["-Wl,--push-state,--no-as-needed", "-lgcc_s", "-Wl,--pop-state"]


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
        extra_link_args=["-pthread", *link_flags(), *whole_program(), *thread_exit()],
        libraries=["m", "dl"],
        depends=[str(path) for path in sorted(Path("csrc").rglob("*.h"))],
    )


def shim_extension(torch: Path) -> Extension:
    clang = "clang" in os.environ.get("CXX", sysconfig.get_config_var("CXX") or "")
    version = torch_fact(torch, "__version__")
    return Extension(
        "memtools._torch",
        [SHIM["SOURCE"]],
        language="c++",
        include_dirs=["csrc"],
        extra_compile_args=[
            *WARNINGS,
            *compile_flags(),
            *SHIM["compile_flags"](torch, version, clang),
        ],
        library_dirs=[str(torch / "lib")],
        libraries=[*SHIM["LIBRARIES"]],
        extra_link_args=link_flags(),
        depends=[*SHIM["HEADERS"]],
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
    sources of the shim, of which `memtools build-shim` makes it for a torch that comes later."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        package = Path(self.build_lib, "memtools")
        (package / "_build_info.py").write_text(build_info())
        for name in [SHIM["SOURCE"], *SHIM["HEADERS"]]:
            (package / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(HERE / name, package / name)


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
        if TORCH is None:  # an earlier build may have left one, for a torch that is gone
            Path(self.get_ext_fullpath("memtools._torch")).unlink(missing_ok=True)
        self.compile_in_parallel()
        super().build_extensions()

    def compile_in_parallel(self) -> None:
        """Make the compiler object compile the files of an extension in parallel, and only those
        that have changed: by itself it compiles all of them, one after the other.

        The shim is one file and takes longer than all others together. It is compiled on one core
        while the files of the core extension share the other ones.
        """
        self.parallel = len(self.extensions)  # one thread for each extension
        compile_all, compile_one = self.compiler.compile, self.compiler._compile
        cores = max(1, CORES - self.parallel + 1)
        of_thread = threading.local()

        def compile_extension(sources: list[str], *args: Any, **kwargs: Any) -> Any:
            of_thread.jobs = jobs = []
            objects = compile_all(sources, *args, **kwargs)
            settings = kwargs["depends"][-1]  # build_extensions() has put it there
            jobs = [job for job in jobs if self.force or not up_to_date(Path(job[0]), settings)]
            if jobs:
                workers = min(cores, len(jobs))
                language = "C++" if sources[0].endswith(".cpp") else "C"
                self.announce(
                    f"compiling {counted(len(jobs), language + ' file')} on "
                    f"{counted(workers, 'core')}",
                    level=logging.INFO,
                )
                pool = ThreadPoolExecutor(workers)
                try:
                    for done in [pool.submit(compile_one, *job) for job in jobs]:
                        done.result()
                finally:
                    pool.shutdown(cancel_futures=True)  # the first error ends it
            return objects

        self.compiler.compile = compile_extension
        self.compiler._compile = lambda *job: of_thread.jobs.append(job)


def counted(n: int, noun: str) -> str:
    return f"{n} {noun}" + ("s" if n != 1 else "")


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


def long_description(text: str) -> str:
    """README.md for those who read it without the files beside it: a link to one of them becomes
    its text, and a picture is left out. Code stays as it is."""
    fence = re.compile(r"^(```.*?^```\n)", re.M | re.S)
    parts = fence.split(text)
    return "".join(part if fence.match(part) else without_relative(part) for part in parts)


def without_relative(text: str) -> str:
    away = (
        r"(?![a-z]+:|#)"  # no scheme such as https: or mailto:, and not a place in the page itself
    )
    picture = (
        rf"<picture>.*?</picture>\n*|<img\b[^>]*\bsrc=\"{away}[^>]*>|!\[[^\]]*\]\({away}[^)]*\)"
    )
    text = re.sub(picture, "", text, flags=re.S)
    text = re.sub(rf"\[([^\]]+)\]\({away}[^)]*\)", r"\1", text)
    return re.sub(rf"<a\b[^>]*\bhref=\"{away}[^>]*>(.*?)</a>", r"\1", text, flags=re.S)


TORCH = torch_dir()
setup(
    long_description=long_description((HERE / "README.md").read_text("utf-8")),
    long_description_content_type="text/markdown",
    ext_modules=[core_extension()] + ([shim_extension(TORCH)] if TORCH else []),
    cmdclass={"build_py": BuildPy, "build_ext": BuildExt},
)
