"""`memtools doctor`: what works here, what does not and why, and what the host allows."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import platform
import re
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

from memtools import MemtoolsError, __version__
from memtools._base import environment, shim
from memtools._base.install import rebuild_command
from memtools._base.text import aligned
from memtools._cli.allocators import allocator_facts
from memtools._cli.facts import SHIM, Fact, Section, guarded, known, no, unknown, yes
from memtools._cli.progress import Progress
from memtools._cli.records import printed
from memtools._cli.system import ROOT, host_memory, kernel

TITLES = {
    "versions": "Versions",
    "extensions": "Extension modules",
    "cuda": "CUDA",
    "host_memory": "Host memory",
    "kernel": "Kernel settings and limits",
    "allocators": "Allocators",
    "environment": "Environment keys",
}
INSTALL_TORCH = "install torch 2.11 or later: run python -m pip install 'torch>=2.11'"
PYTEST_REMEDY = "pytest is not installed; run python -m pip install pytest"
PAGE_REMEDY = "jinja2 is not installed; run python -m pip install jinja2"
TRAINERS_REMEDY = "transformers is not installed; run python -m pip install transformers"
LIVE_REMEDY = "for the live view run python -m pip install rich"


#: labels of facts whose keys are words of memtools
LABELS = {
    "core": "memtools' C part",
    "core_path": "its path",
    "shim": "part compiled against torch",
    "shim_torch_version": "its torch version",
    "shim_rebuild": "to compile it again",
    "peak_reset": "exact peaks of phases",
}


@dataclass(frozen=True)
class Part:
    """A line of "What works here".

    Attributes:
        title: the name of the part.
        works: whether it works.
        remark: if it does not, why, and what to do.
        package: the package that is missing, if nothing else is; "" otherwise.
        can: whether it could work on this machine. A part for GPUs cannot if there is none.
    """

    title: str
    works: bool
    remark: str
    package: str = ""
    can: bool = True


@dataclass
class Findings:
    """The report: facts by section, what works here, and what is broken."""

    sections: dict[str, Section] = field(default_factory=dict)
    parts: dict[str, Part] = field(default_factory=dict)
    # What should work on this machine and does not: the reason for exit code 1. A missing GPU or a
    # missing torch does not count.
    broken: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Torch:
    """The contents of torch's version.py, read without importing torch."""

    version: str
    git: str | None = None  #: the commit that it was built from
    cuda: str | None = None


def one_line(error: BaseException | str) -> str:
    """The first line of an error: those of torch have a C++ backtrace after it."""
    lines = str(error).strip().splitlines()
    return lines[0].strip() if lines else type(error).__name__


def find_package(name: str) -> Path | None:
    """The folder in which `import name` would find the package, without importing it."""
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):  # ValueError: a half-imported module has no spec
        return None
    # The folder that an uninstalled package leaves behind is a namespace, without an origin.
    return Path(spec.origin).parent if spec and spec.origin else None


def installed_version(package: str) -> Fact:
    """Its version, without importing it."""
    from importlib import metadata  # Importing it takes 20 ms, also for other commands.

    try:
        return known(metadata.version(package))
    except metadata.PackageNotFoundError:
        return Fact(None, "not installed")


def read_torch(package: Path | None) -> Torch | None:
    if package is None:
        return None
    try:
        text = (package / "version.py").read_text(encoding="utf-8")
    except (OSError, ValueError):
        text = ""

    def constant(name: str) -> str | None:
        match = re.search(rf"^{name}\s*(?::[^=]*)?=\s*['\"](.+?)['\"]", text, re.M)
        return match[1] if match else None

    version = constant("__version__") or installed_version("torch").value
    return Torch(str(version or "unknown"), constant("git_version"), constant("cuda"))


def version_facts(torch: Torch | None) -> Section:
    absent = Fact(None, "not installed")
    cpu_only = Fact(None, "none (a build for the CPU)") if torch else absent
    return {
        "memtools": known(__version__),
        "python": known(platform.python_version()),
        "platform": known(f"{platform.system()} {platform.machine()}"),
        "kernel": known(platform.release()),
        # Another C library does not know the name, and Python then raises ValueError.
        "libc": guarded(lambda: known(os.confstr("CS_GNU_LIBC_VERSION") or "unknown")),
        "torch": known(torch.version) if torch else absent,
        "torch_cuda": known(torch.cuda) if torch and torch.cuda else cpu_only,
        "numpy": installed_version("numpy"),
    }


