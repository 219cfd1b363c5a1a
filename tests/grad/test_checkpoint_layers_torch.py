"""checkpoint_layers beside torch.compile, DDP and FSDP2."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

from memtools import checkpoint_layers
from tests.grad.test_checkpoint_layers import Model, X, forwards


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # torch's, while it traces
@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.BatchNorm1d])
def test_a_compiled_model_has_one_graph_and_the_same_gradients(norm):
    torch._dynamo.reset()
    plain = Model(norm=norm)
    for block in plain.blocks:
        block.drop = nn.Identity()
    model = copy.deepcopy(plain)
    checkpoint_layers(model)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    for _ in range(2):
        plain(X).sum().backward()
        compiled(X).sum().backward()
    assert counter.frame_count == 1
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)
    for a, b in zip(model.buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(a, b)


@pytest.fixture
def group() -> Iterator[None]:
    """A process group of this process alone."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group")
def test_ddp_reduces_once_and_has_the_same_gradients():
    plain = Model()
    model: Any = nn.parallel.DistributedDataParallel(copy.deepcopy(plain))
    handle = checkpoint_layers(model)
    assert handle.names[0] == "module.blocks.0"
    torch.manual_seed(1)
    with model.no_sync():
        model(X).sum().backward()
    model(X).sum().backward()
    torch.manual_seed(1)
    for _ in range(2):
        plain(X).sum().backward()
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("first", ["wrapped", "sharded"])
def test_sharded_layers_have_the_same_gradients(first):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    plain = Model()
    model = copy.deepcopy(plain)
    mesh = init_device_mesh("cpu", (1,))
    if first == "wrapped":
        checkpoint_layers(model)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    if first == "sharded":
        checkpoint_layers(model)
    for one in (model, plain):
        torch.manual_seed(1)
        one(X).sum().backward()
    assert forwards(model) == [2] * 4
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(a.grad.full_tensor(), b.grad)
