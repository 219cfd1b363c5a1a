"""One CUDA device for tests that ask the same of the fake runtime and of a GPU.

`make test-gpu` sets MT_GPU=1: then it is the machine's GPU, and tests of the fake runtime alone are
skipped."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from tests.kit.fakecuda import FakeRuntime, as_cuda, as_host

REAL = os.environ.get("MT_GPU") == "1"


class FakeDevice:
    """Runs nothing before it is read, but for what a test lets it run."""

    def __init__(self, fake: FakeRuntime) -> None:
        self.fake = fake
        self.syncs = fake.host_syncs()

    def put(self, host: torch.Tensor) -> torch.Tensor:
        return as_cuda(host)

    def get(self, tensor: torch.Tensor) -> torch.Tensor:
        self.fake.run_all()
        return as_host(tensor).clone()

    def write(self, to: torch.Tensor, source: torch.Tensor) -> None:
        """From another tensor of the device, behind what was enqueued on the stream before."""
        self.fake.write(to.data_ptr(), source.data_ptr(), source.nbytes, None)

    def keep_busy(self) -> None:
        """From now on `waited()` says whether the host has waited for the device."""
        self.syncs = self.fake.host_syncs()

    def waited(self) -> bool:
        return self.fake.host_syncs() > self.syncs

    def seed(self, seed: int) -> None:
        """Streams run in another legal order."""
        self.fake.seed(seed)

    def run_some(self, n: int) -> None:
        self.fake.run(n)

    def used_bytes(self) -> int:
        return int(self.fake.page_bytes())

    @contextmanager
    def capturing(self) -> Iterator[None]:
        self.fake.set_capturing(None, True)
        yield
        self.fake.set_capturing(None, False)


class RealDevice:
    """The same, on a GPU."""

    def put(self, host: torch.Tensor) -> torch.Tensor:
        return host.to("cuda")

    def get(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.cpu()

    def write(self, to: torch.Tensor, source: torch.Tensor) -> None:
        to.copy_(source)

    def keep_busy(self) -> None:
        """The current stream is busy for about a second: until then, nothing has waited."""
        torch.cuda._sleep(int(2e9))
        self.behind = torch.cuda.Event()
        self.behind.record()

    def waited(self) -> bool:
        return self.behind.query()

    def seed(self, seed: int) -> None:
        """A GPU has its own order."""

    def run_some(self, n: int) -> None:
        """A GPU runs by itself."""

    def used_bytes(self) -> int:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info()
        return total - free

    @contextmanager
    def capturing(self) -> Iterator[None]:
        torch.cuda.synchronize()
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            torch.ones(1, device="cuda")  # torch warns of an empty graph
            yield


Device = FakeDevice | RealDevice