def load(name: str) -> ModuleType | str:
    """The module, or one line that says why it cannot be imported."""
    try:
        return importlib.import_module(name)
    except Exception as error:  # A broken module may raise anything.
        return one_line(error)


def connect(torch: Torch | None, core: ModuleType | str) -> tuple[str, str]:
    """Import torch and load the shim, as the first use of a tensor would. Returns why torch cannot
    be reached, and why the shim is not used; "" where it can and is."""
    if torch is None or isinstance(core, str):
        reason = "memtools._core does not load" if torch else "torch is not installed"
        return reason, reason
    try:
        bridge = importlib.import_module("memtools._base.torch")
        # The report itself says what the bridge or torch would warn about.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            bridge.connect()
        loaded, reason = bridge.shim_status()
    except Exception as error:  # importing torch can fail in any way
        return one_line(error), "torch is not connected"
    return "", "" if loaded else one_line(reason or "it gives no reason")


def all_shims(info: ModuleType | str) -> list[shim.Shim]:
    return [] if isinstance(info, str) else list(shim.built(info))


def extension_facts(
    core: ModuleType | str, info: ModuleType | str, no_torch: str, no_shim: str
) -> Section:
    versions = dict.fromkeys(one.torch_version for one in all_shims(info) if not one.refused)
    return {
        "core": no(core) if isinstance(core, str) else yes(),
        "core_path": unknown(core) if isinstance(core, str) else known(str(core.__file__)),
        "torch_connected": no(no_torch) if no_torch else yes(),
        "shim": no(no_shim) if no_shim else yes(),
        "shim_torch_version": known(", ".join(versions)) if versions else Fact(None, "not built"),
        "shim_rebuild": known(shim.BUILD_COMMAND) if no_shim else Fact(None, "not needed"),
    }


def cuda_facts(
    core: ModuleType | str, info: ModuleType | str, root: Path, broken: list[str]
) -> Section:
    """The facts about CUDA. Call it after connect(): the CUDA runtime is the one that torch
    loads."""
    facts = {
        "headers_version": unknown(info) if isinstance(info, str) else _headers(info),
        "kernel_driver": guarded(lambda: _kernel_driver(root / "proc/driver/nvidia/version")),
    }
    keys = ("runtime_version", "driver_version", "devices")
    if isinstance(core, str):
        return facts | dict.fromkeys(keys, unknown(core))
    try:
        found = core.cuda_info()
    except Exception as error:
        # A MemtoolsError is a fact about this machine. Any other exception is a defect.
        if not isinstance(error, MemtoolsError):
            broken.append(f"memtools._core.cuda_info() fails: {one_line(error)}")
        return facts | dict.fromkeys(keys, Fact(None, f"none ({one_line(error)})"))
    devices = "0 (no CUDA device answers)" if found["devices"] == 0 else str(found["devices"])
    return facts | {
        "runtime_version": _cuda_version(found["runtime_version"]),
        "driver_version": _cuda_version(found["driver_version"]),
        "devices": Fact(found["devices"], devices),
    }


def _headers(info: ModuleType) -> Fact:
    headers = info.CUDA_HEADERS
    return known(headers) if headers else Fact(None, "none (the CUDA backend is left out)")


def _kernel_driver(path: Path) -> Fact:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return Fact(None, "none (the NVIDIA kernel driver is not loaded)")
    match = re.search(r"^NVRM version:.*?\s(\d+(?:\.\d+)+)\s", text, re.M)
    if match is None:
        raise ValueError(f"{path} names no version")
    return known(match[1])


def _cuda_version(number: int) -> Fact:
    """CUDA writes 13.0 as 13000, and 0 if there is no driver."""
    return Fact(number, f"{number // 1000}.{number % 1000 // 10}" if number else "0 (no driver)")


def environment_facts(environ: Mapping[str, str], broken: list[str]) -> Section:
    """The environment keys that are set, and what the others are for."""
    try:
        environment.read(environ)
    except ValueError as error:
        broken.append(str(error))
    given = environment.set_keys(environ)
    return {
        key: known(given[key]) if key in given else Fact(None, f"not set ({what})")
        for key, what in environment.KEYS.items()
    }


