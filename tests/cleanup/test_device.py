"""CleanupPolicy and devices, without one: a made-up allocator, the fake driver and a made-up
torch.cuda, in a program of its own, because an allocator is for a process's life."""

from __future__ import annotations

import pytest

from tests.monitor.test_sampler_devices import Program, program  # noqa: F401 - fixtures

POLICY = """
sampler.stop()
import os
from types import SimpleNamespace
from memtools import CleanupPolicy; from memtools._base import torch as _bridge
from tests.kit.fakedevice import FakeCuda
MIB = 2**20
fake = FakeCuda(2)
made_up = SimpleNamespace(cuda=fake, version=SimpleNamespace(cuda="13.0"))
_bridge.loaded = lambda: made_up
cuda.set_device(0)
stream = cuda.stream()  # the program has a context now
cuda.set_capacity(1000 * MIB)
put(0, 100 * MIB, 100 * MIB, 0, 100 * MIB)
put(1, 0, 0, 0, 0)
policy = CleanupPolicy(None, at_epoch=False)
said = []
policy.add("note", said.append, pressure=True)
def looked():
    policy._core.look()
    policy.step()
def done():
    return {a.name: a.count for a in policy.report().actions if a.count}
looked()
assert done() == {}, done()
"""


@pytest.mark.slow
def test_a_cache_that_is_no_use_is_emptied(program: Program):  # noqa: F811
    program(f"""{POLICY}
for numbers, reason in (
    ((100 * MIB, 400 * MIB, 200 * MIB, 390 * MIB), "fragmented"),
    ((100 * MIB, 500 * MIB, 0, 200 * MIB), "idle cache"),
):
    policy = CleanupPolicy(None, at_epoch=False)
    policy.add("note", said.append, pressure=True)
    put(0, *numbers)
    if os.fork() == 0:
        policy._core.forget()
        assert not policy._core.look() >> 2 & 1, "the devices are the parent's"
        os._exit(0)
    assert os.wait()[1] == 0
    fake.empty_cache = lambda: put(0, 100 * MIB, 120 * MIB, 0, 100 * MIB)
    looked()
    found = policy.report()["empty_cache"]
    assert done() == {{"empty_cache": 1}}, done()
    assert found.device_freed_bytes >= 280 * MIB, found
    assert reason in found.when
    assert said == []
""")


@pytest.mark.slow
def test_pressure_of_a_device_asks_for_gc_cache_pools_and_callbacks(program: Program):  # noqa: F811
    program(f"""{POLICY}
from memtools import KVPool
kept, idle = (
    KVPool(1, 1, 64, max_tokens=1 << 20, max_sequences=1, dtype="float16", device="cuda:0")
    for _ in range(2)
)
lease = kept.acquire(1)
lease.reserve(1 << 20)
with idle.acquire(1) as other:
    other.reserve(1 << 19)
assert kept.stats().live_bytes == 256 * MIB and idle.stats().idle_bytes == 128 * MIB
cuda.set_capacity(400 * MIB)
put(0, 5 * MIB, 9 * MIB, 0, 9 * MIB)
while not policy._core.look():  # what the driver said last is kept for 20 ms
    pass
order = []
fake.empty_cache = lambda: order.append("empty_cache")
policy.add("first", lambda: order.append("first"), pressure=True)
policy.watch(kept), policy.watch(idle)
looked()
assert done() == {{"gc": 1, "empty_cache": 1, "pool_trim": 1, "note": 1, "first": 1}}, done()
assert order == ["first", "empty_cache"]
assert said[0].reasons == ("device pressure",), said
assert policy.report()["pool_trim"].device_freed_bytes == 128 * MIB
assert kept.stats().live_bytes == 256 * MIB
policy._core.done(0, 10**12, *[-1] * 6)  # a gc of 1,000 s rests for longer than this test lasts
looked()
assert done()["gc"] == 1, "it rests"
""")
