"""Out of memory in a pass that has changed what the model holds: the retry begins as the failed
pass did, whatever kind of buffer, submodule or attribute that is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import memtools
from memtools._grad import undo
from tests.grad.backoffcases import undoing
from tests.kit.oominject import out_of_memory

WIDTH = 4
ROWS = 16


class Holder(nn.Module):
    """A layer whose input is shifted by what earlier passes have left in the model."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(WIDTH, 1)
        self.prepare()

    def prepare(self) -> None: ...

    def shift(self, mean: torch.Tensor) -> Any:
        raise NotImplementedError

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(x - self.shift(x.detach().mean(0)))


class FilledNone(Holder):
    """A buffer that is None until the first pass."""

    def prepare(self) -> None:
        self.register_buffer("mean", None)

    def shift(self, mean):
        self.mean = mean if self.mean is None else 0.5 * self.mean + 0.5 * mean
        return self.mean


class Registered(Holder):
    def shift(self, mean):
        if "mean" not in self._buffers:
            self.register_buffer("mean", mean, persistent=False)
        else:
            self.mean = 0.5 * self.mean + 0.5 * mean
        return self.mean


class Emptied(Holder):
    def prepare(self) -> None:
        self.register_buffer("mean", torch.full((WIDTH,), 3.0))
        self.register_buffer("other", torch.zeros(1))

    def shift(self, mean):
        shift, self.mean = mean if self.mean is None else self.mean, None
        return shift


class Deleted(Holder):
    def prepare(self) -> None:
        self.register_buffer("mean", torch.full((WIDTH,), 3.0))
        self.register_buffer("other", torch.zeros(1))

    def shift(self, mean):
        if "mean" not in self._buffers:
            return mean
        shift = self.mean
        del self.mean
        return shift


class AddedModule(Holder):
    """A submodule that the first pass makes; its buffers change in the next ones."""

    def shift(self, mean):
        if "inner" not in self._modules:
            self.inner = FilledNone()
        return self.inner.shift(mean)


class AddedAttribute(Holder):
    def shift(self, mean):
        self.mean = 0.5 * getattr(self, "mean", mean * 0) + 0.5 * mean
        return self.mean


class CountedAttribute(Holder):
    def prepare(self) -> None:
        self.passes = 0

    def shift(self, mean):
        self.passes += 1
        return mean / self.passes


class TensorAttribute(Holder):
    """A tensor that is no buffer, changed in place."""

    def prepare(self) -> None:
        self.mean = torch.zeros(WIDTH)

    def shift(self, mean):
        return self.mean.mul_(0.5).add_(mean)


class AddedParameter(Holder):
    def shift(self, mean):
        if "scale" not in self._parameters:
            self.scale = nn.Parameter(mean, requires_grad=False)
        return self.scale


class MomentumEncoder(Holder):
    """Parameters that are not trained, and follow the others in each pass."""

    def prepare(self) -> None:
        self.slow = nn.Linear(WIDTH, 3).requires_grad_(False)

    def shift(self, mean):
        for parameter in self.slow.parameters():
            parameter.data = 0.9 * parameter.data + mean.mean()
        return self.slow(mean).mean()


class Codebook(Holder):
    """And one that is changed in place, by a way that leaves no trace in its version."""

    def prepare(self) -> None:
        self.code = nn.Parameter(torch.zeros(WIDTH), requires_grad=False)

    def shift(self, mean):
        self.code.data.mul_(0.5).add_(mean)
        return self.code


class GrowingList(Holder):
    def prepare(self) -> None:
        self.norms = nn.ModuleList()

    def shift(self, mean):
        self.norms.append(nn.BatchNorm1d(WIDTH, affine=False))
        pair = torch.stack([mean, mean + 1])
        return sum(norm(pair).mean(0) + norm.running_mean for norm in self.norms)


class NormInLegacyClothes(Holder):
    def prepare(self) -> None:
        self.first = nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))

    def shift(self, mean):
        return self.first(mean)


MODELS = [
    FilledNone,
    Registered,
    Emptied,
    Deleted,
    AddedModule,
    AddedAttribute,
    CountedAttribute,
    TensorAttribute,
    AddedParameter,
    MomentumEncoder,
    Codebook,
    GrowingList,
    NormInLegacyClothes,
]


def trained(make: Callable[[], nn.Module], way: str, fails: str) -> tuple[dict[str, Any], Any]:
    """Two windows of 16 rows that end as 8 and 8; `fails`: where 16 rows run out of memory, or ""
    for a run that has these sizes from the start."""
    torch.manual_seed(0)
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    size = None if fails else ROWS // 2
    acc = undoing(memtools.GradAccumulator(model, optimizer, micro_batch_size=size), way)

    def loss_fn(x: torch.Tensor) -> tuple[torch.Tensor, int]:
        if len(x) == ROWS and fails == "early":
            model(x[:2])
            raise out_of_memory()
        loss = model(x).square().sum()
        if len(x) == ROWS:
            if fails == "backward":
                loss.backward()
            raise out_of_memory()
        return loss, len(x)

    batch = torch.arange(ROWS * WIDTH).view(ROWS, WIDTH) / 10
    for factor in (1, 2):
        acc.step(batch * factor, loss_fn)
    held = {name: vars(one) for name, one in model.named_modules()}
    plain = {
        (name, key): value.tolist() if isinstance(value, torch.Tensor) else value
        for name, attributes in held.items()
        for key, value in attributes.items()
        if isinstance(value, (int, torch.Tensor))
    }
    tensors = [*model.named_buffers(), *model.named_parameters()]
    return {name: one.tolist() for name, one in tensors} | plain, len(acc.report().retries)