def works_here(findings: Findings, no_torch: str, no_shim: str) -> dict[str, Part]:
    """A line for each part. If it does not work, the line says why, and what to do."""
    extensions, cuda = findings.sections["extensions"], findings.sections["cuda"]
    rebuild = rebuild_command()
    no_core, blocked = "", ""
    if not extensions["core"].value:
        no_core = blocked = f"memtools._core does not load; run {rebuild}"
    elif findings.sections["versions"]["torch"].value is None:
        blocked = f"torch is not installed; {INSTALL_TORCH}"
    elif no_torch:
        blocked = f"torch does not connect: {no_torch}; {INSTALL_TORCH}"
    no_cuda = blocked or _why_no_cuda(cuda, findings.sections["versions"]["torch_cuda"], rebuild)
    page = installed_version("jinja2")
    no_page = no_core or (PAGE_REMEDY if page.value is None else "")
    pytest = installed_version("pytest")
    no_pytest = no_core or (PYTEST_REMEDY if pytest.value is None else "")
    trainers = installed_version("transformers")
    no_trainers = blocked or (TRAINERS_REMEDY if trainers.value is None else "")
    live = (
        "live view, by rich"
        if installed_version("rich").value
        else f"one line per update; {LIVE_REMEDY}"
    )
    pool = "on the host" if no_cuda else "on the host and on CUDA"
    cleanup = "gc, malloc_trim" if no_cuda else "gc, malloc_trim, empty_cache"
    off = findings.sections["environment"]["MEMTOOLS"].value == "0"
    no_act = no_core or ("MEMTOOLS=0 turns it off; unset it" if off else "")
    check, accumulation = f"by the {SHIM}", "native passes, on torch's threads"
    if no_shim:
        build = shim.BUILD_COMMAND
        accumulation = f"native passes, on one thread; for torch's threads run {build}"
        check = f"by a torch call; for the faster {SHIM} ({no_shim}) run {build}"
    return {
        "gate_history_cpu": Part("gate history (CPU)", not blocked, blocked),
        "gate_history_cuda": Part("gate history (CUDA)", not no_cuda, no_cuda, can=_has_gpu(cuda)),
        "kv_pool": Part("KV-cache pool", not blocked, blocked or pool),
        "cleanup_policy": Part("cleanup policy", not no_act, no_act or cleanup),
        "amp": Part("accumulation (AMP)", not blocked, blocked or accumulation),
        "run": Part("memtools run", not no_act, no_act or "records an unchanged program"),
        "plan": Part("memtools plan", not blocked, blocked or "plans a step without running it"),
        "use": _by("memtools.use", "transformers", trainers, no_trainers),
        "watch": Part("memtools watch", not no_core, no_core or live),
        "report": _by("memtools report", "jinja2", page, no_page),
        "pytest_plugin": _by("pytest's plugin", "pytest", pytest, no_pytest),
        "neg_bit_check": Part("tensor checks", not blocked, blocked or check),
    }


def _by(title: str, package: str, version: Fact, reason: str) -> Part:
    """A part that needs a package. `reason`: why it does not work, "" if it does."""
    missing = package if reason and version.value is None else ""
    return Part(title, not reason, reason or f"by {package} {version.value}", missing)


def _has_gpu(cuda: Section) -> bool:
    return bool(cuda["devices"].value) or cuda["kernel_driver"].value is not None


def _why_no_cuda(cuda: Section, torch_cuda: Fact, rebuild: str) -> str:
    """All reasons why CUDA does not work, so that they can be removed at once."""
    devices, missing = cuda["devices"].value, []
    if not devices and (devices == 0 or cuda["kernel_driver"].value is None):
        missing.append("no CUDA device answers: install an NVIDIA GPU and its driver")
    elif devices is None:
        missing.append(f"no CUDA runtime, {cuda['devices'].text}: install torch's build for CUDA")
    if torch_cuda.value is None:
        missing.append("torch is a build for the CPU: install its build for CUDA")
    if cuda["headers_version"].value is None:
        missing.append(
            "memtools was built without the CUDA Toolkit headers: set MEMTOOLS_CUDA_HOME "
            f"to a toolkit and run {rebuild}"
        )
    return "; ".join(missing)


