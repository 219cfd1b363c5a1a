"""Fixtures for all tests: gates, and what the process holds."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from memtools import _build_info, _core
from memtools._base import torch as base_torch
from tests.kit.fakecuda import FakeRuntime

try:
    import torch

    from tests.kit.cudadevice import REAL, Device, FakeDevice, RealDevice
except ModuleNotFoundError:  # make test-pythons: the tests that need none
    torch, REAL = None, False  # type: ignore[assignment]

ROOT = Path(__file__).resolve().parent.parent
# TRL reports each trainer to the hub from a thread, whose objects other tests would count.
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
# In a shell's background or under nohup this process ignores them, and so would all it starts.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGQUIT, signal.SIG_DFL)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
# The same inputs in every run of the suite; `make fuzz` takes new ones.
settings.register_profile("steady", derandomize=True)
settings.register_profile("random", derandomize=False, print_blob=True)
settings.load_profile("steady")
assert os.environ.get("MEMTOOLS_EXPECT_SANITIZE", "") in ("", _build_info.SANITIZE), "not sanitised"


@pytest.fixture(autouse=True)
def _one_thread_and_seed() -> Iterator[None]:
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    if torch is not None:
        torch.manual_seed(0)
        before = torch.get_num_threads()
        torch.set_num_threads(1)
    yield
    if torch is not None:
        torch.set_num_threads(before)
    # All programs that later tests begin would inherit it, and survive what is to end them.
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == blocked


@pytest.fixture(scope="session", autouse=True)
def _nothing_left_in_the_repository() -> Iterator[None]:
    """A record that a test makes without a folder of its own stays where the tests were begun."""
    before = records_left()
    yield
    assert records_left() <= before


def records_left() -> set[str]:
    return {path.name for path in ROOT.glob("*.mem*")}


@pytest.fixture
def frozen() -> Iterator[None]:
    """What was there before is passed over: a collection takes no half second and frees nothing of
    other tests. What this test leaves behind as garbage goes with it."""
    gc.freeze()
    yield
    gc.collect()
    gc.unfreeze()


#: Rooms whose tests collect garbage, or take a census, again and again.
FROZEN = ("gate", "grad", "kv", "meta", "monitor")


@pytest.fixture(autouse=True)
def _heap_of_its_own(request: pytest.FixtureRequest) -> None:
    if request.path.parent.name in FROZEN:
        request.getfixturevalue("frozen")


Gates = Callable[..., "torch.Tensor"]


@pytest.fixture
def gates() -> Gates:
    """gates(rows, experts, dtype): softmax rows."""

    def make(rows: int = 16, experts: int = 8, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.softmax(torch.randn(rows, experts), -1).to(dtype)

    return make


@pytest.fixture
def rss() -> Callable[[], int]:
    """Resident bytes of this process."""

    def read() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    return read


@pytest.fixture
def without_shim() -> Callable[[], contextlib.AbstractContextManager[None]]:
    """A context in which memtools._core works by public torch calls alone."""

    @contextlib.contextmanager
    def context() -> Iterator[None]:
        bridge = base_torch.connect()
        parts = base_torch.parts(torch)
        _core._connect(*parts, None)
        try:
            yield
        finally:
            _core._connect(*parts, bridge.shim.ops if bridge.shim else None)

    return context


@pytest.fixture(params=["shim", "without shim"])
def either_way(
    request: pytest.FixtureRequest,
    without_shim: Callable[[], contextlib.AbstractContextManager[None]],
) -> Iterator[None]:
    """Runs the test by the shim, and again by public torch calls alone."""
    with contextlib.nullcontext() if request.param == "shim" else without_shim():
        yield


@pytest.fixture(scope="session", autouse=True)
def _fake_library() -> FakeRuntime | None:
    """Loads the fake CUDA runtime and points this process's memtools at it, before any test: a
    process opens one once, and whichever test is first may be what opens it. None for a GPU."""
    if REAL:
        return None
    path = ROOT / "build/c/libfakecudart.so"
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path.with_suffix(".lock"), "w") as lock:  # another worker of xdist makes it as well
        fcntl.flock(lock, fcntl.LOCK_EX)
        subprocess.run(["make", "-s", str(path.relative_to(ROOT))], cwd=ROOT, check=True)
    os.environ["MEMTOOLS_CUDART"] = str(path)
    runtime = FakeRuntime(path)
    assert _core.cuda_info()["devices"] == 2, "another CUDA runtime was opened before"
    return runtime


@pytest.fixture(scope="session")
def allocator(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A made-up allocator of devices, as a library that a program of its own may load."""
    if torch is None:
        pytest.skip("needs torch")
    out = tmp_path_factory.mktemp("allocator") / "fakeallocator.so"
    torch_at = Path(torch.__file__).parent
    subprocess.run(
        [os.environ.get("CXX", "c++"), "-shared", "-fPIC", "-std=c++20", "-O0", "-w",
         f"-I{torch_at}/include", ROOT / "tests/fake_cuda/fakeallocator.cpp",
         f"-L{torch_at}/lib", "-lc10", "-o", out], check=True,
    )  # fmt: skip
    return out


@pytest.fixture
def fake_cuda(_fake_library: FakeRuntime | None) -> Iterator[FakeRuntime]:
    """The fake CUDA runtime, lazy: copies run when the test says so. Nothing may be left over."""
    if _fake_library is None:
        pytest.skip("asks what only the fake runtime can show")
    _fake_library.reset()
    before = _fake_library.live()
    yield _fake_library
    busy, misuses = _fake_library.busy_frees(), _fake_library.misuses()
    _fake_library.reset()
    gc.collect()
    _fake_library.run_all()
    assert _fake_library.live() == before
    assert _fake_library.busy_frees() == busy == 0
    assert _fake_library.misuses() == misuses == 0


@pytest.fixture
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    """A CUDA device: the fake runtime's, or a GPU where `make test-gpu` runs."""
    if not REAL:
        yield FakeDevice(request.getfixturevalue("fake_cuda"))
        return
    yield RealDevice()
    torch.cuda.synchronize()