@pytest.mark.parametrize("way", ["scratch", "redo"])
@pytest.mark.parametrize("fails", ["early", "late", "backward"])
@pytest.mark.parametrize("make", MODELS)
def test_what_a_failed_pass_made_is_gone(make, fails, way):
    expected, _ = trained(make, way, "")
    got, retries = trained(make, way, fails)
    assert retries == 1
    assert got == expected
    assert list(got) == list(expected)


def _inference() -> torch.Tensor:
    with torch.inference_mode():
        return torch.ones(3)


BUFFERS = {
    "expanded": lambda: torch.ones(1, 4).expand(4, 4),
    "expanded, large": lambda: torch.ones(1, 1 << 10).expand(1 << 10, 1 << 10),
    "expanded twice": lambda: torch.ones(1, 3, 1).expand(2, 3, 4),
    "inference": _inference,
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "jagged": lambda: torch.nested.nested_tensor(
        [torch.ones(2), torch.ones(3)], layout=torch.jagged
    ),
    "sparse": lambda: torch.eye(4).to_sparse(),
    "csr": lambda: torch.eye(4).to_sparse_csr(),
    "every other": lambda: torch.ones(8)[::2],
    "conjugate": lambda: torch.ones(4, dtype=torch.cfloat).conj(),
    "flags": lambda: torch.ones(4, dtype=torch.bool),
    "meta": lambda: torch.empty(4, device="meta"),
    "empty": lambda: torch.empty(0),
    "8-bit float": lambda: torch.ones(4).to(torch.float8_e4m3fn),
}


def _change(buffer: torch.Tensor) -> None:
    """Halve its values in the way that its kind allows."""
    with torch.no_grad(), torch.inference_mode(buffer.is_inference()):
        if buffer.is_nested or buffer.layout is not torch.strided:
            buffer.values().mul_(0.5)
        elif 0 in buffer.stride():
            buffer.as_strided((buffer.untyped_storage().nbytes() // 4,), (1,), 0).mul_(0.5)
        elif buffer.dtype is torch.bool:
            buffer.logical_not_()
        elif buffer.itemsize == 1:
            buffer.copy_(buffer.float() * 0.5)
        else:
            buffer.mul_(0.5)


def _values(buffer: torch.Tensor) -> Any:
    if buffer.is_meta:
        return buffer.shape
    if buffer.is_nested:
        return buffer.values().tolist()
    return (buffer if buffer.layout is torch.strided else buffer.to_dense()).tolist()


@pytest.mark.filterwarnings("ignore:.*(Sparse CSR|nested tensors|resolve_conj|imaginary).*")
@pytest.mark.parametrize("kind", BUFFERS)
def test_a_buffer_of_any_kind_is_as_before(kind):
    model = nn.Linear(WIDTH, 1)
    model.register_buffer("buffer", BUFFERS[kind]())
    acc = memtools.GradAccumulator(model, torch.optim.SGD(model.parameters(), 0.1))
    seen = []

    def loss_fn(x: torch.Tensor) -> tuple[torch.Tensor, int]:
        seen.append(_values(model.buffer))
        _change(model.buffer)
        if len(x) == ROWS:
            raise out_of_memory()
        return model(x).square().sum(), len(x)

    acc.step(torch.ones(ROWS, WIDTH), loss_fn)
    tried, first, second = seen
    assert first == tried
    assert second != first or kind in ("meta", "empty")


class Stubborn(torch.Tensor):
    """A tensor that nothing can be written into."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function is torch.Tensor.copy_:
            raise TypeError("it cannot be written")
        return super().__torch_function__(function, types, args, kwargs or {})


def test_a_buffer_that_cannot_be_put_back_is_refused_before_memory_runs_out():
    model = nn.Linear(WIDTH, 1)
    model.register_buffer("table", torch.ones(3).as_subclass(Stubborn))
    acc = memtools.GradAccumulator(model, torch.optim.SGD(model.parameters(), 0.1))
    before = model.weight.detach().clone()
    sentence = r"the buffer 'table', a Stubborn of layout torch.strided, cannot be put back"
    with pytest.raises(TypeError, match=sentence):
        acc.step(torch.ones(ROWS, WIDTH), lambda x: (model(x).sum(), len(x)))
    assert torch.equal(model.weight, before)


@pytest.mark.parametrize("fails", [1, 2])
def test_a_frozen_parameter_without_a_copy_is_refused_in_the_first_window(fails, monkeypatch):
    """As where such parameters take a tenth of the memory or more."""
    monkeypatch.setattr(undo, "memory_of", lambda device: 0.0)
    model = Codebook()
    acc = memtools.GradAccumulator(model, torch.optim.SGD(model.parameters(), 0.1))

    def loss_fn(x: torch.Tensor) -> tuple[torch.Tensor, int]:
        loss = model(x).square().sum()
        if len(x) == ROWS and x[0, 0] == fails:
            raise out_of_memory()
        return loss, len(x)

    if fails == 1:
        with pytest.raises(RuntimeError, match=r"'code', which has requires_grad=False and of wh"):
            acc.step(torch.ones(ROWS, WIDTH), loss_fn)
        return
    acc.step(torch.ones(ROWS, WIDTH), loss_fn)
    before = model.code.clone()
    acc.step(torch.full((ROWS, WIDTH), 2.0), loss_fn)
    assert len(acc.report().retries) == 1
    assert torch.equal(model.code, (before / 2 + 2) / 2 + 2), "as in two passes of 8 rows"