def examine(root: Path = ROOT, environ: Mapping[str, str] = os.environ) -> Findings:
    findings = Findings()
    torch = read_torch(find_package("torch"))
    core, info = load("memtools._core"), load("memtools._build_info")
    no_torch, no_shim = connect(torch, core)
    rebuild = rebuild_command()
    if isinstance(core, str):
        findings.broken.append(f"memtools._core does not load: {core}; run {rebuild}")
    elif torch and no_torch:
        findings.broken.append(f"torch {torch.version} does not connect: {no_torch}")
    elif torch and no_shim and shim.may_be_loaded(all_shims(info), torch.version, torch.git):
        why = f"the {SHIM} is not loaded: {no_shim}"
        findings.broken.append(f"{why}; run {shim.BUILD_COMMAND}")
    findings.sections = {
        "versions": version_facts(torch),
        "extensions": extension_facts(core, info, no_torch, no_shim),
        "cuda": cuda_facts(core, info, root, findings.broken),
        "host_memory": _of_core(core, lambda: host_memory(root)),
        "kernel": kernel(root),
        "allocators": _of_core(core, allocator_facts),
        "environment": environment_facts(environ, findings.broken),
    }
    findings.parts = works_here(findings, no_torch, no_shim)
    return findings


def _of_core(core: ModuleType | str, facts: Callable[[], Section]) -> Section:
    """Facts that need _core; empty if it does not load."""
    return {} if isinstance(core, str) else facts()


def as_text(findings: Findings) -> str:
    facts = [pair for section in findings.sections.values() for pair in section.items()]
    body = aligned([(label(key), fact.text) for key, fact in facts])
    parts = [(p.title, "yes" if p.works else "no", p.remark) for p in findings.parts.values()]
    lines = [verdict(findings), "", "What works here", *aligned(parts)]
    for name, section in findings.sections.items():
        lines += ["", TITLES[name], *(next(body) for _ in section)] if section else []
    return "\n".join(lines)


def verdict(findings: Findings) -> str:
    """The first line: whether all works that can, what is broken, and which packages are
    missing."""
    broken = list(findings.broken)
    missing = {part.title: part.package for part in findings.parts.values() if part.package}
    no = [p.title for p in findings.parts.values() if not (p.works or p.package) and p.can]
    sentences = []
    if broken:
        sentences.append(f"{things(len(broken), 'is', 'are')} broken: {'; '.join(broken)}.")
    elif no:
        sentences.append(f"{things(len(no), 'does', 'do')} not work: {', '.join(no)}.")
    if not sentences:
        gpu = next((p for p in findings.parts.values() if not p.can), None)
        of = "" if gpu is None else " It has no NVIDIA GPU that answers."
        sentences.append(f"Everything that this machine can do works.{of}")
    if missing:
        named = ", ".join(f"{package} (for {title})" for title, package in missing.items())
        sentences.append(f"Not installed: {named}.")
    return " ".join(sentences)


def things(number: int, one: str, several: str) -> str:
    """`1 thing does`, `2 things do`."""
    return f"1 thing {one}" if number == 1 else f"{number} things {several}"


def label(key: str) -> str:
    if key in LABELS:
        return LABELS[key]
    return key if key.isupper() else key.removesuffix("_bytes").replace("_", " ")


def as_json(findings: Findings) -> str:
    """The facts as JSON. "notes" says why a value is null or false."""
    notes = {
        f"{name}.{key}": fact.text
        for name, section in findings.sections.items()
        for key, fact in section.items()
        if fact.value is None or fact.value is False
    }
    document: dict[str, object] = {
        name: {key: fact.value for key, fact in section.items()}
        for name, section in findings.sections.items()
    }
    document["works"] = {
        key: {"works": part.works, "remark": part.remark} for key, part in findings.parts.items()
    }
    document["broken"] = findings.broken
    document["notes"] = notes
    return json.dumps(document, indent=2)


class Doctor:
    """Show what works on this machine, what does not, and how to fix it.

    It imports torch, and prints versions, extension modules, CUDA, kernel settings, and the memory
    that this process may use: the lowest limit of its control groups. The exit code is 1 if
    something is broken, such as a part compiled for another torch; a missing GPU or torch is not.
    """

    name = "doctor"

    def prepare_parser(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--json", action="store_true", help="the same facts as JSON: raw numbers, stable keys"
        )

    def run(self, args: argparse.Namespace) -> int:
        with Progress() as progress:
            progress("examining torch and this machine")  # importing torch takes seconds
            findings = examine()
        printed(as_json(findings) if args.json else as_text(findings))
        if findings.broken:
            print(f"memtools doctor: {'; '.join(findings.broken)}", file=sys.stderr)
        return 1 if findings.broken else 0
