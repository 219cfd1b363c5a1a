"""`memtools doctor`: host facts on fake trees, findings on stub modules, and the real command."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import resource
import sys
import warnings
from pathlib import Path
from subprocess import PIPE, CompletedProcess, run
from types import ModuleType
from typing import Any, TypeAlias

import pytest

import memtools
from memtools import DeviceError, MemtoolsError
from memtools import _cli as cli
from memtools._base import environment
from memtools._base.size import format_bytes
from memtools._cli import doctor
from memtools._cli.facts import Fact
from memtools._cli.system import _shared_memory, host_memory, kernel

Patch: TypeAlias = pytest.MonkeyPatch
Capture: TypeAlias = pytest.CaptureFixture[str]
HUGE = "9223372036854771712"  # how v1 writes "no limit"
OTHER = "36 31 0:33 / /cg/cpu rw - cgroup cgroup rw,cpu,cpuacct"
LIMIT_FILE = {"v1": "memory.limit_in_bytes", "v2": "memory.max"}
USAGE_FILE = {"v1": "memory.usage_in_bytes", "v2": "memory.current"}


def v1(top: str = "/", point: str = "/cg/memory") -> str:
    return f"35 31 0:32 {top} {point} rw,relatime shared:7 - cgroup cgroup rw,memory"


def v2(top: str = "/", point: str = "/cg") -> str:
    return f"41 31 0:38 {top} {point} rw - cgroup2 cgroup2 rw,nsdelegate"


def plant(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, "utf-8", "surrogateescape")
    return root


def host(root: Path, mounts: list[str], groups: str, levels: str = "", memory: str = "v2") -> Path:
    """A fake tree; `levels`: each limit, as "cg/a=max, cg=4096"; DIR: unreadable; NONE: no file."""
    lines = ["21 23 0:20 / /proc rw - proc proc rw", *mounts, "an odd line"]
    plant(root, {"proc/self/mountinfo": "\n".join(lines)})
    plant(root, {"proc/self/cgroup": groups.replace(" ", "\n")} if groups else {})
    for level in filter(None, levels.split(", ")):
        directory, _, text = level.partition("=")
        inside = {"DIR": f"{LIMIT_FILE[memory]}/x", "NONE": "cgroup.procs"}
        plant(root, {f"{directory}/{inside.get(text, LIMIT_FILE[memory])}": text})
    return root


# mounts, /proc/self/cgroup, limit files -> version of the memory controller, limit, and the group
# that states it (without a limit: its own), whose usage counts. tests/monitor/test_probe.py
# has groups at random, and holds what doctor says against a plain model.
LIMITS = {
    "v2, lower in an ancestor": (
        [v2()], "0::/a/b/c", "cg/a/b/c=9000, cg/a/b=max, cg/a=5000", "v2", 5000, "cg/a"),
    "v2, a level without it": ([v2()], "0::/a/b", "cg/a/b=NONE, cg/a=70", "v2", 70, "cg/a"),
    "v2, a mount from outside": ([v2("/..")], "0::/../x", "cg/x=80", "v2", 80, "cg/x"),
    "v1, lower in an ancestor": (
        [OTHER, v1()], "4:hugetlb,memory:/a/b",
        f"cg/memory/a/b=900, cg/memory/a=600, cg/memory={HUGE}", "v1", 600, "cg/memory/a"),
    "v1, a subtree mounted above the group": (
        [v1("/docker/x")], "4:memory:/docker/x/job", f"cg/memory/job={HUGE}, cg/memory=700",
        "v1", 700, "cg/memory"),
    "hybrid, memory on v1": (
        [v1(), v2("/", "/u")], "4:memory:/a 0::/", "cg/memory/a=9, cg/memory=9",
        "v1", 9, "cg/memory"),
    "a later mount over it": ([v2(), v2("/a")], "0::/a/b", "cg/b=9", "v2", 9, "cg/b"),
    "spaces, colons and bytes in the names": (
        [v2("/", r"/c\040g")], "0::/a:b\udcff", "c g/a:b\udcff=9", "v2", 9, "c g/a:b\udcff"),
    "the memory controller is off": ([OTHER], "3:cpu,cpuacct:/", "", None, None, None),
}  # fmt: skip
MEMORY = (
    "total_bytes available_bytes swap_free_bytes shared_memory_size_bytes shared_memory_free_bytes "
    "cgroup_version memory_limit_bytes memory_limit_directory memory_usage_bytes pressure_readings "
    "peak_reset"
)
CGROUP_KEYS = ("cgroup_version", "memory_limit_bytes", "memory_limit_directory",
               "memory_usage_bytes")  # fmt: skip


@pytest.mark.parametrize("case", LIMITS)
def test_the_limit_is_the_lowest_of_the_group_and_its_ancestors(case: str, tmp_path: Path) -> None:
    mounts, groups, levels, memory, limit, group = LIMITS[case]
    root = host(tmp_path, mounts, groups, levels, memory or "v2")
    if memory and group:
        stat = "inactive_file 1\ntotal_inactive_file 1\n"  # which can be dropped, and do not count
        plant(root, {f"{group}/{USAGE_FILE[memory]}": "18\n", f"{group}/memory.stat": stat})
    facts = host_memory(root)
    directory = str(root / group) if limit and group else None
    assert [facts[key].value for key in CGROUP_KEYS] == [
        memory, limit, directory, 17 if group else None
    ]  # fmt: skip
    assert facts["memory_limit_bytes"].text.startswith("unlimited") == (limit is None)


def test_v1_tells_a_lower_limit_above_what_is_mounted(tmp_path: Path) -> None:
    host(tmp_path, [v1("/pod/ctr")], "4:memory:/pod/ctr", f"cg/memory={HUGE}", "v1")
    plant(tmp_path, {"cg/memory/memory.stat": "cache 1\nhierarchical_memory_limit 300\n"})
    facts = host_memory(tmp_path)
    assert facts["memory_limit_bytes"].value == 300
    assert facts["memory_limit_directory"].text == f"unknown (above {tmp_path}/cg/memory)"


@pytest.mark.parametrize(("mounts", "groups", "levels", "reason"), [
    ([v2("/docker/x")], "0::/docker/y", "cg=9", "lies outside what is mounted"),
    ([v2()], "0::/gone", "cg=9", "folder is not there"),
    ([OTHER], "4:memory:/a", "", "no control-group file system is mounted"),
    ([v2()], "", "", "no /proc/self/cgroup"),
    ([v2()], "0::/a", "cg=DIR, cg/a=9", "a control group states a limit that cannot be read"),
    ([v2()], "0::/", "cg=lots", "a control group states a limit that cannot be read"),
])  # fmt: skip
def test_a_limit_that_cannot_be_seen_is_unknown_with_its_reason(
    mounts: list[str], groups: str, levels: str, reason: str, tmp_path: Path
) -> None:
    facts = host_memory(host(tmp_path, mounts, groups, levels))
    for fact in (facts["memory_limit_bytes"], facts["memory_limit_directory"]):
        assert (fact.value, fact.text[:9]) == (None, "unknown (")
        assert reason in fact.text


def test_on_an_empty_root_everything_is_unknown_and_nothing_raises(tmp_path: Path) -> None:
    facts = host_memory(tmp_path) | kernel(tmp_path)
    own = {"rlimit_as_bytes", "rlimit_data_bytes", "rlimit_memlock_bytes"}
    for key in facts.keys() - own - {"pressure_readings", "peak_reset"}:
        assert (facts[key].value, facts[key].text[:12]) == (None, "unknown (no ")
    assert facts["pressure_readings"] == Fact(False, "no (no v2 control group is mounted)")


def test_pressure_is_read_from_the_v2_side_also_where_memory_is_on_v1(tmp_path: Path) -> None:
    host(tmp_path, [v1(), v2("/", "/cg/unified")], "4:memory:/a 0::/b")
    pressure = tmp_path / "cg/unified/b/memory.pressure"
    stalls = "some avg10=0.00 avg60=0.00 avg300=0.00 total=0\n"
    plant(tmp_path, {"cg/unified/b/memory.pressure": stalls, "cg/unified/b/cgroup.type": "domain"})
    assert host_memory(tmp_path)["pressure_readings"] == Fact(True, f"yes ({pressure})")
    (tmp_path / "cg/unified/b/cgroup.type").unlink()
    assert "of the whole machine" in host_memory(tmp_path)["pressure_readings"].text
    pressure.unlink()
    assert host_memory(tmp_path)["pressure_readings"] == Fact(False, f"no (no {pressure})")


@pytest.mark.parametrize(("room", "free", "key", "words"), [
    (64 << 20, 60 << 20, "shared_memory_size_bytes",
     "(a DataLoader with workers fails with \"Bus error\" if its batches do not fit; give the "
     "container more: docker run --shm-size=8g, or --ipc=host)"),
    (8 << 30, 10 << 20, "shared_memory_free_bytes", "; see what is left there: ls -l /x)"),
    (8 << 30, 4 << 30, None, ""),
])  # fmt: skip
def test_little_room_in_shared_memory_is_said_with_what_comes_of_it(
    room: int, free: int, key: str | None, words: str
) -> None:
    facts = _shared_memory((free, room), Path("/x"))
    assert [fact.value for fact in facts.values()] == [room, free]
    for name, fact in facts.items():
        plain = format_bytes(int(fact.value or 0))
        assert fact.text == plain if name != key else fact.text.startswith(plain)
        assert name != key or words in fact.text


def test_the_room_in_shared_memory_is_that_of_the_mount(tmp_path: Path) -> None:
    (tmp_path / "dev/shm").mkdir(parents=True)
    facts, is_now = host_memory(tmp_path), os.statvfs(tmp_path)
    assert facts["shared_memory_size_bytes"].value == is_now.f_blocks * is_now.f_frsize
    assert facts["shared_memory_free_bytes"].value
    (tmp_path / "dev/shm").rmdir()
    gone = host_memory(tmp_path)["shared_memory_free_bytes"]
    assert (gone.value, gone.text) == (None, f"unknown (no {tmp_path}/dev/shm)")


THP = "sys/kernel/mm/transparent_hugepage"
MEMINFO = "MemTotal:  2048 kB\nMemFree: 5 kB\nSwapFree: 0 kB\n"
# file, what it says, the fact's key, its value, and what its text contains
SETTINGS = [
    ("proc/meminfo", MEMINFO, "total_bytes", 2 << 20, "2.0 MiB"),
    ("proc/meminfo", MEMINFO, "swap_free_bytes", 0, "0 B"),
    ("proc/meminfo", MEMINFO, "available_bytes", None, "(no MemAvailable in "),
    ("proc/sys/vm/max_map_count", "65530\n", "max_map_count", 65530, "65530"),
    ("proc/sys/vm/overcommit_memory", "2\n", "overcommit_mode", 2, "2 (never past the commit"),
    ("proc/sys/vm/overcommit_memory", "7\n", "overcommit_mode", 7, "7 (not a known mode)"),
    (f"{THP}/enabled", "always [madvise]\n", "transparent_huge_pages", "madvise", "always [mad"),
    (f"{THP}/shmem_enabled", "odd\n", "transparent_huge_pages_shmem", None, "says 'odd'"),
]


@pytest.mark.parametrize(("file", "says", "key", "value", "text"), SETTINGS)
def test_a_setting_is_read_and_explained(
    file: str, says: str, key: str, value: object, text: str, tmp_path: Path
) -> None:
    plant(tmp_path, {file: says})
    fact = (host_memory(tmp_path) | kernel(tmp_path))[key]
    assert fact.value == value
    assert text in fact.text


def test_limits_of_the_process_are_in_bytes_or_unlimited(monkeypatch: Patch) -> None:
    soft = {resource.RLIMIT_AS: resource.RLIM_INFINITY, resource.RLIMIT_MEMLOCK: 8192}
    soft[resource.RLIMIT_DATA] = 1 << 30
    monkeypatch.setattr(resource, "getrlimit", lambda which: (soft[which], resource.RLIM_INFINITY))
    assert kernel()["rlimit_as_bytes"] == Fact(None, "unlimited")
    assert kernel()["rlimit_data_bytes"] == Fact(1 << 30, "1.00 GiB")
    assert kernel()["rlimit_memlock_bytes"] == Fact(8192, "8.0 KiB")


TORCH = "__version__ = '2.13.0+cu130'\ngit_version = 'abc'\ncuda: Optional[str] = '13.0'\n"
DRIVER = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build"
BUILD = {"TORCH_VERSION": "2.13.0+cu130", "TORCH_GIT_VERSION": "abc", "CUDA_HEADERS": "13.0"}


def examine(patch: Patch, root: Path, torch: str = TORCH, core: bool = True,
            devices: int | Exception = 2, status: tuple[bool, str] = (True, ""),
            error: Exception | None = None, **build: object) -> doctor.Findings:  # fmt: skip
    """What doctor finds on a machine of stubs: a torch, and our modules as they answer on it."""

    def connect() -> None:
        warnings.warn("what the report says by itself", stacklevel=2)
        if error:
            raise error

    def cuda_info() -> dict[str, int]:
        if isinstance(devices, Exception):
            raise devices
        return {"runtime_version": 13000, "driver_version": 13010, "devices": devices}

    def module(name: str, **contents: object) -> None:
        patch.setitem(sys.modules, f"memtools.{name}", ModuleType(name))
        vars(sys.modules[f"memtools.{name}"]).update(contents)

    plant(root, {"torch/version.py": torch, "proc/driver/nvidia/version": DRIVER})
    patch.setattr(doctor, "find_package", lambda name: root / name if torch else None)
    module("_build_info", **BUILD | build)
    module("_base.torch", connect=connect, shim_status=lambda: status)
    module("_core", __file__="core.so", cuda_info=cuda_info)
    if not core:
        patch.setitem(sys.modules, "memtools._core", None)
    return doctor.examine(root, {})


ALL_WORKS = "Everything that this machine can do works."
# what is different -> number of broken things, what works, pieces of the text
FINDINGS: dict[str, tuple[dict[str, Any], int, str, list[str]]] = {
    "nothing": ({}, 0, "cpu cuda check", [
        f"{ALL_WORKS} ",
        "torch cuda 13.0", "memtools' C part yes its path core.so", "kernel driver 580.95.05",
        "driver version 13.1 devices 2",
        "its torch version 2.13.0+cu130 to compile it again not needed",
        "tensor checks yes by the part compiled against torch",
        "memtools run yes", "memtools watch yes", "memtools report yes by jinja2", "and on CUDA"]),
    "no core": ({"core": False, "error": ImportError("no _core")}, 1, "", [
        "1 thing is broken: memtools._core does not load: import of memtools._core halted; ",
        "C part no (import of memtools._core halted", "devices unknown (",
        "policy no memtools._core",
        "torch connected no (memtools._core does not load)",
        "gate history (CPU) no memtools._core does not load; run python -m pip install"]),
    "a stale shim": ({"status": (False, "built for 2.12.0\nC++ trace")}, 1, "cpu cuda check", [
        "1 thing is broken: the part compiled against torch is not loaded: built for 2.12.0; run "
        "memtools build-shim.",
        "part compiled against torch no (built for 2.12.0) its torch version 2.13.0+cu130",
        "yes by a torch call; for the faster part compiled against torch (built for 2.12.0) run "
        "memtools build-shim", "to compile it again memtools build-shim"]),
    "no shim": ({"status": (False, "not built"), "TORCH_VERSION": None}, 0, "cpu cuda check", [
        "part compiled against torch no (not built) its torch version not built",
        "faster part compiled against torch (not built) run"]),
    "no headers": ({"CUDA_HEADERS": None}, 0, "cpu check", [
        "1 thing does not work: gate history (CUDA).",
        "headers version none (", "set MEMTOOLS_CUDA_HOME"]),
    "no torch": ({"torch": "", "error": AssertionError("it was imported")}, 0, "", [
        "7 things do not work: gate history (CPU), gate history (CUDA), KV-cache pool, "
        "accumulation (AMP), memtools plan, memtools.use, tensor checks.",
        "torch not installed", f"(CPU) no torch is not installed; {doctor.INSTALL_TORCH}",
        "torch connected no (torch is not installed)"]),
    "torch for the CPU": ({"torch": "__version__ = '2.13.0'"}, 0, "cpu check", [
        "torch cuda none (a build for the CPU)", "(CUDA) no torch is a build for the CPU: install",
        "pool yes on the host cleanup"]),
    "an old torch": ({"error": ImportError("too old\nmore")}, 1, "", [
        "torch connected no (too old)", "(CPU) no torch does not connect: too old; install torch"]),
    "no CUDA runtime": ({"devices": DeviceError("no runtime library")}, 0, "cpu check", [
        "devices none (no runtime library)", "install torch's build for CUDA"]),
    "no device": ({"devices": 0}, 0, "cpu check", [
        "devices 0 (no CUDA device answers)", "install an NVIDIA GPU and its driver"]),
    "a defect": ({"devices": KeyError("defect")}, 1, "cpu check", ["devices none ('defect')"]),
}  # fmt: skip


def test_the_cuda_headers_are_unknown_if_the_build_is(tmp_path: Path) -> None:
    facts = doctor.cuda_facts("no core", "no _build_info", tmp_path, [])
    assert facts["headers_version"].text == "unknown (no _build_info)"


@pytest.mark.parametrize("case", FINDINGS)
def test_what_is_different_shows_and_only_what_should_work_is_broken(
    case: str, monkeypatch: Patch, tmp_path: Path, capsys: Capture
) -> None:
    different, broken, works, pieces = FINDINGS[case]
    report = examine(monkeypatch, tmp_path, **different)
    assert len(report.broken) == broken
    assert all("\n" not in line for line in report.broken)
    known = "kv_pool cleanup_policy amp run plan use watch report pytest_plugin"
    working = [key for key, p in report.parts.items() if p.works and key not in known]
    assert " ".join(key.rpartition("_")[2] for key in working) == works
    monkeypatch.setattr(doctor, "examine", lambda: report)
    assert cli.main(["doctor"]) == (1 if broken else 0)
    out, err = capsys.readouterr()
    lines = out.splitlines()  # whether all works, what works, and the details
    assert lines[1:3] == ["", "What works here"]
    assert lines[3 + len(report.parts) :][:2] == ["", "Versions"]
    assert [piece for piece in pieces if piece not in " ".join(out.split())] == []
    assert err == "".join(f"memtools doctor: {line}\n" for line in report.broken)
    notes = json.loads(doctor.as_json(report))["notes"]
    assert ("extensions.shim" in notes) == (report.sections["extensions"]["shim"].value is not True)


def test_packages_that_would_add_to_it_are_named_in_the_first_line(
    monkeypatch: Patch, tmp_path: Path
) -> None:
    there = doctor.installed_version
    absent = {"jinja2", "pytest"}
    monkeypatch.setattr(
        doctor,
        "installed_version",
        lambda name: there("not-a-package-of-anybody" if name in absent else name),
    )
    report = examine(monkeypatch, tmp_path)
    assert doctor.verdict(report) == (
        f"{ALL_WORKS} Not installed: jinja2 (for memtools report), pytest (for pytest's plugin)."
    )
    assert report.broken == []


def test_a_machine_without_a_gpu_cannot_do_what_needs_one(
    monkeypatch: Patch, tmp_path: Path
) -> None:
    monkeypatch.setattr(doctor, "_kernel_driver", lambda path: Fact(None, "none"))
    report = examine(monkeypatch, tmp_path, devices=0)
    assert not report.parts["gate_history_cuda"].can
    said, _, _ = doctor.verdict(report).partition(" Not installed: ")  # as in make test-pythons
    assert said == f"{ALL_WORKS} It has no NVIDIA GPU that answers."


def test_torch_is_found_and_read_without_importing_it(tmp_path: Path) -> None:
    plant(tmp_path, {"a/version.py": "__version__ = '2.11.0'\ncuda: Optional[str] = None\n"})
    assert doctor.read_torch(tmp_path / "a") == doctor.Torch("2.11.0", None, None)
    code = "from memtools import _cli; from memtools._cli import doctor; _cli.main(['--version'])"
    code += "; doctor.find_package('torch'); import sys; sys.exit('torch' in sys.modules)"
    assert command("-c", code).returncode == 0


def test_the_rebuild_command_names_the_source_tree_where_it_is_known(tmp_path: Path) -> None:
    """It works in a fresh environment: pip brings setuptools, which that one lacks."""
    assert "--no-build-isolation" not in doctor.rebuild_command(tmp_path / "memtools")
    assert doctor.rebuild_command(tmp_path / "memtools").endswith("(in memtools' source tree)")
    plant(tmp_path, {"setup.py": ""})
    assert doctor.rebuild_command(tmp_path / "memtools").endswith(f"-e {tmp_path}")


def test_no_message_tells_to_install_memtools_from_an_index() -> None:
    """There is no such name on one, and somebody else may take it."""
    package = Path(memtools.__file__).parent
    for path in [*package.rglob("*.py"), *package.rglob("*.j2")]:
        lines = path.read_text("utf-8").splitlines()
        assert not [line for line in lines if "install" in line and "memtools[" in line], path


KEYS = {
    "versions": "memtools python platform kernel libc torch torch_cuda numpy",
    "extensions": "core core_path torch_connected shim shim_torch_version shim_rebuild",
    "cuda": "headers_version kernel_driver runtime_version driver_version devices",
    "host_memory": MEMORY,
    "kernel": "transparent_huge_pages transparent_huge_pages_shmem max_map_count overcommit_mode "
    "rlimit_as_bytes rlimit_data_bytes rlimit_memlock_bytes",
    "allocators": "malloc malloc_arenas malloc_settings cuda_settings cuda_caching advice",
    "environment": " ".join(environment.KEYS),
    "works": "gate_history_cpu gate_history_cuda kv_pool cleanup_policy amp run plan use watch "
    "report pytest_plugin neg_bit_check",
}


def test_the_environment_keys_that_are_set_are_shown() -> None:
    broken: list[str] = []
    keys = {"MEMTOOLS_LOG": "run.mem", "MEMTOOLS_LIMIT": " ", "MEMTOOLS_GUARD": "0.9"}
    keys["MEMTOOLS_OF_ANOTHER_VERSION"] = "1"  # is neither shown nor refused
    facts = doctor.environment_facts(keys, broken)
    assert (broken, list(facts)) == ([], list(environment.KEYS))
    assert {key: fact.value for key, fact in facts.items() if fact.value is not None} == {
        "MEMTOOLS_LOG": "run.mem",
        "MEMTOOLS_GUARD": "0.9",
    }
    assert facts["MEMTOOLS"].text == "not set (0 turns watching and cleaning off)"


def test_a_key_that_makes_no_sense_and_one_that_turns_memtools_off_are_told(tmp_path: Path) -> None:
    found = doctor.examine(tmp_path, {"MEMTOOLS": "0", "MEMTOOLS_LIMIT": "much"})
    assert any(line.startswith("MEMTOOLS_LIMIT must be a number of bytes") for line in found.broken)
    off = {part.title for part in found.parts.values() if "MEMTOOLS=0" in part.remark}
    assert off == {"cleanup policy", "memtools run"}


def command(*args: str, stdout: int = PIPE, **environ: str) -> CompletedProcess[str]:
    """Runs the copy of memtools that this process imported, wherever it lies."""
    here = str(Path(memtools.__file__).parent.parent)
    env = os.environ | {"PYTHONPATH": here, "PYTHONSAFEPATH": "1", **environ}
    line = [sys.executable, *args]
    return run(line, text=True, stdout=stdout, stderr=PIPE, env=env)


@pytest.mark.slow
def test_doctor_prints_the_same_facts_as_text_and_as_json() -> None:
    # A setting that no terminal can print: one odd byte must not end the report.
    text = command("-m", "memtools", "doctor", MEMTOOLS_LOG="\udcff")
    raw = command("-m", "memtools", "doctor", "--json", MEMTOOLS_LOG="\udcff")
    assert (text.returncode, raw.returncode) == (0, 0), text.stderr
    report = json.loads(raw.stdout)
    assert list(report) == [*KEYS, "broken", "notes"]
    assert report["versions"]["memtools"] == memtools.__version__
    assert report["environment"]["MEMTOOLS_LOG"] == "\udcff"
    assert r"MEMTOOLS_LOG                  \udcff" in text.stdout
    has_torch = importlib.util.find_spec("torch") is not None
    assert report["works"]["gate_history_cpu"]["works"] is has_torch
    assert {name: list(report[name]) for name in KEYS} == {k: v.split() for k, v in KEYS.items()}
    for name, title in doctor.TITLES.items():
        assert f"{title}\n" in text.stdout
        for key, value in report[name].items():
            assert f"\n  {doctor.label(key)} " in text.stdout
            assert (f"{name}.{key}" in report["notes"]) == (value is None or value is False)


@pytest.mark.slow
def test_a_reader_that_has_gone_is_no_traceback() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = command("-m", "memtools", "doctor", stdout=writer, PYTHONUNBUFFERED="")
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, "")


@pytest.mark.parametrize("args", [[], ["nonsense"], ["doctor", "--nonsense"], ["doctor", "extra"]])
def test_wrong_usage_is_one_line_and_exit_code_2(args: list[str], capsys: Capture) -> None:
    assert cli.main(args) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith("memtools")
    if not args:
        names = "run, explain, report, watch, compare, plan, demo, doctor, export, build-shim"
        assert err == f"memtools: give a command: {names} (see memtools --help)\n"


def test_a_command_that_is_nearly_right_is_named(capsys: Capture) -> None:
    assert cli.main(["explian", "run.mem"]) == 2
    assert capsys.readouterr().err == (
        "memtools: there is no command explian: did you mean explain? (see memtools --help)\n"
    )


ERRORS = {"ours": MemtoolsError("two\nlines"), "os": OSError("two lines"),
          "user": KeyboardInterrupt(), "defect": KeyError("x")}  # fmt: skip


class Fail:
    """Fail in some way."""

    name = "fail"

    def prepare_parser(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("how", choices=ERRORS)

    def run(self, args: argparse.Namespace) -> int:
        raise ERRORS[args.how]


def test_a_command_is_one_class_whose_docstring_is_its_help(
    capsys: Capture, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(cli, "COMMANDS", (*cli.COMMANDS, Fail))
    assert [cli.main(["--help"]), cli.main(["fail", "--help"])] == [0, 0]
    assert capsys.readouterr().out.count("Fail in some way.") == 2
    assert [cli.main(["fail", how]) for how in ("ours", "os", "user")] == [1, 1, 1]
    lines = ["memtools fail: two lines"] * 2 + ["memtools fail: interrupted"]
    assert capsys.readouterr().err.splitlines() == lines
    with pytest.raises(KeyError):
        cli.main(["fail", "defect"])
